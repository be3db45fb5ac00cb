"""The fleet of real workers: signed assignments go out, accepted replies come back.

open a phase    (phase row, one signed assignment per client), then tell the clients
wait            until enough have replied, nobody is left, or the deadline has passed
close it        (stragglers are recorded with their reason), then hand out the replies
"""

import logging
from collections.abc import Callable
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session, selectinload

from coordinator.aggregation.phases import Asked, Replies, Reply, Selected
from coordinator.rounds.evidence import Expected, RecordError
from coordinator.rounds.fleets.base import (
    Fleet,
    Held,
    Question,
    RevokedMeanwhile,
    RunFacts,
    Skipped,
    StoredInputs,
    Surroundings,
)
from coordinator.rounds.presence import Assigned, Cancelled, Presence
from coordinator.rounds.revoked import REVOKED, fulfilled, of_revoked, revoked_before
from coordinator.rounds.states import close_phase, end_assignment
from federation.envelope import envelope_digest
from federation.runs import RunSpec
from federation.v1.common_pb2 import AssignmentManifest, Input, Row, SignedEnvelope
from federation.vectors import RowFile, model_layout, update_rows
from federation.work.base import Shape, payload_layout
from federation.work.registry import encode
from storage import models
from storage.models import Assignment, AssignmentState, PhaseState, Run, RunState

log = logging.getLogger(__name__)

LOOK_SECONDS = 60.0  # after which a phase looks at the clock again


