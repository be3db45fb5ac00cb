"""`fedpareto worker roster`: the members and keys that this worker trusts in private rounds."""

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from fedpareto.cli.failure import USAGE, CommandFailure, answer
from fedpareto.cli.member.member_command import DEFAULT_HOME, HomeOption, MemberSite, member_command, membership
from fedpareto.cli.shared_options import JsonOption, PassphraseOption
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from federation.trust.key_chain import read_rotations
    from worker.home import WorkerHome
    from worker.ledgers.round_ledger import RoundLedger
    from worker.site.policy_file import Policy, PolicyError
    from worker.site.roster import Card, Changes, Roster, RosterError, changes, pinned_roster, read_roster


_COMPARE = (
    "Compare these digits with the other owners, by telephone or in person: not through the coordinator, which could "
    "change them on the way."
)


def card(
    home: HomeOption = DEFAULT_HOME,
    old_home: Annotated[
        Path | None,
        typer.Option(
            help="This member's directory from before, when it has joined again: the old key signs the new one."
        ),
    ] = None,
    passphrase_file: PassphraseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print this member's entry in a roster: its name and its public key. It is not secret."""
    with membership(home, passphrase_file) as (worker_home, member, _):
        old_key = None
        if old_home is not None:
            with membership(old_home, passphrase_file) as (_, before, _):
                if (before.federation_id, before.client_id) != (member.federation_id, member.client_id):
                    raise CommandFailure(f"{old_home} is the directory of {before.client_id} of {before.federation_id}")
                old_key = before.signing_key
        entry = Card.of(member, read_rotations(worker_home.own_rotations), old_key)
    document = {"federation_id": entry.federation_id, "client_id": entry.client_id, "key": entry.key.hex()}
    title = f"# The card of {entry.client_id}, not secret. The cards of all members, one after the other, are a roster."
    answer(as_json, {**document, "card": entry.text()}, title, entry.text())


@member_command(RosterError)
def pin(
    site: MemberSite,
    as_json: bool,
    file: Annotated[Path, typer.Argument(help="The roster: the cards of all members, one after the other.")],
    replace: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MEMBER",
            help="Accept the new key of this member without a signature by its old key. Call its owner first. "
            "Repeat it for several.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Trust these members and keys, and no others, in private rounds.

    The command shows what changes, and asks. A running worker uses the roster after a restart.
    """
    worker_home, member, _ = site
    new = read_roster(file, member)
    differences = changes(pinned_roster(worker_home.roster, member), new)
    accepted = set(replace or ())
    if unknown := sorted(accepted - set(differences.unsigned)):
        raise CommandFailure(f"--replace {unknown[0]}: its key does not change without a signature", code=USAGE)
    if unsigned := sorted(set(differences.unsigned) - accepted):
        raise CommandFailure(
            f"{unsigned[0]} has another key than in the pinned roster, and its old key has not signed the new one. "
            "Call its owner. If the owner still has the old directory, ask for a card made with --old-home; if "
            f"not, and the owner reads you the same new key, give --replace {unsigned[0]}"
        )
    if not as_json:
        for line in (*_members(new), *_changed(differences)):
            typer.echo(line)
    if differences:
        _confirm(yes)
        new.pin(worker_home.roster)
    message = (
        "Pinned; a worker that runs takes it when it is started again." if differences else "It is pinned already."
    )
    answer(as_json, {**_document(new), "changes": vars(differences)}, message, _COMPARE)


@member_command(RosterError, PolicyError)
def show(site: MemberSite, as_json: bool) -> None:
    """Show the pinned roster, and how many private rounds have counted."""
    roster, policy = pinned_roster(site.home.roster, site.member), Policy.load(site.home.policy)
    used = _used(site.home, policy)
    lines = [
        f"{name}: {task['sessions']} of {task['sessions_allowed']} private rounds, {task['evaluations']} of "
        f"{task['evaluations_allowed']} evaluations"
        for name, task in used.items()
    ]
    if roster is None:
        answer(as_json, {"roster": None, "tasks": used}, "no roster is pinned: private rounds are declined", *lines)
    else:
        answer(as_json, {"roster": _document(roster), "tasks": used}, *_members(roster), *lines, _COMPARE)


def _used(worker_home: "WorkerHome", policy: "Policy") -> dict[str, dict[str, int]]:
    """The counted sessions and the limits of each task with sessions or with a policy of its own, by its data set."""
    with closing(RoundLedger(worker_home.rounds)) as ledger:
        shared = policy.data_sets
        entries = {name: ledger.entries(shared.get(name, {name})) for name in {*policy.secure.tasks, *ledger.tasks()}}
    used = {}
    for name, of_task in sorted(entries.items()):
        evaluations, allowed = sum(entry.evaluation for entry in of_task), policy.secure.of(name)
        used[name] = {
            "sessions": len(of_task) - evaluations,
            "sessions_allowed": allowed.sessions,
            "evaluations": evaluations,
            "evaluations_allowed": allowed.evaluations,
        }
    return used


def _document(roster: "Roster") -> dict[str, Any]:
    return {
        "federation_id": roster.federation_id,
        "digest": roster.digest,
        "members": [{"client_id": name, "key": key.hex()} for name, key in roster.keys.items()],
    }


def _members(roster: "Roster") -> Iterator[str]:
    yield f"The roster of {roster.federation_id}, {len(roster.cards)} members:"
    for name, key in roster.keys.items():
        yield f"  {name}  {key.hex()}"
    yield f"Digest: {roster.digest}"


def _changed(differences: "Changes") -> Iterator[str]:
    labels = {
        "added": "new member",
        "removed": "no longer a member",
        "rotated": "new key, signed by the old one",
        "unsigned": "new key, NOT signed by the old one",
    }
    for kind, names in vars(differences).items():
        for name in names:
            yield f"{labels[kind]}: {name}"


def _confirm(yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise CommandFailure("there is no terminal to ask at: compare what changes, and give --yes", code=USAGE)
    if not typer.confirm("Pin this roster?", err=True):
        raise CommandFailure("nothing was changed")
