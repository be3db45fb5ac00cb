"""A worker whose disk is full: it keeps its reply in memory, or declines, says so, and shows no traceback."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.digests import digest
from federation.monitoring.events import Events
from federation.trust.envelope import sign
from federation.v1.common_pb2 import AssignmentManifest, ReplyManifest
from federation.vectors import update_layout
from tests.harness import wait_for
from tests.scripted import files_in, opened
from tests.soak.faults import fill, small_disk
from tests.worker.scene import Scene, files_of_at_most
from tests.works import ask_bf16
from worker.home import DiskFull, WorkerHome
from worker.ledgers.left_ledger import LeftState
from worker.ledgers.left_reading import read_left
from worker.receipts import append, read_receipts
from worker.work.local_state import kept_state
from worker.work.spool import Spool


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on a small file system of its own."""
    with small_disk(tmp_path / "small", "256k") as mounted:
        if not mounted:
            pytest.skip("a small file system can be mounted by root only; the limit on file sizes stands in for it")
        yield tmp_path / "small"


@pytest.fixture(autouse=True)
def no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert all(record.exc_info is None for record in caplog.get_records("call"))


def test_a_model_that_the_disk_does_not_take_is_declined(scene: Scene) -> None:
    running = scene.attending()
    with files_of_at_most(5000):
        scene.assign(0)
        declined = running.wait_for("declined")[0]
        assert declined["reason"] == "disk"
        assert "make room" in declined["message"]
    scene.receipts(1, 1)


def test_an_update_that_the_disk_does_not_take_is_kept_in_memory_and_leaves_once_it_can_be_recorded(
    scene: Scene,
) -> None:
    running = scene.attending()
    scene.receipts(1, 0)
    with files_of_at_most(5000):
        scene.assign(1)
        told = " ".join(event["message"] for event in running.wait_for("disk", 2))
        assert "the update for assignment assignment-1 is kept in memory" in told
        assert "assignment assignment-1: it is not sent before it is on record here: make room on this" in told
        assert len(scene.coordinator.submissions) == 1
        assert len(running.events("submitting")) == 1
    running.wait_for("receipt", 2)
    assert len(running.events("disk")) == 2, "told once"
    submission = scene.coordinator.submissions[1]
    assert opened(submission, running.member).payload == digest(submission.payload)
    assert [row.first.state for row in read_left(running.home.left).rows] == [LeftState.ACCEPTED] * 2


def test_a_receipt_that_the_disk_does_not_take_is_kept_in_memory_and_written_later(scene: Scene) -> None:
    running = scene.attending()
    scene.receipts(1, 0)
    path = running.home.receipts
    path.write_bytes(path.read_bytes() * 50)  # longer than each other file; a receipt that stands there twice is one
    size = path.stat().st_size
    with files_of_at_most(size + 100):
        scene.receipts(2, 1)
        told = " ".join(event["message"] for event in running.events("disk"))
        assert "the receipt for assignment assignment-1 is kept in memory" in told
        assert path.stat().st_size == size
    scene.receipts(3, 2)
    receipts = read_receipts(path, running.member.coordinator.chain)
    assert [receipt.assignment_id for receipt in receipts] == [f"assignment-{number}" for number in range(3)]


def test_a_worker_whose_cache_is_emptied_while_it_runs_goes_on(scene: Scene) -> None:
    running = scene.attending()
    scene.receipts(1, 0)
    for path in running.home.cache.rglob("*.safetensors"):
        path.unlink()
    scene.receipts(2, 1)
    shutil.rmtree(running.home.cache)
    scene.receipts(3, 2)
    assert running.events("declined") == []


def test_few_updates_are_kept_in_memory_and_further_work_is_declined(scene: Scene) -> None:
    running = scene.attending()
    scene.receipts(1, 0)
    scene.coordinator.hold_submissions = threading.Event()
    with files_of_at_most(5000):
        for number in range(1, 4):
            scene.assign(number)
        declined = running.wait_for("declined")[0]
    scene.coordinator.hold_submissions.set()
    running.wait_for("receipt", 3)
    assert (declined["assignment_id"], declined["reason"]) == ("assignment-3", "disk")