class RemoteFleet(Fleet):
    """The workers that attend, or that are enrolled, as the run's selection says.

    Args:
        run: whose fleet.
        around: the coordinator.
        presence: where clients are told of assignments.
        new_id: makes the ids of assignments.
        pool_complete: False while clients are expected back after a restart of the coordinator.
    """

    def __init__(
        self,
        run: RunFacts,
        around: Surroundings,
        *,
        presence: Presence,
        new_id: Callable[[], str],
        pool_complete: Callable[[], bool],
    ) -> None:
        self._run = run
        self._spec = run.spec
        self._around = around
        self._database = around.database
        self._presence = presence
        self._new_id = new_id
        self._pool_complete = pool_complete
        self._began = around.clock()

    def complete(self) -> bool:
        """See the base."""
        return self._pool_complete()

    def known(self, session: Session) -> dict[str, Selected]:
        """See the base."""
        return known_clients(session, self._spec, self._run.objectives)

    def pool(self, session: Session) -> dict[str, int]:
        """See the base."""
        pool = {client: one.samples for client, one in self.known(session).items()}
        if self._spec.selection.pool == "attending":
            attending = self._presence.attending()
            pool = {client: samples for client, samples in pool.items() if client in attending}
        return pool

    def ask(self, question: Question) -> Replies:
        """One phase: opened unless it was, waited for unless it is closed; its replies from the database."""
        phase_id, told = self._open_phase(question)
        if told:
            self._announce(phase_id, told)
        self._around.changed()
        while True:
            while (left := self._time_left(phase_id)) > 0:
                # Not longer, since the clock may be set meanwhile.
                self._around.wait(min(left, LOOK_SECONDS))
            if self._close_phase(phase_id):
                break
        self._leave_out_revoked(question, phase_id)
        return self._replies(question, phase_id)

    def _open_phase(self, question: Question) -> tuple[int, list[str]]:
        """Records the phase with one signed assignment per client. Returns its id and whom to tell."""
        now = self._around.clock()
        kind = question.phase.kind
        stored = StoredInputs(question.phase, self._around.blobs)
        inputs = {client_id: stored.of(client_id) for client_id in question.clients}
        layout = model_layout(self._around.blobs.local(question.base_model))
        with self._database.begin() as session:
            found = session.scalar(
                select(models.Phase).where(
                    models.Phase.round_id == question.round_id, models.Phase.number == question.number
                )
            )
            if found is not None:
                return found.phase_id, []
            self._run.running(session)
            deadline = now + timedelta(seconds=kind.terms(self._spec).deadline_seconds)
            opened = models.Phase(
                round_id=question.round_id,
                number=question.number,
                attempt=question.attempt,
                kind=kind.name,
                decides=kind.decides,
                state=PhaseState.OPEN,
                wanted=question.wanted,
                started=now,
                deadline=deadline,
            )
            # A client that was revoked since the selection gets nothing. Locked: one that is revoked from here on is
            # so after this transaction, and the revocation finds the assignment and cancels it.
            active = session.scalars(
                select(models.Client.client_id)
                .where(models.Client.client_id.in_(question.clients), models.Client.state == models.ClientState.ACTIVE)
                .order_by(models.Client.client_id)
                .with_for_update(read=True)
            ).all()
            if kind.decides and revoked_before(session, question.round_id, question.attempt, question.number):
                raise RevokedMeanwhile
            known = self.known(session)
            previous_step = _newest_step(session, self._run.run_id)
            for client_id in sorted(active):
                objectives = known[client_id].objectives if client_id in known else self._run.objectives
                manifest = self._manifest(question, client_id, Shape(layout, self._run.objectives, objectives))
                manifest.inputs.extend(
                    Input(name=one.name, digest=one.digest, size=one.size) for one in inputs[client_id]
                )
                manifest.previous_step = previous_step
                manifest.created.FromDatetime(now)
                manifest.deadline.FromDatetime(deadline)
                opened.assignments.append(
                    Assignment(
                        assignment_id=manifest.assignment_id,
                        client_id=client_id,
                        state=AssignmentState.OPEN,
                        base_model=question.base_model,
                        inputs=inputs[client_id],
                        objectives=list(objectives),
                        envelope=self._around.sign(manifest).SerializeToString(),
                        created=now,
                    )
                )
            session.add(opened)
        log.info(
            "run %s round %d phase %d: %s for %d clients",
            self._run.run_id,
            question.round,
            question.number,
            opened.kind,
            len(active),
        )
        return opened.phase_id, sorted(active)

    def _manifest(self, question: Question, client_id: str, shape: Shape) -> AssignmentManifest:
        work = question.phase.work(Asked(client_id, shape.serves, self._spec))
        rows = work.rows(shape)
        return AssignmentManifest(
            federation_id=self._around.federation_id,
            run_id=self._run.run_id,
            round=question.round,
            attempt=question.attempt,
            phase=question.number,
            assignment_id=self._new_id(),
            client_id=client_id,
            base_model=question.base_model,
            base_model_bytes=shape.layout.file_bytes,
            spec=self._run.spec_digest,
            task=self._spec.task,
            kind=work.name,
            work=encode(work),
            rows=[Row(name=row.name, dtype=row.dtype, length=row.length) for row in rows],
            max_payload_bytes=payload_layout(rows).file_bytes if rows else 0,
            seed=self._spec.seed,
            objectives=shape.serves,
        )

    def _announce(self, phase_id: int, clients: list[str]) -> None:
        """Tells clients of their assignments at once, if they attend."""
        with self._database.read() as session:
            envelopes = session.execute(
                select(Assignment.client_id, Assignment.envelope).where(
                    Assignment.phase_id == phase_id, Assignment.client_id.in_(clients)
                )
            ).all()
        for client_id, envelope in envelopes:
            self._presence.say(client_id, Assigned(envelope))

    def _time_left(self, phase_id: int) -> float:
        """Seconds to wait for further replies: 0 when enough are in, or nobody is left to wait for.

        Nobody waits for a client after the deadline, or when it has been absent for the grace that the run gives.

        Raises:
            Held: the run is not RUNNING.
        """
        with self._database.read() as session:
            if session.scalar(select(Run.state).where(Run.run_id == self._run.run_id)) is not RunState.RUNNING:
                raise Held
            phase = session.get_one(models.Phase, phase_id)
            enough = fulfilled(session, phase_id) >= phase.wanted
            ends = self._waits(session, phase)
        if phase.state is PhaseState.CLOSED or not ends:
            return 0.0
        if enough:
            return 0.0
        return max(0.0, (max(ends.values()) - self._around.clock()).total_seconds())

    def _waits(self, session: Session, phase: models.Phase) -> dict[str, datetime]:
        """Until when the phase waits for each client that has not replied."""
        attending, left = self._presence.attending(), self._presence.left()
        grace = timedelta(seconds=self._spec.selection.grace_seconds)
        ends = {}
        for client_id in session.scalars(
            select(Assignment.client_id).where(
                Assignment.phase_id == phase.phase_id, Assignment.state == AssignmentState.OPEN
            )
        ):
            ends[client_id] = phase.deadline
            if client_id in attending:
                continue
            gone = left.get(client_id)
            if self._spec.selection.pool == "attending":
                # It attended when it was selected: before a restart of the coordinator, if it has not been seen since.
                gone = max(gone or self._began, phase.started)
            if gone is not None and gone >= phase.started:
                ends[client_id] = min(phase.deadline, gone + grace)
        return ends

    def _close_phase(self, phase_id: int) -> bool:
        """Closes the phase, unless it has to wait for somebody; clients without a reply are recorded, and told."""
        cancelled: list[Assignment] = []
        now = self._around.clock()
        with self._database.begin() as session:
            phase = session.get_one(models.Phase, phase_id, with_for_update=True)
            if phase.state is PhaseState.CLOSED:
                return True
            enough = fulfilled(session, phase_id) >= phase.wanted
            ends = self._waits(session, phase)
            if not enough and any(end > now for end in ends.values()):
                return False
            for assignment in session.scalars(
                select(Assignment)
                .where(Assignment.phase_id == phase_id, Assignment.state == AssignmentState.OPEN)
                .order_by(Assignment.assignment_id)
                .with_for_update()
            ):
                if enough:
                    end_assignment(assignment, AssignmentState.CANCELLED, now, "not-needed")
                else:
                    late = ends[assignment.client_id] >= phase.deadline
                    end_assignment(assignment, AssignmentState.EXPIRED, now, "deadline" if late else "absent")
                cancelled.append(assignment)
            close_phase(phase, now)
        for assignment in cancelled:
            log.info("assignment %s of %s: %s", assignment.assignment_id, assignment.client_id, assignment.reason)
            self._presence.say(assignment.client_id, Cancelled(assignment.assignment_id, assignment.reason))
        return True

    def _leave_out_revoked(self, question: Question, phase_id: int) -> None:
        """Notes on record whose accepted replies do not count because the member has been revoked since.

        Raises:
            Skipped: the next phase was asked for by such a reply, and cannot be asked for again.
        """
        with self._database.read() as session:
            if not session.scalars(of_revoked(phase_id)).all():
                return
        with self._database.begin() as session:
            self._run.running(session)
            gone = session.scalars(of_revoked(phase_id).with_for_update(of=Assignment)).all()
            names = ", ".join(assignment.client_id for assignment in gone)
            later = select(models.Phase.phase_id).where(
                models.Phase.round_id == question.round_id, models.Phase.number > question.number
            )
            if gone and session.scalar(later.limit(1)) is not None:
                raise Skipped(f"{REVOKED}: {names}: revoked after the next phase was asked for by its reply")
            for assignment in gone:
                assignment.reason, assignment.message = REVOKED, "its reply was accepted, and does not count"
        log.warning("run %s round %d: revoked since, left out: %s", self._run.run_id, question.round, names)

    def _replies(self, question: Question, phase_id: int) -> Replies:
        """The accepted replies, as their members signed them; every byte of an update is verified before it is used.

        Raises:
            RecordError: the record differs from what was signed.
        """
        expected = Expected(
            federation_id=self._around.federation_id,
            run_id=self._run.run_id,
            spec=self._run.spec_digest,
            task=self._spec.task,
            round=question.round,
            phase=question.number,
            base_model=question.base_model,
            attempt=question.attempt,
            kind=question.phase.kind.name,
        )
        evidence = self._around.evidence
        with self._database.read() as session:
            accepted = session.execute(
                select(models.Update, Assignment, models.Client)
                .join(Assignment, Assignment.assignment_id == models.Update.assignment_id)
                .join(models.Client, models.Client.client_id == Assignment.client_id)
                .where(Assignment.phase_id == phase_id, models.Update.accepted)
                .options(selectinload(Assignment.inputs))
            ).all()
            answered = select(Assignment.assignment_id).where(
                Assignment.phase_id == phase_id, Assignment.state == AssignmentState.FULFILLED
            )
            unread = set(session.scalars(answered))
        replies = []
        for update, assignment, client in accepted:
            name = assignment.assignment_id
            if name not in unread:
                raise RecordError("updates", update.update_id, "accepted", f"assignment {name} has no further reply")
            unread.remove(name)
            order = evidence.order(assignment, expected)
            manifest = evidence.reply(update, order, client)
            if assignment.reason == REVOKED:
                continue
            rows: dict[str, RowFile] = {}
            if manifest.payload:
                rows = update_rows(self._around.blobs.local(manifest.payload))
            replies.append(
                Reply(
                    client_id=manifest.client_id,
                    samples=manifest.samples,
                    losses=dict(manifest.losses),
                    metrics=dict(manifest.metrics),
                    rows=tuple(rows.values()),
                    names=tuple(rows),
                    objectives=tuple(order.objectives),
                    envelope=update.envelope_digest,
                    payload=manifest.payload,
                )
            )
        if unread:
            raise RecordError("assignments", min(unread), "state", "FULFILLED, and there is no accepted reply")
        return Replies(replies, device=self._around.device)


