"""The record of a run as one file: `admin bundle` writes it, `verify` verifies it, `replay` applies another rule."""

import math
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from federation.text import counted, escaped
from fedpareto.cli.admin.app import Home, RunName, Yes, app, confirm, connected, show
from fedpareto.cli.completion import algorithms
from fedpareto.cli.failure import USAGE, CommandFailure, answer, failing
from fedpareto.cli.shared_options import ForceOption, JsonOption
from fedpareto.cli.whole_file import whole_file

if TYPE_CHECKING:
    from federation.v1.admin_pb2 import ExportBundleResponse
    from federation.v1.admin_pb2_grpc import AdminStub
    from verification.log import RunLog

NOT_VERIFIED = 3  # the exit code where something could not be verified, and nothing is wrong


@app.command("bundle")
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
    from federation.v1 import admin_pb2 as v1

    if out.exists() and not force:
        raise CommandFailure(f"{out} exists: give --force to overwrite it", code=USAGE)
    with connected(context, home) as stub:
        if payloads:
            confirm(yes, lambda: payloads_question(stub, run, out), why="the file would show each member's updates")
        size = _save(stub.ExportBundle(v1.ExportBundleRequest(run=run, payloads=payloads)), out)
    from federation.record.bundle import BundleError, BundleReader
    from verification.errors import Wrong
    from verification.run import OpenedRun

    with failing(BundleError, Wrong), BundleReader(out) as bundle:
        digest = OpenedRun.of(bundle).log.record
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
    from federation.spec.run_spec import RunSpec
    from federation.v1 import admin_pb2 as v1
    from fedpareto import formatting

    run = stub.GetRun(v1.GetRunRequest(run=name)).run
    (disk,) = (item for item in stub.GetDisk(v1.GetDiskRequest()).runs if item.run_id == run.run_id)
    noise = ""
    if RunSpec.parse(run.spec.encode()).privacy.client_noise:
        noise = (
            "Noise protects the clients of this run (privacy.client_noise). The updates in the file are those from "
            "before the noise: nothing protects them there.\n"
        )
    return (
        f"{out} will hold the updates of {counted(len(run.members), 'member')} ({formatting.size(disk.replies)}) and "
        f"the models of the run ({formatting.size(disk.models)}). Everybody who gets the file sees each member's "
        f"updates, and what they reveal of its data.\n{noise}Write it?"
    )


@app.command("replay")
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
    as_json: JsonOption = False,
) -> None:
    """Show what another algorithm would have done.

    The other algorithm gets the same updates.

    For each round: the share of each client in the actual direction and in that of the other algorithm, the cosine
    between both directions, and the clients whose updates each direction opposes.

    With another model, clients would have sent other updates. So the rounds after the first different step are marked
    as counterfactual. Needs the role security-officer.
    """
    from coordinator.aggregation.interface import HyperparameterError
    from federation.record.bundle import BlobAbsent, BundleError, BundleReader
    from federation.v1 import admin_pb2 as v1
    from fedpareto.cli.research.aggregate import parameters_of
    from verification.counterfactual import counterfactual
    from verification.errors import Wrong

    values = parameters_of(param or [])
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run.fedpareto"
        with connected(context, home) as stub:
            _save(stub.ExportBundle(v1.ExportBundleRequest(run=run, payloads=payloads)), path)
        try:
            with failing(Wrong, BundleError), failing(HyperparameterError, code=USAGE), BundleReader(path) as bundle:
                results = list(counterfactual(bundle, name, values, number))
        except BlobAbsent as error:
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
    from fedpareto.cli.show.tables import console, new_table

    for result in results:
        mark = ", counterfactual" if result.counterfactual else ""
        typer.echo(f"round {result.number}{mark}: cosine {result.cosine:.4f}, length {result.ratio:.3g} times as long")
        table = new_table("client", ">was", f">{name}", "against")
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


