"""`fedpareto worker doctor`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from federation.findings import CheckOutcome, Finding
from fedpareto.cli import completion
from fedpareto.cli.failure import USAGE, CommandFailure, failing
from fedpareto.cli.member.by_task import TrainerCommandOption, TrainerOption, TrainerSilenceOption, choices
from fedpareto.cli.member.member_command import membership
from fedpareto.cli.secret_input import proxies_for
from fedpareto.cli.shared_options import (
    CodeOption,
    DownloadOption,
    JsonOption,
    PartitionOption,
    PartOption,
    PartSeedOption,
    PassphraseOption,
    ProxyOption,
    SizesOption,
)
from fedpareto.on_first_use import on_first_use
from fedpareto.standard_streams import print_document

with on_first_use():
    from federation.tasks import DataSource, Part, PartError
    from federation.training.trainers import TrainerChoice
    from federation.trust.member_files import MemberFiles
    from worker import doctor
    from worker.home import WorkerHome


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
    part: PartOption = None,
    partition: PartitionOption = "iid",
    sizes: SizesOption = "equal",
    part_seed: PartSeedOption = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    trainer: TrainerOption = None,
    trainer_command: TrainerCommandOption = None,
    trainer_silence: TrainerSilenceOption = 600.0,
    download: DownloadOption = False,
    passphrase_file: PassphraseOption = None,
    proxy: ProxyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check network, keys, clock, disk, device, data and task.

    It prints a line for each check; a failed check says what to do. Nothing is changed, and no data is sent. The exit
    code is 1 when a check failed; a machine without a GPU passes.
    """
    with failing(PartError, code=USAGE):
        dealt = Part.parse(part, partition, part_seed, sizes) if part is not None else None
    source, trainers = DataSource(data, dealt, download), choices(trainer, trainer_command, trainer_silence, task or [])
    findings = []
    for finding in chain(
        _check_connection(home, address, passphrase_file, proxy), _train(home, task or [], source, device, trainers)
    ):
        findings.append(finding)
        if not as_json:
            typer.echo(finding.line)
    if as_json:
        print_document(json.dumps([asdict(finding) for finding in findings]))
    failed = sum(finding.outcome is CheckOutcome.FAILED for finding in findings)
    if failed:
        raise CommandFailure(f"{failed} of {len(findings)} checks failed")


def _check_connection(
    home: Path, address: str | None, passphrase_file: Path | None, proxy: str | None
) -> Iterator[Finding]:
    """Checks the membership and the connection to the coordinator, or only that to an address."""
    if address is not None:
        yield from doctor.check_network(address, proxies_for([address], proxy)(address), None, datetime.now(UTC))
        yield Finding.skipped("coordinator", "only members are let in: join first")
    else:
        try:
            with membership(home, passphrase_file) as (worker_home, member, _):
                pass
        except CommandFailure as failure:
            yield Finding.failed(
                "membership", f"{failure.message}; before that, check the way with --address HOST:PORT"
            )
        else:
            yield from _check_as_member(worker_home, replace(member, proxy=proxies_for(member.addresses, proxy)))


def _check_as_member(worker_home: "WorkerHome", member: "MemberFiles") -> Iterator[Finding]:
    """Checks everything from the certificate to the coordinator; skips the checks after a failure."""
    now = datetime.now(UTC)
    yield (own := doctor.check_membership(member, now))
    ways = [list(doctor.check_network(address, member.proxy(address), member, now)) for address in member.addresses]
    failed = [any(finding.outcome is CheckOutcome.FAILED for finding in way) for way in ways]
    for finding in chain.from_iterable(ways):  # one coordinator is enough, so that an address that fails is a warning
        warns = finding.outcome is CheckOutcome.FAILED and not all(failed)
        yield replace(finding, outcome=CheckOutcome.WARNING) if warns else finding
    fine = own.outcome is not CheckOutcome.FAILED and not all(failed)
    if fine:
        yield (coordinator := doctor.check_coordinator(member))
        fine = coordinator.outcome is CheckOutcome.OK
    else:
        yield Finding.skipped("coordinator", "first repair what failed above")
    if fine:
        yield from doctor.check_welcome(worker_home, member)
    else:
        yield Finding.skipped("clock", "the coordinator tells the time")
    yield from doctor.check_downloads(worker_home, member.proxy)
    yield from doctor.check_failures(worker_home)


def _train(
    home: Path, tasks: Sequence[str], source: "DataSource", device: str, trainers: "Mapping[str, TrainerChoice]"
) -> Iterator[Finding]:
    largest = 0
    yield (chosen := doctor.check_device(device))
    device = "cpu" if chosen.outcome is CheckOutcome.FAILED else device  # task and data can be tried all the same
    if not tasks:
        yield Finding.skipped("task", "name it: --task NAME --data DIR")
    for finding, size in doctor.check_tasks(tasks, source, device, trainers):
        largest = max(largest, size)
        yield finding
    yield doctor.check_disk(home, largest)
