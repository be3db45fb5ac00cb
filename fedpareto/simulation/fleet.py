"""The simulated fleet: the conductor's questions answered in this process.

Replies are recorded unsigned, and refused for the reasons for which a coordinator refuses them. Updates stay in memory,
unless the algorithm needs them in later rounds.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.rounds import selection
from coordinator.rounds.fleets.base import Fleet, Held, Question, RunContext, RunFacts
from coordinator.rounds.replies.content import content_problem, payload_problem
from coordinator.rounds.replies.recorder import Signed, ending, reply_row
from coordinator.rounds.transitions import close_phase, end_assignment
from federation.aggregation.base import Algorithm
from federation.aggregation.phases import Asked, PhaseReply, Replies, Selected
from federation.attacks.probe import Probe
from federation.digests import digest
from federation.owners_code import described
from federation.spec.computation import SPLITS, Computation, Descend, Measure, MeasureAlong, training_losses
from federation.spec.sharing import BUFFERS
from federation.statistics.rules import MemberRules
from federation.tasks import task
from federation.training import TrainingDiverged, TrainingStopped
from federation.training.contract import no_share_in_words, no_shares
from federation.training.held_data import HeldSplits
from federation.transport.payload_check import PayloadCheck
from federation.trust.envelope import envelope_digest, sign
from federation.trust.proofs import UNSIGNED
from federation.v1.common_pb2 import AssignmentManifest, Row, SignedEnvelope
from federation.vectors import model_row, payload_bytes, widen
from federation.work.base import Memory, Result, RowSchema, Work, WorkError, WorkingClient, payload_layout
from federation.work.replies import reply_manifest
from federation.work.site import Site
from fedpareto.simulation.attackers import attacked
from fedpareto.simulation.local import LocalWork, Outcome, Turn
from fedpareto.simulation.local_state import PopulationState
from fedpareto.simulation.population import Population
from fedpareto.simulation.simulated_members import SimulatedMembers
from fedpareto.simulation.spending import DIVERGED, Spending
from storage import models
from storage.models import Assignment
from storage.states import AssignmentState, ClientState, RoundState

LOGGER = logging.getLogger("fedpareto.simulation")
SOFTWARE = "simulation"
Vector = NDArray[np.float32]


@dataclass(frozen=True)
class SimulatedDecline:
    """A client's decline."""

    reason: str
    message: str


@dataclass(frozen=True)
class Answered:
    """The content of a reply, the rows of its payload, and the residuals that rounding leaves with the client."""

    result: Result
    rows: tuple[RowSchema, ...]
    residuals: tuple[RowSchema, ...]


Answer = Answered | SimulatedDecline


