"""The conductor: takes one run from where the database says that it stands to its end.

Crash only: whatever the conductor knows is in the database or the blob store before it acts on it. After `kill -9` at
any instant, the next conductor runs the algorithm's generator again, feeds it the stored replies, and goes on; given
the same replies it makes the same bytes.

    begin a round    (round row: who is selected)                                  OPEN
      for each phase that the generator yields:
        ask the fleet, send its replies to the generator
      make the step  (result model, Gram matrix, signed step, the run's new model) STEPPED
      evaluate       (one more phase, on the new model)                            COMPLETED
"""

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.aggregation.phases import (
    Evaluate,
    Jacobian,
    Phase,
    Replies,
    Residual,
    RoundContext,
    RoundGenerator,
    Step,
)
from coordinator.aggregation.qp import UnsolvedError
from coordinator.aggregation.registry import algorithm
from coordinator.aggregation.rules import TooFewUpdatesError
from coordinator.aggregation.streaming import one_thread
from coordinator.rounds import outcome, selection
from coordinator.rounds.fleet import Fleet, Held, Question, RevokedMeanwhile, RunFacts, Surroundings
from coordinator.rounds.participation import WarningLog
from coordinator.rounds.revoked import left_out
from coordinator.rounds.states import move_round, move_run
from coordinator.rounds.stepping import Skipped, Stepped, canonical, make_step, recall
from federation.digests import digest
from federation.envelope import seal
from federation.objectives import encoder_columns
from federation.sketches import SketchError
from federation.v1.common_pb2 import ObjectiveWeight, StepManifest
from federation.vectors import model_layout
from storage import audit, models
from storage.models import Client, ClientState, Round, RoundState, Run, RunState

log = logging.getLogger(__name__)


