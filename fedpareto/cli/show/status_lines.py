"""What the console's first page says, on a terminal and as a document."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from federation.text import counted
from federation.trust.admin_files import Account
from federation.v1.admin_pb2_grpc import AdminStub
from fedpareto.admin_messages import name_of
from fedpareto.cli.show import alert_lines
from fedpareto.cli.show.tables import new_table, runs, state
from fedpareto.web.console.first_page import FederationState, MemberState, Need

_GOOD = "good"  # the look of a member that needs no look


def status(stub: AdminStub, account: Account, *, live: bool) -> tuple[Any, Callable[[], RenderableType]]:
    """What an administrator sees, for programs and for people; `live` says that a coordinator serves."""
    seen = FederationState.read(stub, live=live, administrator=account.name)
    return _document(seen, account.federation_id), lambda: _picture(seen, account.federation_id)


def _picture(seen: FederationState, federation: str) -> RenderableType:
    """Whether all is well, what needs the operator, what runs, who is not connected."""
    serves = "" if seen.live else " No coordinator serves; this is what the record says."
    parts: list[RenderableType] = [Text(f"{federation}: {seen.sentence} {seen.counts}.{serves}", style="bold")]
    now = seen.lists.at
    if seen.alerts or seen.needs:
        parts.append(_title("needs you"))
    if seen.alerts:
        parts.append(alert_lines.alerts(seen.alerts, now, seen.names, every=False))
    parts += _waiting(seen.needs)
    if seen.own_requests:
        parts += [_title("waits for another officer"), *_waiting(seen.own_requests)]
    if seen.open_runs:
        parts.append(_title("running"))
    for item in seen.running:
        line = Text(f"{seen.names.named(item.run.run_id, item.run.name)}  ")
        line.append(state(name_of(item.run, "state")))
        line.append(f"  {', '.join(filter(None, (item.progress, item.left)))}")
        parts += [line, *(Text(f"    {text}") for text in (item.verdict, item.waits) if text)]
    members = seen.members
    if members:
        parts += [_title("members"), *_members(members)]
    if seen.ended:
        parts += [_title("runs that have ended"), runs(seen.ended)]
    if seen.notices:
        parts += [_title("notices"), alert_lines.alerts(seen.notices, now, seen.names, every=False)]
    return Group(*parts)


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _waiting(needs: Iterable[Need]) -> Iterator[Text]:
    for need in needs:
        yield Text(f"{need.sentence}", style="yellow")
        yield Text(f"    fedpareto admin {need.command}", style="dim")


def _members(members: Iterable[MemberState]) -> Iterator[RenderableType]:
    """The members that need a look; the others are counted."""
    table, connected = new_table("member", "connection", "since"), 0
    for member in members:
        if member.look == _GOOD:
            connected += 1
        else:
            table.add_row(member.client.client_id, Text(member.state, style="yellow"), member.since)
    if table.row_count:
        yield table
    if connected:
        yield Text(f"{counted(connected, 'member')} connected", style="green")


def _document(seen: FederationState, federation: str) -> dict[str, Any]:
    return {
        "federation_id": federation,
        "live": seen.live,
        "sentence": seen.sentence,
        "counts": seen.counts,
        "alerts": seen.alerts,
        "needs": list(map(vars, seen.needs)),
        "own_requests": list(map(vars, seen.own_requests)),
        "running": [
            {
                **{name: getattr(item.run, name) for name in ("run_id", "name", "rounds_done", "rounds_total")},
                "state": name_of(item.run, "state"),
                **{name: getattr(item, name) for name in ("progress", "left", "waits", "verdict")},
            }
            for item in seen.running
        ],
        "members": [
            {"client_id": item.client.client_id, "state": item.state, "since": item.since} for item in seen.members
        ],
        "ended": seen.ended,
        "notices": seen.notices,
    }
