"""A fleet: the clients that a conductor asks, either real workers or clients simulated in one process."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Protocol

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.cluster.leases import NO_LEASE, Lease
from coordinator.rounds.fleets.past_rounds import PastRounds
from coordinator.rounds.replies.evidence import Evidence, RecordError, SignatureMemory
from coordinator.signing_keys import Signing
from federation.aggregation.phases import AlgorithmPhase, Replies, Selected
from federation.digests import digest
from federation.spec.run_spec import RunSpec
from federation.spec.sharing import Unshared
from federation.spec.task_metrics import MetricKind, kind_of
from federation.trust.envelope import ManifestT
from federation.v1.common_pb2 import SignedEnvelope
from federation.vectors import Layout, model_layout
from federation.work.base import Origin, Shape
from federation.work.evaluate.work import Evaluate
from storage import models
from storage.blobs import BlobStore
from storage.database import Database
from storage.models import Model, Round, Run
from storage.records import ConversationFacts, RunMemory
from storage.states import PhaseState, RunState

MAX_SENT_BYTES = 128 << 10  # of the inputs that travel with one assignment; a worker takes messages of 1 MiB


class Held(Exception):
    """The run is not RUNNING any more, or the coordinator is stopping: leave everything as it is."""


class Fenced(Held):
    """Another coordinator has taken the run: this one may write nothing more about it."""


class Skipped(Exception):
    """This round ends without a step; the message says why. `required` are the missing required clients."""

    def __init__(self, why: str, required: Sequence[str] = ()) -> None:
        super().__init__(why)
        self.required = tuple(required)


class RevokedMeanwhile(Exception):
    """A member was revoked after its reply was read: the round's conversation must run again without it."""


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run that never change."""

    run_id: str
    spec: RunSpec  # the submitted specification, parsed
    document: bytes  # the same, as it was submitted
    spec_digest: str  # its digest
    parameters: int  # d, the number of the model's trainable parameters
    objectives: tuple[str, ...]  # of the task, in its order
    metrics: tuple[MetricKind, ...]  # of the task, beside loss and accuracy
    submitted_by: str = ""  # the name of the administrator
    lease: Lease = NO_LEASE  # under which this process conducts the run

    @classmethod
    def load(cls, database: Database, run_id: str, lease: Lease = NO_LEASE) -> "RunFacts":
        """Reads the facts of a run, which is conducted under a lease, from the record.

        Raises:
            RecordError: the specification does not have its digest, which is in every assignment.
        """
        with database.read() as session:
            run = session.get_one(Run, run_id)
            if digest(run.spec) != run.spec_digest:
                raise RecordError("runs", run_id, "spec", f"its digest is not {run.spec_digest}")
            parameters = session.get_one(Model, run.initial_model).parameters
            spec = RunSpec.parse(run.spec)
            by = run.submitted_by.rpartition("/")[2]
            facts = run_id, spec, run.spec, run.spec_digest, parameters, tuple(run.objectives), run.metrics
            return cls(*facts, by, lease)

    @property
    def evaluation(self) -> Evaluate:
        """The evaluation that clients make of a model after a round."""
        return Evaluate(splits=self.spec.evaluated, metrics=self.metrics)

    def shape(self, layout: Layout, serves: tuple[str, ...]) -> Shape:
        """The shape of the run's model and objectives, for a client that serves these objectives."""
        parameters = self.spec.parameters
        trained, count = parameters.trained(layout).size, parameters.parameters_of(layout).size
        return Shape(layout, self.objectives, serves, trained - count, layout.size - trained)

    def origin(self, federation_id: str, base_model: str) -> Origin:
        """The fields that all assignments on this model repeat."""
        return Origin(
            federation_id=federation_id,
            run_id=self.run_id,
            task=self.spec.task,
            spec=self.spec_digest,
            base_model=base_model,
            seed=self.spec.seed,
            unshared=Unshared.of(self.spec.parameters),
        )

    @property
    def stopped_by(self) -> MetricKind | None:
        """The metric by which the run is stopped before its last round; None if by none."""
        return kind_of(self.spec.stop.metric, self.metrics)

    def check_running(self, session: Session) -> None:
        """Raises Held if the run is not RUNNING."""
        if session.scalar(select(Run.state).where(Run.run_id == self.run_id)) is not RunState.RUNNING:
            raise Held

    def locked(self, session: Session) -> Run:
        """The run, locked until the transaction ends. Every transaction of a conductor that writes begins with this.

        Raises:
            Fenced: another coordinator has taken the run since.
        """
        run = session.get_one(Run, self.run_id, with_for_update=True)
        if Lease(run.conductor, run.epoch) != self.lease:
            raise Fenced(
                f"another coordinator has taken it: the lease has epoch {run.epoch}, that of this process had "
                f"{self.lease.epoch}"
            )
        return run

    def running(self, session: Session) -> Run:
        """The run, locked until the transaction ends, so that no operator changes its state.

        Raises:
            Fenced: another coordinator has taken the run since.
            Held: it is not RUNNING.
        """
        run = self.locked(session)
        if run.state is not RunState.RUNNING:
            raise Held
        return run


