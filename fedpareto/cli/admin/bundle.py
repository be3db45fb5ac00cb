"""The record of a run as one file: `admin bundle` writes it, `admin replay` applies another rule to it."""

import math
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from federation.text import counted
from fedpareto.cli.admin.app import Home, RunName, Yes, confirm, connected, show
from fedpareto.cli.completion import algorithms
from fedpareto.cli.failure import USAGE, CommandFailure, answer, failing
from fedpareto.cli.shared_options import CodeOption, ForceOption, JsonOption
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from federation.aggregation.interface import HyperparameterError
    from federation.record import bundle as bundles
    from federation.record.bundle import BundleError, BundleReader
    from federation.spec.run_spec import RunSpec
    from federation.v1 import admin_pb2 as v1
    from federation.v1.admin_pb2 import ExportBundleResponse
    from federation.v1.admin_pb2_grpc import AdminStub
    from fedpareto import formatting
    from fedpareto.cli.research.aggregate import parameters_of
    from fedpareto.cli.show.tables import console, new_table
    from fedpareto.cli.whole_file import whole_file
    from verification.counterfactual import counterfactual
    from verification.errors import VerificationError
    from verification.keys import read_keys
    from verification.log import read_log


def bundle_command(
    context: typer.Context,
    run: RunName,
    out: Annotated[Path, typer.Option(help="The file to write, such as run.fedpareto.")],
    payloads: Annotated[
        bool, typer.Option("--payloads", help="Add updates and models, as far as the coordinator keeps them.")
    ] = False,
    yes: Yes = False,
    force: ForceOption = False,
    home: Home = None,
    as_json: JsonOption = False,
) -> None:
    """Write the record of a run to one file.

    Others verify it with `fedpareto verify`.

    The file has the specification, the certificates and every signed message. Without --payloads it has no update and
    no model: then coefficients can be verified from the Gram matrix, and the Gram matrix and the models cannot.

    With --payloads, everybody who gets the file sees the members' updates: the command states its content and its
    size, and asks first. Needs the role security-officer.
    """
    if out.exists() and not force:
        raise CommandFailure(f"{out} exists: give --force to overwrite it", code=USAGE)
    with connected(context, home) as stub:
        if payloads:
            confirm(yes, lambda: payloads_question(stub, run, out), why="the file would show each member's updates")
        size = _save(stub.ExportBundle(v1.ExportBundleRequest(run=run, payloads=payloads)), out)
    with failing(BundleError, VerificationError), BundleReader(out) as bundle:
        digest = read_log(bundle, read_keys(bundle)).record
        rounds = bundle.about.rounds
    note = f"digest of the record {digest}" if digest else "the run has not ended, so its record has no digest yet"
    document = {"file": str(out), "record": digest, "size": size, "rounds": rounds}
    show(as_json, document, f"{out}: {size:,} bytes, {counted(rounds, 'round')}, {note}")
    if not payloads:
        typer.echo(
            "It has no updates and no models, so `fedpareto verify` cannot show that K and the models follow from the "
            "updates; --payloads adds them.",
            err=True,
        )


def payloads_question(stub: "AdminStub", name: str, out: Path) -> str:
    """The question before a bundle with payloads is written: its content and its size."""
    run = stub.GetRun(v1.GetRunRequest(run=name, choice=v1.RUN_CHOICE_ONLY)).run
    (disk,) = (item for item in stub.GetDisk(v1.GetDiskRequest()).runs if item.run_id == run.run_id)
    noise = ""
    if RunSpec.parse(run.spec.encode()).privacy.client_noise:
        noise = (
            "Noise protects the members of this run (privacy.client_noise). The updates in the file are those from "
            "before the noise: nothing protects them there.\n"
        )
    return (
        f"{out} will hold the updates of {counted(len(run.members), 'member')} ({formatting.size(disk.replies)}) and "
        f"the models of the run ({formatting.size(disk.models)}). Everybody who gets the file sees each member's "
        f"updates, and what they reveal of its data.\n{noise}Write it?"
    )


def replay_command(
    context: typer.Context,
    run: RunName,
    number: Annotated[int | None, typer.Argument(metavar="[ROUND]", help="This round alone, from 0.")] = None,
    name: Annotated[
        str, typer.Option("--algorithm", "-a", metavar="NAME", help="The other algorithm.", autocompletion=algorithms)
    ] = "fedmgda+",
    param: Annotated[
        list[str] | None,
        typer.Option("--set", "-p", metavar="KEY=VALUE", help="A hyper-parameter; repeat it for several."),
    ] = None,
    payloads: Annotated[
        bool, typer.Option("--payloads", help="Fetch the updates, for algorithms that read more than their products.")
    ] = False,
    home: Home = None,
    code: CodeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what another algorithm would have done.

    The other algorithm gets the same updates.

    For each round: the share of each member in the actual direction and in that of the other algorithm, the cosine
    between both directions, and the members whose updates each direction opposes.

    With another model, members would have sent other updates. So the rounds after the first different step are marked
    as counterfactual. Needs the role security-officer.
    """
    values = parameters_of(param or [])
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run.fedpareto"
        with connected(context, home) as stub:
            _save(stub.ExportBundle(v1.ExportBundleRequest(run=run, payloads=payloads)), path)
        try:
            with (
                failing(VerificationError, BundleError),
                failing(HyperparameterError, code=USAGE),
                BundleReader(path) as bundle,
            ):
                results = list(counterfactual(bundle, name, values, number))
        except bundles.BlobAbsent as error:
            raise CommandFailure(
                f"{name} reads more than the products of updates: give --payloads ({error})"
            ) from error
    if not results:
        raise CommandFailure(f"run {run} has no step" + ("" if number is None else f" in round {number}"))
    if as_json:
        answer(
            True,
            {
                "run": run,
                "algorithm": name,
                "hyperparameters": values,
                "rounds": [_plain(asdict(result)) for result in results],
            },
        )
        return
    for result in results:
        mark = ", counterfactual" if result.counterfactual else ""
        typer.echo(f"round {result.number}{mark}: cosine {result.cosine:.4f}, length {result.ratio:.3g} times as long")
        table = new_table("member", ">was", f">{name}", "against")
        for client, done, other in zip(result.clients, result.done, result.other, strict=True):
            opposing = [
                word for word, clients in (("was", result.worse_done), (name, result.worse_other)) if client in clients
            ]
            table.add_row(client, f"{done:.1%}", f"{other:.1%}", ", ".join(opposing))
        console().print(table)


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields for JSON, which has no NaN: None in its place."""
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in fields.items()}


def _save(pieces: "Iterable[ExportBundleResponse]", path: Path) -> int:
    """Writes a bundle whole or not at all; returns its size in bytes."""
    with failing(OSError, what=f"cannot write {path}"), whole_file(path) as file:
        return _write(pieces, file)


def _write(pieces: "Iterable[ExportBundleResponse]", file: BinaryIO) -> int:
    size, whole = 0, False
    for piece in pieces:
        size += file.write(piece.chunk)
        whole = piece.end
    if not whole:
        raise CommandFailure("the coordinator ended before the bundle was whole; nothing was written")
    return size
