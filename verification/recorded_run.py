"""The facts of a run that never change, as a verifier reads them from a bundle or from a coordinator's database."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Protocol

from federation.aggregation.base import Algorithm
from federation.aggregation.phase_kinds import measuring_phase
from federation.aggregation.phases import Asked
from federation.spec.run_spec import RunSpec
from federation.spec.task_metrics import MetricKind
from federation.trust.key_chain import KeyChain
from federation.vectors import Layout, RowFile
from federation.work.base import Work
from federation.work.evaluate.work import Evaluate


class RecordedBlobs(Protocol):
    """The blobs that the messages of a run name, as far as they are kept.

    Each method but `has` raises BlobAbsent for one that is not there.
    """

    def has(self, digest: str, /) -> bool:
        """True if a blob is there."""

    def blob(self, digest: str, limit: int, /) -> bytes:
        """The bytes of a blob of at most `limit` bytes."""

    def size(self, digest: str, /) -> int:
        """The size of a blob in bytes."""

    def rows(self, digest: str, /) -> Mapping[str, RowFile]:
        """The rows of a payload, by name."""

    def layout(self, digest: str, /) -> Layout:
        """The layout of a model."""


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """The facts of a run.

    Attributes:
        source: what names them, for messages: "bundle" or "record".
        blobs: of its messages.
        federation_id: the federation.
        run_id: the run.
        document: its specification, as it was submitted.
        spec: the same, parsed.
        spec_digest: its digest.
        rule: its algorithm.
        objectives: of the task, in its order.
        kinds: the metrics of the task, beside loss and accuracy.
        clients: the ids of those that have keys.
        chain: gives the signing keys of a client; None for an unknown client.
        reads_updates: False if rules are evaluated on K and on signed numbers alone, and never read an update.
    """

    source: str
    blobs: RecordedBlobs
    federation_id: str
    run_id: str
    document: bytes
    spec: RunSpec
    spec_digest: str
    rule: Algorithm
    objectives: tuple[str, ...]
    kinds: tuple[MetricKind, ...]
    clients: Container[str]
    chain: Callable[[str], KeyChain | None]
    reads_updates: bool = True

    @property
    def measurement(self) -> Work:
        """The work of members that measure a model, or describe their data, in the clear."""
        return measuring_phase(self.spec, self.kinds).work(Asked("", (), self.spec, 0))

    @property
    def evaluation(self) -> Evaluate:
        """The work of members that measure a model in the clear."""
        return Evaluate(splits=self.spec.evaluated, metrics=self.kinds)
