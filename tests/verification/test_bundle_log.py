"""The audit log in a bundle: its entries are those that were signed, and the record agrees with them."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.record.bundle import BundleReader
from federation.v1.common_pb2 import CheckpointManifest, LogKeyManifest
from federation.v1.record_pb2 import LoggedEntry, LogRecord
from tests.few import few
from tests.stage import Stage, spec
from tests.verification.scene import Edited, log_signed_again, refusal, signed_again
from tests.verification.test_bundle import NAMES, exported, played
from verification.run import OpenedRun


@pytest.fixture(scope="module")
def record(_module_stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Edited:
    """The record that the tests of this file edit."""
    stage = _module_stage
    played(stage, "fedavg", "", rounds=1)  # entries of another run, which the bundle does not show
    task, players = stage.crew(*NAMES)
    run = stage.submit(spec("logged", task, 2, algorithm="fedavg", more=f"selection.minimum = {len(NAMES)}"))
    stage.play(run, *players, until=lambda: len(stage.rounds(run)) == 2)
    stage.served.coordinator._sequencer.sequence(show=True)  # a checkpoint for each step
    stage.play(run, *players)
    return Edited.of(exported(stage, run, tmp_path_factory.mktemp("bundle") / "run.fedpareto"))


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


def test_a_log_under_the_key_of_a_stranger_is_named(stage: Stage, record: Edited, tmp_path: Path) -> None:
    stranger = Ed25519PrivateKey.generate()

    def other_key(log: LogRecord) -> None:
        raw = stranger.public_key().public_bytes_raw()
        signed_again(log.key, LogKeyManifest, stage.served.home.signing_key, lambda found: setattr(found, "key", raw))
        log_signed_again(log, stranger)

    assert "the key of the audit log: entry" in refusal(record.with_log(other_key), tmp_path)


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
