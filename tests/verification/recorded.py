"""Runs of which each value is edited, and whether an edit is refused or the page lists its value."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.backups.home_keys import rotate_signing_key
from coordinator.home import CoordinatorHome
from federation.record.bundle import BundleError, BundleReader
from federation.trust.envelope import key_id
from federation.trust.member_files import MemberFiles
from federation.v1 import admin_pb2 as admin
from federation.v1.admin_pb2_grpc import AdminStub
from tests.coordinator.members.scene import Change
from tests.coordinator.rounds.runs.scene import answer, asked, attends, say
from tests.harness import federation
from tests.paths import DOCS
from tests.running import refused
from tests.stage import Stage, spec, stage
from tests.verification import every_value
from tests.verification.every_value import Edit, edited, edits, signed_anew
from tests.verification.record_vectors import KEYS, vector
from tests.verification.scene import MOST, Edited, exported, forget_peak, peak
from tests.worker.work.scene import Members, scene
from verification.errors import VerificationError
from verification.run import OpenedRun

PAGE = DOCS / "reference/verify.md"
FREE, SIGNED, NAMED = "Nothing", "Only signed", "Named"
"""How the third column of the page begins for values that are not bound, or by their signature alone."""
OF_FACTS = re.compile(r"(assignment|reply|round|run|consent)\.")
"""The actions whose log entries are about facts of the record; others have rows of their own."""


CONTEXTS = {
    "": "",
    " of an evaluation": " evaluation",
    " of a skipped round": " skipped",
    " of another action": " another",
    " of a file without updates": " bare",
    " of ciphertexts": " ciphertexts",
    " of statistics that fill a model": " filling",
}
EXCEPTIONS = {"two exchanged": "the order", "one added": "a further one", "one removed": "one that is left out"}
"""The page's words for an operation that may be done to a value although the value is bound."""


@dataclass(frozen=True)
class Recorded:
    """A bundle, the signing keys of all, and how much of it cannot be verified."""

    bundle: Edited
    keys: Mapping[str, Ed25519PrivateKey]

    @property
    def bare(self) -> bool:
        """True if the bundle has neither updates nor models."""
        return not self.bundle.about.payloads

    @property
    def holders(self) -> dict[bytes, Ed25519PrivateKey]:
        return {key_id(key.public_key()): key for key in self.keys.values()}

    def again(self) -> Edited:
        """The bundle, after all of it was signed again."""
        return signed_anew(self.bundle, every_value.messages(self.bundle), self.holders, self.keys["log"])


@cache
def bound() -> dict[str, str]:
    """The third column of the page's table, by value."""
    (table,) = re.findall(r"## Each value in a bundle\n(.*?)\n## ", PAGE.read_text(), re.S)
    found: dict[str, str] = {}
    for kind, context, fields, words in re.findall(r"^\| `(\w+)`(.*?) \| (.*?) \| (.*?) \|$", table, re.M):
        for name in re.findall(r"`(\w+)`", fields):
            assert found.setdefault(f"{kind}.{name}{CONTEXTS[context]}", words) == words
    return found


@cache
def unverified() -> set[str]:
    """The metrics that the page calls not verified."""
    (table,) = re.findall(r"\n## Metrics\n(.*?)\n## ", PAGE.read_text(), re.S)
    return {
        name for row in re.findall(r"^\| (.*?) \| .*? \| no \|$", table, re.M) for name in re.findall("`(.*?)`", row)
    }


def by(edit: Edit, *, bare: bool = False) -> str:
    """How the page says that the value of an edit is bound; `bare` in a file without updates."""
    context, _, value = edit.value.rpartition(" ")
    kind, _, field = value.partition(".")
    if field == every_value.UNKNOWN:
        return "The format"
    if kind == "LoggedEntry":
        context = "" if OF_FACTS.match(context) else "another"
    words = (bare and bound().get(f"{value} bare")) or bound().get(f"{value} {context}") or bound()[value]
    exceptions = words.partition("Except ")[2]
    if EXCEPTIONS.get(edit.operation, "-") in exceptions or edit.operation.partition(" ")[2] in unverified():
        return FREE
    return words


def outcome(bundle: Edited, path: Path) -> tuple[str, int]:
    """Whether a bundle is refused or accepted, with little memory; and how much in it could not be verified."""
    bundle.write(path)
    before = forget_peak()
    try:
        with BundleReader(path) as reader:
            return "accepted", sum(len(one.missing) for one in OpenedRun.of(reader).verify())
    except (VerificationError, BundleError):
        return "refused", 0
    finally:
        assert peak() - before < MOST


def accepted(
    chosen: Mapping[str, Edit], path: Path, make: Callable[[Edit], Edited], same: Edited, *, bare: bool
) -> tuple[dict[str, Edit], int]:
    """The edits that are accepted although they change something; and how many were refused, or named as absent."""
    found, refusals, before = {}, 0, outcome(same, path)
    assert before[0] == "accepted"
    for name, edit in chosen.items():
        changed = make(edit)
        if changed.entries == same.entries:
            continue
        after = outcome(changed, path)
        if after == before:
            found[name] = edit
        else:
            refusals += 1
            words = by(edit, bare=bare)
            assert after[0] == "refused" or words.startswith((NAMED, SIGNED, FREE)), f"{name} is named as absent"
    return found, refusals


