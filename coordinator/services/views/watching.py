"""Runs with their members, and news for watchers of a run, as the messages of the Admin service."""

from collections.abc import Mapping
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.alerts import rows
from coordinator.rounds.fleets.presence import Attending
from coordinator.rounds.runs.participation import Participation, read_rounds
from coordinator.rounds.transitions import ROUND_ENDED, RUN_ENDED
from coordinator.services.views import alerts, details, overview
from coordinator.services.views.conversion import like
from coordinator.services.views.summaries import ended_rounds, phases_of, rounds_from, summaries
from federation.v1 import admin_pb2 as messages
from storage import models
from storage.states import AssignmentState, PhaseState

MOST_LOOKS_AFTER_END = 3  # while the alerts of a run that has ended are not complete


def run_with_members(session: Session, item: models.Run, *, spec: bool = False) -> messages.Run:
    """A run with what each member did in it, and its alerts; with its specification if `spec`."""
    participation = Participation()
    for round_ in read_rounds(session, item.run_id):
        participation.add(round_)
    run = overview.run(session, item, spec=spec)
    add_members(run, participation)
    run.alerts.extend(alerts.of_run(session, item))
    return run


def runs_from(session: Session, start: int, count: int, *, brief: bool) -> list[messages.Run]:
    """Runs, newest first: at most `count` of them, after the first `start`; without their members if `brief`."""
    query = select(models.Run).order_by(models.Run.created.desc(), models.Run.run_id).offset(start).limit(count)
    shown = run_alone if brief else run_with_members
    return [shown(session, item) for item in session.scalars(query)]


def run_alone(session: Session, item: models.Run, *, spec: bool = False) -> messages.Run:
    """A run with its alerts and without its members; with its specification if `spec`."""
    run = overview.run(session, item, spec=spec)
    run.alerts.extend(alerts.of_run(session, item))
    return run


class Watching:
    """One watcher of one run; it remembers what the watcher has been sent.

    With `parts`, rounds that end come with every client's part, in place of the sums over all rounds: for these every
    round of the run is read.
    """

    def __init__(self, run_id: str, *, parts: bool) -> None:
        self._run_id = run_id
        self._parts = parts
        self._participation = Participation()
        self._since: int | None = None
        self._looks_after_end = 0
        self.over = False

    def look(
        self, session: Session, attending: Mapping[str, Attending], now: datetime
    ) -> list[messages.WatchRunResponse]:
        """News since the last call, at least one message; the last one shows the run as it is now."""
        first = self._since is None
        since = ended_rounds(session, self._run_id) if self._since is None else self._since
        item = session.get_one(models.Run, self._run_id)
        ended = [row for row in rounds_from(session, self._run_id, since) if row.state in ROUND_ENDED]
        self._since = ended[-1].number + 1 if ended else since
        if (first or ended) and not self._parts:
            for round_ in read_rounds(session, self._run_id, self._participation.next_round):
                self._participation.add(round_)
        if item.state in RUN_ENDED:  # its alerts follow in a moment
            self._looks_after_end += 1
            self.over = rows.complete(session, self._run_id) or self._looks_after_end > MOST_LOOKS_AFTER_END
        run = overview.run(session, item)
        run.alerts.extend(alerts.of_run(session, item))
        if first or ended or self.over:
            add_members(run, self._participation)
        responses = [messages.WatchRunResponse(run=run, ended=summary) for summary in summaries(session, ended)]
        if self._parts:
            for response, parts in zip(responses, details.rounds_with_parts(session, ended), strict=True):
                response.parts.CopyFrom(parts)
        responses = responses or [messages.WatchRunResponse(run=run)]
        phase = _open_phase(session, self._run_id, attending)
        if phase is not None:
            responses[-1].phase.CopyFrom(phase)
        for message in responses:
            message.now.FromDatetime(now)
        return responses


def _open_phase(session: Session, run_id: str, attending: Mapping[str, Attending]) -> messages.PhaseProgress | None:
    """The open phase with the clients that have not replied yet; None between phases."""
    phase = session.scalar(
        select(models.Phase)
        .join(models.Round)
        .where(models.Round.run_id == run_id, models.Phase.state == PhaseState.OPEN)
        .order_by(models.Phase.phase_id.desc())
        .limit(1)
    )
    if phase is None:
        return None
    progress = phases_of(session, [phase.round_id])[phase.round_id][phase.number]
    rows = session.execute(
        select(models.Assignment.client_id, models.Assignment.created, models.Client.last_seen)
        .join(models.Client, models.Client.client_id == models.Assignment.client_id)
        .where(models.Assignment.phase_id == phase.phase_id, models.Assignment.state == AssignmentState.OPEN)
        .order_by(models.Assignment.client_id)
    )
    for client, asked, last_seen in rows:
        stream = attending.get(client)
        seen = last_seen if stream is None else stream.last_seen
        progress.outstanding.append(
            like(messages.Outstanding, None, client_id=client, asked=asked, attending=bool(stream), last_seen=seen)
        )
    return progress


def add_members(run: messages.Run, participation: Participation) -> None:
    """Adds what each member did in a run."""
    for member in participation.members:
        outcomes = {outcome.lower(): count for outcome, count in member.outcomes.items()}
        run.members.append(like(messages.MemberSummary, member, **outcomes))