class Wait(Protocol):
    """Waits in a conductor's thread."""

    def __call__(self, seconds: float | None, replies: int = 1) -> None:
        """Returns when the run has changed, this number of replies has come, or these seconds are over.

        Raises:
            Held: the coordinator is stopping.
        """


@dataclass(frozen=True)
class RunContext:
    """The parts of the coordinator that a conductor uses."""

    database: Database
    blobs: BlobStore  # where models and updates are kept
    signing: Signing  # the coordinator's keys
    device: str  # where updates are aggregated, "cpu" or "cuda"
    clock: Callable[[], datetime]  # the time, aware
    wait: Wait
    changed: Callable[[], None]  # announces a change to those that watch the run
    signatures: SignatureMemory = field(default_factory=SignatureMemory)  # those that this process has verified or made

    @property
    def federation_id(self) -> str:
        """The name of the federation."""
        return self.signing.federation_id

    def sign(self, manifest: ManifestT) -> SignedEnvelope:
        """A manifest in an envelope that the coordinator signs."""
        return self.signatures.sign(manifest, self.signing.key)

    @property
    def evidence(self) -> Evidence:
        """Reads rows of the record as they were signed."""
        return Evidence(self.signing, self.signatures)


@dataclass(frozen=True, kw_only=True)
class Question:
    """One phase of one round, for some clients."""

    current: Round  # the round, with the number of its attempt
    number: int  # of the phase in the round, from 0, over all attempts
    phase: AlgorithmPhase
    clients: list[str]
    wanted: int  # the number of replies with which the phase is complete
    base_model: str  # the digest of the model to train or evaluate
    layout: Layout  # of this model
    conversation: ConversationFacts | None = None  # recorded with the first phase of a conversation

    def row(self, spec: RunSpec, started: datetime) -> models.Phase:
        """A new row for the phase, open from `started` for the specification's time and that of large replies."""
        kind = self.phase.kind
        seconds = kind.terms(spec).deadline_seconds + self.phase.transfer_seconds()
        return models.Phase(
            round_id=self.current.round_id,
            number=self.number,
            attempt=self.current.attempt,
            kind=kind.name,
            decides=kind.decides,
            state=PhaseState.OPEN,
            wanted=self.wanted,
            conversation={} if self.conversation is None else self.conversation.encode(),
            started=started,
            deadline=started + timedelta(seconds=seconds),
        )


@dataclass(frozen=True)
class Inputs:
    """The inputs of one client besides the model: new rows, and the contents in their order if they are small."""

    rows: list[models.Input]
    sent: tuple[bytes, ...]  # with the assignment; empty if the client must fetch them

    @classmethod
    def of(cls, stored: Sequence[tuple[str, str, bytes]]) -> "Inputs":
        """Makes inputs from names, digests and contents."""
        rows = [models.Input(name=name, digest=digest, size=len(content)) for name, digest, content in stored]
        small = sum(row.size for row in rows) <= MAX_SENT_BYTES
        return cls(rows, tuple(content for *_, content in stored) if small else ())


