"""The signed results with which runs fill the layer Standardise of their models."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.rounds.transitions import RUN_ENDED
from federation.refusals import Refusal
from federation.spec.run_sections import ParametersSpec
from federation.spec.run_spec import RunSpec
from federation.statistics.scale import ScaleError, check_scale
from federation.trust.envelope import envelope_digest
from federation.v1.common_pb2 import ResultManifest, SignedEnvelope
from federation.v1.record_pb2 import DescribedData
from federation.vectors import Layout, model_layout, model_row
from storage.blobs import BlobStore
from storage.models import Client, Round, Run
from storage.states import ClientState


def described_data(session: Session, result: str) -> DescribedData | None:
    """The result of this digest of a run that described data, as it was signed, and its document; None without one."""
    found = _signed(session, result)
    if found is None:
        return None
    round_id, signed = found
    return DescribedData(result=signed, document=_document(session, round_id) or b"")


def _signed(session: Session, result: str) -> tuple[int, SignedEnvelope] | None:
    """The round that has the result of this digest, and the result; None without one."""
    # Not with their documents, which are large.
    for round_id, envelope in session.execute(select(Round.round_id, Round.result).where(Round.result.is_not(None))):
        signed = SignedEnvelope.FromString(envelope or b"")
        if envelope_digest(signed) == result:
            return round_id, signed
    return None


def _document(session: Session, round_id: int) -> bytes | None:
    return session.scalar(select(Round.document).filter_by(round_id=round_id))


def check_known(session: Session, parameters: ParametersSpec) -> bytes:
    """The document of the result that a run is filled from; empty for a run that names none.

    Raises:
        Refusal: `scale`: this coordinator has signed no such result.
    """
    if not parameters.statistics:
        return b""
    data = described_data(session, parameters.statistics)
    if data is None:
        raise Refusal(
            "scale",
            f"parameters.statistics: no run of this federation that described data has the result "
            f"{parameters.statistics}; `submit --statistics RUN` writes that of a run",
        )
    return data.document


def check_filled(blobs: BlobStore, models: Iterable[str], parameters: ParametersSpec, document: bytes) -> None:
    """Checks the fixed tensors of models, which are stored, by their digests, against the document of the result.

    Raises:
        Refusal: `scale`: they are not filled from it.
    """
    for model in models:
        path = blobs.local(model)
        layout, row = model_layout(path), model_row(path)
        trained = parameters.trained(layout)
        fixed = Layout(layout.tensors[len(trained.tensors) :])
        try:
            check_scale(fixed.split(row.columns(slice(trained.size, layout.size)).read()), document)
        except ScaleError as error:
            raise Refusal("scale", f"the model is not filled from the result that the run names: {error}") from None


@dataclass(frozen=True)
class _Described:
    """A result that does not change: its round, and the digest of its document."""

    round_id: int
    document: str


class OfferedResults:
    """The results of runs that described data, for the members that compare their models with them.

    Many members fetch the same one at a time: its round is looked up once, and they share one copy of its document.
    Used from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: dict[str, _Described] = {}  # by the digest of the result
        self._documents: WeakValueDictionary[int, memoryview] = WeakValueDictionary()  # that are being sent, by round

    def offered(self, session: Session, client_id: str, name: str) -> bytes | memoryview | None:
        """The signed result or the document of this digest, if a run that asks this client is filled from it."""
        client = session.get_one(Client, client_id)
        if client.state is not ClientState.ACTIVE:
            return None
        for spec_document in session.scalars(select(Run.spec).where(Run.state.not_in(list(RUN_ENDED)))):
            if b"statistics" not in spec_document:
                continue
            spec = RunSpec.parse(spec_document)
            result = spec.parameters.statistics
            if not result or spec.task not in client.tasks or (described := self._find(session, result)) is None:
                continue
            if name == result:
                signed = session.scalars(select(Round.result).filter_by(round_id=described.round_id)).one() or b""
                return SignedEnvelope.FromString(signed).SerializeToString(deterministic=True)
            if name == described.document:
                return self._document(session, described.round_id)
        return None

    def _find(self, session: Session, result: str) -> _Described | None:
        if result not in self._results and (found := _signed(session, result)) is not None:
            round_id, signed = found
            self._results[result] = _Described(round_id, ResultManifest.FromString(signed.manifest).document)
        return self._results.get(result)

    def _document(self, session: Session, round_id: int) -> memoryview:
        with self._lock:  # those that ask meanwhile wait for the copy, and share it
            if (document := self._documents.get(round_id)) is None:
                document = self._documents[round_id] = memoryview(_document(session, round_id) or b"")
            return document