def verify_command(
    file: Annotated[Path, typer.Argument(help="A bundle that `fedpareto admin bundle` wrote.")],
    ca: Annotated[
        str,
        typer.Option(
            "--ca", metavar="FINGERPRINT", help="SHA-256 of the CA's certificate, as a member of the federation has it."
        ),
    ] = "",
    model: Annotated[
        Path | None, typer.Option("--model", metavar="FILE", help="A model that `fedpareto admin export` wrote.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Verify the record of a run: signatures, rules, models.

    It needs no coordinator and no network. It verifies each signature, that replies belong to their assignments and
    steps to their replies, the rule's coefficients from the Gram matrix, the Gram matrix from the updates, each number
    of each model, and that the audit log has entries for all of this. Without --ca it trusts the CA in the file, and
    prints a warning.

    With --model it also names the round that made a model, and checks that the digest in the model is that of this
    record.

    Exit codes: 0 all was verified; 1 there is an error, and the first one is named; 3 there is no error, but
    something could not be verified, such as models in a file without payloads, or with noise that the coordinator
    chose.
    """
    from federation.record.bundle import BundleError, BundleReader
    from verification.errors import Wrong
    from verification.exported import check_model
    from verification.run import OpenedRun

    rounds: list[dict[str, Any]] = []
    document: dict[str, Any] = {"file": str(file)}
    wrong, missing = "", []

    def say(line: str) -> None:
        if not as_json:
            typer.echo(escaped(line))  # names and reasons are the bundle's author's

    with failing(OSError, BundleError), BundleReader(file) as bundle:
        about = bundle.about
        try:
            run = OpenedRun.of(bundle, ca)
            document["members"] = {name: keys.raw[-1].hex() for name, keys in sorted(run.keys.clients.items())}
            trusted = "as you named it" if ca else "which the file itself names; compare it with a member's"
            say(f"run {about.name} ({about.run_id}) of {about.federation_id}, {counted(about.rounds, 'round')}")
            say(f"CA {run.keys.ca_fingerprint}, {trusted}")
            for verified in _with_progress(run.verify(), about.rounds):
                rounds.append({"round": verified.number, "words": verified.words, "missing": list(verified.missing)})
                missing += verified.missing
                say(f"round {verified.number}: {verified.words}")
                for reason in verified.missing if about.payloads else ():
                    say(f"round {verified.number}: not verified, because {reason}")
            if missing and not about.payloads:
                parts = ", ".join(dict.fromkeys(reason.partition(":")[0] for reason in missing))
                say(
                    f"not verified: {parts}, because the file has no updates and no models; "
                    f"`fedpareto admin bundle {about.run_id} --payloads --out FILE` adds them"
                )
            document |= _of_the_log(run.log, say)
            if model is not None:
                checked = check_model(run, model)
                document["model"] = {"words": checked.words, "missing": checked.missing}
                say(checked.words)
                if checked.missing:
                    missing.append(checked.missing)
                    say(f"not verified, because {checked.missing}")
        except Wrong as error:
            wrong = str(error)
        whole = not missing
        document |= {
            "run": about.run_id,
            "verified": not wrong and whole,
            "wrong": wrong,
            "rounds": rounds,
        }
    if as_json:
        answer(True, document)
    if wrong:
        raise CommandFailure(escaped(f"{file} does not verify: {wrong}"))
    summary = "everything was verified" if whole else "nothing is wrong; what is named above could not be verified"
    say(f"{file}: {summary}")
    if not whole:
        raise typer.Exit(NOT_VERIFIED)


def _of_the_log(log: "RunLog", say: "Callable[[str], None]") -> dict[str, Any]:
    """Prints a verified log. Returns its part of the document, with the digest of the record."""
    newest = log.newest
    at = newest.created.ToDatetime(tzinfo=UTC)
    entries = counted(len(log.entries), "entry", "entries")
    say(f"audit log: {entries}, under a checkpoint of {newest.size} entries, signed at {at:%F %T} UTC")
    document: dict[str, Any] = {
        "log": {"entries": len(log.entries), "checkpoint": newest.size, "signed": at.isoformat()}
    }
    say(f"digest of the record: {log.record or 'none, since the run has not ended'}")
    return document | {"record": log.record}


def _with_progress(rounds: "Iterable[Any]", total: int) -> "Iterable[Any]":
    """Yields the rounds with a progress bar on standard error, if it is a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    if not console.is_terminal:
        return rounds
    return track(rounds, "verifying", total=total, console=console, transient=True)