def check_listed(recorded: Recorded, chosen: Mapping[str, Edit], path: Path) -> tuple[set[str], int]:
    """Checks that each edit is refused, or that the page lists its value. Returns the listed values that were free."""
    same = recorded.bundle.having(every_value.entries(every_value.messages(recorded.bundle)))
    keys, log, bare = recorded.holders, recorded.keys["log"], recorded.bare
    alone, first = accepted(chosen, path, lambda edit: edited(recorded.bundle, edit, {}), same, bare=bare)
    assert {name for name, edit in alone.items() if not by(edit, bare=bare).startswith(FREE)} == set()
    again = recorded.again()
    by_all, second = accepted(chosen, path, lambda edit: edited(recorded.bundle, edit, keys, log), again, bare=bare)
    assert {name for name, edit in by_all.items() if not by(edit, bare=bare).startswith((FREE, SIGNED))} == set()
    return {edit.value for edit in (*alone.values(), *by_all.values())}, first + second


def first_of(recorded: Recorded, *kinds: str) -> dict[str, Edit]:
    """An edit of each value of these messages."""
    found: dict[str, Edit] = {}
    for edit in edits(recorded.bundle).values():
        if edit.value.rpartition(" ")[2].partition(".")[0] in kinds:
            found.setdefault(edit.value, edit)
    return {edit.name: edit for edit in found.values()}


def frozen(name: str) -> Recorded:
    return Recorded(Edited.of(vector(name)), KEYS)


def eventful(directory: Path) -> Recorded:
    """A run in which members answer, decline, equivocate and replace their keys, and so does the coordinator."""
    with stage(directory / "coordinator", f"sqlite:///{directory / 'coordinator.db'}") as made:
        return played_eventfully(made, directory / "run.fedpareto")


def played_eventfully(stage: Stage, path: Path) -> Recorded:
    task = stage.task()
    ann, ben, cleo, dan, eve = players = stage.cast(task, *(f"{name}-{stage.count}" for name in "abcde"))
    for player in (ann, ben):
        player.stream = attends(player, task)
    more = "server = { optimizer = 'momentum', learning_rate = 0.5 }\nselection = { minimum = 5, quorum = 0.5 }"
    run = stage.submit(spec(f"eventful-{stage.count}", task, 2, more=more))
    for player in (ann, ben):
        assert player.stream is not None
        say(player, player.stream, answer(player, asked(player, player.stream), "accepted"))
    orders = {player: player.order() for player in players}
    size = sum(row.length for row in orders[cleo].rows)
    cleo.reply(orders[cleo])
    with refused("ALREADY_EXISTS", "assignment-fulfilled"):
        cleo.submit(orders[cleo], np.ones(size, np.float32))
    dan.decline(orders[dan], "disk", "it is full")
    with refused("INVALID_ARGUMENT", "non-finite"):
        eve.submit(orders[eve], np.full(size, np.nan, np.float32))
    keys = {player.name: player.member.files.signing_key for player in players}
    ben.reply(orders[ben])
    ben.member = Change(ben.member).done()
    ben.attend(**ben.tasks)
    ann.reply(orders[ann])
    keys |= {"new": ben.member.files.signing_key, "coordinator": stage.served.home.signing_key}

    def replace() -> None:
        stage.served.home = rotate_signing_key(stage.served.home, now=stage.clock())

    stage.restart(between=replace)
    for player in stage.players.values():
        player.member.files.coordinator.learn(stage.served.home.rotations)
    stage.complete(run, *players)
    keys |= {"replaced": stage.served.home.signing_key, "log": stage.served.home.log_key.key}
    return Recorded(Edited.of(exported(stage, run, path)), keys)


PRIVATE = """\
task = "two-digits"
rounds = 1
algorithm.name = "fedmgda+"
selection = { minimum = 8, pool = "enrolled" }
train = { steps = 1, batch_size = 20, deadline_seconds = 120.0 }
evaluate = { every = 1, splits = ["test"] }
limits = { skipped_rounds = 1 }
privacy.secure = "private"
"""


HELD = """\
task = "digits"
kind = "statistics"
selection = { minimum = 5, pool = "enrolled" }
privacy.secure = "sum"
[statistics]
columns = ["x28", "x29", "y"]
ranges.x28 = [0.0, 1.0]
classes.y = 10
bins = 8
splits = ["train", "validation", "test"]
deadline_seconds = 120.0
"""
"""A private run that describes data: a column with a range, one without, and classes."""


def held_privately(directory: Path) -> Recorded:
    """Private statistics of five real workers, whose owners approve each run."""
    with federation(directory) as fed:
        fed.serve()
        made = Members(fed, [f"m{number}" for number in range(5)], task="digits")
        made.enrol('approve = "each-run"\n')
        for client in made.clients:
            made.work(client)
        fed.attending(*made.clients)
        run = fed.submit("held", HELD)
        made.approve(run)
        fed.wait_completed(run)
        return _recorded(made, run, directory / "held.fedpareto")


def private(directory: Path, more: str = "") -> Recorded:
    """A private run of real workers; `more` are further keys of its specification."""
    with scene(directory, 8) as made:
        run = made.fed.completed("private", PRIVATE + more)
        return _recorded(made, run, directory / "private.fedpareto")


def _recorded(made: Members, run: str, path: Path) -> Recorded:
    """The record of a run of real workers, with the keys of all."""
    with made.fed.administrator() as channel:
        request = admin.ExportBundleRequest(run=run, payloads=True)
        path.write_bytes(b"".join(part.chunk for part in AdminStub(channel).ExportBundle(request, timeout=120)))
    keys = {name: MemberFiles.load(made.fed.directory / name).signing_key for name in made.clients}
    home = CoordinatorHome.load(made.fed.home)
    return Recorded(Edited.of(path), {**keys, "coordinator": home.signing_key, "log": home.log_key.key})