class Conductor:
    """Conducts one run. `conduct` returns when the run has ended; it raises Held when it is held."""

    def __init__(self, run: RunFacts, around: Surroundings, fleet: Fleet) -> None:
        self._run = run
        self._run_id = run.run_id
        self._spec = run.spec
        self._around = around
        self._database = around.database
        self._fleet = fleet
        self._algorithm = algorithm(self._spec.algorithm.name, self._spec.algorithm.hyperparameters)
        self._warnings = WarningLog(around.database, run.run_id)

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
        run = self._run.running(session)
        if len(recent) == limit and all(round_.state is RoundState.SKIPPED for round_ in recent):
            why = f"{limit} rounds in a row were skipped; the last one: {recent[0].reason}"
            move_run(run, RunState.FAILED, self._around.clock(), why)
        elif number >= self._spec.rounds:
            move_run(run, RunState.COMPLETED, self._around.clock())
        else:
            return False
        audit.record(
            session,
            at=self._around.clock(),
            actor="coordinator",
            action=f"run.{run.state.lower()}",
            subject=self._run_id,
            detail=run.reason,
        )
        log.info("run %s: %s %s", self._run_id, run.state, run.reason)
        return True

    def _begin_round(self, number: int) -> Round:
        """Waits for the pool, selects, and records the selection before anybody is asked."""
        while True:
            complete = self._fleet.complete()  # asked first: whoever makes it complete must be in the pool
            with self._database.read() as session:
                run = session.get_one(Run, self._run_id)
                if run.state is not RunState.RUNNING:
                    raise Held
                missing = self._missing(session, complete)
            if missing != run.reason or not missing:  # only then is there anything to write
                with self._database.begin() as session:
                    run = self._run.running(session)
                    run.reason = missing = self._missing(session, complete)
                    if not missing:
                        begun = self._selected(session, run, number)
                        break
                log.info("run %s: %s", self._run_id, missing)
                self._around.changed()
            self._around.wait(None if complete else 1.0)
        log.info("run %s round %d: selected %s", self._run_id, number, ", ".join(begun.selected))
        return begun

    def _missing(self, session: Session, complete: bool) -> str:
        """Whom a round has to wait for; empty when it can begin."""
        ready, minimum = len(self._fleet.pool(session)), self._spec.selection.minimum
        if ready < minimum:
            return f"waiting for clients: {ready} of {minimum} are ready for {self._spec.task}"
        return "" if complete else "waiting for clients to come back after a restart"

    def _selected(self, session: Session, run: Run, number: int) -> Round:
        self._state(session, number)
        rule, pool = self._spec.selection, self._fleet.pool(session)
        selected = selection.select(rule, pool, seed=self._spec.seed, round_number=number)
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
        return begun

    def _conduct_round(self, current: Round) -> None:
        if current.state is RoundState.OPEN:
            try:
                self._converse_and_step(current)
            except Skipped as skipped:
                self._skip(current, str(skipped))
                return
        self._evaluate_and_finish(current.round_id)

    def _converse_and_step(self, current: Round) -> None:
        """Makes the round's step of replies of members that are members when it is recorded.

        Raises:
            Skipped: there is no step.
        """
        while True:
            try:
                step, phases = self._converse(current)
                self._aggregate(current, step, phases)
            except RevokedMeanwhile:
                log.warning("run %s round %d: a member was revoked; without it", self._run_id, current.number)
            else:
                return

    def _converse(self, current: Round) -> tuple[Step, int]:
        """Runs the algorithm's generator against the clients, or against the stored replies.

        Returns:
            The step, and how many phases it took.
        """
        with self._database.read() as session:
            state = self._state(session, current.number, current.base_model)
            known = self._fleet.known(session)
        layout = model_layout(self._around.blobs.path(current.base_model))
        context = RoundContext(
            number=current.number,
            total=self._spec.rounds,
            prior=self._spec.algorithm.prior,
            state=state.get("rule", {}),
            device=self._around.device,
            recall=partial(recall, self._around.blobs),
            objectives=self._run.objectives,
            parameters=layout.size,
            encoder=encoder_columns(layout),
            seed=self._spec.seed,
            local_rate=self._spec.train.learning_rate,
            selected={name: known[name] for name in current.selected if name in known},
            draw=partial(self._draw, current),
            revoked=self._revoked,
        )
        conversation: RoundGenerator = self._algorithm.round(context)
        number = 0
        phase = _continued(conversation, None)
        while True:
            clients = list(current.selected if phase.clients is None else phase.clients)
            wanted = min(current.wanted, len(clients))
            replies = self._fleet.ask(
                Question(
                    round_id=current.round_id,
                    round=current.number,
                    number=number,
                    phase=phase,
                    clients=clients,
                    wanted=wanted,
                    base_model=current.base_model,
                )
            )
            self._checkpoint()
            wanted = self._recorded(current, number, wanted)
            gradients = isinstance(phase, Jacobian | Residual)
            need = selection.quorum((self._spec.jacobian if gradients else self._spec.selection).quorum, wanted)
            if len(replies) < need:
                asked = "with gradients" if gradients else "replied"
                raise Skipped(f"quorum: {len(replies)} of {len(clients)} clients {asked}, {need} are needed")
            try:
                phase = _continued(conversation, replies)
            except StopIteration as end:
                return end.value, number + 1
            number += 1

    def _draw(self, current: Round, purpose: str) -> tuple[str, ...]:
        """Another choice of clients for the same round."""
        drawn = selection.select(
            self._spec.selection, self._pool(), seed=self._spec.seed, round_number=current.number, purpose=purpose
        )
        return tuple(drawn)

    def _revoked(self) -> frozenset[str]:
        with self._database.read() as session:
            return frozenset(session.scalars(select(Client.client_id).where(Client.state == ClientState.REVOKED)))

    def _pool(self) -> dict[str, int]:
        """The pool, with those who are expected back after a restart."""
        while not self._fleet.complete():
            self._checkpoint()
            self._around.wait(1.0)
        with self._database.read() as session:
            return self._fleet.pool(session)

    def _recorded(self, current: Round, number: int, wanted: int) -> int:
        """How many replies a phase wanted when it was opened: since then, a restart may have changed the pool."""
        phase = select(models.Phase.wanted).where(
            models.Phase.round_id == current.round_id, models.Phase.number == number
        )
        with self._database.read() as session:
            return session.scalar(phase) or wanted

    def _skip(self, current: Round, why: str) -> None:
        with self._database.begin() as session:
            self._run.running(session)
            round_ = session.get_one(Round, current.round_id)
            round_.metrics = outcome.traffic(session, current.round_id, self._around.blobs.size)
            move_round(round_, RoundState.SKIPPED, self._around.clock(), why)
        log.warning("run %s round %d: skipped: %s", self._run_id, current.number, why)
        self._warnings.round_ended()
        self._around.changed()

    # --- the step

    def _aggregate(self, current: Round, step: Step, phases: int) -> None:
        """Makes the new model, stores it, and records the signed step."""
        with self._database.read() as session:
            state = self._state(session, current.number, current.base_model)
        with one_thread():
            made = make_step(
                step,
                algorithm=self._algorithm,
                spec=self._spec,
                number=current.number,
                base_model=current.base_model,
                state=state,
                blobs=self._around.blobs,
                device=self._around.device,
            )
        self._record_step(current, step, phases, made)

    def _state(self, session: Session, number: int, base_model: str | None = None) -> dict[str, Any]:
        """What the run remembers before a round; see `Evidence.state`.

        Raises:
            RecordError: it is not what the newest signed step left behind.
        """
        before = session.scalar(
            select(Round)
            .where(Round.run_id == self._run_id, Round.number < number, Round.step.is_not(None))
            .order_by(Round.number.desc())
            .limit(1)
        )
        run = session.get_one(Run, self._run_id)
        return self._around.evidence.state(run, before, base_model)

    def _record_step(self, current: Round, step: Step, phases: int, made: Stepped) -> None:
        combination = step.combination
        now = self._around.clock()
        with self._database.begin() as session:
            run = self._run.running(session)
            revoked = set(session.scalars(select(Client.client_id).where(Client.state == ClientState.REVOKED)))
            if revoked & {part.client_id for part in (*step.replies, *step.consulted, *step.history)}:
                raise RevokedMeanwhile
            # Those that the step was made of: a client may have replied to several phases.
            envelopes = [reply.envelope for reply in step.replies]
            updates = session.scalars(select(models.Update).where(models.Update.envelope_digest.in_(envelopes)))
            shares = outcome.shares(step, made.direction)
            for update in updates:
                share = shares[update.client_id]
                update.norm, update.weight = share.norm, share.weight
                update.coefficient, update.cosine = share.coefficient, share.cosine
            manifest = StepManifest(
                federation_id=self._around.federation_id,
                run_id=self._run_id,
                round=current.number,
                base_model=current.base_model,
                result_model=made.model,
                updates=[*envelopes, *(past.envelope for past in step.history)],
                coefficients=combination.coefficients.tolist(),
                rate=0.0 if made.stationary else made.rate,
                gram=made.gram,
                algorithm=self._spec.algorithm.name,
                hyperparameters=canonical(self._spec.algorithm.hyperparameters),
                state_before=digest(canonical(run.state_data).encode()),
                state_after=digest(canonical(made.state).encode()),
                consulted=[reply.envelope for reply in step.consulted],
                forgotten=step.forgotten,
                revoked=left_out(session, current.round_id),
                weights=[
                    ObjectiveWeight(objective=name, weight=value) for name, value in outcome.weights(step).items()
                ],
            )
            manifest.created.FromDatetime(now)
            for model in sorted({made.model, made.result}):
                size = self._around.blobs.size(model)
                models.note_model(session, model, size=size, parameters=self._run.parameters, created=now)
            round_ = session.get_one(Round, current.round_id)
            round_.result_model, round_.deployed_model = made.model, made.result
            round_.gram = made.gram
            round_.evaluation_phase = phases
            envelope = seal(manifest, self._around.signing_key)
            self._around.signatures.note(envelope, StepManifest, self._around.signing_key.public_key())
            round_.step = envelope.SerializeToString()
            round_.objectives, numbers = outcome.objectives(step, self._run.objectives)
            measured = {**made.direction.diagnostics, **outcome.agreement(step), **numbers}
            round_.metrics = {"step/rate": made.rate, **_numbers(measured)}
            move_round(round_, RoundState.STEPPED, now, "stationary" if made.stationary else "")
            run.model = made.model
            run.state_data = made.state
        log.info("run %s round %d: stepped to %s", self._run_id, current.number, made.model)
        self._around.changed()

    # --- evaluation

    def _evaluate_and_finish(self, round_id: int) -> None:
        with self._database.read() as session:
            current = session.get_one(Round, round_id)
        model, number = current.deployed_model, current.evaluation_phase
        if model is None or number is None:
            raise RuntimeError(f"round {current.number} of run {self._run_id} is STEPPED without a model")
        every = self._spec.evaluate.every
        last = current.number + 1 == self._spec.rounds
        replies: Replies | None = None
        if last or (every and (current.number + 1) % every == 0):
            pool = sorted(self._pool())
            replies = self._fleet.ask(
                Question(
                    round_id=current.round_id,
                    round=current.number,
                    number=number,
                    phase=Evaluate(splits=self._spec.evaluate.splits),
                    clients=pool,
                    wanted=len(pool),
                    base_model=model,
                )
            )
        self._finish_round(current, model, replies)

    def _finish_round(self, current: Round, model: str, replies: Replies | None) -> None:
        observed = {} if replies is None else self._fleet.observe(model)
        now = self._around.clock()
        with self._database.begin() as session:
            self._run.running(session)
            round_ = session.get_one(Round, current.round_id)
            if replies is not None:
                session.add_all(outcome.evaluations(current.round_id, model, replies, self._spec.evaluate.splits))
                scores = (
                    outcome.scores(replies, self._run.objectives)
                    | ({} if self._algorithm.averages else outcome.improved(session, current.round_id, replies))
                    | observed
                )
                round_.metrics = {**round_.metrics, **_numbers(scores)}
            round_.metrics = {**round_.metrics, **outcome.traffic(session, current.round_id, self._around.blobs.size)}
            move_round(round_, RoundState.COMPLETED, now)
        log.info("run %s round %d: completed", self._run_id, current.number)
        self._warnings.round_ended()
        self._around.changed()

    def _checkpoint(self) -> None:
        with self._database.read() as session:
            state = session.scalar(select(Run.state).where(Run.run_id == self._run_id))
        if state is not RunState.RUNNING:
            raise Held
        self._around.wait(0)


def _continued(conversation: RoundGenerator, replies: Replies | None) -> Phase:
    """The next phase of a conversation, after the replies to the one before; None before the first.

    Raises:
        Skipped: the rule cannot use these replies, or these clients; the next round's may do better.
        StopIteration: the conversation has ended; its value is the step.
    """
    try:
        with one_thread():
            return conversation.send(replies)  # type: ignore[arg-type] # a generator that has not begun takes None
    except (TooFewUpdatesError, UnsolvedError, SketchError) as error:
        raise Skipped(f"aggregation: {error}") from error


def _numbers(values: Mapping[str, float]) -> dict[str, float]:
    """What JSON can hold."""
    return {name: float(value) for name, value in values.items() if np.isfinite(value)}