class _ClientMemory(Memory):
    """The memory of one simulated client of an attempt at a round."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def get(self, name: str) -> bytes | None:
        return self._values.get(name)

    def put(self, name: str, value: bytes, *, durable: bool = False) -> None:
        """Keeps a value. An interrupted simulation computes the round again from its first phase."""
        self._values[name] = value


class SimulatedFleet(Fleet):
    """The clients of a simulation.

    Args:
        run: the run.
        context: the database, the blobs, the clock.
        algorithm: the run's.
        population: the clients.
        local: trains and evaluates them.
        probe: measures the success of a backdoor, where attackers plant one.
        local_state: the states that the clients keep of the run.
        ordinary: the state of the process in which the clients compute, `ordinary`.
        stopped: is called while clients train; True ends the work.
    """

    def __init__(
        self,
        run: RunFacts,
        context: RunContext,
        *,
        algorithm: Algorithm,
        population: Population,
        local: LocalWork,
        probe: Probe | None,
        local_state: PopulationState,
        ordinary: Callable[[], AbstractContextManager[None]],
        stopped: Callable[[], bool],
    ) -> None:
        super().__init__(run, context)
        self._keeps_updates = algorithm.keeps_updates
        self._population = population
        self._local = local
        self._probe = probe
        self._local_state = local_state
        self._ordinary = ordinary
        self._stopped = stopped
        chosen = run.spec.privacy.effective_members or None  # the owners' requirement is the run's
        self._members = SimulatedMembers(run.spec.seed, population.samples, run.spec.task, effective_members=chosen)
        self._attempt = (-1, -1)
        self._memories: dict[str, _ClientMemory] = {}  # of that attempt, by client
        self.left_out: dict[str, str] = {}  # measurements that nobody counts, by name, in words
        self._spending = Spending(run.run_id, context.database, population.samples)

    @property
    def conceals(self) -> bool:
        return False

    def known(self, session: Session) -> dict[str, Selected]:
        serves, limit = self._population.serves, self.run.spec.limits.samples
        admits = self.run.spec.selection.admits
        return {
            name: Selected(min(n, limit), serves[name])
            for name, n in self._population.samples.items()
            if n > 0 and admits(name)
        }

    def derive(self, label: str, context: bytes) -> bytes:
        """From the run's seed, so that the simulation can be repeated."""
        return self._members.derive(f"coordinator/{label}", context.decode())

    def keys(self, session: Session) -> dict[str, bytes]:
        return self._members.key_ids()

    def ask(self, question: Question) -> Replies:
        began, started = time.perf_counter(), self.context.clock()
        # The replies that measure a new model are not recorded: the conductor records their scores.
        records = question.phase.kind.decides or not self.run.spec.trains
        clients = self._first(question) if records else question.clients
        inputs = self.store_inputs(question)
        try:
            with self._ordinary():
                answers = self._answers(question, clients)
        except TrainingStopped:
            raise Held from None
        if not records:
            scores = [self._reply(name, answer) for name, answer in answers.items() if isinstance(answer, Answered)]
            return Replies(scores, device=self.context.device)
        seconds = (time.perf_counter() - began) / max(1, len(clients))
        replies: list[PhaseReply] = []
        assignments = []
        for name in sorted(question.clients):
            assignment = Assignment(
                assignment_id=digest(f"{self.run.run_id}/{question.current.number}/{question.number}/{name}".encode())[
                    7:39
                ],
                client_id=name,
                state=AssignmentState.OPEN,
                base_model=question.base_model,
                inputs=inputs[name].rows,
                objectives=list(self._population.serves[name]),
                envelope=b"",
                created=started,
            )
            assignments.append(assignment)
            if name not in answers:
                end_assignment(assignment, AssignmentState.CANCELLED, self.context.clock(), "not-needed")
            elif (reply := self._take(question, assignment, answers[name], seconds)) is not None:
                replies.append(reply)
        self._record(question, assignments, started)
        declines = {name: answer.reason for name, answer in answers.items() if isinstance(answer, SimulatedDecline)}
        return Replies(replies, device=self.context.device, declines=declines)

    def observe(self, model: str) -> dict[str, float]:
        if self._probe is None:
            return {}
        with self._ordinary():
            return {"backdoor": self._probe.rate(model_row(self.context.blobs.local(model)).read())}

    # --- the clients' work

    def _answers(self, question: Question, clients: list[str]) -> dict[str, Answer]:
        """The answer of each client."""
        base = model_row(self.context.blobs.local(question.base_model)).read()
        spec, serves = self.run.spec, self._population.serves
        shared, private = question.phase.inputs(), spec.privacy.secure != "off"
        origin = self.run.origin(self.context.federation_id, question.base_model)
        if self._attempt != (question.current.number, question.current.attempt):
            self._attempt, self._memories = (question.current.number, question.current.attempt), {}
        site, held = Site(), dict[str, HeldSplits]()
        if spec.describes:
            site = Site(statistics={spec.task: MemberRules()})
            known, splits = task(spec.task), self._population.splits
            held = {name: HeldSplits(known, splits[name]) for name in clients}
        members = {
            name: WorkingClient(
                client_id=name,
                round=question.current.number,
                attempt=question.current.attempt,
                shape=self.run.shape(question.layout, serves[name]),
                memory=self._memories.setdefault(name, _ClientMemory()),
                inputs={**shared, **question.phase.own_inputs(name)},
                origin=origin,
                site=self._members.site(name, self._population.attackers.get(name)) if private else site,
                approved=True,
                data=held.get(name),
            )
            for name in clients
        }
        number = question.current.number
        works = {name: question.phase.work(Asked(name, serves[name], spec, number)) for name in clients}
        computations: dict[str, Computation] = {}
        declined: dict[str, Answer] = {}
        for name, work in works.items():
            try:
                computation = work.computation(members[name])
                residual = self._local_state.residual(number, name, work.residuals(members[name].shape))
            except WorkError as error:
                declined[name] = SimulatedDecline(error.reason or "failed", str(error))
                continue
            members[name] = replace(members[name], residual=residual)
            if computation is not None:
                attack = self._population.attackers.get(name)
                if isinstance(computation, Descend) and attack is not None:
                    targets = attack.on_targets(computation.targets)
                    computation = replace(computation, targets=targets, idle=not attack.trains)
                computations[name] = computation
        outcomes: dict[str, Outcome] = {name: Result({}, {}, {}, self._population.samples[name]) for name in clients}
        statements = self._spending.statements(computations)
        own = self._local_state.at(number, computations)
        outcomes |= self._computed(base, computations, Turn(spec.seed, number, self._stopped, own))
        if any(not isinstance(computation, Measure | MeasureAlong) for computation in computations.values()):
            outcomes = attacked(outcomes, self._population.attackers, question, spec.seed, partial(self._change, base))
        for name, outcome in outcomes.items():
            if isinstance(outcome, Result):
                measured = isinstance(computations.get(name), Measure)
                self._tell_left_out(number, name, outcome.metrics, measured=measured)
            if works[name].conceals and not isinstance(outcome, Result):
                outcomes[name] = self._failed(number, name, computations[name], outcome)
        for name, statement in statements.items():
            if isinstance(outcome := outcomes[name], Result):
                outcomes[name] = replace(outcome, privacy=statement)
        honest = [name for name in clients if name not in declined]
        return {name: _answer(works[name], members[name], outcomes[name]) for name in honest} | declined

    def _tell_left_out(self, number: int, client: str, metrics: Mapping[str, float], *, measured: bool) -> None:
        """Warns once of each measurement that is left out; `measured` splits have a loss, unless it is not finite."""
        found = {name: no_share_in_words(name, value) for name, value in no_shares(metrics).items()}
        for split in SPLITS if measured else ():
            name = f"{split}/loss"
            if metrics.get(f"{split}/samples", 0) > 0 and not math.isfinite(metrics.get(name, math.nan)):
                found[name] = f"{name} is not finite in round {number}, so the means over the clients lack it"
        for name, words in found.items():
            if name not in self.left_out:
                self.left_out[name] = f"{client}: {words}"
                LOGGER.warning("%s", self.left_out[name])

    def _failed(
        self, number: int, name: str, computation: Computation, failure: TrainingDiverged | WorkError
    ) -> Outcome:
        """The outcome of a failed computation in a private round, which the client answers as a worker does.

        The metrics of an evaluation are those of the run's initial model, without values.
        """
        LOGGER.warning("round %d: the computation of %s failed in a private round: %s", number, name, failure)
        metrics: Mapping[str, float] = {}
        if isinstance(computation, Measure):
            with self.context.database.read() as session:
                model = session.get_one(models.Run, self.run.run_id).initial_model
            turn = Turn(self.run.spec.seed, number, self._stopped, self._local_state.at(number, {name: computation}))
            first = self._local.compute(model_row(self.context.blobs.local(model)).read(), {name: computation}, turn)
            if not isinstance(measured := first[name], Result):
                return measured
            metrics = dict.fromkeys(measured.metrics, math.nan)
        return Result({}, {}, metrics, self._population.samples[name], failure=described(failure))

    def _computed(self, base: Vector, computations: Mapping[str, Computation], turn: Turn) -> dict[str, Outcome]:
        """The outcomes of the computations. In a line search, all clients measure one model after the other."""
        searches = [item for item in computations.values() if isinstance(item, MeasureAlong)]
        if not searches:
            plain = {name: item for name, item in computations.items() if not isinstance(item, MeasureAlong)}
            return self._local.compute(base, plain, turn)
        measurements = dict.fromkeys(computations, Measure(splits=("train",)))
        metrics: dict[str, dict[str, Mapping[str, float]]] = {client: {} for client in computations}
        for name, model in searches[0].models(base):
            for client, outcome in self._local.compute(model, measurements, turn).items():
                if isinstance(outcome, Result):
                    metrics[client][name] = outcome.metrics
        samples = self._population.samples
        return {client: Result({}, {}, training_losses(losses), samples[client]) for client, losses in metrics.items()}

    def _first(self, question: Question) -> list[str]:
        """The clients whose replies come first, as many as the round wants; drawn at random if more were asked."""
        if len(question.clients) <= question.wanted:
            return question.clients
        generator = selection.generator(self.run.spec.seed, question.current.number, "reply")
        chosen = generator.choice(len(question.clients), size=question.wanted, replace=False)
        return [question.clients[index] for index in sorted(chosen)]

    def _change(self, base: Vector, question: Question) -> Vector:
        """w_{t-1} - w_t of the parameters, zeros in the first round; from the record, for an interrupted simulation."""
        with self.context.database.read() as session:
            before = session.scalar(
                select(models.Round.base_model).where(
                    models.Round.run_id == self.run.run_id, models.Round.number == question.current.number - 1
                )
            )
        last = base if before is None else model_row(self.context.blobs.local(before)).read()
        return (last - base)[: self.run.spec.parameters.parameters_of(question.layout).size]

    def _take(self, question: Question, assignment: Assignment, answer: Answer, seconds: float) -> PhaseReply | None:
        """Records one client's reply as the intake would; None if it declined or is refused."""
        now, name = self.context.clock(), assignment.client_id
        if isinstance(answer, SimulatedDecline):
            end_assignment(assignment, AssignmentState.DECLINED, now, answer.reason, answer.message)
            return None
        result, rows = answer.result, answer.rows
        check, pieces, payload = None, [], ""
        if rows:
            layout = payload_layout(rows)
            check, pieces = PayloadCheck(layout), payload_bytes(layout, result.rows)
            for piece in pieces:
                check.feed(piece)
            payload = check.finish()
        order = AssignmentManifest(
            **self.facts(question),
            assignment_id=assignment.assignment_id,
            client_id=name,
            kind=question.phase.kind.name,
            rows=[Row(name=row.name, dtype=row.dtype, length=row.length) for row in rows],
        )
        timed = replace(result, seconds=0.0 if question.phase.kind.conceals else seconds)
        manifest = reply_manifest(order, timed, software=SOFTWARE, repeatable=self._local.repeatable(name))
        manifest.payload, manifest.payload_bytes = payload, sum(map(len, pieces))
        kind, limits = question.phase.kind, self.run.spec.limits
        problem = content_problem(manifest, kind, limits)
        if problem is None and check is not None:
            problem = payload_problem(check, kind, limits)
        keeps = problem is None and self._keeps_updates and kind.sends_update and bool(rows)
        if keeps:
            with self.context.blobs.writer(hash=False) as writer:
                for piece in pieces:
                    writer.write(piece)
                writer.commit(payload)
        if manifest.statement:  # other members verify it
            envelope = sign(manifest, self._members.keys[name])
        else:
            envelope = SignedEnvelope(manifest=manifest.SerializeToString(deterministic=True))
        signed = Signed(envelope, envelope_digest(envelope), manifest)
        recorded = models.Reply(assignment=assignment, **reply_row(signed, problem, now, receipt=b"", stored=keeps))
        state, reason, message = ending(problem)
        end_assignment(assignment, state, now, reason, message)
        if problem is not None:
            return None
        self._local_state.keep(question.current.number, name, result, answer.residuals)
        reply = self._reply(name, answer, envelope=recorded.envelope_digest, payload=recorded.payload)
        return replace(reply, statement=result.statement, signed=recorded.envelope, signed_payload=payload)

    def _reply(self, name: str, answer: Answered, *, envelope: str = "", payload: str = "") -> PhaseReply:
        result, rows = answer.result, [row for row in answer.rows if row.name != BUFFERS]
        row_values = ((row, result.rows[row.name]) for row in rows)
        return PhaseReply(
            client_id=name,
            samples=result.samples,
            losses=result.losses,
            metrics=result.metrics,
            rows=tuple(widen(values) if row.dtype == "BF16" else values for row, values in row_values),
            names=tuple(row.name for row in rows),
            buffers=result.rows.get(BUFFERS),
            objectives=self._population.serves[name],
            envelope=envelope,
            payload=payload,
        )

    def _record(self, question: Question, assignments: list[Assignment], started: datetime) -> None:
        """Records a phase with all that belongs to it."""
        now = self.context.clock()
        with self.context.database.begin() as session:
            self.run.running(session)
            phase = question.row(self.run.spec, started)
            phase.assignments.extend(assignments)
            close_phase(phase, now)
            session.add(phase)


