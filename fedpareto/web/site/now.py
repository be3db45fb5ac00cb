"""What a worker does now, from the files of its home: the sentence of `worker status` and of the member's console."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from federation.text import escaped
from federation.work.closing import SiteClosing
from fedpareto.formatting import moment
from worker.connection.approval import noted
from worker.home import WorkerHome
from worker.site.leaving import read_leave, read_withdrawal
from worker.site.pause import closing_now, read_pause
from worker.site.policy_file import Policy
from worker.status import SeenWorker, WorkerStatus, read_status


@dataclass(frozen=True)
class SiteNow:
    """The state of a site; `sentence` says it for people, and `closing` is None while the site is open."""

    sentence: str
    runs: bool
    seen: SeenWorker | None
    status: WorkerStatus
    closing: SiteClosing | None
    approval: str
    leaving: str = ""  # in words; empty unless the owner wants to leave
    left: datetime | None = None  # when the site has left

    def document(self) -> dict[str, Any]:
        """The state as values for JSON; times are `datetime`."""
        return {
            "sentence": self.sentence,
            "runs": self.runs,
            "last_sign": None if self.seen is None else self.seen.last_sign,
            "connection": None if self.status.connection is None else asdict(self.status.connection),
            "closing": closing_document(self.closing),
            "approval": self.approval,
            "leaving": self.leaving != "",
            "left": self.left,
            "work": [asdict(work) for work in self.status.work],
        }


def site_now(home: WorkerHome, now: datetime) -> SiteNow:
    """Reads the state of a site; it takes no lock and needs no key.

    Raises:
        WorkerHomeError, PolicyError: a file is damaged.
    """
    seen = read_status(home.status)
    runs = seen is not None and seen.runs(now)
    status = seen.status if seen is not None and runs else WorkerStatus(None, ())
    pause, problem = read_pause(home.pause)
    closing = closing_now(pause, Policy.load(home.policy).open, now)
    approval = noted(home.pending) if runs else ""
    leaving, withdrawal = _leaving_words(home), read_withdrawal(home.withdrawal)
    left = None if withdrawal is None else withdrawal.left
    if left is not None and not runs:
        sentence = (
            f"this site has left the federation on {moment(left)}; to come back, join again with a new join string for "
            f"its name: `fedpareto worker join --home {home.directory}`"
        )
        return SiteNow(escaped(sentence), runs, seen, status, closing, approval, leaving, left)
    words = list(_connection_words(home, seen, status, runs=runs))
    words += [leaving] if leaving else _site_words(closing, problem, approval)
    words += [
        f"{work.doing} in round {work.round} of run {work.run_id} since {moment(work.since)}" for work in status.work
    ]
    sentence = escaped("; ".join(words))
    return SiteNow(sentence, runs, seen, status, closing, approval, leaving, left)


def _leaving_words(home: WorkerHome) -> str:
    leave, problem = read_leave(home.leave)
    if problem or leave is None:
        return problem
    first = "" if leave.now else " once what it has begun has ended, and"
    return f"it leaves the federation{first} as soon as a coordinator answers; it begins no new work"


def _connection_words(home: WorkerHome, seen: SeenWorker | None, status: WorkerStatus, *, runs: bool) -> Iterator[str]:
    if not runs:
        last = "" if seen is None else f", the last one has given no sign of life since {moment(seen.last_sign)}"
        yield f"no worker runs{last}: start it with `fedpareto worker run --home {home.directory}`"
    elif status.connection is None:
        yield "the worker has started, and is not connected yet"
    elif status.connection.connected:
        yield f"connected since {moment(status.connection.since)}"
    else:
        yield f"not connected since {moment(status.connection.since)}: {status.connection.problem}"


def _site_words(closing: SiteClosing | None, problem: str, approval: str) -> Iterator[str]:
    if approval:
        yield approval
    if problem:
        yield problem
    elif closing is not None:
        yield closing_words(closing)


def closing_words(closing: SiteClosing) -> str:
    """The state of a closed site, with the time in the local zone."""
    if closing.until is None:
        return "paused until you resume it (`fedpareto worker resume`), and begins no new work"
    why = "paused" if closing.paused else "closed, by the hours of policy.toml,"
    return f"{why} until {moment(closing.until)}, and begins no new work"


def closing_document(closing: SiteClosing | None) -> dict[str, Any] | None:
    """The same as values for JSON."""
    if closing is None:
        return None
    return {"paused": closing.paused, "until": None if closing.until is None else closing.until.isoformat()}
