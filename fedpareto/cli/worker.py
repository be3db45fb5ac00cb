"""`fedpareto worker`: a member's side."""

import json
import logging
import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedpareto.cli import completion
from fedpareto.cli.code_option import CodeOption
from fedpareto.cli.failure import USAGE, Failure
from fedpareto.cli.join_string import STANDARD_INPUT, read_join_string
from fedpareto.cli.logs import to_standard_error
from fedpareto.cli.passphrases import new_passphrase, passphrase_for

if TYPE_CHECKING:
    from federation.attacks import Attack
    from federation.member_files import MemberFiles
    from federation.tasks import DataSource
    from worker.home import Home
    from worker.policy import Policy
    from worker.receipts import Receipt

app = typer.Typer(help="A member's worker: join a federation, and train for it.", no_args_is_help=True)

HomeOption = Annotated[Path, typer.Option("--home", help="Directory of this worker: keys, certificate, spool.")]
PassphraseOption = Annotated[
    Path | None, typer.Option("--passphrase-file", help="File whose first line is the passphrase of the private keys.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
DEFAULT_HOME = Path("fedpareto-worker")


@app.command()
def join(
    home: HomeOption = DEFAULT_HOME,
    join_file: Annotated[
        Path, typer.Option(help="File whose first line is the join string; - is standard input.")
    ] = STANDARD_INPUT,
    arguments: Annotated[list[str] | None, typer.Argument(hidden=True, help="Refused, without a secret in it.")] = None,
    passphrase_file: PassphraseOption = None,
    ask_passphrase: Annotated[bool, typer.Option(help="Ask for a passphrase for the private keys.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Become a member: make keys, get a certificate. Reads the join string from standard input, or asks for it."""
    from federation.join_string import JoinString  # noqa: PLC0415
    from federation.keys import IdentityError  # noqa: PLC0415
    from worker.enroll import EnrollmentError, enroll  # noqa: PLC0415
    from worker.home import Home  # noqa: PLC0415

    try:
        decoded = JoinString.decode(read_join_string(join_file, arguments or []))
    except IdentityError as error:
        raise Failure(str(error), code=USAGE) from error
    passphrase = new_passphrase(passphrase_file, ask=ask_passphrase)
    try:
        enrolled = enroll(Home(home), decoded, passphrase=passphrase)
    except EnrollmentError as error:
        raise Failure(str(error)) from error
    member = enrolled.member
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "federation_id": member.federation_id,
                    "client_id": member.client_id,
                    "address": member.address,
                    "home": str(home),
                    "certificate_expires": member.not_after.isoformat(),
                    "approval_pending": enrolled.approval_pending,
                }
            )
        )
        return
    typer.echo(f"{member.client_id} is a member of {member.federation_id}; keys and certificate are in {home}")
    if enrolled.approval_pending:
        typer.echo(f"An operator must approve it before it gets work: fedpareto admin approve {member.client_id}")
    typer.echo(f"Next: fedpareto worker run --home {home} --task NAME --data DIR")


@app.command()
def run(
    task: Annotated[
        list[str],
        typer.Option(help="A task that this worker may train; repeat it for several.", autocompletion=completion.tasks),
    ],
    home: HomeOption = DEFAULT_HOME,
    data: Annotated[Path | None, typer.Option(help="Directory of this client's data.")] = None,
    code: CodeOption = None,
    part: Annotated[
        str | None, typer.Option(help="Rehearse with one part of a data set: 3/8 is the third of eight.")
    ] = None,
    partition: Annotated[
        str, typer.Option(help="The partition: iid, shards:S, dirichlet:ALPHA or natural; see `fedpareto data show`.")
    ] = "iid",
    sizes: Annotated[
        str, typer.Option(help="Number of samples of a part, for iid and dirichlet: equal or lognormal:SIGMA.")
    ] = "equal",
    part_seed: Annotated[int, typer.Option(help="Seed of the partition; the same for all parts.")] = 0,
    objectives: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[TASK=]NAMES",
            help="The objectives that this client serves, for a task with several: left,right. Default: all. "
            "With several tasks: TASK=left,right, repeated.",
        ),
    ] = None,
    sketch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="module:Class", help="A sketch of your own that this worker may use; repeat it for several."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads for training.")] = None,
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per event.")] = False,
) -> None:
    """Attend, and do the assigned work.

    The worker runs until it is stopped (SIGTERM or Ctrl-C).
    """
    from federation.attacks import AttackError, parse_attack  # noqa: PLC0415
    from federation.sketches import SketchError, load  # noqa: PLC0415
    from federation.tasks import DataSource, Part, PartError  # noqa: PLC0415
    from worker.home import Home, HomeError  # noqa: PLC0415
    from worker.policy import Policy, PolicyError  # noqa: PLC0415

    to_standard_error("INFO", "%(asctime)s %(levelname)s %(message)s")
    try:
        rehearsal = parse_attack(attack) if attack is not None else None
        if accomplices is not None and rehearsal is None:
            raise AttackError(f"--accomplices {accomplices}: without --attack there is nothing to do together")
        source = DataSource(data, Part.parse(part, partition, part_seed, sizes) if part is not None else None, download)
        for name in sketch or ():
            load(name)
    except (AttackError, PartError, SketchError) as error:
        raise Failure(str(error), code=USAGE) from error
    place = Home(home)
    try:
        place.require_joined()
        policy = Policy.load(place.policy)
        with place.lock():
            member = _load_member(home, _passphrase(home, passphrase_file))
            served = _served(objectives or [], task)
            _work(place, member, policy, task, source, served, device, threads, rehearsal, accomplices, as_json)
    except (HomeError, PolicyError) as error:
        raise Failure(str(error)) from error
    except OSError as error:
        raise Failure(f"{error.filename or home}: {error.strerror or error}") from error


