"""A worker as a witness of the coordinator's audit log: what it keeps, what it refuses, and what a restore explains."""

import io
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.audit.checkpoints import LogKey
from federation.monitoring.events import Events
from federation.record.merkle import leaf_hash
from federation.trust.envelope import from_text, sign, verify
from federation.v1.common_pb2 import CheckpointManifest, KeptLog, LogHead, LogKeyManifest, RestoreManifest
from tests.harness import wait_for
from tests.scripted import FEDERATION, ScriptedCoordinator, ScriptedLog
from tests.worker.scene import Scene
from worker.connection.witness import MAX_KEPT, LogForked, Witness
from worker.home import WorkerHome, WorkerHomeError
from worker.progress import StatementError

NOON = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)


class Watch:
    """A witness in a directory, and the log that it is shown."""

    def __init__(self, coordinator: ScriptedCoordinator, directory: Path) -> None:
        self.signing_key = coordinator.signing_key
        self.member = coordinator.member()
        self.home = WorkerHome(directory)
        self.log = ScriptedLog(self.signing_key)
        self.told = io.StringIO()
        self.witness = self.begin()

    def begin(self) -> Witness:
        """The witness of a worker that starts."""
        files = self.home.log, self.home.forked_log
        self.witness = Witness(*files, member=self.member, events=Events(self.told))
        return self.witness

    def welcome(self, head: LogHead | None = None, restored: RestoreManifest | None = None) -> None:
        shown = self.log.head(self.witness.size) if head is None else head
        self.witness.welcome(self.log.certified, shown, restored)

    def grow(self, *counts: int) -> None:
        """The log grows by each of these numbers of entries, and the worker is welcome after each."""
        for count in counts:
            self.log.grow(count)
            self.welcome()

    def refused(self, text: str, head: LogHead | None = None, restored: RestoreManifest | None = None) -> None:
        size = self.witness.size
        with pytest.raises(LogForked, match=text):
            self.welcome(head, restored)
        assert self.witness.size == size


@pytest.fixture
def watch(coordinator: ScriptedCoordinator, tmp_path: Path) -> Watch:
    return Watch(coordinator, tmp_path)


def statement(*kept: tuple[int, int]) -> RestoreManifest:
    """Of restores: the minute of each, and the number of entries that it kept."""
    manifest = RestoreManifest(federation_id=FEDERATION)
    for minute, size in kept:
        log = KeptLog(size=size)
        log.restored.FromDatetime(NOON + timedelta(minutes=minute))
        manifest.logs.append(log)
    return manifest


def test_a_log_that_grows_is_followed_also_over_a_restart_of_the_worker(watch: Watch) -> None:
    for size in (1, 2, 300, 301):
        watch.grow(size - len(watch.log.leaves))
        assert watch.witness.size == size
        watch.begin()
        assert watch.witness.size == size
    watch.welcome()
    assert not watch.told.getvalue()


def test_a_log_that_was_cut_or_changed_is_refused_with_both_checkpoints_as_evidence(watch: Watch) -> None:
    watch.grow(9)
    leaves = list(watch.log.leaves)
    watch.log.leaves = leaves[:7]
    watch.refused("no proof that it continues the 10 entries .* it shows 7.*coordinator restored`.*security officer")
    evidence = json.loads(watch.home.forked_log.read_text())
    kept, shown = (
        verify(from_text(evidence[name]), CheckpointManifest, watch.log.key.public) for name in ("kept", "shown")
    )
    assert (kept.size, shown.size) == (10, 7)
    watch.log.leaves = [leaf_hash(b"changed"), *leaves[1:]]
    watch.refused("the proof does not hold that it continues the 10 entries")
    watch.log.grow(5)
    watch.refused("the proof does not hold")
    watch.log.leaves = leaves
    watch.welcome()


def test_in_a_welcome_no_proof_but_from_the_newest_checkpoint_counts(watch: Watch) -> None:
    watch.grow(4, 4, 4)
    honest = watch.log.head(9)
    watch.log.leaves = watch.log.leaves[:9]
    watch.log.grow(8, b"forked")
    watch.refused("no proof that it continues the 13 entries", watch.log.head(9))
    watch.refused("no proof that it continues the 13 entries", honest)


def test_checkpoints_beside_work_are_followed_and_may_overtake_each_other(watch: Watch) -> None:
    watch.witness.saw(LogHead())  # before any welcome there is no key to verify it with
    watch.welcome()
    watch.log.grow(4)
    first = watch.log.head(1)
    watch.log.grow(4)
    second = watch.log.head(1)
    watch.witness.saw(second)
    assert watch.witness.size == 9
    watch.witness.saw(first)
    assert watch.witness.size == 9
    watch.log.grow(1)
    watch.log.leaves[3] = leaf_hash(b"changed")
    with pytest.raises(LogForked):
        watch.witness.saw(watch.log.head(9))
    with pytest.raises(LogForked):
        watch.witness.saw(watch.log.head(0))


