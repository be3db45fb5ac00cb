"""`fedpareto worker run`: attends, and does the assigned work."""

import logging
import random
import signal
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fedpareto.cli import completion
from fedpareto.cli.failure import USAGE, CommandFailure, failing
from fedpareto.cli.member.by_task import (
    ObjectivesOption,
    ProcessesOption,
    TrainerCommandOption,
    TrainerOption,
    TrainerSilenceOption,
    choices,
    served,
)
from fedpareto.cli.member.member_command import DEFAULT_HOME, HomeOption, connecting
from fedpareto.cli.shared_options import (
    CodeOption,
    PartitionOption,
    PartOption,
    PartSeedOption,
    PassphraseOption,
    ProxyOption,
    SizesOption,
    json_option,
)
from fedpareto.on_first_use import on_first_use
from fedpareto.standard_streams import event_stream

with on_first_use():
    from federation.attacks import AttackError, parse_attack
    from federation.directories import DirectoryGone
    from federation.plugins import PluginError
    from federation.sketches import load
    from federation.sketches.base import SketchError
    from federation.tasks import DataError, DataSource, Loading, Part, PartError
    from fedpareto.cli.logs import to_standard_error
    from fedpareto.cli.member.trial import rehearse_round, run_of
    from worker.connection.attendance import AttendanceError
    from worker.events import Events
    from worker.rotation import RotationError, end_rotation
    from worker.service import Worker, prepare_offers
    from worker.site.policy import Policy, PolicyError
    from worker.site.roster import RosterError
    from worker.threads import WorkerEndedError
    from worker.work.accomplices import Accomplices
    from worker.work.attacker import Attacker
    from worker.work.spool import SpoolError


def run(
    task: Annotated[
        list[str],
        typer.Option(help="A task that this worker may train; repeat it for several.", autocompletion=completion.tasks),
    ],
    home: HomeOption = DEFAULT_HOME,
    data: Annotated[Path | None, typer.Option(help="Directory of this client's data.")] = None,
    code: CodeOption = None,
    part: PartOption = None,
    partition: PartitionOption = "iid",
    sizes: SizesOption = "equal",
    part_seed: PartSeedOption = 0,
    objectives: ObjectivesOption = None,
    trainer: TrainerOption = None,
    trainer_command: TrainerCommandOption = None,
    trainer_silence: TrainerSilenceOption = 600.0,
    processes: ProcessesOption = 1,
    sketch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="module:Class", help="A sketch of your own that this worker may use; repeat it for several."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads for training.")] = None,
    loader_workers: Annotated[
        int, typer.Option(min=0, help="Processes that read samples which are not in memory; 0 for the trainer's own.")
    ] = 0,
    pin_memory: Annotated[
        bool,
        typer.Option(
            "--pin-memory",
            help="Read samples that are not in memory into pinned memory, from which a GPU copies faster.",
        ),
    ] = False,
    download: Annotated[bool, typer.Option(help="Let tasks fetch public data sets into --data.")] = False,
    attack: Annotated[
        str | None,
        typer.Option(
            help="Rehearse an attack in your own federation: sign-flip, scale=100,bias=1000, ...; "
            "`fedpareto worker attacks` lists them.",
            autocompletion=completion.attacks,
        ),
    ] = None,
    accomplices: Annotated[
        Path | None,
        typer.Option(
            help="Directory that attackers share, for attacks that need the honest updates of several clients."
        ),
    ] = None,
    passphrase_file: PassphraseOption = None,
    proxy: ProxyOption = None,
    rehearse: Annotated[
        bool,
        typer.Option("--rehearse", help="Train one round, send nothing, print time, memory and bytes, and end."),
    ] = False,
    spec: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A run specification, which --rehearse follows. Without --rehearse, its smallest minibatch is tried "
            "before the worker attends.",
        ),
    ] = None,
    as_json: Annotated[bool, json_option("Print one JSON object per event.")] = False,
) -> None:
    """Attend, and do the assigned work.

    The worker runs until it is stopped (SIGTERM or Ctrl-C). With --rehearse it needs only the task and the data.
    """
    to_standard_error("INFO", "%(asctime)s %(levelname)s %(message)s")
    with failing(AttackError, PartError, SketchError, code=USAGE):
        rehearsal = parse_attack(attack) if attack is not None else None
        if accomplices is not None and rehearsal is None:
            raise AttackError(f"--accomplices {accomplices}: without --attack there is nothing to do together")
        dealt = Part.parse(part, partition, part_seed, sizes) if part is not None else None
        source = DataSource(data, dealt, download, Loading(loader_workers, pin_memory))
        for name in sketch or ():
            load(name)
    served_objectives = served(objectives, task)
    trainers = choices(trainer, trainer_command, trainer_silence, task, processes=processes, code=code or ())
    tasks = list(dict.fromkeys(task))
    offered = partial(
        prepare_offers, tasks, source, device=device, threads=threads, objectives=served_objectives, trainers=trainers
    )
    intended = run_of(spec)
    if rehearse:
        rehearse_round(offered, intended, as_json=as_json)
        return
    if intended is not None and intended.task not in tasks:
        raise CommandFailure(
            f"{spec} is for the task {intended.task}, and this worker offers {', '.join(tasks)}: add "
            f"--task {intended.task}, or leave --spec out",
            code=USAGE,
        )
    with failing(PolicyError), connecting(home, passphrase_file, proxy) as (worker_home, stored_member, passphrase):
        policy = Policy.load(worker_home.policy)
        policy.check_allows(task)
        with failing(RotationError, RosterError):
            member = end_rotation(worker_home, stored_member, passphrase=passphrase)
        with failing(DataError, SpoolError, ValueError):
            attacker = None
            if rehearsal is not None:
                shared_directory = Accomplices(accomplices, member.client_id) if accomplices is not None else None
                attacker = Attacker(rehearsal, member.client_id, shared_directory)
            offers, devices = offered(attack=rehearsal, client_id=member.client_id, run=intended)
            worker = Worker(
                home=worker_home,
                member=member,
                offers=offers,
                device=devices,
                events=Events(event_stream() if as_json else None),
                uniform=random.SystemRandom().uniform,
                attacker=attacker,
                policy=policy,
                passphrase=passphrase,
            )
        _run_until_stopped(worker)


def _run_until_stopped(worker: "Worker") -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.stop())
    with failing(AttendanceError, DirectoryGone, PluginError, WorkerEndedError):
        worker.run()
    logging.getLogger("fedpareto.worker").info("stopped")
