"""The approval of a new member: until a security officer gives it, the worker attends and gets no work."""

from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC
from pathlib import Path

from federation.monitoring.events import Events
from federation.v1.federation_pb2 import Pending


def waits(client_id: str, pending: Pending) -> str:
    """That a member waits, since when, and for whom."""
    officers = "a security officer" if pending.officers < 2 else f"{min(pending.officers, 99)} security officers"
    try:
        since = f" since {pending.since.ToDatetime(UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError):  # no time
        since = ""
    return (
        f"{client_id} has waited{since} for {officers} of the federation to approve it, and gets no work until then: "
        f"say that you have joined; `fedpareto admin approve {client_id}` approves it there"
    )


def noted(path: Path) -> str:
    """What the worker was told last, as of `waits`; empty if it does not wait."""
    with suppress(OSError, ValueError):
        return path.read_text(encoding="utf-8")
    return ""


@dataclass(frozen=True, eq=False)
class Approval:
    """Tells the owner of the wait and its end. The file at `path`, which `worker doctor` reads, lasts as long."""

    path: Path
    client_id: str
    events: Events

    def told(self, pending: Pending | None) -> None:
        """Takes what the coordinator says: that the member waits, or not."""
        try:
            if pending is not None:
                text = waits(self.client_id, pending)
                self.events.warn("pending", text)
                self.path.write_text(text, encoding="utf-8")
            elif self.path.exists():
                self.path.unlink()
                self.events.tell("approved", f"{self.client_id} is approved: it gets work from now on")
        except OSError as error:
            self.events.disk(f"{self.path.name} cannot be written: {error}")
