"""The fleet of real workers: signed assignments go out, accepted replies come back.

A phase is opened: its row and one signed assignment for each client are recorded, then sent. It is
closed when enough have replied, no client is left, or the deadline has passed; clients without a reply are recorded.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy import bindparam, insert, select
from sqlalchemy.orm import Session

from coordinator.clock import past
from coordinator.rounds.export import newest_step
from coordinator.rounds.fleets.base import (
    Fleet,
    Held,
    Question,
    RevokedMeanwhile,
    RunContext,
    RunFacts,
    Skipped,
)
from coordinator.rounds.fleets.consents import reluctant
from coordinator.rounds.fleets.deliveries import sessions_ended
from coordinator.rounds.fleets.known import known_clients, too_old
from coordinator.rounds.fleets.lost_members import ABSENT, PhaseTimes, asked_again, times_of
from coordinator.rounds.fleets.presence import Assigned, Presence
from coordinator.rounds.replies import signed_columns
from coordinator.rounds.replies.reply_counts import count_reply
from coordinator.rounds.replies.revoked import LEFT, REVOKED, count_fulfilled, fulfilled, of_revoked, revoked_before
from coordinator.rounds.transitions import close_phase, end_assignment, open_assignments
from federation.aggregation.phases import Asked, Replies, Selected
from federation.monitoring.tally import MonitoredKind, MonitoredNumber
from federation.process.assignment_log import about_assignment
from federation.record import log_entries
from federation.spec.run_facts import unshared_parameters
from federation.trust.envelope import envelope_digest
from federation.v1.common_pb2 import AssignmentManifest, Input, Row
from federation.work.base import payload_layout
from federation.work.closing import SiteClosing
from federation.work.evaluate.work import Evaluate
from federation.work.registry import encode
from storage import audit, models
from storage.models import Assignment
from storage.records import ConversationFacts
from storage.states import AssignmentState, ClientState, PhaseState, RunState

log = logging.getLogger(__name__)

PHASE_SECONDS = MonitoredNumber(
    "fedpareto_phase_seconds",
    "Seconds of the phases of rounds that have ended, by the kind of work.",
    MonitoredKind.DURATION,
    ("kind",),
    (0.5, 2.0, 10.0, 60.0, 300.0, 1800.0, 7200.0, 28800.0),
    most=50,
)
LOOK_SECONDS = 60.0  # after which a phase looks at the clock again
# The progress of a phase, and the clients without a reply: built once, since these queries run after each reply or in
# each phase.
_PROGRESS = (
    select(
        models.Phase.state,
        models.Phase.wanted,
        models.Phase.started,
        models.Phase.deadline,
        models.Run.state.label("run"),
        count_fulfilled(models.Phase.phase_id).scalar_subquery().label("replied"),
    )
    .join_from(models.Phase, models.Round)
    .join(models.Run)
    .where(models.Phase.phase_id == bindparam("phase"))
)
_UNANSWERED = select(Assignment.client_id).where(
    Assignment.phase_id == bindparam("phase"), Assignment.state == AssignmentState.OPEN
)


@dataclass(frozen=True)
class _Issued:
    """An assignment of a phase that is opened."""

    order: AssignmentManifest
    digest: str  # of the envelope
    message: Assigned
    left: bool  # its client has left since the conversation began: the assignment has ended, and is not sent


class _RemainingWait(NamedTuple):
    """The time for which a phase waits, unless this number of replies comes before."""

    seconds: float
    replies: int


_NOTHING = _RemainingWait(0.0, 0)


class RemoteFleet(Fleet):
    """The workers that attend, or that are enrolled, as the run's selection says.

    Args:
        run: the run.
        context: the coordinator.
        presence: sends assignments to the clients that attend.
        new_id: makes the ids of assignments.
        pool_complete: False while clients are expected back after a restart of the coordinator.
    """

    def __init__(
        self,
        run: RunFacts,
        context: RunContext,
        *,
        presence: Presence,
        new_id: Callable[[], str],
        pool_complete: Callable[[], bool],
    ) -> None:
        super().__init__(run, context)
        self._spec = run.spec
        self._database = context.database
        self._presence = presence
        self._new_id = new_id
        self._pool_complete = pool_complete
        self._began = context.clock()
        # When phases were found to begin in time to come. This is kept: they come nearer with each look.
        self._set_right: dict[int, datetime] = {}

    def complete(self) -> bool:
        return self._pool_complete()

    def known(self, session: Session) -> dict[str, Selected]:
        unwilling = reluctant(session, self.run.run_id)
        clients = known_clients(session, self._spec, self.run.objectives)
        return {name: client for name, client in clients.items() if name not in unwilling}

    def keys(self, session: Session) -> dict[str, bytes]:
        active = models.Client.state == ClientState.ACTIVE
        rows = session.execute(select(models.Client.client_id, models.Client.key_id).where(active))
        return {client_id: bytes.fromhex(key_id) for client_id, key_id in rows}

    def pool(self, session: Session) -> dict[str, int]:
        pool, closed = super().pool(session), self._closed()
        if self._spec.selection.pool == "attending":
            attending = self._presence.attending()
            pool = {client: samples for client, samples in pool.items() if client in attending}
        return {client: samples for client, samples in pool.items() if client not in closed}

    def absent(self, session: Session) -> dict[str, str]:
        reasons = {name: f"is {closing}" for name, closing in self._closed().items()}
        reasons |= reluctant(session, self.run.run_id)
        old = {name: f"cannot take part: {why}" for name, why in too_old(session, self._spec).items()}
        if not (reasons or old):
            return {}
        clients, attending = known_clients(session, self._spec, self.run.objectives), self._presence.attending()
        reasons = {name: why for name, why in reasons.items() if name in clients} | old
        return {name: reasons[name] for name in sorted(reasons) if name in attending}

    def _closed(self) -> dict[str, SiteClosing]:
        """The clients whose sites are closed or paused now."""
        attending = self._presence.attending().items()
        return {name: stream.closing for name, stream in attending if stream.closing is not None}

    def ask(self, question: Question) -> Replies:
        phase_id = self._issue(question)
        self.context.changed()
        self._wait(phase_id)
        self._leave_out_revoked(question, phase_id)
        expected = {**self.facts(question), "kind": question.phase.kind.name}
        replies = self.context.evidence.replies(self._database, self.context.blobs, phase_id, expected)
        with self._database.read() as session:
            declined = (Assignment.phase_id == phase_id, Assignment.state == AssignmentState.DECLINED)
            reasons = session.execute(select(Assignment.client_id, Assignment.reason).where(*declined)).all()
        return Replies(replies, device=self.context.device, declines=dict(reasons))

    def back(self, question: Question) -> list[str]:
        with self._database.read() as session:
            known, pool = self.known(session).keys(), self.pool(session).keys() & self._presence.attending().keys()
            return asked_again(session, question, self._spec.selection, could=known - self._closed().keys(), there=pool)

    def _issue(self, question: Question) -> int:
        """Records the phase with a signed assignment for each client, and tells the clients. Returns the phase's id.

        A phase that is on record, such as from before a restart, is not issued again.
        """
        now, inputs = self.context.clock(), self.store_inputs(question)
        with self._database.begin() as session:
            self.run.running(session)  # before the look, so that nothing is on its way to the record meanwhile
            before = session.scalar(
                select(models.Phase.phase_id).filter_by(round_id=question.current.round_id, number=question.number)
            )
            if before is not None:
                return before
            active, left = _lock_members(session, question.clients)
            asked = sorted([*active, *left & self._counted_on(session, question)])
            phase = question.row(self._spec, now)
            if question.phase.kind.decides and revoked_before(session, question.current, question.number):
                raise RevokedMeanwhile
            clients, previous_step = self.known(session), newest_step(session, self.run.run_id)
            session.add(phase)
            session.flush()
            issued = []
            for client_id in asked:
                serves = clients[client_id].objectives if client_id in clients else self.run.objectives
                needed = inputs[client_id]
                order = self._order(question, client_id, serves, needed.rows)
                order.previous_step, order.members = previous_step, len(asked)
                order.created.FromDatetime(now)
                order.deadline.FromDatetime(phase.deadline)
                signed = self.context.sign(order)
                message = Assigned(order.assignment_id, signed.SerializeToString(), needed.sent)
                issued.append(_Issued(order, envelope_digest(signed), message, client_id in left))
            _record(session, phase.phase_id, issued, now)
        where = f"run {self.run.run_id} round {question.current.number} phase {question.number}"
        log.info("%s: %s for %d clients", where, phase.kind, len(active))
        sent = [(item.order.client_id, item.message) for item in issued if not item.left]
        self._presence.say_all(self.run.run_id, sent)
        return phase.phase_id

    def _counted_on(self, session: Session, question: Question) -> frozenset[str]:
        """The clients that the conversation of a question builds on, as it was at its first phase.

        One of them that has left since gets an assignment that has ended. So the record has it as one that gave no
        reply, and what follows from the record is the same after a restart, and for everybody who verifies it.
        """
        if not question.phase.kind.decides and self._spec.privacy.secure == "off":
            return frozenset()
        if question.conversation is not None:
            return frozenset(question.conversation.clients)
        earlier = select(models.Phase.conversation).where(
            models.Phase.round_id == question.current.round_id,
            models.Phase.attempt == question.current.attempt,
            models.Phase.number < question.number,
        )
        found = map(ConversationFacts.decode, session.scalars(earlier.order_by(models.Phase.number.desc())))
        return frozenset(next((facts.clients for facts in found if facts is not None), ()))

    def _wait(self, phase_id: int) -> None:
        """Waits until the phase is closed: enough have replied, no client is left, or the deadline has passed."""
        closed = False
        while not closed:
            while (left := self._remaining_wait(phase_id)).seconds > 0:
                # Not longer, since the clock may be set meanwhile.
                self.context.wait(min(left.seconds, LOOK_SECONDS), left.replies)
            closed = self._close_phase(phase_id)

    def _order(
        self,
        question: Question,
        client_id: str,
        serves: tuple[str, ...],
        needed: Sequence[models.Input],
    ) -> AssignmentManifest:
        """The order for one client, without the fields that the opening of the phase decides."""
        parameters = self._spec.parameters
        work = question.phase.work(Asked(client_id, serves, self._spec, question.current.number))
        rows = work.rows(self.run.shape(question.layout, serves))
        return AssignmentManifest(
            **self.facts(question),
            assignment_id=self._new_id(),
            client_id=client_id,
            base_model_bytes=question.layout.file_bytes,
            kind=work.name,
            work=encode(work),
            inputs=[Input(name=row.name, digest=row.digest, size=row.size) for row in needed],
            rows=[Row(name=row.name, dtype=row.dtype, length=row.length) for row in rows],
            max_payload_bytes=payload_layout(rows).file_bytes if rows else 0,
            seed=self._spec.seed,
            objectives=serves,
            unshared=None if parameters.shares_all else unshared_parameters(parameters),
            submitted_by=self.run.submitted_by,
        )

    def _remaining_wait(self, phase_id: int) -> _RemainingWait:
        """The wait of a phase: none when enough replies are in, or no client is left to wait for.

        The phase does not wait for a client after the deadline, or after its absence exceeds the run's grace.
        """
        with self._database.read() as session:
            phase = session.connection().execute(_PROGRESS, {"phase": phase_id}).one()
            if phase.run is not RunState.RUNNING:
                raise Held
            if phase.state is PhaseState.CLOSED:
                return _NOTHING
            enough = phase.replied >= phase.wanted
            if enough and not self._spec.selection.required:
                return _NOTHING
            times = self._times(phase_id, phase.started, phase.deadline)
            ends = self._wait_ends(session, phase_id, times, enough=enough)
        if not ends:
            return _NOTHING
        last = max(ends.values())
        replies = list(ends.values()).count(last)  # with fewer, the phase still waits for one of these clients
        if not enough:
            replies = min(replies, phase.wanted - phase.replied)
        return _RemainingWait((last - self.context.clock()).total_seconds(), replies)

    def _times(self, phase_id: int, started: datetime, deadline: datetime) -> PhaseTimes:
        now = self.context.clock()
        if past(started, now) is None:
            self._set_right.setdefault(phase_id, now)
        return times_of(started, deadline, began=self._began, set_right=self._set_right.get(phase_id))

    def _wait_ends(self, session: Session, phase_id: int, times: PhaseTimes, *, enough: bool) -> dict[str, datetime]:
        """The end of the phase's wait for each client without a reply; with `enough`, for the required ones."""
        attending, left = self._presence.attending(), self._presence.left()
        grace = timedelta(seconds=self._spec.selection.grace_seconds)
        ends = {}
        for client_id in session.connection().execute(_UNANSWERED, {"phase": phase_id}).scalars():
            if enough and client_id not in self._spec.selection.required:
                continue
            ends[client_id] = times.deadline
            if client_id in attending:
                continue
            gone = left.get(client_id)
            if self._spec.selection.pool == "attending":
                # It attended when it was selected: before a restart of the coordinator, if it has not been seen since.
                gone = max(gone or self._began, times.started)
            if gone is not None and gone >= times.started:
                ends[client_id] = min(times.deadline, gone + grace)
        return ends

    def _close_phase(self, phase_id: int) -> bool:
        """Closes the phase, unless it waits for a client; records and notifies the clients without a reply."""
        now = self.context.clock()
        with self._database.begin() as session:
            self.run.running(session)
            phase = session.get_one(models.Phase, phase_id, with_for_update=True)
            if phase.state is PhaseState.CLOSED:
                return True
            enough = fulfilled(session, phase_id) >= phase.wanted
            times = self._times(phase_id, phase.started, phase.deadline)
            ends = self._wait_ends(session, phase_id, times, enough=enough)
            if any(end > now for end in ends.values()):
                return False
            ended = open_assignments(session, Assignment.phase_id == phase_id)
            # Clients that have not come back after a restart of the coordinator may have worked all the time.
            away = set[str]() if times.found else self._away(ended)
            for assignment in ended:
                if enough and assignment.client_id not in ends:
                    end_assignment(assignment, AssignmentState.CANCELLED, now, "not-needed")
                else:
                    absent = ends[assignment.client_id] < times.deadline or assignment.client_id in away
                    end_assignment(assignment, AssignmentState.EXPIRED, now, ABSENT if absent else "deadline")
            close_phase(phase, now)
        tally = self._database.tally
        tally.note(PHASE_SECONDS, phase.kind, seconds=(now - phase.started).total_seconds())
        for assignment in ended:
            if assignment.state is AssignmentState.EXPIRED:
                count_reply(tally, assignment.client_id, "missing", assignment.reason)
        self.tell_cancelled(ended)
        return True

    def _away(self, assignments: Sequence[Assignment]) -> set[str]:
        """The clients of these assignments that do not attend."""
        return {assignment.client_id for assignment in assignments} - self._presence.attending().keys()

    def tell_cancelled(self, assignments: Sequence[Assignment]) -> None:
        for assignment in assignments:
            name = assignment.assignment_id
            with about_assignment(name):
                log.info("assignment %s of %s: %s", name, assignment.client_id, assignment.reason)
        self._presence.say_cancelled(self.run.run_id, assignments)

    def tell_ended(self, current: models.Round, attempt: int) -> None:
        if self._spec.privacy.secure == "off":
            return
        with self._database.read() as session:
            of_attempt = models.Round.round_id == current.round_id, models.Phase.attempt == attempt
            ended = sessions_ended(session, *of_attempt)
        self._presence.say_all(self.run.run_id, ended)

    def _leave_out_revoked(self, question: Question, phase_id: int) -> None:
        """Records the accepted replies that do not count because their members have been revoked since.

        Raises:
            Skipped: the next phase was asked for by such a reply, and cannot be asked for again.
            RevokedMeanwhile: in a phase of a private round, which cannot go on without it.
        """
        with self._database.read() as session:
            if not session.scalars(of_revoked(phase_id)).all():
                return
        with self._database.begin() as session:
            self.run.running(session)
            gone = session.scalars(of_revoked(phase_id).with_for_update(of=Assignment)).all()
            names = ", ".join(assignment.client_id for assignment in gone)
            later = select(models.Phase.phase_id).where(
                models.Phase.round_id == question.current.round_id, models.Phase.number > question.number
            )
            # Section 2.5: the others' masks are made with its key. The attempt is over; the next one has other terms
            # and other masks.
            if gone and self._spec.privacy.secure != "off" and question.phase.kind.decides:
                raise RevokedMeanwhile
            # Nobody is asked to measure by the measurements of others.
            follows = question.phase.kind is not Evaluate and session.scalar(later.limit(1)) is not None
            if gone and follows:
                raise Skipped(f"{REVOKED}: {names}: revoked after the next phase was asked for by its reply")
            for assignment in gone:
                assignment.reason, assignment.message = REVOKED, "its reply was accepted, and does not count"
        log.warning("run %s round %d: revoked since, left out: %s", self.run.run_id, question.current.number, names)