def _newest_step(session: Session, run_id: str) -> str:
    """The digest of the signed envelope of a run's newest step; empty before the first."""
    step = session.scalar(
        select(models.Round.step)
        .where(models.Round.run_id == run_id, models.Round.step.is_not(None))
        .order_by(models.Round.number.desc())
        .limit(1)
    )
    return "" if step is None else envelope_digest(SignedEnvelope.FromString(step))


def known_clients(session: Session, spec: RunSpec, objectives: tuple[str, ...]) -> dict[str, Selected]:
    """Active clients that offer the task of a run and serve at least one of its objectives."""
    active = session.scalars(select(models.Client).where(models.Client.state == models.ClientState.ACTIVE))
    # The samples of an offer are a claim, which nobody signed: bounded as those of an update are.
    known = {
        client.client_id: Selected(
            min(int(client.tasks[spec.task]), spec.limits.samples), serves(client, spec, objectives)
        )
        for client in active
        if client.tasks.get(spec.task, 0) > 0
    }
    return {name: one for name, one in known.items() if one.objectives}


def serves(client: models.Client, spec: RunSpec, objectives: tuple[str, ...]) -> tuple[str, ...]:
    """Which of a run's objectives a client serves: what it declares, within what the specification says of it."""
    declared = client.objectives.get(spec.task) or objectives
    allowed = spec.objectives.serve.get(client.client_id, objectives)
    return tuple(name for name in objectives if name in declared and name in allowed)