@app.command()
def renew(
    home: HomeOption = DEFAULT_HOME, passphrase_file: PassphraseOption = None, as_json: JsonOption = False
) -> None:
    """Get the next certificate before the present one ends.

    Stop the worker of this directory first.
    """
    from worker.enroll import RenewalError  # noqa: PLC0415
    from worker.enroll import renew as renew_certificate  # noqa: PLC0415
    from worker.home import Home, HomeError  # noqa: PLC0415

    place = Home(home)
    try:
        place.require_joined()
        with place.lock():
            passphrase = _passphrase(home, passphrase_file)
            member = renew_certificate(place, _load_member(home, passphrase), passphrase=passphrase)
    except (HomeError, RenewalError) as error:
        raise Failure(str(error)) from error
    except OSError as error:
        raise Failure(f"{error.filename or home}: {error.strerror or error}") from error
    if as_json:
        typer.echo(json.dumps({"client_id": member.client_id, "certificate_expires": member.not_after.isoformat()}))
        return
    typer.echo(
        f"{member.client_id} has a new certificate, until {member.not_after:%Y-%m-%d %H:%M} UTC; the old one ends when "
        "the worker attends next"
    )


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
    from federation.text import escaped  # noqa: PLC0415
    from worker.home import Home, HomeError  # noqa: PLC0415
    from worker.progress import accept_restore, pending_restore  # noqa: PLC0415

    place = Home(home)
    try:
        place.require_joined()
        pending = pending_restore(place.progress, _load_member(home, _passphrase(home, passphrase_file)))
    except HomeError as error:
        raise Failure(str(error)) from error
    if pending is not None and accept:
        accept_restore(place.accepted_restore, pending.digest)
    if as_json:
        document = {"restored": pending.made.isoformat(), "runs": pending.runs} if pending is not None else None
        typer.echo(json.dumps({"pending": document, "accepted": pending is not None and accept}))
        return
    if pending is None:
        typer.echo("no restore waits for you")
        return
    typer.echo(f"The coordinator signed on {pending.made:%Y-%m-%d %H:%M} UTC that it was restored from a backup.")
    for run, (seen, kept) in pending.runs.items():
        typer.echo(f"run {escaped(run)} goes back from round {seen} to round {kept}")
    typer.echo("Accepted." if accept else "Accept it with --accept; until then the worker does no work for these runs.")


@app.command()
def receipts(
    home: HomeOption = DEFAULT_HOME,
    compare: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Another member's receipts.jsonl, to compare models and steps with."),
    ] = None,
    passphrase_file: PassphraseOption = None,
    as_json: JsonOption = False,
) -> None:
    """List and verify receipts, or compare them with another member's."""
    from worker.home import Home, HomeError  # noqa: PLC0415
    from worker.receipts import ReceiptsError, disagreements, read_receipts  # noqa: PLC0415

    place = Home(home)
    try:
        place.require_joined()
        key = _load_member(home, _passphrase(home, passphrase_file)).coordinator_key
        ours = read_receipts(place.receipts, key) if place.receipts.exists() else []
        theirs = read_receipts(compare, key) if compare is not None else []
    except (HomeError, ReceiptsError) as error:
        raise Failure(str(error)) from error
    if compare is None:
        _show_receipts(ours, as_json)
        return
    both = {receipt.occasion for receipt in ours} & {receipt.occasion for receipt in theirs}
    found = disagreements(ours, theirs)
    if as_json:
        pairs = [{"ours": asdict(mine), "theirs": asdict(other)} for mine, other in found]
        typer.echo(json.dumps({"compared": len(both), "disagreements": pairs}))
    else:
        for mine, other in found:
            _show_receipts([mine, other], as_json=False)
        typer.echo(f"{len(both)} occasions compared, {len(found)} disagree")
    if found:
        raise Failure(
            "the coordinator gave two members different models or steps: keep both files, and inform all members"
        )