def test_what_is_kept_of_a_run_waits_in_memory_with_its_reply_and_is_written_later(
    scene: Scene, tmp_path: Path
) -> None:
    running = scene.attending()
    scene.coordinator.assign(ask_bf16(scene.order(0)))
    running.wait_for("receipt")
    kept = kept_state(running.home.kept, "run-1")
    with files_of_at_most(15_000):  # the update fits, and what its rounding left, twice as many bytes, does not
        scene.coordinator.assign(ask_bf16(scene.order(1)))
        running.wait_for("disk", 2)  # the state is in memory, and the reply waits until it can be recorded
        scene.coordinator.assign(ask_bf16(scene.order(2)))  # it needs what the reply before has left
        assert running.wait_for("declined")[0]["reason"] == "disk"
        assert kept.rounds() == [0]
        assert [Path(name).suffix for name in running.spooled()] == [".payload"]  # a restart hands in nothing
    running.wait_for("receipt", 2)
    assert kept.rounds() == [0, 1]
    told = " ".join(event["message"] for event in running.events("disk"))
    assert "the state of the run for assignment assignment-1 is kept in memory" in told
    assert len(running.events("training")) == 2


def test_while_the_state_of_a_run_cannot_be_read_its_work_is_declined_and_the_state_stays(scene: Scene) -> None:
    running = scene.attending()
    scene.coordinator.assign(ask_bf16(scene.order(0)))
    running.wait_for("receipt")
    kept = kept_state(running.home.kept, "run-1")
    content = kept.path(0).read_bytes()
    kept.path(0).unlink()
    kept.path(0).mkdir()  # to read it is an error of the system
    scene.coordinator.assign(ask_bf16(scene.order(1)))
    declined = running.wait_for("declined")[0]
    assert (declined["assignment_id"], declined["reason"]) == ("assignment-1", "disk")
    assert f"{kept.path(0)}" in declined["message"]
    kept.path(0).rmdir()
    kept.path(0).write_bytes(content)
    scene.coordinator.assign(ask_bf16(scene.order(2)))
    running.wait_for("receipt", 2)
    assert kept.rounds() == [0, 2]


def test_of_a_reply_that_neither_disk_nor_memory_takes_nothing_is_left(tmp_path: Path) -> None:
    home, key = WorkerHome(tmp_path), Ed25519PrivateKey.generate()
    spool, layout = Spool(home, key, Events()), update_layout([("loss", 100)])
    rows = {"loss": np.ones(100, dtype=np.float32)}

    def add(name: str) -> None:
        order = sign(AssignmentManifest(assignment_id=name), key)
        spool.add(ReplyManifest(assignment_id=name), layout, rows, order, state=bytes(100))

    with files_of_at_most(200):
        for name in ("a", "b"):
            add(name)
        left = files_in(home.spool)
        with pytest.raises(DiskFull, match="2 replies are kept in memory already"):
            add("c")
    assert (len(left), files_in(home.spool)) == (2, left)
    assert [entry.in_memory for entry in spool.entries()] == [True, True]


def test_a_worker_goes_on_with_a_disk_that_is_really_full(scene: Scene, disk: Path) -> None:
    running = scene.attending(home=WorkerHome(disk / "home"))
    scene.receipts(1, 0)
    fill(disk)
    scene.assign(1)
    wait_for(lambda: any("not sent" in event["message"] for event in running.events("disk")), "the full disk", 60)
    (disk / "ballast").unlink()
    running.wait_for("receipt", 2)
    scene.receipts(3, 2)
    assert len(read_receipts(running.home.receipts, running.member.coordinator.chain)) == 3


def test_lines_are_appended_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append(path, "one\n")
    with files_of_at_most(6), pytest.raises(OSError, match="large"):
        append(path, "two\n")
    assert path.read_text() == "one\n"
