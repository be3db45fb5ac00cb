"""`fedpareto worker run`: attends, and does the assigned work."""

import logging
import os
import random
import signal
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fedpareto.cli.failure import USAGE, CommandFailure, failing
from fedpareto.cli.member.member_command import DEFAULT_HOME, ConfigOption, HomeOption, connecting, site_config
from fedpareto.cli.member.trainer_choices import trainers_of
from fedpareto.cli.member.worker_settings import DeviceOption, SetOption, TaskOption, chosen
from fedpareto.cli.shared_options import CodeOption, DataOption, LogFormatOption, LogLevelOption, json_option
from fedpareto.on_first_use import on_first_use
from fedpareto.standard_streams import event_stream

with on_first_use():
    from federation.attacks import AttackError, parse_attack
    from federation.directories import DirectoryGone
    from federation.monitoring.events import Events
    from federation.monitoring.metrics_section import MetricsError
    from federation.plugins import PluginError
    from federation.process.service_manager import ServiceManager
    from federation.sketches import load
    from federation.sketches.base import SketchError
    from federation.tasks import DataError, PartError
    from fedpareto.cli.logs import to_standard_error
    from fedpareto.cli.member.trial import rehearse_round, run_of
    from worker.connection.attendance import AttendanceError
    from worker.event_counts import serving_counts
    from worker.notifier import Notifier
    from worker.rotation import RotationError, end_rotation
    from worker.service import Worker, prepare_offers
    from worker.site.policy_file import Policy, PolicyError
    from worker.site.roster import RosterError
    from worker.site.withdrawing import LeavingError, withdraw_again
    from worker.threads import WorkerEndedError
    from worker.work.accomplices import Accomplices
    from worker.work.attacker import Attacker
    from worker.work.spool import SpoolError


def run(
    home: HomeOption = DEFAULT_HOME,
    config: ConfigOption = None,
    task: TaskOption = None,
    data: DataOption = None,
    code: CodeOption = None,
    device: DeviceOption = None,
    rehearse: Annotated[
        bool,
        typer.Option("--rehearse", help="Train one round, send nothing, print time, memory and bytes, and end."),
    ] = False,
    settings: SetOption = None,
    log_level: LogLevelOption = "info",
    log_format: LogFormatOption = "text",
    as_json: Annotated[bool, json_option("Print one JSON object per event.")] = False,
) -> None:
    """Attend, and do the assigned work.

    The worker runs until it is stopped (SIGTERM or Ctrl-C). With --rehearse it needs only the task and the data.

    Settings stand in worker.toml, which `fedpareto worker join` writes into the worker's directory; an option wins over
    the file.
    """
    to_standard_error(log_level, "%(asctime)s %(levelname)s %(message)s", log_format)
    manager = ServiceManager.of(os.environ)
    site = chosen(site_config(home, config), settings, task=task, data=data, code=code, device=device)
    if not site.tasks:
        raise CommandFailure(
            "no task: name it with --task, or write tasks = [...] into worker.toml, which `fedpareto worker config` "
            "shows",
            code=USAGE,
        )
    with failing(AttackError, PartError, SketchError, code=USAGE):
        rehearsal = parse_attack(site.attack) if site.attack else None
        source = site.source
        for name in site.sketches:
            load(name)
    offered = partial(
        prepare_offers,
        site.tasks,
        source,
        device=site.device,
        threads=site.threads or None,
        objectives=site.of_tasks("objectives"),
        trainers=trainers_of(site),
    )
    intended = run_of(Path(site.spec) if site.spec else None)
    if rehearse:
        rehearse_round(offered, intended, as_json=as_json)
        return
    if intended is not None and intended.task not in site.tasks:
        raise CommandFailure(
            f"{site.spec} is for the task {intended.task}, and this worker offers {', '.join(site.tasks)}: add "
            f"--task {intended.task}, or leave spec out",
            code=USAGE,
        )
    opened = connecting(home, site.passphrase, site.proxy or None)
    with failing(PolicyError), opened as (worker_home, stored_member, passphrase):
        policy = Policy.load(worker_home.policy)
        policy.check_allows(site.tasks)
        with failing(LeavingError):
            if withdraw_again(worker_home, stored_member):
                logging.getLogger("fedpareto.worker").info(
                    "this site has left the federation; to come back: fedpareto worker join, with a new join string"
                )
                return
        with failing(RotationError, RosterError):
            member = end_rotation(worker_home, stored_member, passphrase=passphrase)
        events = Events(event_stream() if as_json else None, worker_home.directories)
        with failing(MetricsError), serving_counts(site.metrics, events):
            notifier = Notifier(
                site.notify,
                events,
                federation_id=member.federation_id,
                client_id=member.client_id,
                environment=os.environ,
            )
            with failing(DataError, SpoolError, ValueError):
                attacker = None
                if rehearsal is not None:
                    shared = Accomplices(Path(site.accomplices), member.client_id) if site.accomplices else None
                    attacker = Attacker(rehearsal, member.client_id, shared)
                offers, devices = offered(
                    attack=rehearsal,
                    client_id=member.client_id,
                    run=intended,
                    describes=policy.described_of(site.tasks),
                )
                worker = Worker(
                    home=worker_home,
                    member=member,
                    offers=offers,
                    device=devices,
                    events=events,
                    uniform=random.SystemRandom().uniform,
                    attacker=attacker,
                    policy=policy,
                    passphrase=passphrase,
                    manager=manager,
                )
            with notifier:
                _run_until_stopped(worker)


def _run_until_stopped(worker: "Worker") -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.stop())
    with failing(AttendanceError, DirectoryGone, PluginError, WorkerEndedError):
        worker.run()
    logging.getLogger("fedpareto.worker").info("stopped")
