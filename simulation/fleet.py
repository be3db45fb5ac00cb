"""The simulated fleet: the conductor's questions answered in this process.

What a real member would sign is written down unsigned; what the coordinator would refuse is refused, with the same
reason. Updates stay in memory, unless the algorithm needs them in later rounds.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from coordinator.aggregation.base import Algorithm
from coordinator.aggregation.gram import Row
from coordinator.aggregation.phases import Evaluate, Jacobian, Replies, Reply, Residual, Selected, Train
from coordinator.rounds import selection
from coordinator.rounds.content import content_problem, payload_problem
from coordinator.rounds.fleet import Fleet, Held, Question, RunFacts, Surroundings, stored_reference
from coordinator.rounds.states import close_phase, end_assignment
from federation.attacks import attack_seed
from federation.attacks.probe import Probe
from federation.digests import digest
from federation.envelope import envelope_digest
from federation.identity import UNSIGNED
from federation.objectives import JOINT, Targets
from federation.refusals import Refusal
from federation.sketches import SketchError
from federation.sketches.asked import jacobian_of, second_leg, sketch_of
from federation.sketches.seeds import own_seed, shared_seed
from federation.training import TrainingDiverged, TrainingStopped, TrainResult, TrainWork
from federation.v1 import common_pb2
from federation.v1.common_pb2 import SignedEnvelope, UpdateManifest
from federation.vectors import PayloadCheck, model_layout, model_row, update_layout
from simulation.local import LocalWork, Order, Outcome
from simulation.population import Population
from storage import models
from storage.models import Assignment, AssignmentState, PhaseKind, PhaseState

SOFTWARE = "simulation"
_KINDS = {Train: PhaseKind.TRAIN, Jacobian: PhaseKind.JACOBIAN, Residual: PhaseKind.RESIDUAL}
Vector = NDArray[np.float32]


class SimulatedFleet(Fleet):
    """Clients without machines of their own.

    Args:
        run: whose fleet.
        around: the database, the blobs, the clock.
        algorithm: the run's, to know whether it needs updates later.
        population: the clients.
        local: what trains and evaluates them.
        probe: measures how far a backdoor has come, where attackers plant one.
        stopped: whether to give up; asked while clients train.
    """

    def __init__(
        self,
        run: RunFacts,
        around: Surroundings,
        *,
        algorithm: Algorithm,
        population: Population,
        local: LocalWork,
        probe: Probe | None,
        stopped: Callable[[], bool],
    ) -> None:
        self._run = run
        self._around = around
        self._keeps_updates = algorithm.keeps_updates
        self._population = population
        self._local = local
        self._probe = probe
        self._stopped = stopped

    def known(self, session: Session) -> dict[str, Selected]:
        """See the base: everybody with training samples."""
        serves, limit = self._population.serves, self._run.spec.limits.samples
        return {name: Selected(min(n, limit), serves[name]) for name, n in self._population.samples.items() if n > 0}

    def pool(self, session: Session) -> dict[str, int]:
        """See the base: everybody with training samples."""
        return {name: one.samples for name, one in self.known(session).items()}

    def ask(self, question: Question) -> Replies:
        """See the base. Asked again, the same is computed again."""
        base = model_row(self._around.blobs.path(question.base_model)).read()
        try:
            if isinstance(question.phase, Evaluate):
                return self._evaluate(question, question.phase, base)
            return self._work(question, question.phase, base)
        except TrainingStopped:
            raise Held from None

    def observe(self, model: str) -> dict[str, float]:
        """See the base: `backdoor`, the attackers' success rate."""
        if self._probe is None:
            return {}
        return {"backdoor": self._probe.rate(model_row(self._around.blobs.path(model)).read())}

    # --- evaluation: nothing to record but the scores, which the conductor does

    def _evaluate(self, question: Question, phase: Evaluate, base: Vector) -> Replies:
        scores = self._local.evaluate(base, question.clients, phase.splits, stopped=self._stopped)
        return Replies(
            [
                Reply(
                    client_id=name,
                    samples=self._population.samples[name],
                    losses={},
                    metrics=metrics,
                    objectives=self._population.serves[name],
                )
                for name, metrics in scores.items()
            ],
            device=self._around.device,
        )

    # --- training, and gradients

    def _work(self, question: Question, phase: Train | Jacobian | Residual, base: Vector) -> Replies:
        began, started = time.perf_counter(), self._around.clock()
        clients = self._first(question)
        outcomes: Mapping[str, Outcome | SketchError]
        if isinstance(phase, Train):
            outcomes = self._trained(question, phase, clients, base)
        else:
            outcomes = self._gradients(question, phase, clients, base)
        seconds = (time.perf_counter() - began) / max(1, len(clients))
        replies: list[Reply] = []
        record = [self._not_needed(question, name) for name in question.clients if name not in clients]
        for name in sorted(outcomes):
            row, reply = self._take(question, name, outcomes[name], seconds)
            record.append(row)
            if reply is not None:
                replies.append(reply)
        reference = stored_reference(phase, self._around.blobs)
        for assignment in record:
            assignment.created, assignment.reference = started, reference
        self._record(question, record, started)
        return Replies(replies, device=self._around.device)

    def _order(self, question: Question, **changed: Any) -> Order:
        spec = self._run.spec
        return Order(work=TrainWork.of(spec.train), seed=spec.seed, round=question.round, **changed)

    def _trained(self, question: Question, phase: Train, clients: list[str], base: Vector) -> dict[str, Outcome]:
        """What the clients' training came to, and what attackers made of theirs."""
        attackers, serves = self._population.attackers, self._population.serves
        targets = {name: phase.targets(serves[name]) for name in clients}
        idle = [name for name in clients if name in attackers and not attackers[name].trains]
        training = [name for name in clients if name not in idle]
        order = self._order(
            question,
            targets=targets,
            from_jacobian=phase.from_jacobian,
            measure=phase.measure and self._run.spec.train.measure,
        )
        outcomes = self._local.train(base, order, training, stopped=self._stopped)
        outcomes |= self._idle(base, idle, targets)
        self._attack(question, base, outcomes)
        return outcomes

    def _gradients(
        self, question: Question, phase: Jacobian | Residual, clients: list[str], base: Vector
    ) -> dict[str, Outcome | SketchError]:
        """The clients' sketches of their gradients, or what these lost; or why there is none."""
        second = isinstance(phase, Residual)
        asked = phase.jacobian if isinstance(phase, Residual) else phase
        order = self._order(question, measure=asked.measure and not second)
        outcomes = self._local.jacobian(base, order, clients, stopped=self._stopped)
        self._attack(question, base, outcomes)
        layout = model_layout(self._around.blobs.path(question.base_model))
        made = sketch_of(asked, layout, self._run.objectives)
        shared = shared_seed(self._run.spec.seed, question.round)
        sketched: dict[str, Outcome | SketchError] = {}
        for name, outcome in outcomes.items():
            sketched[name] = outcome
            if isinstance(outcome, TrainResult):
                A = jacobian_of(outcome.rows, asked, layout)
                own = own_seed(self._run.spec.seed, question.round, name)
                try:
                    rows = made.compress(A, shared_seed=shared, own_seed=own)
                    if isinstance(phase, Residual):
                        rows = second_leg(made).residual(A, rows, phase.reference, phase.objectives)
                    sketched[name] = replace(outcome, rows=rows)
                except SketchError as error:
                    sketched[name] = error
        return sketched

    def _first(self, question: Question) -> list[str]:
        """Who replies before the round has as many as it wants; by lot, where more were asked."""
        if len(question.clients) <= question.wanted:
            return question.clients
        lot = selection.generator(self._run.spec.seed, question.round, "reply")
        chosen = lot.choice(len(question.clients), size=question.wanted, replace=False)
        return [question.clients[place] for place in sorted(chosen)]

    def _not_needed(self, question: Question, name: str) -> Assignment:
        assignment = self._assignment(question, name)
        end_assignment(assignment, AssignmentState.CANCELLED, assignment.created, "not-needed")
        return assignment

    def _assignment(self, question: Question, name: str) -> Assignment:
        return Assignment(
            assignment_id=digest(f"{self._run.run_id}/{question.round}/{question.number}/{name}".encode())[7:39],
            client_id=name,
            state=AssignmentState.OPEN,
            base_model=question.base_model,
            objectives=list(self._population.serves[name]),
            envelope=b"",
            created=self._around.clock(),
        )

    def _idle(self, base: Vector, clients: list[str], targets: Mapping[str, Targets]) -> dict[str, Outcome]:
        """What clients that only pretend to train have to hand in: measured losses, and no step."""
        results: dict[str, Outcome] = {}
        for name, metrics in self._local.evaluate(base, clients, ("train",), stopped=self._stopped).items():
            rows = {row: np.zeros_like(base) for row in targets[name]}
            losses = {
                key.removeprefix("train/loss").removeprefix("/") or JOINT: value
                for key, value in metrics.items()
                if key.startswith("train/loss")
            }
            results[name] = TrainResult(rows, losses, metrics, self._population.samples[name], 0.0)
        return results

    def _attack(self, question: Question, base: Vector, outcomes: dict[str, Outcome]) -> None:
        """Attackers know the honest updates of the round; their own places are taken by what they make of them."""
        attacks = {name: one for name, one in self._population.attackers.items() if name in outcomes}
        if not attacks:
            return
        change = self._change(question, base)
        honest = [one for name, one in sorted(outcomes.items()) if name not in attacks and isinstance(one, TrainResult)]
        names = dict.fromkeys(row for one in outcomes.values() if isinstance(one, TrainResult) for row in one.rows)
        for objective in names:
            rows = [one.rows[objective] for one in honest if objective in one.rows]
            m = sum(isinstance(one, TrainResult) and objective in one.rows for one in outcomes.values())
            peers = np.stack(rows) if rows else np.empty((0, len(base)), dtype=np.float32)
            for name, attack in attacks.items():
                outcome = outcomes[name]
                if isinstance(outcome, TrainResult) and objective in outcome.rows:
                    seed = attack_seed(self._run.spec.seed, question.round, name)
                    own = outcome.rows[objective] if attack.trains else change
                    sent = attack.on_update(own, peers=peers, m=m, seed=seed)
                    outcomes[name] = _with_row(outcome, objective, sent)
        for name, attack in attacks.items():
            outcome = outcomes[name]
            if isinstance(outcome, TrainResult):
                outcomes[name] = replace(outcome, losses=attack.on_losses(outcome.losses))

    def _change(self, question: Question, base: Vector) -> Vector:
        """w_{t-1} - w_t, zeros in the first round: from the record, so that an interrupted simulation knows it too."""
        with self._around.database.read() as session:
            before = session.scalar(
                select(models.Round.base_model).where(
                    models.Round.run_id == self._run.run_id, models.Round.number == question.round - 1
                )
            )
        return np.zeros_like(base) if before is None else model_row(self._around.blobs.path(before)).read() - base

    def _take(
        self, question: Question, name: str, outcome: Outcome | SketchError, seconds: float
    ) -> tuple[Assignment, Reply | None]:
        """One client's reply as the intake would take it: accepted, or refused with its reason."""
        now = self._around.clock()
        assignment = self._assignment(question, name)
        if isinstance(outcome, TrainingDiverged):
            end_assignment(assignment, AssignmentState.DECLINED, now, "training-diverged", str(outcome))
            return assignment, None
        if isinstance(outcome, SketchError):
            end_assignment(assignment, AssignmentState.DECLINED, now, "failed", f"SketchError: {outcome}")
            return assignment, None
        layout = update_layout([(objective, len(row)) for objective, row in outcome.rows.items()])
        check = PayloadCheck(layout)
        pieces = [memoryview(layout.header()), *(row.data.cast("B") for row in outcome.rows.values())]
        for piece in pieces:
            check.feed(piece)
        payload = check.finish()
        manifest = UpdateManifest(
            federation_id=self._around.federation_id,
            run_id=self._run.run_id,
            round=question.round,
            phase=question.number,
            assignment_id=assignment.assignment_id,
            client_id=name,
            base_model=question.base_model,
            spec=self._run.spec_digest,
            rows=[common_pb2.Row(objective=key, dtype="F32", length=len(row)) for key, row in outcome.rows.items()],
            payload=payload,
            payload_bytes=layout.file_bytes,
            samples=outcome.samples,
            losses=dict(outcome.losses),
            metrics=dict(outcome.metrics),
            software=SOFTWARE,
            task=self._run.spec.task,
            seconds=seconds,
        )
        limits = self._run.spec.limits
        trains = isinstance(question.phase, Train)
        problem = content_problem(manifest, trains=True, limits=limits) or payload_problem(
            check, trains=trains, limits=limits
        )
        envelope = SignedEnvelope(manifest=manifest.SerializeToString(deterministic=True))
        keeps = problem is None and trains and self._keeps_updates
        if keeps:
            with self._around.blobs.writer(hash=False) as writer:
                for piece in pieces:
                    writer.write(piece)
                writer.commit(payload)
        update = models.Update(
            client_id=name,
            accepted=problem is None,
            reason=problem.reason if problem else "",
            envelope=envelope.SerializeToString(deterministic=True),
            envelope_digest=envelope_digest(envelope),
            receipt=b"",
            payload=payload if keeps else "",
            payload_bytes=layout.file_bytes,
            samples=outcome.samples,
            losses={key: value for key, value in outcome.losses.items() if np.isfinite(value)},
            metrics=dict(outcome.metrics),
            received=now,
        )
        assignment.updates.append(update)
        _end(assignment, problem, now)
        if problem is not None:
            return assignment, None
        rows: tuple[Row, ...] = tuple(outcome.rows.values())
        return assignment, Reply(
            client_id=name,
            samples=outcome.samples,
            losses=outcome.losses,
            metrics=outcome.metrics,
            rows=rows,
            names=tuple(outcome.rows),
            objectives=self._population.serves[name],
            envelope=update.envelope_digest,
            payload=update.payload,
        )

    def _record(self, question: Question, assignments: list[Assignment], started: datetime) -> None:
        """Puts a phase on record, in place of what an interrupted simulation left of it: the step is made of this."""
        now = self._around.clock()
        with self._around.database.begin() as session:
            self._run.running(session)
            left = select(models.Phase.phase_id).where(
                models.Phase.round_id == question.round_id, models.Phase.number == question.number
            )
            asked = select(Assignment.assignment_id).where(Assignment.phase_id.in_(left))
            session.execute(delete(models.Update).where(models.Update.assignment_id.in_(asked)))
            session.execute(delete(Assignment).where(Assignment.phase_id.in_(left)))
            session.execute(delete(models.Phase).where(models.Phase.phase_id.in_(left)))
            phase = models.Phase(
                round_id=question.round_id,
                number=question.number,
                kind=_KINDS[type(question.phase)],
                state=PhaseState.OPEN,
                wanted=question.wanted,
                started=started,
                deadline=started + timedelta(seconds=self._run.spec.train.deadline_seconds),
            )
            phase.assignments.extend(assignments)
            close_phase(phase, now)
            session.add(phase)


def enroll(session: Session, population: Population, task: str, around: Surroundings) -> None:
    """Puts the simulated clients on record, unless they are."""
    known = set(session.scalars(select(models.Client.client_id)))
    for name, samples in population.samples.items():
        if name not in known:
            session.add(
                models.Client(
                    client_id=name,
                    state=models.ClientState.ACTIVE,
                    signing_key=UNSIGNED,
                    key_id=digest(name.encode()).partition(":")[2],
                    tasks={task: samples},
                    objectives={task: list(population.serves[name])},
                    software=SOFTWARE,
                    enrolled=around.clock(),
                )
            )


def _with_row(outcome: TrainResult, objective: str, row: Vector) -> TrainResult:
    return replace(outcome, rows={**outcome.rows, objective: np.ascontiguousarray(row, dtype=np.float32)})


def _end(assignment: Assignment, problem: Refusal | None, now: datetime) -> None:
    if problem is None:
        end_assignment(assignment, AssignmentState.FULFILLED, now)
    else:
        end_assignment(assignment, AssignmentState.REJECTED, now, problem.reason, problem.message)
