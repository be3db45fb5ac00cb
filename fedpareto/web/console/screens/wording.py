"""Sentences of the pages: how far a run is, for whom it waits, since when a member is away."""

import math
import time
from datetime import UTC, datetime
from statistics import median

from federation.text import counted
from federation.v1 import admin_pb2 as v1
from federation.v1.common_pb2 import RunState
from fedpareto import formatting
from fedpareto.run_names import ENDED
from fedpareto.web.console.federation_reader import HeldRun
from fedpareto.web.sections.run_words import NAMED

_RECENT = 10  # rounds whose median length foretells the next ones


def rounds_done(run: v1.Run) -> str:
    """How far a run is: "7 of 15 rounds done", or of one that has ended "15 of 15 rounds"."""
    return f"{run.rounds_done} of {counted(run.rounds_total, 'round')}{'' if run.state in ENDED else ' done'}"


def time_left(held: HeldRun) -> str:
    """How long a run will take, by its last rounds: "about 12 min left"; empty if that is not known."""
    run = held.run
    if run.state != RunState.RUN_STATE_RUNNING or not held.table.lines:
        return ""
    stop = held.table.stop
    recent = [held.table.lines[n].summary.seconds for n in range(max(0, stop - _RECENT), stop) if n in held.table.lines]
    known = [seconds for seconds in recent if math.isfinite(seconds)]
    left = run.rounds_total - run.rounds_done
    if not known or not left:
        return ""
    spent = 0.0
    if held.phase is not None and held.phase.HasField("started"):
        spent = max(0.0, time.time() + held.ahead - held.phase.started.ToNanoseconds() / 1e9)
    return f"about {formatting.span(max(1.0, left * median(known) - min(spent, median(known))))} left"


def waiting(held: HeldRun) -> str:
    """For whom an open phase waits: "round 6, train: 4 of 5 replied; waits since 12:03 for hospital-b (not connected)".

    Between phases it is the reason why the run does not go on, if any.
    """
    phase = held.phase
    if phase is None or held.over:
        return held.run.reason
    where = f"round {phase.round}, {phase.kind}"
    if not phase.outstanding:
        return f"{where}: all {phase.asked} have replied"
    since = min(phase.outstanding, key=lambda member: member.asked.ToNanoseconds()).asked
    first = [_awaited(member) for member in sorted(phase.outstanding, key=lambda m: (m.attending, m.client_id))[:NAMED]]
    more = len(phase.outstanding) - len(first)
    names = ", ".join(first) + (f" and {more} more" if more > 0 else "")
    return f"{where}: {phase.replied} of {phase.asked} replied; waits since {formatting.moment(since)} for {names}"


def _awaited(member: v1.Outstanding) -> str:
    return member.client_id if member.attending else f"{member.client_id} (not connected)"


def since(message: v1.Client) -> str:
    """Since when a member is away."""
    return f"since {formatting.moment(message.last_seen)}" if message.HasField("last_seen") else "never seen"


def days_left(at: datetime, now: datetime | None = None) -> int:
    """Whole days until a time."""
    return (at - (now or datetime.now(UTC))).days
