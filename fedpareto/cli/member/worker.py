"""`fedpareto worker`: a member's side."""

import logging
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedpareto.cli import completion
from fedpareto.cli.failure import USAGE, answer, failing
from fedpareto.cli.logs import to_standard_error
from fedpareto.cli.member.by_task import (
    ObjectivesOption,
    ProcessesOption,
    TrainerCommandOption,
    TrainerOption,
    TrainerSilenceOption,
    choices,
    served,
)
from fedpareto.cli.member.trial import rehearse_round
from fedpareto.cli.secret_input import (
    STANDARD_INPUT,
    new_passphrase,
    passphrase_for,
    proxy_for,
    read_join_string,
)
from fedpareto.cli.shared_options import (
    AskOption,
    CodeOption,
    JsonOption,
    PartitionOption,
    PartOption,
    PartSeedOption,
    PassphraseOption,
    ProxyOption,
    SizesOption,
)

if TYPE_CHECKING:
    from federation.trust.member_files import MemberFiles
    from worker.home import WorkerHome
    from worker.service import Worker

app = typer.Typer(help="A member's worker: join a federation, and train for it.", no_args_is_help=True)

HomeOption = Annotated[Path, typer.Option("--home", help="Directory of this worker: keys, certificate, spool.")]
DEFAULT_HOME = Path("fedpareto-worker")


