"""The conductor: takes one run from where the database says that it stands to its end.

Crash only: whatever the conductor knows is in the database or the blob store before it acts on it. After `kill -9` at
any instant, the next conductor runs the algorithm's generator again, feeds it the stored replies, and goes on; given
the same replies it makes the same bytes.

    begin a round    (round row: who is selected)                                  OPEN
      for each phase that the generator yields:
        open it      (phase row, one signed assignment per client), then tell the clients
        wait         until enough have replied, nobody is left, or the deadline has passed
        close it     (stragglers are recorded with their reason), then send the replies to the generator
      aggregate      (result model, Gram matrix, signed step, the run's new model)  STEPPED
      evaluate       (one more phase, on the new model)                             COMPLETED
"""

import io
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.aggregation.gram import Row, apply_step
from coordinator.aggregation.phases import Evaluate, Phase, Replies, Reply, RoundContext, RoundGenerator, Step, Train
from coordinator.aggregation.qp import UnsolvedError
from coordinator.aggregation.registry import algorithm, server_rate
from coordinator.aggregation.rules import TooFewUpdatesError
from coordinator.rounds import metrics, outcome, selection
from coordinator.rounds.hub import Hub
from coordinator.rounds.states import close_phase, end_assignment, move_round, move_run
from federation.digests import digest
from federation.envelope import seal
from federation.runs import RunSpec
from federation.v1 import common_pb2
from federation.v1.common_pb2 import AssignmentManifest, EvaluateWork, StepManifest, TrainWork
from federation.v1.federation_pb2 import AttendResponse, Cancel
from federation.vectors import model_layout, model_row, update_layout, update_rows
from storage import models
from storage.blobs import BlobStore
from storage.database import Database
from storage.models import (
    Assignment,
    AssignmentState,
    PhaseKind,
    PhaseState,
    Round,
    RoundState,
    Run,
    RunState,
)

log = logging.getLogger(__name__)


class Held(Exception):
    """The run is not RUNNING any more, or the coordinator is stopping: leave everything as it is."""


class Skipped(Exception):
    """This round ends without a step; the message says why."""


@dataclass(frozen=True)
class Surroundings:
    """What a conductor needs of the coordinator.

    Attributes:
        database: where facts are kept.
        blobs: where models and updates are kept.
        hub: where clients are told of assignments.
        signing_key: the coordinator's.
        federation_id: the federation.
        device: where updates are aggregated, "cpu" or "cuda".
        clock: the time, aware.
        new_id: makes the ids of assignments.
        wait: blocks until something changed in the run or the time (seconds) is over; raises Held when stopping.
        pool_complete: False while clients are expected back after a restart of the coordinator.
        changed: announces a change to whoever watches the run.
    """

    database: Database
    blobs: BlobStore
    hub: Hub
    signing_key: Ed25519PrivateKey
    federation_id: str
    device: str
    clock: Callable[[], datetime]
    new_id: Callable[[], str]
    wait: Callable[[float | None], None]
    pool_complete: Callable[[], bool]
    changed: Callable[[], None]


