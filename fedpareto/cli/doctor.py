"""`fedpareto worker doctor`."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedpareto.cli import completion
from fedpareto.cli.failure import Failure, failing, require
from fedpareto.cli.options import CodeOption, DownloadOption, JsonOption, PassphraseOption, ProxyOption
from fedpareto.cli.secret_input import passphrase_for, proxy_for

if TYPE_CHECKING:
    from federation.findings import Finding
    from federation.member_files import MemberFiles
    from federation.tasks import DataSource
    from worker.home import Home


def doctor_command(
    home: Annotated[Path, typer.Option(help="Directory of this worker.")] = Path("fedpareto-worker"),
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Check the way to this coordinator, before the worker has joined."),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(help="A task to try; repeat it for several.", autocompletion=completion.tasks),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Directory of this client's data.")] = None,
    code: CodeOption = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    download: DownloadOption = False,
    passphrase_file: PassphraseOption = None,
    proxy: ProxyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check membership, name, proxy, TLS, clock, device, task, data, disk.

    One line for each, with what to do where something is wrong. Nothing is changed, and nothing of the data is sent.
    The exit code is 1 when a check failed; no GPU is no failure.
    """
    from federation.findings import Outcome
    from federation.tasks import DataSource

    findings = []
    for finding in _examine(
        home, address, task or [], DataSource(data, None, download), device, passphrase_file, proxy
    ):
        findings.append(finding)
        if not as_json:
            typer.echo(finding.line)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings]))
    failed = sum(finding.outcome is Outcome.FAILED for finding in findings)
    if failed:
        raise Failure(f"{failed} of {len(findings)} checks failed")


def _examine(
    home: Path,
    address: str | None,
    tasks: Sequence[str],
    source: "DataSource",
    device: str,
    passphrase_file: Path | None,
    proxy: str | None,
) -> "Iterator[Finding]":
    from federation.findings import Finding
    from worker import doctor
    from worker.home import Home

    place = Home(home)
    if address is not None:
        yield from doctor.check_network(address, proxy_for(address, proxy), None)
        yield Finding.skipped("coordinator", "only members are let in: join first")
    else:
        try:
            member = _member(place, passphrase_file)
        except Failure as failure:
            yield Finding.failed(
                "membership", f"{failure.message}; before that, check the way with --address HOST:PORT"
            )
        else:
            yield from _reach(place, replace(member, proxy=proxy_for(member.address, proxy)))
    yield from _train(home, tasks, source, device)


def _member(place: "Home", passphrase_file: Path | None) -> "MemberFiles":
    from federation.keys import IdentityError
    from federation.member_files import MemberFiles
    from worker.home import HomeError

    with failing(HomeError, IdentityError, OSError):
        place.require_joined()
        return MemberFiles.load(place.directory, passphrase_for(place.directory / "tls.key", passphrase_file))


def _reach(place: "Home", member: "MemberFiles") -> "Iterator[Finding]":
    """Checks everything from the certificate to the coordinator; what comes after a failure is skipped."""
    from federation.findings import Finding, Outcome
    from worker import doctor

    fine = True
    for finding in (
        doctor.check_membership(member, datetime.now(UTC)),
        *doctor.check_network(member.address, member.proxy, member),
    ):
        fine &= finding.outcome is not Outcome.FAILED
        yield finding
    if fine:
        yield (coordinator := doctor.check_coordinator(member))
        fine = coordinator.outcome is Outcome.OK
    else:
        yield Finding.skipped("coordinator", "first repair what failed above")
    yield doctor.check_clock(place, member) if fine else Finding.skipped("clock", "the coordinator tells the time")


def _train(home: Path, tasks: Sequence[str], source: "DataSource", device: str) -> "Iterator[Finding]":
    from federation.findings import Finding, Outcome
    from worker import doctor

    largest = 0
    try:
        require("a worker trains with", "torch")
    except Failure as failure:
        yield Finding.failed("device", failure.message)
    else:
        yield (chosen := doctor.check_device(device))
        device = "cpu" if chosen.outcome is Outcome.FAILED else device  # task and data can be tried all the same
        if not tasks:
            yield Finding.skipped("task", "name it: --task NAME --data DIR")
        for finding, size in doctor.check_tasks(tasks, source, device):
            largest = max(largest, size)
            yield finding
    yield doctor.check_disk(home, largest)
