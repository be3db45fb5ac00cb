"""Sentences of the pages: how far a run is, for whom it waits, what happened in a round."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median

from federation.text import counted
from federation.v1 import admin_pb2 as v1
from federation.v1.common_pb2 import RunState
from fedpareto import formatting
from fedpareto.admin_messages import name_of
from fedpareto.run_names import ENDED
from fedpareto.turnout import MemberTurnout, Turnout, never_asked
from fedpareto.web.console.federation_reader import HeldRun
from fedpareto.web.console.run_history import OUTCOMES, Outcome, RoundLine, RunHistory
from fedpareto.web.pages.verdict import Standing, verdict

NAMED = 3  # members that a sentence names
_RECENT = 10  # rounds whose median length foretells the next ones
_COUNTED = (Outcome.REPLIED, Outcome.DECLINED, Outcome.REFUSED, Outcome.MISSING)  # outcomes of rounds that needed it
VERBS = {Outcome.DECLINED: "declined", Outcome.REFUSED: "was refused", Outcome.MISSING: "did not reply"}


def rounds_done(run: v1.Run) -> str:
    """How far a run is: "7 of 15 rounds done", or of one that has ended "15 of 15 rounds"."""
    return f"{run.rounds_done} of {counted(run.rounds_total, 'round')}{'' if run.state in ENDED else ' done'}"


def time_left(held: HeldRun) -> str:
    """How long a run will take, by its last rounds: "about 12 min left"; empty if that is not known."""
    run = held.run
    if run.state != RunState.RUN_STATE_RUNNING or not held.history.lines:
        return ""
    stop = held.history.stop
    recent = [held.history.lines[n].seconds for n in range(max(0, stop - _RECENT), stop) if n in held.history.lines]
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


def of_round(line: RoundLine) -> str:
    """A round in a sentence: "4 of 5 replied; hospital-c declined: disk"."""
    told = [f"{line.accepted} of {line.asked} replied"]
    if line.state == "SKIPPED":
        told.append(f"no step: {line.reason}" if line.reason else "no step")
    elif line.reason:
        told.append(line.reason)
    names = sorted(line.failed, key=formatting.natural)
    for name in names[:NAMED]:
        outcome, why = line.failed[name]
        told.append(f"{name} {VERBS[outcome]}{f': {why}' if why else ''}")
    if len(names) > NAMED:
        told.append(f"{len(names) - NAMED} more failed")
    return "; ".join(told)


@dataclass(frozen=True)
class Scored:
    """How the members' scores are written: "test accuracy", and larger is better."""

    title: str
    higher: bool
    share: bool

    def text(self, value: float) -> str:
        """A score as text."""
        return formatting.percent(value) if self.share else formatting.number(value)


def scored(run: v1.Run, history: RunHistory) -> Scored:
    """What the scores of a run are."""
    split, measure = history.scored or ("", "accuracy")
    metric = next((item for item in run.metrics if item.name == measure.partition("/")[0]), None)
    higher = measure != "loss" if metric is None else metric.better == "higher"
    share = measure == "accuracy" or (metric is not None and metric.largest == 1.0)
    return Scored(f"{split} {measure}".strip(), higher, share)


def standing(run: v1.Run, history: RunHistory) -> Standing | None:
    """Each member's first and last score; None if no member has one, or they are hidden."""
    first, last = history.first_and_last()
    if not last:
        return None
    kind = scored(run, history)
    measure = history.scored[1] if history.scored else "accuracy"
    return Standing(measure=measure, first=first, last=last, higher=kind.higher, rounds=history.evaluated)


def turnout(held: HeldRun) -> Turnout:
    """Who took part: by the rounds once all are read, before that by the run's members if they are known."""
    history = held.history
    if not held.complete:
        return Turnout.of(held.details) if held.details is not None and held.details.members else Turnout()
    codes = history.outcomes()
    counts = {outcome: (codes == OUTCOMES.index(outcome)).sum(axis=1).tolist() for outcome in _COUNTED}
    parts = [
        MemberTurnout(name=name, replied=replied, declined=declined, refused=refused, missing=missing)
        for name, replied, declined, refused, missing in zip(history.members, *counts.values(), strict=True)
    ]
    never = never_asked(held.details) if held.details is not None else {}
    unasked = {name: why for name, why in never.items() if name not in history.members}
    return Turnout([part for part in parts if part.asked], unasked)


def verdict_of(held: HeldRun) -> str:
    """How the members fare, in one sentence."""
    run, history = held.run, held.history
    if not run.rounds_done:
        return "The first round has not ended yet." if not held.over else f"It ended without a round. {run.reason}"
    if not history.lines:
        return "Its rounds are being read."
    newest = history.lines[max(history.lines)]
    sentence = verdict(standing(run, history), over=held.over, accuracy=newest.mean, turnout=turnout(held))
    return sentence if sentence.endswith(".") else f"{sentence}."


def state_look(run: v1.Run) -> str:
    """The class of a state's badge."""
    looks = {"RUNNING": "good", "COMPLETED": "good", "PAUSED": "warning", "FAILED": "critical", "STOPPED": "warning"}
    return looks.get(name_of(run, "state"), "notice")


def since(message: v1.Client) -> str:
    """Since when a member is away."""
    return f"since {formatting.moment(message.last_seen)}" if message.HasField("last_seen") else "never seen"


def days_left(at: datetime, now: datetime | None = None) -> int:
    """Whole days until a time."""
    return (at - (now or datetime.now(UTC))).days


def some(names: Sequence[str], most: int = NAMED) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