@app.command()
def join(
    home: HomeOption = DEFAULT_HOME,
    join_file: Annotated[
        Path, typer.Option(help="File whose first line is the join string; - is standard input.")
    ] = STANDARD_INPUT,
    arguments: Annotated[list[str] | None, typer.Argument(hidden=True, help="Refused, without a secret in it.")] = None,
    passphrase_file: PassphraseOption = None,
    ask_passphrase: AskOption = False,
    proxy: ProxyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Become a member: make keys, get a certificate. Reads the join string from standard input, or asks for it.

    A member whose certificate has ended, or whose TLS key is lost, joins again with its directory, its signing key
    and a new join string for its name.
    """
    from federation.trust.join_string import JoinStringFields
    from federation.trust.keys import IdentityError
    from worker.home import WorkerHome, WorkerHomeError
    from worker.line.enroll import EnrollmentError, enroll, join_again

    with failing(IdentityError, code=USAGE):
        decoded = JoinStringFields.decode(read_join_string(join_file, arguments or []))
    proxy_in_use = proxy_for(decoded.address, proxy)
    worker_home = WorkerHome(home)
    again = worker_home.joined
    with failing(EnrollmentError, WorkerHomeError, IdentityError, OSError):
        if again:
            with worker_home.lock():
                passphrase = passphrase_for(home / "signing.key", passphrase_file)
                enrolled = join_again(worker_home, decoded, passphrase=passphrase, proxy=proxy_in_use)
        else:
            passphrase = new_passphrase(passphrase_file, ask=ask_passphrase)
            enrolled = enroll(worker_home, decoded, passphrase=passphrase, proxy=proxy_in_use)
    member = enrolled.member
    document = {
        "federation_id": member.federation_id,
        "client_id": member.client_id,
        "address": member.address,
        "home": str(home),
        "certificate_expires": member.not_after.isoformat(),
        "approval_pending": enrolled.approval_pending,
    }
    approval = f"An operator must approve it before it gets work: fedpareto admin approve {member.client_id}"
    answer(
        as_json,
        document,
        f"{member.client_id} is a member of {member.federation_id}; keys and certificate are in {home}",
        *([approval] if enrolled.approval_pending else []),
        f"Next: fedpareto worker run --home {home} --task NAME --data DIR" + (f" --proxy {proxy}" if proxy else ""),
    )


@app.command()
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
        typer.Option(metavar="FILE", help="With --rehearse: the run specification that the training follows."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per event.")] = False,
) -> None:
    """Attend, and do the assigned work.

    The worker runs until it is stopped (SIGTERM or Ctrl-C). With --rehearse it needs only the task and the data.
    """
    from federation.attacks import AttackError, parse_attack
    from federation.sketches import load
    from federation.sketches.base import SketchError
    from federation.tasks import DataError, DataSource, Loading, Part, PartError
    from worker.events import Events
    from worker.rotation import RotationError, end_rotation
    from worker.service import Worker, prepare_offers
    from worker.site.policy import Policy, PolicyError
    from worker.site.roster import RosterError
    from worker.work.accomplices import Accomplices
    from worker.work.attacker import Attacker
    from worker.work.spool import SpoolError

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
    if rehearse:
        rehearse_round(offered, spec, as_json=as_json)
        return
    with failing(PolicyError), connecting(home, passphrase_file, proxy) as (worker_home, stored_member, passphrase):
        policy = Policy.load(worker_home.policy)
        policy.must_allow(task)
        with failing(RotationError, RosterError):
            member = end_rotation(worker_home, stored_member, passphrase=passphrase)
        with failing(DataError, SpoolError, ValueError):
            attacker = None
            if rehearsal is not None:
                shared_directory = Accomplices(accomplices, member.client_id) if accomplices is not None else None
                attacker = Attacker(rehearsal, member.client_id, shared_directory)
            offers, devices = offered(attack=rehearsal, client_id=member.client_id)
            worker = Worker(
                home=worker_home,
                member=member,
                offers=offers,
                device=devices,
                events=Events(sys.stdout if as_json else None),
                uniform=random.SystemRandom().uniform,
                attacker=attacker,
                policy=policy,
                passphrase=passphrase,
            )
        _run_until_stopped(worker)


def _run_until_stopped(worker: "Worker") -> None:
    from worker.line.attendance import AttendanceError

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.stop())
    with failing(AttendanceError):
        worker.run()
    logging.getLogger("fedpareto.worker").info("stopped")


@app.command()
def restored(
    home: HomeOption = DEFAULT_HOME,
    accept: Annotated[
        bool, typer.Option("--accept", help="Accept the statement: work on the runs that go back to an earlier round.")
    ] = False,
    passphrase_file: PassphraseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show or accept the statement that a backup was restored.

    The worker asks for this where policy.toml says restore = "ask".
    """
    from federation.text import escaped
    from worker.progress import accept_restore, pending_restore

    with membership(home, passphrase_file) as (worker_home, member, _):
        pending = pending_restore(worker_home.progress, member)
    if pending is None:
        answer(as_json, {"pending": None, "accepted": False}, "no restore waits for you")
        return
    if accept:
        accept_restore(worker_home.accepted_restore, pending.digest)
    answer(
        as_json,
        {"pending": {"restored": pending.made.isoformat(), "runs": pending.runs}, "accepted": accept},
        f"The coordinator signed on {pending.made:%Y-%m-%d %H:%M} UTC that it was restored from a backup.",
        *(
            f"run {escaped(run)} goes back from round {seen} to round {kept}"
            for run, (seen, kept) in pending.runs.items()
        ),
        "Accepted." if accept else "Accept it with --accept; until then the worker does no work for these runs.",
    )


@app.command()
def privacy(home: HomeOption = DEFAULT_HOME, as_json: JsonOption = False) -> None:
    """Show what training with noise has spent of each data set."""
    from federation.spec.accounting import AccountingError
    from federation.text import counted, escaped
    from worker.home import WorkerHome, WorkerHomeError
    from worker.site.policy import Policy, PolicyError
    from worker.site.privacy import spent

    worker_home = WorkerHome(home)
    with failing(WorkerHomeError, PolicyError, AccountingError, OSError):
        worker_home.require_joined()
        accounts = spent(worker_home.privacy, Policy.load(worker_home.policy).privacy)
    lines = []
    for account in accounts:
        budget = f" of {account.budget:g}" if account.budget is not None else ", without a budget"
        lines.append(
            f"{account.data_set}: epsilon = {account.epsilon:.4g}{budget} (delta = {account.delta:g}; at most "
            f"{account.bound:.4g} by Renyi differential privacy) in {counted(len(account.entries), 'training')}"
        )
        for part in account.by_run:
            lines.append(
                escaped(f"  run {part.run}: {counted(part.steps, 'step')}, noise {part.noise:g}, rate {part.rate:.4g}")
            )
    answer(as_json, [asdict(account) for account in accounts], *lines or ["no training with noise is on record"])


@app.command()
def attacks(code: CodeOption = None, as_json: JsonOption = False) -> None:
    """List the attacks that can be rehearsed, with their options."""
    from federation.attacks.catalogue import entries

    lines = []
    for entry in entries():
        options = (f"      {name}: {words}" for name, words in entry.options.items())
        lines += [entry.spelling, f"    {entry.summary}", *options]
    answer(as_json, [asdict(entry) for entry in entries()], *lines)


@contextmanager
def membership(
    home: Path, passphrase_file: Path | None, *, lock: bool = False
) -> "Iterator[tuple[WorkerHome, MemberFiles, bytes | None]]":
    """The directory of a member, its files and the passphrase of its keys; `lock` keeps other processes out."""
    from federation.trust.keys import IdentityError
    from federation.trust.member_files import MemberFiles
    from worker.home import WorkerHome, WorkerHomeError

    worker_home = WorkerHome(home)
    with failing(WorkerHomeError, IdentityError, OSError):
        worker_home.require_joined()
        with worker_home.lock() if lock else nullcontext():
            passphrase = passphrase_for(home / "tls.key", passphrase_file)
            yield worker_home, MemberFiles.load(home, passphrase), passphrase


@contextmanager
def connecting(
    home: Path, passphrase_file: Path | None, proxy: str | None
) -> "Iterator[tuple[WorkerHome, MemberFiles, bytes | None]]":
    """Like `membership`, for a command that calls the coordinator, through the proxy of the user or the site."""
    with membership(home, passphrase_file, lock=True) as (worker_home, member, passphrase):
        proxy_in_use = proxy_for(member.address, proxy)
        if proxy_in_use is not None:
            logging.getLogger("fedpareto.worker").info(
                "the way to the coordinator is through the proxy %s", proxy_in_use
            )
        yield worker_home, replace(member, proxy=proxy_in_use), passphrase
