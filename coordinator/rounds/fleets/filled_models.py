"""The signed results with which runs fill the layer Standardise of their models."""

from collections.abc import Iterable

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.rounds.transitions import RUN_ENDED
from federation.digests import digest, parse
from federation.refusals import Refusal
from federation.spec.run_sections import ParametersSpec
from federation.spec.run_spec import RunSpec
from federation.statistics.scale import ScaleError, check_scale
from federation.trust.envelope import envelope_digest
from federation.v1.common_pb2 import SignedEnvelope
from federation.v1.record_pb2 import DescribedData
from federation.vectors import Layout, model_layout, model_row
from storage.blobs import BlobStore
from storage.models import Client, Round, Run
from storage.states import ClientState


def described_data(session: Session, result: str) -> DescribedData | None:
    """The result of this digest of a run that described data, as it was signed, and its document; None without one."""
    rounds = select(Round.result, Round.document).where(Round.result.is_not(None))
    for envelope, document in session.execute(rounds):
        signed = SignedEnvelope.FromString(envelope or b"")
        if envelope_digest(signed) == result:
            return DescribedData(result=signed, document=document or b"")
    return None


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


def check_filled(session: Session, blobs: BlobStore, models: Iterable[str], parameters: ParametersSpec) -> None:
    """Checks the fixed tensors of models, which are stored, by their digests, against the result that it names.

    Raises:
        Refusal: `scale`: they are not filled from it, or this coordinator has signed no such result.
    """
    document = check_known(session, parameters)
    for model in models:
        path = blobs.local(model)
        layout, row = model_layout(path), model_row(path)
        trained = parameters.trained(layout)
        fixed = Layout(layout.tensors[len(trained.tensors) :])
        try:
            check_scale(fixed.split(row.columns(slice(trained.size, layout.size)).read()), document)
        except ScaleError as error:
            raise Refusal("scale", f"the model is not filled from the result that the run names: {error}") from None


def offered_result(session: Session, client_id: str, name: str) -> bytes | None:
    """The signed result or the document of this digest, if a run that asks this client is filled from it; else None."""
    client = session.get_one(Client, client_id)
    if client.state is not ClientState.ACTIVE:
        return None
    for document in session.scalars(select(Run.spec).where(Run.state.not_in(list(RUN_ENDED)))):
        if b"statistics" not in document:
            continue
        spec = RunSpec.parse(document)
        if not spec.parameters.statistics or spec.task not in client.tasks:
            continue
        data = described_data(session, spec.parameters.statistics)
        if data is not None and name == spec.parameters.statistics:
            return data.result.SerializeToString(deterministic=True)
        if data is not None and name == digest(data.document, parse(name)[0]):
            return data.document
    return None
