"""The files of a run that has ended, for targets that keep files: its model, the model's card, and the report."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc

from federation.spec.run_spec import SpecError
from federation.transport.channels import refusal_from_rpc_error
from federation.v1.admin_pb2 import ExportModelRequest
from federation.v1.admin_pb2_grpc import AdminStub
from fedpareto.cli.admin.download import card_facts, save
from fedpareto.cli.failure import CommandFailure
from fedpareto.cli.show.model_card import write_card
from fedpareto.web.report import page
from fedpareto.web.sections.shown_run import ShownRun


@contextmanager
def of(stub: AdminStub, run_id: str, tell: Callable[[str], object]) -> Iterator[Sequence[Path]]:
    """The files of a run, in a directory that is deleted at the end.

    They are what `admin export --card` and `report` write. `tell` is told which of them cannot be made.
    """
    with tempfile.TemporaryDirectory(prefix="fedpareto-follow-") as directory:
        yield [file for make in (_model, _report) for file in _made(make, stub, run_id, Path(directory), tell)]


def _made(
    make: Callable[[AdminStub, str, Path], list[Path]],
    stub: AdminStub,
    run_id: str,
    directory: Path,
    tell: Callable[[str], object],
) -> list[Path]:
    try:
        return make(stub, run_id, directory)
    except grpc.RpcError as error:
        problem = refusal_from_rpc_error(error).message
    except (CommandFailure, SpecError, OSError) as error:
        problem = str(error)
    tell(f"without {'its model and card' if make is _model else 'the report'}: {problem}")
    return []


def _model(stub: AdminStub, run_id: str, directory: Path) -> list[Path]:
    model, card = directory / "model.safetensors", directory / "card.md"
    saved = save(stub.ExportModel(ExportModelRequest(run=run_id)), model)
    write_card(card_facts(stub, run_id, saved), card, model, as_json=False)
    return [model, card]


def _report(stub: AdminStub, run_id: str, directory: Path) -> list[Path]:
    report = directory / "report.html"
    report.write_text(page(ShownRun.read(stub, run_id)), encoding="utf-8")
    return [report]
