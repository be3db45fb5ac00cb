"""The audit log in a bundle: its entries are those that were signed, and the record agrees with them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.record.bundle import BundleReader
from federation.record.merkle import node_hash
from federation.v1.common_pb2 import CheckpointManifest, LogKeyManifest
from federation.v1.record_pb2 import LoggedEntry, LogNode, LogRecord
from tests.few import few
from tests.stage import Stage, spec
from tests.verification.scene import Edited, log_signed_again, refusal, signed_again
from tests.verification.test_bundle import NAMES, exported, played
from verification.run import OpenedRun

Edit = Callable[[LogRecord], object]
_made: list[tuple[Stage, Edited]] = []  # the record that the tests of this file edit


@pytest.fixture
def record(stage: Stage, tmp_path: Path) -> Edited:
    if not _made or _made[-1][0] is not stage:
        played(stage, "fedavg", "", rounds=1)  # entries of another run, which the bundle does not show
        task, players = stage.crew(*NAMES)
        run = stage.submit(spec("logged", task, 2, algorithm="fedavg", more=f"selection.minimum = {len(NAMES)}"))
        stage.play(run, *players, until=lambda: len(stage.rounds(run)) == 2)
        stage.served.coordinator._sequencer.sequence(show=True)  # a checkpoint for each step
        stage.play(run, *players)
        _made.append((stage, Edited.of(exported(stage, run, tmp_path / "run.fedpareto"))))
    return _made[-1][1]


def find(record: LogRecord, action: str, place: int = 0) -> LoggedEntry:
    return [entry for entry in record.entries if entry.action == action][place]


def test_the_bundle_shows_the_entries_of_its_run_and_of_no_other(record: Edited, tmp_path: Path) -> None:
    log = record.log
    actions = [entry.action for entry in log.entries]
    assert {action: actions.count(action) for action in set(actions)} == {
        "key.set": 4,
        "join-string.created": len(NAMES),
        "Enroll": len(NAMES),
        "run.submitted": 1,
        "assignment.issued": 4 * len(NAMES),
        "reply.accepted": 4 * len(NAMES),
        "round.stepped": 2,
        "run.completed": 1,
        "bundle.exported": 1,
    }
    assert len(log.nodes) < 20
    sizes = [CheckpointManifest.FromString(one.manifest).size for one in log.checkpoints]
    assert len(sizes) >= 2
    assert all(any(entry.number < size for size in sizes) for entry in log.entries)
    with BundleReader(record.write(tmp_path / "same")) as reader:
        run = OpenedRun.of(reader)
        list(run.verify())
        assert run.log.end == find(log, "run.completed")


@few("Enroll", "round.stepped")
@pytest.mark.parametrize("action", ["run.submitted", "Enroll", "reply.accepted", "round.stepped", "run.completed"])
@pytest.mark.parametrize(
    "column", ["entry_id", "at", "times", "actor", "action", "subject", "outcome", "detail", "digest", "previous"]
)
def test_each_column_of_an_entry_counts(record: Edited, tmp_path: Path, action: str, column: str) -> None:
    def edit(log: LogRecord) -> None:
        entry = find(log, action)
        value = getattr(entry, column)
        other: object = value + 1 if isinstance(value, int) else value + "x" if isinstance(value, str) else bytes(32)
        setattr(entry, column, other)

    number = find(record.log, action).number
    said = refusal(record.with_log(edit), tmp_path)
    names = f"entry {number} ", f"entry {number + 1} does not continue the entry before it", "an entry from "
    assert any(name in said for name in names), said


def _without(action: str, *, hidden: bool = False) -> Edit:
    """Removes an entry; a hidden one leaves its leaf."""

    def edit(log: LogRecord) -> None:
        entry = find(log, action, -1)
        after = next((one for one in log.entries if one.number == entry.number + 1), None)
        if hidden:
            assert after is not None
            log.nodes.append(LogNode(start=entry.number, stop=entry.number + 1, hash=after.previous))
        log.entries.remove(entry)

    return edit


def _swapped(log: LogRecord) -> None:
    first = log.entries.pop(-2)
    log.entries.append(first)


def _exchanged(log: LogRecord) -> None:
    one, other = log.entries[-2], log.entries[-1]
    one.number, other.number = other.number, one.number
    _swapped(log)


def _added(log: LogRecord) -> None:
    entry = log.entries.add()
    entry.CopyFrom(log.entries[-1])
    entry.number, entry.action = CheckpointManifest.FromString(log.checkpoints[-1].manifest).size, "run.paused"


def _hiding(log: LogRecord) -> None:
    log.entries[-1].detail = "changed, below a node that was signed"
    log.nodes.append(LogNode(start=0, stop=CheckpointManifest.FromString(log.checkpoints[-1].manifest).size))


EDITS: dict[str, tuple[Edit, str]] = {
    "an entry removed": (_without("reply.accepted"), "nothing is known of leaf"),
    "an entry hidden": (_without("reply.accepted", hidden=True), "no entry of the audit log tells of it"),
    "a step hidden": (_without("round.stepped", hidden=True), "the step: no entry of the audit log tells of it"),
    "a member hidden": (_without("Enroll"), "nothing is known of leaf"),
    "entries reordered": (_swapped, "comes after entry"),
    "entries exchanged": (_exchanged, "does not continue the entry before it"),
    "an entry added": (_added, "comes after entry"),
    "a node below which an entry was changed": (_hiding, "a node hides entry"),
    "a node changed": (lambda log: setattr(log.nodes[0], "hash", bytes(32)), "an entry from 0 to"),
    "a node removed": (lambda log: log.nodes.pop(0), "nothing is known of leaf"),
    "no checkpoint": (lambda log: log.ClearField("checkpoints"), "cover [] entries; expected one or more"),
    "the last checkpoint removed": (lambda log: log.checkpoints.pop(), "under a checkpoint of"),
    "checkpoints exchanged": (lambda log: log.checkpoints.reverse(), "entries; expected one or more, growing"),
    "no key": (lambda log: log.ClearField("key"), "the key of the audit log: "),
    "an impossible time": (lambda log: setattr(log.entries[0], "at", 2**62), "tells of no time"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_log_is_named(record: Edited, tmp_path: Path, name: str) -> None:
    edit, expected = EDITS[name]
    assert expected in refusal(record.with_log(edit), tmp_path)


def test_checkpoints_of_another_key_tree_or_federation_are_named(stage: Stage, record: Edited, tmp_path: Path) -> None:
    home, stranger = stage.served.home, Ed25519PrivateKey.generate()
    longer = CheckpointManifest.FromString(record.log.checkpoints[-1].manifest).size + 1
    edits: list[tuple[Ed25519PrivateKey, dict[str, Any], str]] = [
        (stranger, {}, "may not sign this"),
        (home.log_key.key, {"root": node_hash(bytes(32), bytes(32))}, "was signed over others"),
        (home.log_key.key, {"size": longer}, "nothing is known of leaf"),
        (home.log_key.key, {"federation_id": "other"}, "the audit log is of another federation"),
    ]
    for key, fields, says in edits:

        def edit(log: LogRecord, key: Ed25519PrivateKey = key, fields: dict[str, Any] = fields) -> None:
            change = CheckpointManifest(**fields)
            signed_again(log.checkpoints[-1], CheckpointManifest, key, lambda found: found.MergeFrom(change))

        assert says in refusal(record.with_log(edit), tmp_path)

    def other_key(log: LogRecord) -> None:
        raw = stranger.public_key().public_bytes_raw()
        signed_again(log.key, LogKeyManifest, home.signing_key, lambda found: setattr(found, "key", raw))
        log_signed_again(log, stranger)

    assert "the key of the audit log: entry" in refusal(record.with_log(other_key), tmp_path)


def _forget(action: str, place: int = 0) -> Edit:
    return lambda log: setattr(find(log, action, place), "action", "forgotten")


def _digest(action: str) -> Edit:
    return lambda log: setattr(find(log, action), "digest", f"blake3:{'7' * 64}")


def _moved(first: str, second: str) -> Edit:
    """Exchanges what the entries of two actions tell; of the first action, the one about the same subject if any."""

    def edit(log: LogRecord) -> None:
        other = find(log, second)
        same = [entry for entry in log.entries if entry.action == first and entry.subject == other.subject]
        one = same[0] if same else find(log, first)
        for name in ("actor", "action", "subject", "detail", "digest"):
            value = getattr(one, name)
            setattr(one, name, getattr(other, name))
            setattr(other, name, value)

    return edit


def _twice(log: LogRecord) -> None:
    """The entry about the end of the run tells of an accepted reply once more."""
    entry, again = find(log, "reply.accepted"), find(log, "key.set")
    again.action, again.subject, again.digest = entry.action, "f" * 32, entry.digest


SIGNED_AGAIN: dict[str, tuple[Edit, str]] = {
    "step": (_forget("round.stepped", 1), "round 1: the step: no entry of the audit log tells of it"),
    "another step": (_digest("round.stepped"), "round 0: the step: entry"),
    "assignment": (_forget("assignment.issued"), "round 0: the assignment of ann in phase 0: no entry"),
    "another reply": (_digest("reply.accepted"), "in phase 0: entry"),  # of the member whose reply came first
    "specification": (_digest("run.submitted"), "the submission of the run: entry"),
    "end": (_forget("run.completed"), "the bundle says that the run is COMPLETED; the audit log tells of no end"),
    "a member's key": (_digest("Enroll"), "the signing key of ann: no entry of the audit log tells of it"),
    "reply before assignment": (_moved("assignment.issued", "reply.accepted"), "before its assignment"),
    "reply after step": (_moved("reply.accepted", "round.stepped"), "after the step"),
    "a reply too many": (_twice, f"tells reply.accepted of {'f' * 32}, which is not in the record"),
}


@pytest.mark.parametrize("name", SIGNED_AGAIN)
def test_a_log_that_the_coordinator_has_signed_again_has_to_agree_with_the_record(
    stage: Stage, record: Edited, tmp_path: Path, name: str
) -> None:
    edit, expected = SIGNED_AGAIN[name]

    def signed(log: LogRecord) -> None:
        edit(log)
        log_signed_again(log, stage.served.home.log_key.key)

    assert expected in refusal(record.with_log(signed), tmp_path)


def test_the_bundle_of_a_run_that_goes_on_has_the_rounds_that_have_ended(stage: Stage, tmp_path: Path) -> None:
    run, players = stage.begin("ann", "ben", rounds=2, more="evaluate.every = 0")
    for player in players:
        player.reply(player.order())
    stage.wait_round(run, 0)
    orders = [player.order() for player in players]
    with BundleReader(exported(stage, run, tmp_path / "early")) as reader:
        assert reader.about.rounds == 1
        opened = OpenedRun.of(reader)
        assert [found.missing for found in opened.verify()] == [()]
        assert opened.log.end is None
    for player, order in zip(players, orders, strict=True):
        player.reply(order)
    stage.play(run, *players)
    with BundleReader(exported(stage, run, tmp_path / "late")) as reader:
        assert len(list(OpenedRun.of(reader).verify())) == 2
