"""The simulated fleet: the conductor's questions answered in this process.

What a real member would sign is written down unsigned; what the coordinator would refuse is refused, with the same
reason. Updates stay in memory, unless the algorithm needs them in later rounds.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from coordinator.aggregation.base import Algorithm
from coordinator.aggregation.phases import Asked, Replies, Reply, Selected
from coordinator.rounds import selection
from coordinator.rounds.content import content_problem, payload_problem
from coordinator.rounds.fleets.base import Fleet, Held, Question, RunFacts, StoredInputs, Surroundings
from coordinator.rounds.recorder import Signed, record_reply
from coordinator.rounds.states import close_phase, end_assignment
from federation.attacks import attack_seed
from federation.attacks.probe import Probe
from federation.digests import digest
from federation.envelope import envelope_digest
from federation.payload_check import PayloadCheck
from federation.proofs import UNSIGNED
from federation.training import TrainingDiverged, TrainingStopped
from federation.v1 import common_pb2
from federation.v1.common_pb2 import SignedEnvelope, UpdateManifest
from federation.vectors import model_layout, model_row, payload_bytes
from federation.work.base import Client, Memory, Result, RowSchema, Shape, Work, WorkError, payload_layout
from federation.work.computation import Computation, Descend, Measure, MeasureAlong, training_losses
from federation.work.train.work import Train
from simulation.local import LocalWork, Outcome
from simulation.population import Population
from storage import models
from storage.models import Assignment, AssignmentState, PhaseState

SOFTWARE = "simulation"
Vector = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class HandedIn:
    """A client's answer.

    Attributes:
        result: the content.
        rows: of its payload; none for an answer without one.
    """

    result: Result
    rows: tuple[RowSchema, ...]


@dataclass(frozen=True)
class Refused:
    """A client declines.

    Attributes:
        reason: a stable reason.
        message: the reason in words.
    """

    reason: str
    message: str


class _ClientMemory(Memory):
    """What one simulated client remembers of an attempt at a round."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def get(self, name: str) -> bytes | None:
        """What was kept under a name; None when nothing is."""
        return self._values.get(name)

    def put(self, name: str, value: bytes, *, durable: bool = False) -> None:
        """Keeps a value. An interrupted simulation computes the round again from its first phase."""
        self._values[name] = value