def forget_interrupted(session: Session, run_id: str) -> None:
    """Removes the phases of an interrupted conversation, with all that belongs to them: they are asked once more.

    That is the present attempt at a round without a step, or else the evaluation of its model.
    """
    going = models.Round.state.in_([RoundState.OPEN, RoundState.STEPPED])
    current = session.scalar(select(models.Round).where(models.Round.run_id == run_id, going))
    if current is None or current.given_up:
        return
    phases = select(models.Phase).where(models.Phase.round_id == current.round_id)
    if current.state is RoundState.OPEN:
        again = phases.where(models.Phase.attempt == current.attempt)
    else:
        again = phases.where(models.Phase.number >= current.evaluation_phase)
    for phase in session.scalars(again):
        session.delete(phase)


def enroll(session: Session, population: Population, task: str, context: RunContext) -> None:
    """Records the simulated clients that are not on record yet."""
    known = set(session.scalars(select(models.Client.client_id)))
    for name, samples in population.samples.items():
        if name not in known:
            session.add(
                models.Client(
                    client_id=name,
                    state=ClientState.ACTIVE,
                    signing_key=UNSIGNED,
                    key_id=digest(name.encode()).partition(":")[2],
                    tasks={task: samples},
                    objectives={task: list(population.serves[name])},
                    software=SOFTWARE,
                    enrolled=context.clock(),
                )
            )


def _answer(work: Work, client: WorkingClient, outcome: Outcome) -> Answer:
    """A client's answer after its computation."""
    if isinstance(outcome, TrainingDiverged):
        return SimulatedDecline(DIVERGED, str(outcome))
    if isinstance(outcome, WorkError):
        return SimulatedDecline(outcome.reason or "failed", str(outcome))
    try:
        return Answered(work.answer(client, outcome), work.rows(client.shape), work.residuals(client.shape))
    except WorkError as error:
        return SimulatedDecline(error.reason or "failed", str(error))