def test_what_the_coordinator_did_not_sign_is_refused(watch: Watch) -> None:
    watch.welcome()
    stranger = ScriptedLog(Ed25519PrivateKey.generate())
    with pytest.raises(StatementError, match="a key of the audit log that the coordinator did not sign"):
        watch.witness.welcome(stranger.certified, stranger.head(1), None)
    with pytest.raises(StatementError, match="a checkpoint that the log's key did not sign"):
        watch.welcome(stranger.head(1))
    with pytest.raises(StatementError, match="a checkpoint that the log's key did not sign"):
        watch.welcome(LogHead())
    other = LogKeyManifest(federation_id="other", key=watch.log.key.public.public_bytes_raw())
    with pytest.raises(StatementError, match="of another federation"):
        watch.witness.welcome(sign(other, watch.signing_key), watch.log.head(1), None)
    key = LogKey(federation_id="other", key=watch.log.key.key)
    with pytest.raises(StatementError, match="a checkpoint of another federation"):
        watch.welcome(LogHead(checkpoint=key.sign(2, bytes(32), NOON)))
    for size, root in ((0, bytes(32)), (5, b"short")):
        with pytest.raises(StatementError, match="without entries or with a root of another length"):
            watch.welcome(LogHead(checkpoint=watch.log.key.sign(size, root, NOON)))
    assert watch.witness.size == 1


def test_after_a_stated_restore_the_log_must_continue_what_it_has_kept(watch: Watch) -> None:
    watch.grow(4, 4, 4)  # 5, 9, 13
    kept = list(watch.log.leaves)
    watch.log.leaves = kept[:10]
    watch.log.grow(20, b"after the restore")
    watch.refused("the proof does not hold that it continues the 13 entries")
    with pytest.raises(StatementError, match="asks again for the proof that its log continues the 9 entries"):
        watch.welcome(restored=statement((1, 10)))
    assert '"log-restored"' in watch.told.getvalue()
    honest = list(watch.log.leaves)
    watch.log.leaves = [*kept[:8], leaf_hash(b"changed"), *honest[9:]]
    watch.refused("the proof does not hold that it continues the 9 entries", restored=statement((1, 10)))
    watch.log.leaves = honest
    watch.welcome(restored=statement((1, 10)))
    assert watch.witness.size == 30
    watch.begin()
    watch.log.leaves = honest[:10]
    watch.log.grow(40, b"a second fork")
    watch.refused("the proof does not hold that it continues the 30", restored=statement((1, 10)))


def test_a_worker_that_missed_several_restores_goes_back_to_the_earliest(watch: Watch) -> None:
    watch.grow(4, 4, 4)
    watch.log.leaves = watch.log.leaves[:6]
    watch.log.grow(30, b"after both")
    both = statement((1, 6), (2, 12))
    with pytest.raises(StatementError, match="continues the 5 entries"):
        watch.welcome(restored=both)
    watch.welcome(restored=both)
    watch.log.grow(3)
    watch.welcome(restored=both)
    assert watch.witness.size == 39


def test_a_restore_before_everything_that_was_seen_begins_anew_and_one_behind_it_changes_nothing(watch: Watch) -> None:
    watch.log.grow(4)
    watch.welcome(restored=statement((1, 3)))  # the first welcome: nothing is lost
    watch.welcome(restored=statement((1, 3), (2, 5)))
    assert (watch.witness.size, watch.told.getvalue()) == (5, "")
    watch.log = ScriptedLog(watch.signing_key)
    watch.welcome(restored=statement((1, 3), (2, 5), (3, 0)))
    assert watch.witness.size == 1


def test_at_most_some_checkpoints_are_kept_and_the_older_they_are_the_fewer(watch: Watch) -> None:
    watch.grow(*[1] * 3 * MAX_KEPT)
    kept = json.loads(watch.home.log.read_text())["checkpoints"]
    sizes = [CheckpointManifest.FromString(from_text(text).manifest).size for text in kept]
    assert len(sizes) <= MAX_KEPT
    assert sizes == sorted(sizes)
    assert sizes[-8:] == list(range(3 * MAX_KEPT - 6, 3 * MAX_KEPT + 2))


@pytest.mark.parametrize("text", ["{}", "[]", '{"checkpoints": ["!"], "restored": ""}', "\0"])
def test_a_damaged_file_is_named(watch: Watch, text: str) -> None:
    watch.home.log.write_text(text)
    with pytest.raises(WorkerHomeError, match=r"log\.json is damaged"):
        watch.begin()


def test_a_worker_does_nothing_for_a_coordinator_whose_log_has_forked(scene: Scene) -> None:
    coordinator, running = scene.coordinator, scene.start()
    coordinator.log.grow(3)
    coordinator.receipt_log = coordinator.log.head
    scene.receipts(1, 1)
    wait_for(lambda: coordinator.heartbeats[-1].log_size == 4, "the worker to tell of the newest checkpoint")
    coordinator.log.leaves[1] = leaf_hash(b"changed")
    scene.receipts(2, 2)
    # Beside the receipt it was shown that the log has forked; it does not attend again.
    [warning] = running.wait_for("log")
    assert "the proof does not hold that it continues the 4 entries" in warning["message"]
    refused = running.wait_for("refused")[0]
    assert "the coordinator's audit log was changed or cut" in refused["message"]
    scene.assign(3)
    running.wait_for("refused", 3)
    assert len(coordinator.submissions) == 2