class _Memories:
    """What the clients remember of the newest attempt at a round; that of others is forgotten."""

    def __init__(self) -> None:
        self._attempt = (-1, -1)
        self._clients: dict[str, _ClientMemory] = {}

    def of(self, client_id: str, round_: int, attempt: int) -> Memory:
        """The memory of one client."""
        if self._attempt != (round_, attempt):
            self._attempt, self._clients = (round_, attempt), {}
        return self._clients.setdefault(client_id, _ClientMemory())


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
        self._memories = _Memories()

    def known(self, session: Session) -> dict[str, Selected]:
        """See the base: everybody with training samples."""
        serves, limit = self._population.serves, self._run.spec.limits.samples
        return {name: Selected(min(n, limit), serves[name]) for name, n in self._population.samples.items() if n > 0}

    def pool(self, session: Session) -> dict[str, int]:
        """See the base: everybody with training samples."""
        return {name: one.samples for name, one in self.known(session).items()}

    def ask(self, question: Question) -> Replies:
        """Computes what every client answers. Asked again, the same is computed again."""
        began, started = time.perf_counter(), self._around.clock()
        kind = question.phase.kind
        clients = self._first(question) if kind.decides else question.clients
        inputs = StoredInputs(question.phase, self._around.blobs)
        try:
            handed_in = self._answers(question, clients)
        except TrainingStopped:
            raise Held from None
        if not kind.decides:  # nothing is put on record but the scores, which the conductor does
            scores = {name: one for name, one in handed_in.items() if isinstance(one, HandedIn)}
            return Replies([self._reply(name, one) for name, one in scores.items()], device=self._around.device)
        seconds = (time.perf_counter() - began) / max(1, len(clients))
        replies: list[Reply] = []
        record = [self._not_needed(question, name) for name in question.clients if name not in clients]
        for name in sorted(handed_in):
            assignment, reply = self._take(question, name, handed_in[name], seconds)
            record.append(assignment)
            if reply is not None:
                replies.append(reply)
        for assignment in record:
            assignment.created, assignment.inputs = started, inputs.of(assignment.client_id)
        self._record(question, record, started)
        return Replies(replies, device=self._around.device)

    def observe(self, model: str) -> dict[str, float]:
        """See the base: `backdoor`, the attackers' success rate."""
        if self._probe is None:
            return {}
        return {"backdoor": self._probe.rate(model_row(self._around.blobs.local(model)).read())}

    # --- the clients' work

    def _answers(self, question: Question, clients: list[str]) -> dict[str, "HandedIn | Refused"]:
        """What each client hands in, or why it declines."""
        base = model_row(self._around.blobs.local(question.base_model)).read()
        layout = model_layout(self._around.blobs.local(question.base_model))
        spec, serves = self._run.spec, self._population.serves
        shared = question.phase.inputs()
        members = {
            name: Client(
                client_id=name,
                seed=spec.seed,
                round=question.round,
                attempt=question.attempt,
                shape=Shape(layout, self._run.objectives, serves[name]),
                memory=self._memories.of(name, question.round, question.attempt),
                inputs={**shared, **question.phase.own_inputs(name)},
            )
            for name in clients
        }
        works = {name: question.phase.work(Asked(name, serves[name], spec)) for name in clients}
        computations: dict[str, Computation] = {}
        for name, work in works.items():
            if (computation := work.computation(members[name])) is not None:
                attack = self._population.attackers.get(name)
                if isinstance(computation, Descend) and attack is not None:
                    targets = attack.on_targets(computation.targets)
                    computation = replace(computation, targets=targets, idle=not attack.trains)
                computations[name] = computation
        outcomes: dict[str, Outcome] = {name: Result({}, {}, {}, self._population.samples[name]) for name in clients}
        outcomes |= self._computed(question, base, computations)
        if any(not isinstance(computation, Measure | MeasureAlong) for computation in computations.values()):
            self._attack(question, base, outcomes)
        return {name: _handed_in(works[name], members[name], outcomes[name]) for name in clients}

    def _computed(
        self, question: Question, base: Vector, computations: Mapping[str, Computation]
    ) -> dict[str, Outcome]:
        """What each client computes. Of a line search, all clients measure one model after the other."""
        compute = partial(self._local.compute, seed=self._run.spec.seed, round=question.round, stopped=self._stopped)
        along = [one for one in computations.values() if isinstance(one, MeasureAlong)]
        if not along:
            return compute(base, {name: one for name, one in computations.items() if not isinstance(one, MeasureAlong)})
        everybody = dict.fromkeys(computations, Measure(splits=("train",)))
        metrics: dict[str, dict[str, Mapping[str, float]]] = {client: {} for client in computations}
        for name, model in along[0].models(base):
            for client, outcome in compute(model, everybody).items():
                if isinstance(outcome, Result):
                    metrics[client][name] = outcome.metrics
        samples = self._population.samples
        return {client: Result({}, {}, training_losses(found), samples[client]) for client, found in metrics.items()}

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

    def _attack(self, question: Question, base: Vector, outcomes: dict[str, Outcome]) -> None:
        """Attackers know the honest updates of the round; their own places are taken by what they make of them."""
        attacks = {name: one for name, one in self._population.attackers.items() if name in outcomes}
        if not attacks:
            return
        change = self._change(question, base)
        honest = [one for name, one in sorted(outcomes.items()) if name not in attacks and isinstance(one, Result)]
        names = dict.fromkeys(row for one in outcomes.values() if isinstance(one, Result) for row in one.rows)
        for objective in names:
            rows = [one.rows[objective] for one in honest if objective in one.rows]
            m = sum(isinstance(one, Result) and objective in one.rows for one in outcomes.values())
            peers = np.stack(rows) if rows else np.empty((0, len(base)), dtype=np.float32)
            for name, attack in attacks.items():
                outcome = outcomes[name]
                if isinstance(outcome, Result) and objective in outcome.rows:
                    seed = attack_seed(self._run.spec.seed, question.round, name)
                    own = outcome.rows[objective] if attack.trains else change
                    distort = attack.on_update if question.phase.kind is Train else attack.on_gradient
                    sent = distort(own, peers=peers, m=m, seed=seed)
                    outcomes[name] = _with_row(outcome, objective, sent)
        for name, attack in attacks.items():
            outcome = outcomes[name]
            if isinstance(outcome, Result):
                outcomes[name] = replace(outcome, losses=attack.on_losses(outcome.losses))

    def _change(self, question: Question, base: Vector) -> Vector:
        """w_{t-1} - w_t, zeros in the first round: from the record, so that an interrupted simulation knows it too."""
        with self._around.database.read() as session:
            before = session.scalar(
                select(models.Round.base_model).where(
                    models.Round.run_id == self._run.run_id, models.Round.number == question.round - 1
                )
            )
        return np.zeros_like(base) if before is None else model_row(self._around.blobs.local(before)).read() - base

    def _take(
        self, question: Question, name: str, answer: "HandedIn | Refused", seconds: float
    ) -> tuple[Assignment, Reply | None]:
        """One client's reply as the intake would take it: accepted, or refused with its reason."""
        now = self._around.clock()
        assignment = self._assignment(question, name)
        if isinstance(answer, Refused):
            end_assignment(assignment, AssignmentState.DECLINED, now, answer.reason, answer.message)
            return assignment, None
        check, pieces, payload = None, [], ""
        if answer.rows:
            layout = payload_layout(answer.rows)
            check, pieces = PayloadCheck(layout), payload_bytes(layout, answer.result.rows)
            for piece in pieces:
                check.feed(piece)
            payload = check.finish()
        result = answer.result
        manifest = UpdateManifest(
            federation_id=self._around.federation_id,
            run_id=self._run.run_id,
            round=question.round,
            attempt=question.attempt,
            phase=question.number,
            assignment_id=assignment.assignment_id,
            client_id=name,
            base_model=question.base_model,
            spec=self._run.spec_digest,
            rows=[common_pb2.Row(name=row.name, dtype=row.dtype, length=row.length) for row in answer.rows],
            payload=payload,
            payload_bytes=sum(map(len, pieces)),
            samples=result.samples,
            losses=dict(result.losses),
            metrics=dict(result.metrics),
            software=SOFTWARE,
            task=self._run.spec.task,
            seconds=seconds,
        )
        kind, limits = question.phase.kind, self._run.spec.limits
        problem = content_problem(manifest, kind, limits)
        if problem is None and check is not None:
            problem = payload_problem(check, kind, limits)
        keeps = problem is None and self._keeps_updates and kind is Train
        if keeps:
            with self._around.blobs.writer(hash=False) as writer:
                for piece in pieces:
                    writer.write(piece)
                writer.commit(payload)
        envelope = SignedEnvelope(manifest=manifest.SerializeToString(deterministic=True))
        signed = Signed(envelope, envelope_digest(envelope), manifest)
        update = record_reply(assignment, signed, problem, now, receipt=b"", stored=keeps)
        if problem is not None:
            return assignment, None
        return assignment, self._reply(name, answer, envelope=update.envelope_digest, payload=update.payload)

    def _reply(self, name: str, answer: "HandedIn", *, envelope: str = "", payload: str = "") -> Reply:
        """A reply as an algorithm sees it."""
        result = answer.result
        return Reply(
            client_id=name,
            samples=result.samples,
            losses=result.losses,
            metrics=result.metrics,
            rows=tuple(result.rows[row.name] for row in answer.rows),
            names=tuple(row.name for row in answer.rows),
            objectives=self._population.serves[name],
            envelope=envelope,
            payload=payload,
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
                attempt=question.attempt,
                kind=question.phase.kind.name,
                decides=question.phase.kind.decides,
                state=PhaseState.OPEN,
                wanted=question.wanted,
                started=started,
                deadline=started + timedelta(seconds=question.phase.kind.terms(self._run.spec).deadline_seconds),
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


def _with_row(outcome: Result, objective: str, row: Vector) -> Result:
    return replace(outcome, rows={**outcome.rows, objective: np.ascontiguousarray(row, dtype=np.float32)})


def _handed_in(work: Work, client: Client, outcome: Outcome) -> "HandedIn | Refused":
    """What a client makes of what it computed."""
    if isinstance(outcome, TrainingDiverged):
        return Refused("training-diverged", str(outcome))
    try:
        return HandedIn(work.answer(client, outcome), work.rows(client.shape))
    except WorkError as error:
        return Refused("failed", str(error))