class Conductor:
    """Conducts one run. `conduct` returns when the run has ended; it raises Held when it is held."""

    def __init__(self, run_id: str, around: Surroundings) -> None:
        self._run_id = run_id
        self._around = around
        self._database = around.database
        with self._database.read() as session:
            run = session.get_one(Run, run_id)
            self._spec = RunSpec.parse(run.spec)
            self._spec_digest = run.spec_digest
            self._parameters = session.get_one(models.Model, run.initial_model).parameters
        self._algorithm = algorithm(self._spec.algorithm.name, self._spec.algorithm.hyperparameters)

    def conduct(self) -> None:
        """Round after round until the run has ended.

        Raises:
            Held: the run was paused or stopped, or the coordinator is stopping.
        """
        with self._database.begin() as session:
            run = session.get_one(Run, self._run_id, with_for_update=True)
            if run.state is RunState.PENDING:
                move_run(run, RunState.RUNNING, self._around.clock())
        while True:
            self._checkpoint()
            current = self._current_round()
            if current is None:
                return
            self._conduct_round(current)

    # --- rounds

    def _current_round(self) -> Round | None:
        """The round that is under way, or a new one; None when the run has ended."""
        with self._database.begin() as session:
            last = session.scalar(
                select(Round).where(Round.run_id == self._run_id).order_by(Round.number.desc()).limit(1)
            )
            if last is not None and last.state in (RoundState.OPEN, RoundState.STEPPED):
                return last
            number = 0 if last is None else last.number + 1
            if self._ended(session, number):
                return None
        return self._begin_round(number)

    def _ended(self, session: Session, number: int) -> bool:
        """Ends the run when its rounds are done, or when too many in a row were skipped."""
        limit = self._spec.limits.skipped_rounds
        recent = session.scalars(
            select(Round).where(Round.run_id == self._run_id).order_by(Round.number.desc()).limit(limit)
        ).all()
        run = self._running(session)
        if len(recent) == limit and all(round_.state is RoundState.SKIPPED for round_ in recent):
            why = f"{limit} rounds in a row were skipped; the last one: {recent[0].reason}"
            move_run(run, RunState.FAILED, self._around.clock(), why)
        elif number >= self._spec.rounds:
            move_run(run, RunState.COMPLETED, self._around.clock())
        else:
            return False
        log.info("run %s: %s %s", self._run_id, run.state, run.reason)
        return True

    def _begin_round(self, number: int) -> Round:
        """Waits for the pool, selects, and records the selection before anybody is asked."""
        rule = self._spec.selection
        while True:
            complete = self._around.pool_complete()  # asked first: whoever makes it complete must be in the pool
            with self._database.begin() as session:
                run = self._running(session)
                pool = self._pool(session)
                if len(pool) >= rule.minimum and complete:
                    selected = selection.select(rule, pool, seed=self._spec.seed, round_number=number)
                    run.reason = ""
                    begun = Round(
                        run_id=self._run_id,
                        number=number,
                        state=RoundState.OPEN,
                        base_model=run.model,
                        selected=selected,
                        wanted=min(len(selected), selection.wanted(rule, len(pool))),
                        started=self._around.clock(),
                    )
                    session.add(begun)
                    break
                waiting = f"waiting for clients: {len(pool)} of {rule.minimum} are ready for {self._spec.task}"
                if len(pool) >= rule.minimum:
                    waiting = "waiting for clients to come back after a restart"
                if run.reason != waiting:
                    run.reason = waiting
                    log.info("run %s: %s", self._run_id, waiting)
            self._around.changed()
            self._around.wait(None if len(pool) < rule.minimum else 1.0)
        log.info("run %s round %d: selected %s", self._run_id, number, ", ".join(selected))
        return begun

    def _pool(self, session: Session) -> dict[str, int]:
        """The clients that could work now: id -> training samples."""
        task = self._spec.task
        active = session.scalars(select(models.Client).where(models.Client.state == models.ClientState.ACTIVE))
        pool = {client.client_id: int(client.tasks[task]) for client in active if client.tasks.get(task, 0) > 0}
        if self._spec.selection.pool == "attending":
            attending = self._around.hub.attending()
            pool = {client: samples for client, samples in pool.items() if client in attending}
        return pool

    def _conduct_round(self, current: Round) -> None:
        if current.state is RoundState.OPEN:
            try:
                step, phases = self._converse(current)
                self._aggregate(current, step, phases)
            except Skipped as skipped:
                self._skip(current, str(skipped))
                return
        self._evaluate_and_finish(current.round_id)

    def _converse(self, current: Round) -> tuple[Step, int]:
        """Runs the algorithm's generator against the clients, or against the stored replies.

        Returns:
            The step, and how many phases it took.
        """
        with self._database.read() as session:
            state = session.get_one(Run, self._run_id).state_data
        context = RoundContext(
            number=current.number,
            total=self._spec.rounds,
            prior=self._spec.algorithm.prior,
            state=state,
            device=self._around.device,
        )
        conversation: RoundGenerator = self._algorithm.round(context)
        number = 0
        phase = next(conversation)
        while True:
            clients = list(current.selected if phase.clients is None else phase.clients)
            wanted = current.wanted if phase.clients is None else len(clients)
            replies = self._ask(current, number, phase, clients, wanted, current.base_model)
            self._checkpoint()
            need = selection.quorum(self._spec.selection, wanted)
            if len(replies) < need:
                raise Skipped(f"quorum: {len(replies)} of {len(clients)} clients replied, {need} are needed")
            try:
                phase = conversation.send(replies)
            except StopIteration as end:
                return end.value, number + 1
            except (TooFewUpdatesError, UnsolvedError) as error:
                # Of these updates, by whoever sent them: the next round's may do better.
                raise Skipped(f"aggregation: {error}") from error
            number += 1

    def _skip(self, current: Round, why: str) -> None:
        with self._database.begin() as session:
            self._running(session)
            round_ = session.get_one(Round, current.round_id)
            move_round(round_, RoundState.SKIPPED, self._around.clock(), why)
        log.warning("run %s round %d: skipped: %s", self._run_id, current.number, why)
        self._around.changed()

    # --- phases

    def _ask(
        self, current: Round, number: int, phase: Phase, clients: list[str], wanted: int, base_model: str
    ) -> Replies:
        """One phase: opened unless it was, waited for unless it is closed; its replies from the database."""
        phase_id, told = self._open_phase(current, number, phase, clients, wanted, base_model)
        if told:
            self._announce(phase_id, told)
        self._around.changed()
        while (left := self._time_left(phase_id)) > 0:
            self._around.wait(left)
        self._close_phase(phase_id)
        return self._replies(phase_id)

    def _open_phase(
        self, current: Round, number: int, phase: Phase, clients: list[str], wanted: int, base_model: str
    ) -> tuple[int, list[str]]:
        """Records the phase with one signed assignment per client. Returns its id and whom to tell."""
        now = self._around.clock()
        seconds = (
            self._spec.train.deadline_seconds if isinstance(phase, Train) else self._spec.evaluate.deadline_seconds
        )
        with self._database.begin() as session:
            found = session.scalar(
                select(models.Phase).where(models.Phase.round_id == current.round_id, models.Phase.number == number)
            )
            if found is not None:
                return found.phase_id, []
            self._running(session)
            deadline = now + timedelta(seconds=seconds)
            opened = models.Phase(
                round_id=current.round_id,
                number=number,
                kind=PhaseKind.TRAIN if isinstance(phase, Train) else PhaseKind.EVALUATE,
                state=PhaseState.OPEN,
                wanted=wanted,
                started=now,
                deadline=deadline,
            )
            size = session.get_one(models.Model, base_model).size
            # A client that was revoked since the selection gets nothing. Locked: one that is revoked from here on is
            # so after this transaction, and the revocation finds the assignment and cancels it.
            active = session.scalars(
                select(models.Client.client_id)
                .where(models.Client.client_id.in_(clients), models.Client.state == models.ClientState.ACTIVE)
                .order_by(models.Client.client_id)
                .with_for_update(read=True)
            ).all()
            for client_id in sorted(active):
                manifest = self._manifest(current, number, phase, client_id, base_model, size)
                manifest.created.FromDatetime(now)
                manifest.deadline.FromDatetime(deadline)
                opened.assignments.append(
                    Assignment(
                        assignment_id=manifest.assignment_id,
                        client_id=client_id,
                        state=AssignmentState.OPEN,
                        base_model=base_model,
                        envelope=seal(manifest, self._around.signing_key).SerializeToString(),
                        created=now,
                    )
                )
            session.add(opened)
        log.info(
            "run %s round %d phase %d: %s for %d clients",
            self._run_id,
            current.number,
            number,
            opened.kind,
            len(active),
        )
        return opened.phase_id, sorted(active)

    def _manifest(
        self, current: Round, number: int, phase: Phase, client_id: str, base_model: str, size: int
    ) -> AssignmentManifest:
        manifest = AssignmentManifest(
            federation_id=self._around.federation_id,
            run_id=self._run_id,
            round=current.number,
            phase=number,
            assignment_id=self._around.new_id(),
            client_id=client_id,
            base_model=base_model,
            base_model_bytes=size,
            spec=self._spec_digest,
            task=self._spec.task,
            seed=self._spec.seed,
        )
        if isinstance(phase, Train):
            train = self._spec.train
            manifest.train.CopyFrom(
                TrainWork(
                    epochs=train.epochs,
                    steps=train.steps,
                    batch_size=train.batch_size,
                    learning_rate=train.learning_rate,
                    proximal_mu=train.proximal_mu,
                    momentum=train.momentum,
                    weight_decay=train.weight_decay,
                )
            )
            rows = [(objective, self._parameters) for objective in phase.objectives]
            manifest.rows.extend(common_pb2.Row(objective=name, dtype="F32", length=length) for name, length in rows)
            manifest.max_payload_bytes = update_layout(rows).file_bytes
        else:
            manifest.evaluate.CopyFrom(EvaluateWork(splits=phase.splits))
        return manifest

    def _announce(self, phase_id: int, clients: list[str]) -> None:
        """Tells clients of their assignments at once, if they attend."""
        with self._database.read() as session:
            envelopes = session.execute(
                select(Assignment.client_id, Assignment.envelope).where(
                    Assignment.phase_id == phase_id, Assignment.client_id.in_(clients)
                )
            ).all()
        for client_id, envelope in envelopes:
            message = AttendResponse()
            message.assignment.ParseFromString(envelope)
            self._around.hub.say(client_id, message)

    def _time_left(self, phase_id: int) -> float:
        """Seconds to wait for further replies: 0 when enough are in, nobody is left, or the deadline has passed.

        Raises:
            Held: the run is not RUNNING.
        """
        with self._database.read() as session:
            if session.scalar(select(Run.state).where(Run.run_id == self._run_id)) is not RunState.RUNNING:
                raise Held
            phase = session.get_one(models.Phase, phase_id)
            states = _states(session, phase_id)
        if phase.state is PhaseState.CLOSED or AssignmentState.OPEN not in states:
            return 0.0
        if states[AssignmentState.FULFILLED] >= phase.wanted:
            return 0.0
        return max(0.0, (phase.deadline - self._around.clock()).total_seconds())

    def _close_phase(self, phase_id: int) -> None:
        """Closes the phase; whoever has not replied is recorded with the reason, and told."""
        cancelled: list[Assignment] = []
        now = self._around.clock()
        with self._database.begin() as session:
            phase = session.get_one(models.Phase, phase_id, with_for_update=True)
            if phase.state is PhaseState.CLOSED:
                return
            enough = _states(session, phase_id)[AssignmentState.FULFILLED] >= phase.wanted
            to, why = (AssignmentState.CANCELLED, "not-needed") if enough else (AssignmentState.EXPIRED, "deadline")
            for assignment in session.scalars(
                select(Assignment)
                .where(Assignment.phase_id == phase_id, Assignment.state == AssignmentState.OPEN)
                .order_by(Assignment.assignment_id)
                .with_for_update()
            ):
                end_assignment(assignment, to, now, why)
                cancelled.append(assignment)
            close_phase(phase, now)
        for assignment in cancelled:
            log.info("assignment %s of %s: %s", assignment.assignment_id, assignment.client_id, assignment.reason)
            cancel = Cancel(assignment_id=assignment.assignment_id, reason=assignment.reason)
            self._around.hub.say(assignment.client_id, AttendResponse(cancel=cancel))

    def _replies(self, phase_id: int) -> Replies:
        """The accepted replies; the bytes of every update are checked against their digest before they are used."""
        with self._database.read() as session:
            updates = session.scalars(
                select(models.Update).join(Assignment).where(Assignment.phase_id == phase_id, models.Update.accepted)
            ).all()
        replies = []
        for update in updates:
            rows: tuple[Row, ...] = ()
            if update.payload:
                self._around.blobs.verify(update.payload)
                rows = tuple(update_rows(self._around.blobs.path(update.payload)).values())
            replies.append(
                Reply(
                    client_id=update.client_id,
                    samples=update.samples,
                    losses=update.losses,
                    metrics=update.metrics,
                    rows=rows,
                    envelope=update.envelope_digest,
                )
            )
        return Replies(replies, device=self._around.device)

    # --- the step

    def _aggregate(self, current: Round, step: Step, phases: int) -> None:
        """Makes the new model, stores it, and records the signed step."""
        rate = server_rate(self._spec.server.learning_rate, self._spec.server.decay, current.number, self._spec.rounds)
        stationary = bool(step.combination.diagnostics.get("stationary", 0.0))
        result = current.base_model if stationary else self._make_model(current, step, rate)
        buffer = io.BytesIO()
        np.save(buffer, step.replies.gram, allow_pickle=False)
        gram_digest = self._around.blobs.put(buffer.getvalue())
        self._record_step(current, step, phases, rate, result, gram_digest, stationary)

    def _make_model(self, current: Round, step: Step, rate: float) -> str:
        base = self._around.blobs.path(current.base_model)
        self._around.blobs.verify(current.base_model)
        with self._around.blobs.writer() as writer:
            writer.write(model_layout(base).header())
            try:
                apply_step(
                    model_row(base),
                    rate,
                    step.combination.coefficients,
                    step.replies.updates,
                    writer.write,
                    device=self._around.device,
                )
            except FloatingPointError as error:
                raise Skipped(f"non-finite: {error}") from error
            return writer.commit()

    def _record_step(
        self,
        current: Round,
        step: Step,
        phases: int,
        rate: float,
        result: str,
        gram_digest: str,
        stationary: bool,
    ) -> None:
        combination = step.combination
        now = self._around.clock()
        with self._database.begin() as session:
            run = self._running(session)
            # Those that the step was made of: a client may have replied to several phases.
            envelopes = [reply.envelope for reply in step.replies]
            updates = session.scalars(select(models.Update).where(models.Update.envelope_digest.in_(envelopes)))
            shares = outcome.shares(step)
            for update in updates:
                share = shares[update.client_id]
                update.norm, update.weight = share.norm, share.weight
                update.coefficient, update.cosine = share.coefficient, share.cosine
            manifest = StepManifest(
                federation_id=self._around.federation_id,
                run_id=self._run_id,
                round=current.number,
                base_model=current.base_model,
                result_model=result,
                updates=envelopes,
                coefficients=combination.coefficients.tolist(),
                rate=0.0 if stationary else rate,
                gram=gram_digest,
                algorithm=self._spec.algorithm.name,
                hyperparameters=_canonical(self._spec.algorithm.hyperparameters),
                state_before=digest(_canonical(run.state_data).encode()),
                state_after=digest(_canonical(combination.state).encode()),
            )
            manifest.created.FromDatetime(now)
            size = self._around.blobs.size(result)
            models.note_model(session, result, size=size, parameters=self._parameters, created=now)
            round_ = session.get_one(Round, current.round_id)
            round_.result_model = result
            round_.gram = gram_digest
            round_.evaluation_phase = phases
            round_.step = seal(manifest, self._around.signing_key).SerializeToString()
            round_.metrics = {"step/rate": rate, **_numbers(combination.diagnostics)}
            move_round(round_, RoundState.STEPPED, now, "stationary" if stationary else "")
            run.model = result
            run.state_data = dict(combination.state)
        log.info("run %s round %d: stepped to %s", self._run_id, current.number, result)
        self._around.changed()

    # --- evaluation

    def _evaluate_and_finish(self, round_id: int) -> None:
        with self._database.read() as session:
            current = session.get_one(Round, round_id)
        model, number = current.result_model, current.evaluation_phase
        if model is None or number is None:
            raise RuntimeError(f"round {current.number} of run {self._run_id} is STEPPED without a model")
        every = self._spec.evaluate.every
        last = current.number + 1 == self._spec.rounds
        replies: Replies | None = None
        if last or (every and (current.number + 1) % every == 0):
            while not self._around.pool_complete():
                self._checkpoint()
                self._around.wait(1.0)
            with self._database.read() as session:
                pool = sorted(self._pool(session))
            phase = Evaluate(splits=self._spec.evaluate.splits)
            replies = self._ask(current, number, phase, pool, len(pool), model)
        self._finish_round(current, model, replies)

    def _finish_round(self, current: Round, model: str, replies: Replies | None) -> None:
        now = self._around.clock()
        with self._database.begin() as session:
            self._running(session)
            round_ = session.get_one(Round, current.round_id)
            if replies is not None:
                session.add_all(outcome.evaluations(current.round_id, model, replies, self._spec.evaluate.splits))
                scores = outcome.scores(replies)
                before = self._losses_before(session, current)
                after = {
                    reply.client_id: reply.metrics["train/loss"] for reply in replies if "train/loss" in reply.metrics
                }
                share = metrics.improved(before, after, before)
                if share is not None:
                    scores["improved"] = share
                round_.metrics = {**round_.metrics, **_numbers(scores)}
            move_round(round_, RoundState.COMPLETED, now)
        log.info("run %s round %d: completed", self._run_id, current.number)
        self._around.changed()

    def _losses_before(self, session: Session, current: Round) -> dict[str, float]:
        """The participants' measured training losses at the round's base model."""
        updates = session.scalars(
            select(models.Update)
            .join(Assignment)
            .join(models.Phase)
            .where(
                models.Phase.round_id == current.round_id,
                models.Phase.kind == PhaseKind.TRAIN,
                models.Update.accepted,
            )
        )
        return {update.client_id: update.metrics["train/loss"] for update in updates if "train/loss" in update.metrics}

    def _running(self, session: Session) -> Run:
        """The run, locked: no word of an operator comes in between until the transaction ends.

        Raises:
            Held: it is not RUNNING.
        """
        run = session.get_one(Run, self._run_id, with_for_update=True)
        if run.state is not RunState.RUNNING:
            raise Held
        return run

    def _checkpoint(self) -> None:
        with self._database.read() as session:
            state = session.scalar(select(Run.state).where(Run.run_id == self._run_id))
        if state is not RunState.RUNNING:
            raise Held
        self._around.wait(0)


def _states(session: Session, phase_id: int) -> Counter[AssignmentState]:
    """How many assignments of a phase are in each state."""
    return Counter(session.scalars(select(Assignment.state).where(Assignment.phase_id == phase_id)))


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _numbers(values: Mapping[str, float]) -> dict[str, float]:
    """What JSON can hold."""
    return {name: float(value) for name, value in values.items() if np.isfinite(value)}
