"""A fleet: whom the conductor asks. Real workers, clients simulated in one process, or the record itself."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.aggregation.phases import Phase, Replies, Selected
from coordinator.rounds.evidence import Evidence, RecordError, SignatureMemory
from federation.digests import digest
from federation.envelope import ManifestT
from federation.runs import RunSpec
from federation.v1.common_pb2 import SignedEnvelope
from storage import models
from storage.blobs import BlobStore
from storage.database import Database
from storage.models import Model, Run, RunState


class Held(Exception):
    """The run is not RUNNING any more, or the coordinator is stopping: leave everything as it is."""


class Skipped(Exception):
    """This round ends without a step; the message says why."""


class RevokedMeanwhile(Exception):
    """A member whose reply has been read was revoked: the round's conversation is to be run again without it."""


@dataclass(frozen=True)
class RunFacts:
    """What never changes about a run.

    Attributes:
        run_id: its id.
        spec: what was submitted, parsed.
        spec_digest: the digest of what was submitted.
        parameters: d, the number of the model's trainable parameters.
        objectives: of the task, in its order.
    """

    run_id: str
    spec: RunSpec
    spec_digest: str
    parameters: int
    objectives: tuple[str, ...]

    @classmethod
    def load(cls, database: Database, run_id: str) -> "RunFacts":
        """Reads them from the record.

        Raises:
            RecordError: the specification does not have its digest, which is in every assignment.
        """
        with database.read() as session:
            run = session.get_one(Run, run_id)
            if digest(run.spec) != run.spec_digest:
                raise RecordError("runs", run_id, "spec", f"its digest is not {run.spec_digest}")
            parameters = session.get_one(Model, run.initial_model).parameters
            return cls(run_id, RunSpec.parse(run.spec), run.spec_digest, parameters, tuple(run.objectives))

    def must_run(self, database: Database) -> None:
        """Raises if the run is held.

        Raises:
            Held: it is not RUNNING.
        """
        with database.read() as session:
            if session.scalar(select(Run.state).where(Run.run_id == self.run_id)) is not RunState.RUNNING:
                raise Held

    def running(self, session: Session) -> Run:
        """The run, locked: no word of an operator comes in between until the transaction ends.

        Raises:
            Held: it is not RUNNING.
        """
        run = session.get_one(Run, self.run_id, with_for_update=True)
        if run.state is not RunState.RUNNING:
            raise Held
        return run


@dataclass(frozen=True)
class Surroundings:
    """What conducting a run needs of the coordinator.

    Attributes:
        database: where facts are kept.
        blobs: where models and updates are kept.
        signing_key: the coordinator's.
        federation_id: the federation.
        device: where updates are aggregated, "cpu" or "cuda".
        clock: the time, aware.
        wait: blocks until something changed in the run or the time (seconds) is over; raises Held when stopping.
        changed: announces a change to those that watch the run.
        signatures: those that this process has verified or made.
    """

    database: Database
    blobs: BlobStore
    signing_key: Ed25519PrivateKey
    federation_id: str
    device: str
    clock: Callable[[], datetime]
    wait: Callable[[float | None], None]
    changed: Callable[[], None]
    signatures: SignatureMemory = field(default_factory=SignatureMemory)

    def sign(self, manifest: ManifestT) -> SignedEnvelope:
        """A manifest in an envelope that the coordinator signs."""
        return self.signatures.sign(manifest, self.signing_key)

    @property
    def evidence(self) -> Evidence:
        """What turns rows of the record into what was signed."""
        return Evidence(self.signing_key.public_key(), self.signatures)


@dataclass(frozen=True, kw_only=True)
class Question:
    """One phase of one round, put to some clients.

    Attributes:
        round_id: the round's row.
        round: its number, from 0.
        attempt: at the round, from 0.
        number: of the phase in the round, from 0, over all attempts.
        phase: what is asked.
        clients: who is asked.
        wanted: with how many replies the phase is complete.
        base_model: the digest of the model to train or evaluate.
    """

    round_id: int
    round: int
    attempt: int
    number: int
    phase: Phase
    clients: list[str]
    wanted: int
    base_model: str


class Fleet(ABC):
    """The clients of one run. Whatever a fleet answers is on record before it is returned."""

    @abstractmethod
    def known(self, session: Session) -> dict[str, Selected]:
        """Every client that may be asked, now or when it comes back, by id: its samples, and what it serves."""

    @abstractmethod
    def pool(self, session: Session) -> dict[str, int]:
        """The clients that could work now: id -> training samples."""

    def complete(self) -> bool:
        """False while clients are expected back, so that a round does not select without them."""
        return True

    @abstractmethod
    def ask(self, question: Question) -> Replies:
        """Puts a question, once: asked again (after a crash, say) it gives the same replies.

        Raises:
            Held: the run is not RUNNING, or the coordinator is stopping.
        """

    def observe(self, model: str) -> dict[str, float]:
        """What no client says of an evaluated model and a simulation can measure, by the metric's name.

        Args:
            model: its digest.
        """
        return {}


def settled_pool(run: RunFacts, around: Surroundings, fleet: Fleet) -> dict[str, int]:
    """The pool, once those are back who are expected back after a restart: client id -> training samples.

    Raises:
        Held: the run is not RUNNING.
    """
    while not fleet.complete():
        run.must_run(around.database)
        around.wait(1.0)
    with around.database.read() as session:
        return fleet.pool(session)


class StoredInputs:
    """Puts what clients need besides the model into the blob store, and names it.

    Args:
        phase: what is asked.
        blobs: the store.
    """

    def __init__(self, phase: Phase, blobs: BlobStore) -> None:
        self._phase = phase
        self._blobs = blobs
        self._shared = [self._stored(name, content) for name, content in sorted(phase.inputs().items())]

    def of(self, client_id: str) -> list[models.Input]:
        """The inputs of one client, by name: new rows for its assignment."""
        own = [self._stored(name, content) for name, content in self._phase.own_inputs(client_id).items()]
        stored = sorted([*self._shared, *own])
        return [models.Input(name=name, digest=digest, size=size) for name, digest, size in stored]

    def _stored(self, name: str, content: bytes) -> tuple[str, str, int]:
        return name, self._blobs.put(content), len(content)