def _show_receipts(receipts: "Sequence[Receipt]", as_json: bool) -> None:
    from federation.text import escaped  # noqa: PLC0415

    if as_json:
        typer.echo(json.dumps([asdict(receipt) for receipt in receipts]))
        return
    for receipt in receipts:
        run, number, phase = receipt.occasion
        outcome = "accepted" if receipt.accepted else f"refused, {receipt.reason}"
        typer.echo(
            escaped(
                f"{receipt.client_id} run {run} round {number} phase {phase}: base model {receipt.base_model[:23]}, "
                f"previous step {receipt.previous_step[:23] or '(none)'}, {outcome}"
            )
        )


@app.command()
def attacks(code: CodeOption = None, as_json: JsonOption = False) -> None:
    """List the attacks that can be rehearsed, with their options."""
    from federation.attacks.catalogue import entries  # noqa: PLC0415

    if as_json:
        typer.echo(json.dumps([asdict(entry) for entry in entries()]))
        return
    for entry in entries():
        typer.echo(f"{entry.spelling}\n    {entry.summary}")
        for name, words in entry.options.items():
            typer.echo(f"      {name}: {words}")


def _work(
    home: "Home",
    member: "MemberFiles",
    policy: "Policy",
    tasks: list[str],
    source: "DataSource",
    objectives: dict[str, tuple[str, ...]],
    device: str,
    threads: int | None,
    attack: "Attack | None",
    accomplices: Path | None,
    as_json: bool,
) -> None:
    from federation.tasks import DataError, TaskError  # noqa: PLC0415
    from worker.accomplices import Accomplices  # noqa: PLC0415
    from worker.attacker import Attacker  # noqa: PLC0415 - imports torch
    from worker.events import Events  # noqa: PLC0415
    from worker.service import Worker, prepare_offers  # noqa: PLC0415 - imports torch
    from worker.session import SessionError  # noqa: PLC0415
    from worker.spool import SpoolError  # noqa: PLC0415

    try:
        attacker = None
        if attack is not None:
            met = Accomplices(accomplices, member.client_id) if accomplices is not None else None
            attacker = Attacker(attack, member.client_id, met)
        offers, device_words = prepare_offers(
            list(dict.fromkeys(tasks)),
            source,
            device=device,
            threads=threads,
            attack=attack,
            client_id=member.client_id,
            objectives=objectives,
        )
        worker = Worker(
            home=home,
            member=member,
            offers=offers,
            device=device_words,
            events=Events(sys.stdout if as_json else None),
            uniform=random.SystemRandom().uniform,
            attacker=attacker,
            policy=policy,
        )
    except (TaskError, DataError, SpoolError, ValueError) as error:
        raise Failure(str(error)) from error
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.stop())
    try:
        worker.run()
    except SessionError as error:
        raise Failure(str(error)) from error
    logging.getLogger("fedpareto.worker").info("stopped")


def _served(texts: list[str], tasks: list[str]) -> dict[str, tuple[str, ...]]:
    """The objectives that the owner serves, by task."""
    served: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, names = text.rpartition("=")
        if not equals and len(set(tasks)) > 1:
            raise Failure(f"--objectives {text}: of which task? Write TASK={text}", code=USAGE)
        name = name if equals else tasks[0]
        if name not in tasks or name in served:
            raise Failure(f"--objectives {text}: name each task of --task at most once", code=USAGE)
        served[name] = tuple(part.strip() for part in names.split(",") if part.strip())
    return served


def _passphrase(home: Path, passphrase_file: Path | None) -> bytes | None:
    from federation.keys import IdentityError  # noqa: PLC0415

    try:
        return passphrase_for(home / "tls.key", passphrase_file)
    except IdentityError as error:
        raise Failure(str(error)) from error


def _load_member(home: Path, passphrase: bytes | None) -> "MemberFiles":
    from federation.keys import IdentityError  # noqa: PLC0415
    from federation.member_files import MemberFiles  # noqa: PLC0415

    try:
        return MemberFiles.load(home, passphrase)
    except IdentityError as error:
        raise Failure(str(error)) from error
