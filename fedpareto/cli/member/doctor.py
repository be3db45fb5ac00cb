"""`fedpareto worker doctor`."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from federation.findings import CheckOutcome, Finding
from fedpareto.cli.failure import USAGE, CommandFailure, failing
from fedpareto.cli.member.member_command import ConfigOption, config_file, membership, site_config
from fedpareto.cli.member.trainer_choices import trainers_of
from fedpareto.cli.member.worker_settings import DeviceOption, SetOption, TaskOption, chosen
from fedpareto.cli.secret_input import proxies_for
from fedpareto.cli.shared_options import CodeOption, DataOption, JsonOption
from fedpareto.on_first_use import on_first_use
from fedpareto.standard_streams import print_document

with on_first_use():
    from federation.tasks import DataSource, PartError
    from federation.trust.member_files import MemberFiles
    from worker import doctor
    from worker.config import WorkerConfig
    from worker.home import WorkerHome


def doctor_command(
    home: Annotated[Path, typer.Option(help="Directory of this worker.")] = Path("fedpareto-worker"),
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Check the way to this coordinator, before the worker has joined."),
    ] = None,
    config: ConfigOption = None,
    task: TaskOption = None,
    data: DataOption = None,
    code: CodeOption = None,
    device: DeviceOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check settings, network, keys, clock, disk, device, data and task.

    It prints a line for each check; a failed check says what to do. Nothing is changed, and no data is sent. The exit
    code is 1 when a check failed; a machine without a GPU passes. The settings are those of `fedpareto worker run`:
    of worker.toml, and of the options.
    """
    in_file, file = _check_file(home, config)
    site = chosen(file, settings, task=task, data=data, code=code, device=device)
    with failing(PartError, code=USAGE):
        source = site.source
    findings = []
    told = [doctor.check_notify(site.notify.command)] if site.notify.command else []
    told += [doctor.check_metrics(site.metrics)] if site.metrics.listen else []
    for finding in chain([in_file], told, _check_connection(home, address, site), _train(home, site, source)):
        findings.append(finding)
        if not as_json:
            typer.echo(finding.line)
    if as_json:
        print_document(json.dumps([asdict(finding) for finding in findings]))
    failed = sum(finding.outcome is CheckOutcome.FAILED for finding in findings)
    if failed:
        raise CommandFailure(f"{failed} of {len(findings)} checks failed")


def _check_file(home: Path, given: Path | None) -> "tuple[Finding, WorkerConfig]":
    """Checks worker.toml. With one that cannot be used, the other checks are made with the defaults."""
    path = config_file(home, given)
    try:
        config = site_config(home, given)
    except CommandFailure as failure:
        return Finding.failed("config", failure.message), WorkerConfig.default()
    if not path.exists():
        return Finding.ok("config", f"no {path}: the defaults, and the options of the command"), config
    keys = ", ".join(filter(config.sets, WorkerConfig.names()))
    return Finding.ok("config", f"{path} sets {keys or 'nothing'}"), config


def _check_connection(home: Path, address: str | None, site: "WorkerConfig") -> Iterator[Finding]:
    """Checks the membership and the connection to the coordinator, or only that to an address."""
    proxy = site.proxy or None
    if address is not None:
        yield from doctor.check_network(address, proxies_for([address], proxy)(address), None, datetime.now(UTC))
        yield Finding.skipped("coordinator", "only members are let in: join first")
    else:
        try:
            with membership(home, site.passphrase) as (worker_home, member, _):
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
    yield from doctor.check_copy(worker_home)
    yield from doctor.check_failures(worker_home)
    yield from doctor.check_pause(worker_home, now)
    yield from doctor.check_leaving(worker_home)


def _train(home: Path, site: "WorkerConfig", source: "DataSource") -> Iterator[Finding]:
    largest = 0
    yield (finding := doctor.check_device(site.device))
    device = "cpu" if finding.outcome is CheckOutcome.FAILED else site.device  # task and data can be tried all the same
    if not site.tasks:
        yield Finding.skipped("task", "name it: --task NAME --data DIR")
    describes = doctor.described_tasks(WorkerHome(home), site.tasks)
    for finding, size in doctor.check_tasks(site.tasks, source, device, trainers_of(site), describes):
        largest = max(largest, size)
        yield finding
    yield doctor.check_disk(home, largest)