def _lock_members(session: Session, clients: Sequence[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Those of these clients that are active now, and those that have left since they were selected.

    They are locked: the revocation or withdrawal of one waits for this transaction, then finds its assignment and ends
    it.
    """
    states = (ClientState.ACTIVE, ClientState.LEFT)
    query = select(models.Client.client_id, models.Client.state)
    query = query.where(models.Client.client_id.in_(clients), models.Client.state.in_(states))
    found = session.execute(query.order_by(models.Client.client_id).with_for_update(read=True)).all()
    active, left = (frozenset(name for name, state in found if state is wanted) for wanted in states)
    return active, left


def _record(session: Session, phase_id: int, issued: Sequence[_Issued], now: datetime) -> None:
    """Records the assignments of a phase."""
    events = [_event(item.order, item.digest, now) for item in issued]
    assignments = [
        {
            **signed_columns.of_assignment(item.order),
            "phase_id": phase_id,
            "state": AssignmentState.CANCELLED if item.left else AssignmentState.OPEN,
            "reason": LEFT if item.left else "",
            "ended": now if item.left else None,
            "envelope": item.message.envelope,
            "created": now,
        }
        for item in issued
    ]
    inputs = [
        {"assignment_id": item.order.assignment_id, **values}
        for item in issued
        for values in signed_columns.of_inputs(item.order)
    ]
    # Each table in one statement: the ORM would handle each row by itself.
    if assignments:
        audit.record_all(session, events)
        session.connection().execute(insert(Assignment), assignments)
    if inputs:
        session.connection().execute(insert(models.Input), inputs)


def _event(order: AssignmentManifest, digest: str, now: datetime) -> audit.LogEvent:
    detail = f"{order.client_id}: run {order.run_id} round {order.round} phase {order.phase}: {order.kind}"
    return audit.LogEvent(now, "coordinator", log_entries.ISSUED, order.assignment_id, detail=detail, digest=digest)