class Fleet(ABC):
    """The clients of one run. The answers of a fleet are on record before it returns them.

    Args:
        run: the run.
        context: the coordinator.
    """

    def __init__(self, run: RunFacts, context: RunContext) -> None:
        self.run = run
        self.context = context
        self.past = PastRounds(run.run_id)

    @property
    def conceals(self) -> bool:
        """True if the run's steps have noise that protects clients, so that their replies stay hidden.

        Of the updates, only the signed step and its blobs are then recorded, and clients are asked for no evaluation:
        their scores would have no noise.
        """
        return self.run.spec.privacy.client_noise > 0

    @abstractmethod
    def known(self, session: Session) -> dict[str, Selected]:
        """Every client that may be asked, now or when it comes back, by id: its samples and its objectives."""

    @abstractmethod
    def keys(self, session: Session) -> dict[str, bytes]:
        """The id of the signing key of every client that is a member, 32 bytes, by client id."""

    def derive(self, label: str, context: bytes) -> bytes:
        """32 bytes that only this coordinator knows, for a label and a context; the same after a restart."""
        info = b"fedpareto/v1/coordinator/" + label.encode() + b"\0" + context
        return HKDF(SHA256(), 32, salt=None, info=info).derive(self.context.signing.secret)

    def pool(self, session: Session) -> dict[str, int]:
        """The clients that could work now: id -> training samples."""
        return {name: client.samples for name, client in self.known(session).items()}

    def absent(self, session: Session) -> dict[str, str]:
        """The clients that offer the task and could not be asked now, by name, with the reason."""
        return {}

    def back(self, question: Question) -> list[str]:
        """The clients to be asked a question once more, sorted; none of simulated ones.

        They were away when the round began and attend now, or were lost while they were asked.
        """
        return []

    def complete(self) -> bool:
        """False while clients are expected back, so that a round does not select without them."""
        return True

    def settled_pool(self) -> dict[str, int]:
        """The pool, as soon as it is complete: client id -> training samples.

        Raises:
            Held: the run is not RUNNING.
        """
        while not self.complete():
            with self.context.database.read() as session:
                self.run.check_running(session)
            self.context.wait(1.0)
        with self.context.database.read() as session:
            return self.pool(session)

    def memory(self, session: Session, number: int, base_model: str | None) -> RunMemory:
        """The run's memory before a round, as the newest signed step left it.

        `base_model` is the digest of the model that the round starts from; None before it begins.

        Raises:
            RecordError: the record differs from what was signed.
        """
        run_id = self.run.run_id
        before = session.scalar(
            select(Round)
            .where(Round.run_id == run_id, Round.number < number, Round.step.is_not(None))
            .order_by(Round.number.desc())
            .limit(1)
        )
        return RunMemory.decode(self.context.evidence.state(session.get_one(Run, run_id), before, base_model))

    def question(
        self,
        current: Round,
        number: int,
        phase: AlgorithmPhase,
        clients: Sequence[str],
        wanted: int,
        base_model: str,
        conversation: ConversationFacts | None = None,
    ) -> Question:
        """A question about a model that is stored; the arguments are as in `Question`.

        Raises:
            BlobMissing, BlobCorrupt: the model cannot be read.
        """
        return Question(
            current=current,
            number=number,
            phase=phase,
            clients=[*clients],
            wanted=wanted,
            base_model=base_model,
            layout=model_layout(self.context.blobs.local(base_model)),
            conversation=conversation,
        )

    @abstractmethod
    def ask(self, question: Question) -> Replies:
        """Asks a question once: asked again, as after a crash, it returns the same replies.

        Raises:
            Held: the run is not RUNNING, or the coordinator is stopping.
        """

    def tell_cancelled(self, assignments: Sequence[models.Assignment]) -> None:
        """Tells clients that their assignments were cancelled; simulated clients need no message."""
        return

    def tell_ended(self, current: models.Round, attempt: int) -> None:
        """Tells members that the private rounds of an attempt are over; simulated ones need no message."""
        return

    def observe(self, model: str) -> dict[str, float]:
        """Measurements of an evaluated model, by digest, that only a simulation can make; by the metric's name."""
        return {}

    def facts(self, question: Question) -> dict[str, Any]:
        """The fields that all manifests of a phase have in common."""
        return {
            "federation_id": self.context.federation_id,
            "run_id": self.run.run_id,
            "spec": self.run.spec_digest,
            "task": self.run.spec.task,
            "round": question.current.number,
            "attempt": question.current.attempt,
            "phase": question.number,
            "base_model": question.base_model,
        }

    def store_inputs(self, question: Question) -> dict[str, Inputs]:
        """Stores the blobs that clients need besides the model, for the assignment of each client."""

        def stored(inputs: Mapping[str, bytes]) -> list[tuple[str, str, bytes]]:
            return [(name, self.context.blobs.put(content), content) for name, content in inputs.items()]

        shared = stored(question.phase.inputs())
        return {
            client_id: Inputs.of(sorted([*shared, *stored(question.phase.own_inputs(client_id))]))
            for client_id in question.clients
        }
