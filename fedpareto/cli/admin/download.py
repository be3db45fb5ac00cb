"""`fedpareto admin export`: writes a model to a file, the whole model with the right digest, or nothing."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from fedpareto.cli.admin.app import Home, RunName, connected, show
from fedpareto.cli.failure import USAGE, CommandFailure, failing
from fedpareto.cli.shared_options import ForceOption, JsonOption
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from federation import digests, vectors
    from federation.record.provenance import Provenance, with_provenance
    from federation.refusals import Refusal
    from federation.spec.run_spec import RunSpec, SpecError
    from federation.trust.envelope import envelope_digest
    from federation.v1 import admin_pb2
    from federation.v1.admin_pb2 import (
        BestBy,
        BestModel,
        ExportModelRequest,
        ExportModelResponse,
        GetRoundRequest,
        GetRunRequest,
        ModelOrigin,
    )
    from federation.v1.admin_pb2_grpc import AdminStub
    from federation.v1.common_pb2 import AssignmentState
    from federation.vectors import header_length
    from fedpareto.admin_messages import name_of
    from fedpareto.cli.show.model_card import CardFacts, recorded_scores, write_card
    from fedpareto.cli.whole_file import whole_file


@dataclass(frozen=True)
class Saved:
    """A model that was written.

    Attributes:
        digest: the digest of the model in the record; the file has metadata about its origin besides.
        size: the size of the model in the record, in bytes.
        best: the round, if it was chosen by a metric.
        origin: the run and round that made it; None if an older coordinator does not tell.
    """

    digest: str
    size: int
    best: "BestModel | None"
    origin: "ModelOrigin | None"

    @property
    def initial(self) -> bool:
        """True for the model that the run began with."""
        return self.origin is not None and not self.origin.HasField("round")


def export(
    context: typer.Context,
    run: RunName,
    out: Annotated[Path, typer.Option(help="The file to write, safetensors.")],
    number: Annotated[
        int | None, typer.Option("--round", min=0, help="The model after this round. Default: the newest.")
    ] = None,
    best: Annotated[
        str, typer.Option("--best", metavar="METRIC", help="The best model by accuracy, loss or a metric of the task.")
    ] = "",
    of: Annotated[str, typer.Option(help="With --best: mean, weighted or worst of the members, or a member.")] = "mean",
    split: Annotated[str, typer.Option(help="With --best: train, validation or test.")] = "validation",
    card: Annotated[
        Path | None, typer.Option("--card", metavar="FILE", help="Also write the model's card: Markdown, or .json.")
    ] = None,
    force: ForceOption = False,
    home: Home = None,
    as_json: JsonOption = False,
) -> None:
    """Write a model of a run to a file.

    Its newest model, the model after one round, or with --best the best one: `--best auc --of worst` is the model
    whose worst member is best off. Choose by the validation split, so that the test split stays an honest measure.
    Of several rounds with the best value, the one with the lowest mean loss on this split is taken, then the latest.
    Before the first step, the newest model is the one that the run began with, and the command says so.
    """
    if best and number is not None:
        raise CommandFailure("give --round or --best, not both", code=USAGE)
    for file in filter(None, (out, card)):
        if file.exists() and not force:
            raise CommandFailure(f"{file} exists: give --force to overwrite it", code=USAGE)
    with connected(context, home) as stub:
        by = BestBy(metric=best, of=of, split=split) if best else None
        saved = save(stub.ExportModel(ExportModelRequest(run=run, round=number, best=by)), out)
        if card is not None:
            with failing(SpecError, what="no card: the run's specification"):
                facts = card_facts(stub, run, saved)
            write_card(facts, card, out, as_json=as_json)
    saved_document: dict[str, Any] = {"file": str(out), "digest": saved.digest, "size": saved.size}
    saved_document["initial"] = saved.initial
    message = f"{out}: {saved.size:,} bytes, {saved.digest}"
    if saved.initial:
        message += "; this is the model that the run began with, since no round up to here has made a step"
    if saved.best is not None:
        saved_document |= {"round": saved.best.round, "value": saved.best.value, "equals": saved.best.equals}
        message += f"; round {saved.best.round}, {split} {best} ({of}) = {saved.best.value:.6g}"
        if saved.best.equals > 1:
            message += (
                f", as in {saved.best.equals} rounds; of these, this one has the lowest mean {split} loss (of equal "
                "losses, it is the latest)"
            )
    if card is not None:
        saved_document["card"] = str(card)
        message += f"\n{card}: the card of the model"
    show(as_json, saved_document, message)


def card_facts(stub: "AdminStub", name: str, saved: Saved) -> "CardFacts":
    """The facts of a card, from what administrators see of the run."""
    run = stub.GetRun(GetRunRequest(run=name, choice=admin_pb2.RUN_CHOICE_ONLY, brief=True)).run
    spec, origin, metrics, names, worst, step = RunSpec.parse(run.spec), saved.origin, dict[str, float](), [], "", ""
    if origin is not None and origin.HasField("round"):
        round_ = stub.GetRound(GetRoundRequest(run=run.run_id, round=origin.round))
        metrics, worst = dict(round_.summary.metrics), round_.summary.worst_client
        if not spec.privacy.client_noise:
            fulfilled = AssignmentState.ASSIGNMENT_STATE_FULFILLED
            names = [part.client_id for part in round_.participations if part.state == fulfilled]
            step = envelope_digest(round_.step) if round_.HasField("step") else ""
    return CardFacts(
        federation=origin.federation_id if origin is not None else "",
        run=run.run_id,
        name=run.name,
        state=name_of(run, "state"),
        round=origin.round if origin is not None and origin.HasField("round") else None,
        model=saved.digest,
        size=saved.size,
        step=step,
        record=origin.record if origin is not None else "",
        spec=spec,
        spec_digest=digests.digest(run.spec.encode()),
        members=len(names),
        names=names,
        scores=list(recorded_scores(metrics, spec, worst)),
        numbers=metrics,
        source="An administrator of the federation wrote this card from the coordinator's record.",
    )


def save(pieces: "Iterable[ExportModelResponse]", path: Path) -> Saved:
    """Writes the pieces to `path`, with metadata about the model's origin.

    Raises:
        CommandFailure: the bytes are not those that the coordinator named, or the file cannot be written; an older
            file stays.
    """
    with (
        failing(OSError, what=f"cannot write {path}"),
        failing(Refusal, what="the model that arrived"),
        whole_file(path) as file,
    ):
        return _write(pieces, file)


def _write(pieces: "Iterable[ExportModelResponse]", file: BinaryIO) -> Saved:
    best, origin = None, None
    digest, size, count, state = "", 0, 0, digests.hasher()
    head: bytes | None = b""  # the part of the header that has arrived, until it is complete
    for piece in pieces:
        if not digest:
            digest, size = piece.digest, piece.size
            best = piece.best if piece.HasField("best") else None
            origin = piece.origin if piece.HasField("origin") else None
            state = digests.hasher(digests.parse(digest)[0])
        state.update(piece.chunk)
        count += len(piece.chunk)
        if head is None or not piece.HasField("origin"):
            file.write(piece.chunk)
            continue
        head += piece.chunk
        if len(head) < vectors.LENGTH_BYTES or len(head) < (end := vectors.LENGTH_BYTES + header_length(head)):
            continue
        file.write(with_provenance(head[:end], _provenance(piece.origin)) + head[end:])
        head = None
    if not digest:
        raise CommandFailure("the coordinator sent no model")
    received = f"{digests.parse(digest)[0]}:{state.hexdigest()}"
    if received != digest or count != size:
        raise CommandFailure(f"the model that arrived is {received} ({count} bytes); expected {digest} ({size} bytes)")
    return Saved(digest, size, best, origin)


def _provenance(origin: "ModelOrigin") -> "Provenance":
    return Provenance(
        federation=origin.federation_id,
        run=origin.run_id,
        round=str(origin.round) if origin.HasField("round") else "",
        record=origin.record,
        entries=str(origin.entries) if origin.record else "",
    )
