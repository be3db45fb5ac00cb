"""`fedpareto verify`: the record of a run, in one file."""

from collections.abc import Callable, Iterable
from datetime import UTC
from pathlib import Path
from typing import Annotated, Any

import typer

from federation.text import counted, escaped
from fedpareto.cli.failure import NOT_VERIFIED, CommandFailure, answer, failing
from fedpareto.cli.shared_options import CodeOption, JsonOption
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from rich.console import Console
    from rich.progress import track

    from federation.record.bundle import BundleError, BundleReader
    from verification import errors
    from verification.exported import check_model
    from verification.log import RunLog
    from verification.run import OpenedRun


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
    code: CodeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Verify the record of a run: signatures, rules, models.

    It needs no coordinator and no network. It verifies each signature, that replies belong to their assignments and
    steps to their replies, the rule's coefficients from the Gram matrix, the Gram matrix from the updates, each number
    of each model, the metrics of each round, and that the audit log has entries for all of this. Without --ca it trusts
    the CA in the file, and prints a warning.

    With --model it also names the round that made a model, and checks that the digest in the model is that of this
    record.

    Exit codes: 0 all was verified; 1 there is an error, and the first one is named; 3 there is no error, but
    something could not be verified, such as models in a file without payloads, or with noise that the coordinator
    chose.
    """
    rounds: list[dict[str, Any]] = []
    measured, unchecked = dict[str, None](), dict[str, None]()  # names of metrics, each once
    document: dict[str, Any] = {"file": str(file)}
    wrong, missing, absent = "", list[str](), list[str]()

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
                rounds.append(
                    {
                        "round": verified.number,
                        "words": verified.words,
                        "missing": [*verified.missing, *verified.absent],
                        "metrics_not_verified": [*verified.measured, *verified.unchecked],
                    }
                )
                missing += verified.missing
                absent += verified.absent
                measured |= dict.fromkeys(verified.measured)
                unchecked |= dict.fromkeys(verified.unchecked)
                say(f"round {verified.number}: {verified.words}")
                for reason in verified.missing if about.payloads else ():
                    say(f"round {verified.number}: not verified, because {reason}")
                for part in verified.absent:
                    say(f"round {verified.number}: the record lacks {part}")
            if missing and not about.payloads:
                parts = ", ".join(dict.fromkeys(reason.partition(":")[0] for reason in missing))
                say(
                    f"not verified: {parts}, because the file has no updates and no models; "
                    f"`fedpareto admin bundle {about.run_id} --payloads --out FILE` adds them"
                )
            if unchecked:
                say(f"metrics not verified, because they need what the file lacks: {', '.join(sorted(unchecked))}")
            if measured:
                say(f"metrics not verified, because only the coordinator measured them: {', '.join(sorted(measured))}")
            document |= _of_the_log(run.log, say)
            if model is not None:
                checked = check_model(run, model)
                document["model"] = {"words": checked.words, "missing": checked.missing}
                say(checked.words)
                if checked.missing:
                    missing.append(checked.missing)
                    say(f"not verified, because {checked.missing}")
        except errors.VerificationError as error:
            wrong = str(error)
        whole = not missing and not absent
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
    everything = "everything else" if measured else "everything"
    summary = f"{everything} was verified" if whole else "nothing is wrong; what is named above was not verified"
    say(f"{file}: {summary}")
    if not whole:
        raise typer.Exit(NOT_VERIFIED)


def _of_the_log(log: "RunLog", say: Callable[[str], None]) -> dict[str, Any]:
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


def _with_progress(rounds: Iterable[Any], total: int) -> Iterable[Any]:
    """Yields the rounds with a progress bar on standard error, if it is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return rounds
    return track(rounds, "verifying", total=total, console=console, transient=True)
