"""What a worker remembers of rounds: values between phases, answered questions, and the lanes of its work."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.wrappers_pb2 import UInt64Value

from federation.digests import digest
from federation.tasks import DataSource, initial_model, task
from federation.training.plans import TrainingPlan
from federation.training.torch_trainer import TorchTrainer
from federation.v1.common_pb2 import AssignmentManifest, Input, Row, SignedEnvelope, UnsharedParameters
from federation.vectors import Array, Vector, update_rows
from federation.work.base import Shape, Work
from federation.work.registry import decode
from tests.harness import wait_for
from tests.paths import OWNERS_CODE
from tests.worker.scene import Scene, files_of_at_most
from worker.home import DiskFull, WorkerHomeError
from worker.site.assignment_checks import CheckedAssignment, Declined
from worker.work.memory import NEXT_QUESTION_WITHIN, WorkerMemory, awaits_question

CODE = OWNERS_CODE / "lottery"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))


@pytest.fixture(autouse=True)
def _lottery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CODE))


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[WorkerMemory]:
    made = WorkerMemory(tmp_path / "memory.db", KEY)
    yield made
    made.close()


def order(
    number: int = 1, *, round_: int = 0, attempt: int = 0, run: str = "run-1", deadline: datetime = NOW, **changes: Any
) -> CheckedAssignment:
    """An assignment of the kind ticket: the number 0 asks the second question."""
    manifest = AssignmentManifest(
        run_id=run, round=round_, attempt=attempt, assignment_id="a", kind="ticket", **changes
    )
    manifest.work = UInt64Value(value=number).SerializeToString()
    layout, _ = initial_model(task("digits"), seed=0)
    shape = Shape(layout, ("loss",), ("loss",))
    work: Work = decode("ticket", manifest.work, shape)
    return CheckedAssignment(SignedEnvelope(), manifest, work, shape, work.rows(shape), deadline)


# --- what is remembered


@pytest.mark.parametrize("durable", [False, True])
def test_a_value_is_there_in_later_phases_of_the_attempt(memory: WorkerMemory, durable: bool) -> None:
    memory.begin(order()).put("share", b"secret", durable=durable)
    assert memory.begin(order(0)).get("share") == b"secret"
    assert memory.begin(order()).get("another") is None


def test_only_durable_values_survive_a_restart_and_they_are_encrypted(memory: WorkerMemory, tmp_path: Path) -> None:
    path, values = tmp_path / "memory.db", memory.begin(order())
    values.put("kept", b"a long and secret value", durable=True)
    values.put("lost", b"another value")
    memory.close()
    assert b"a long and secret value" not in path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    second = WorkerMemory(path, KEY)
    values = second.begin(order())
    assert (values.get("kept"), values.get("lost")) == (b"a long and secret value", None)
    second.close()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        values.get("kept")


@pytest.mark.parametrize("later", [{"round_": 1}, {"attempt": 1}])
def test_values_are_erased_when_a_later_attempt_or_round_begins(
    memory: WorkerMemory, tmp_path: Path, later: dict[str, Any]
) -> None:
    earlier = memory.begin(order())
    earlier.put("kept", b"value", durable=True)
    earlier.put("held", b"value")
    other = memory.begin(order(run="run-2"))
    other.put("kept", b"of another run", durable=True)
    values = memory.begin(order(**later))
    for one in (values, earlier):
        assert (one.get("kept"), one.get("held")) == (None, None)
    assert other.get("kept") == b"of another run"
    with sqlite3.connect(tmp_path / "memory.db") as database:
        assert database.execute("SELECT count(*) FROM kept").fetchone() == (1,)


def test_so_many_runs_are_remembered_and_no_more(
    memory: WorkerMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.work.memory.MAX_ATTEMPTS", 3)
    for number in range(10):
        values = memory.begin(order(run=f"run-{number}"))
        values.put("kept", b"value", durable=True)
        values.put("held", b"value")
    assert len(memory._values) == 3
    with sqlite3.connect(tmp_path / "memory.db") as database:
        assert database.execute("SELECT run FROM kept").fetchall() == [("run-7",), ("run-8",), ("run-9",)]


def test_an_attempt_that_was_given_up_is_declined(memory: WorkerMemory) -> None:
    earlier = memory.begin(order())
    memory.begin(order(attempt=1))
    with pytest.raises(Declined, match="attempt 0 at round 0; attempt 1 has begun"):
        memory.begin(order())
    with pytest.raises(Declined, match="attempt 0 at round 0 ended while its work was done"):
        earlier.put("kept", b"of work that was under way", durable=True)


def test_values_are_erased_a_day_after_the_last_deadline(memory: WorkerMemory) -> None:
    values = memory.begin(order(deadline=NOW))
    values.put("kept", b"value", durable=True)
    memory.begin(order(0, deadline=NOW + timedelta(hours=1)))
    memory.sweep(NOW + timedelta(hours=24, minutes=30))
    assert values.get("kept") == b"value"
    memory.sweep(NOW + timedelta(hours=25, minutes=30))
    assert values.get("kept") is None


def test_an_attempt_that_begins_after_its_values_were_erased_has_its_new_deadline_only(memory: WorkerMemory) -> None:
    memory.begin(order(deadline=NOW + timedelta(days=10)))
    memory.sweep(NOW + timedelta(days=12))
    values = memory.begin(order(deadline=NOW))
    values.put("kept", b"value", durable=True)
    memory.sweep(NOW + timedelta(days=2))
    assert values.get("kept") is None


def test_what_the_disk_does_not_take_is_an_error_and_an_erasure_is_tried_again(memory: WorkerMemory) -> None:
    values = memory.begin(order())
    values.put("kept", b"value", durable=True)
    with files_of_at_most(100):
        with pytest.raises(DiskFull, match=r"memory\.db cannot be written: disk I/O error"):
            values.put("more", b"value", durable=True)
        with pytest.raises(DiskFull, match=r"memory\.db cannot be written"):
            memory.answer(order(7))
        memory.begin(order(attempt=1))
    assert values.get("kept") == b"value"
    memory.sweep(NOW)
    assert values.get("kept") is None
    memory.answer(order(8))


def test_an_erased_value_is_in_no_file_not_even_encrypted(memory: WorkerMemory, tmp_path: Path) -> None:
    path = tmp_path / "memory.db"
    memory.begin(order()).put("kept", b"value", durable=True)
    with sqlite3.connect(path) as database:
        (encrypted,) = database.execute("SELECT value FROM kept").fetchone()
    assert encrypted in path.read_bytes()
    memory.sweep(NOW + timedelta(days=2))
    assert not [file for file in tmp_path.iterdir() if encrypted in file.read_bytes()]
    assert (tmp_path / "memory.db-journal").read_bytes() == b""


def test_the_values_of_one_private_round_are_erased_and_no_others(memory: WorkerMemory, tmp_path: Path) -> None:
    made = order()
    values = memory.begin(made)
    for name in ("first/secret", "second/secret", "first"):
        values.put(name, name.encode(), durable=True)
        values.put(f"{name}/held", b"value")
    other = memory.begin(order(run="run-2"))
    other.put("first/secret", b"of another run", durable=True)
    memory.forget(made.manifest, "")
    memory.forget(made.manifest, "first/")
    assert [values.get(name) for name in ("first/secret", "first/secret/held", "first/held")] == [None] * 3
    assert [values.get(name) for name in ("second/secret", "first")] == [b"second/secret", b"first"]
    assert values.get("second/secret/held") == b"value"
    assert other.get("first/secret") == b"of another run"


def test_a_private_round_ends_a_day_after_its_reply_by_the_own_clock_whatever_its_deadline(tmp_path: Path) -> None:
    path, made = tmp_path / "memory.db", order(deadline=NOW + timedelta(days=1000))
    first = WorkerMemory(path, KEY, lambda: NOW)
    values = first.begin(made)
    for name in ("first/secret", "second/secret"):
        values.put(name, b"value", durable=True)
    first.end_after(made.manifest, "first/", timedelta(days=1))
    first.sweep(NOW)
    assert values.get("first/secret") == b"value"
    first.clock = lambda: NOW + timedelta(hours=20)
    first.end_after(made.manifest, "first/", timedelta(days=1))  # the same reply once more
    first.close()
    second = WorkerMemory(path, KEY, lambda: NOW + timedelta(hours=25))
    second.sweep(NOW)
    values = second.begin(made)
    assert (values.get("first/secret"), values.get("second/secret")) == (None, b"value")
    values.put("first/secret", b"of a later step", durable=True)
    second.sweep(NOW)
    assert values.get("first/secret") == b"of a later step", "it ends once"
    second.close()


def test_a_private_round_awaits_no_question_once_the_deadline_of_the_last_one_is_over(
    memory: WorkerMemory, tmp_path: Path
) -> None:
    """A coordinator that has given it up says nothing; the values themselves are erased a day later."""
    longest, newest = NOW + timedelta(hours=3), NOW + timedelta(hours=1)
    values = memory.begin(order(deadline=longest))
    values.put("held", b"value")
    assert not memory.awaits_question(NOW), "what is kept in memory alone is no private round"
    values.put("kept", b"value", durable=True)
    assert memory.awaits_question(longest)
    memory.begin(order(0, deadline=newest))
    assert memory.awaits_question(newest + NEXT_QUESTION_WITHIN / 2)
    assert not memory.awaits_question(newest + NEXT_QUESTION_WITHIN)
    again = WorkerMemory(tmp_path / "memory.db", KEY)
    for awaits in (again.awaits_question, partial(awaits_question, tmp_path / "memory.db")):
        assert awaits(longest), "after a restart, the longest deadline counts"
        assert not awaits(longest + NEXT_QUESTION_WITHIN)
    again.close()
    memory.erase_all()
    assert not memory.awaits_question(NOW)
    assert (values.get("kept"), values.get("held")) == (None, None)
    values.put("kept", b"of work that was under way", durable=True)
    assert not awaits_question(tmp_path / "nothing.db", NOW)


def test_a_private_round_that_the_disk_does_not_let_go_is_erased_later(memory: WorkerMemory, tmp_path: Path) -> None:
    made = order()
    values = memory.begin(made)
    values.put("first/secret", b"value", durable=True)
    with memory._file.using() as connection:
        connection.execute("PRAGMA busy_timeout = 0")
    with closing(sqlite3.connect(tmp_path / "memory.db", isolation_level=None)) as another:
        another.execute("BEGIN IMMEDIATE")
        memory.forget(made.manifest, "first/")
        assert values.get("first/secret") == b"value"
    memory.sweep(NOW)
    assert values.get("first/secret") is None
    values.put("first/secret", b"of a later step", durable=True)
    memory.sweep(NOW)
    assert values.get("first/secret") == b"of a later step", "it is erased once"


def test_a_value_of_another_key_or_place_is_not_read(memory: WorkerMemory, tmp_path: Path) -> None:
    path = tmp_path / "memory.db"
    memory.begin(order()).put("kept", b"value", durable=True)
    memory.close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE kept SET name = 'moved'")
    for key in (KEY, Ed25519PrivateKey.generate()):
        second = WorkerMemory(path, key)
        with pytest.raises(WorkerHomeError, match="damaged"):
            second.begin(order()).get("moved")
        second.close()


def test_a_database_that_is_damaged_later_is_named(memory: WorkerMemory, tmp_path: Path) -> None:
    memory.answer(order(7))
    (tmp_path / "memory.db").write_bytes(b"no database" * 1000)
    with pytest.raises(WorkerHomeError, match=r"memory\.db is damaged"):
        memory.answer(order(0))


# --- what was answered


def test_a_question_is_answered_once_in_an_attempt_also_after_a_restart(memory: WorkerMemory, tmp_path: Path) -> None:
    memory.answer(order(7))
    memory.answer(order(7))  # the same question gets the same answer
    memory.answer(order(0))  # another question of the attempt
    memory.close()
    second = WorkerMemory(tmp_path / "memory.db", KEY)
    second.answer(order(7))
    frozen = UnsharedParameters(frozen=["head.*"])
    changed: list[dict[str, Any]] = [
        {"base_model": digest(b"another")},
        {"inputs": [Input(name="note")]},
        {"seed": 1},
        {"unshared": frozen},
    ]
    for other in (order(8), *(order(7, **change) for change in changed)):
        with pytest.raises(Declined, check=lambda error: error.reason == "answered"):
            second.answer(other)
    assert not second.answered(order(8, attempt=1))
    second.answer(order(8, attempt=1))
    assert second.answered(order(8, attempt=1))
    second.close()


# --- lanes


def ask_ticket(scene: Scene, number: int) -> None:
    asked = scene.order(number, kind="ticket")
    asked.work = UInt64Value(value=12).SerializeToString()
    del asked.rows[:]
    asked.rows.append(Row(name="answer", dtype="U32", length=1))
    scene.coordinator.assign(asked)


class Patient(TorchTrainer):
    """Begins to train, and goes on once the test lets it."""

    def prepare(self) -> None:
        super().prepare()
        self.began, self.may_go_on = threading.Event(), threading.Event()

    def train(self, model: Vector, plan: TrainingPlan) -> Array:
        self.began.set()
        self.may_go_on.wait(60)
        return super().train(model, plan)


def test_a_message_of_a_protocol_is_answered_while_a_training_goes_on(scene: Scene, tmp_path: Path) -> None:
    scene.train(steps=1)
    trainer = Patient(task("digits"), task("digits").load(DataSource()), threads=1)
    running = scene.start(offers={"digits": trainer})
    try:
        wait_for(trainer.began.is_set, "the training to begin")
        ask_ticket(scene, 1)
        wait_for(lambda: len(scene.coordinator.submissions) == 1, "the answer to the ticket")
        (submission,) = scene.coordinator.submissions
        assert submission.manifest.assignment_id == "assignment-1"
        path = tmp_path / "payload"
        path.write_bytes(submission.payload)
        assert update_rows(path)["answer"].read().tolist() == [144]
        assert [event["kind"] for event in running.events("done")] == ["ticket"]
        trainer.may_go_on.set()
        wait_for(lambda: len(scene.coordinator.submissions) == 2, "the update")
        assert [event["kind"] for event in running.events("done")] == ["ticket", "train"]
    finally:
        trainer.may_go_on.set()
        running.stop()


def test_work_whose_memory_the_disk_does_not_take_is_declined(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    trainer = TorchTrainer(task("digits"), task("digits").load(DataSource()), threads=1)
    running = scene.attending(offers={"digits": trainer})
    with files_of_at_most(running.home.memory.stat().st_size + 4096):
        ask_ticket(scene, 1)
        declined = running.wait_for("declined")[0]
    assert declined["reason"] == "disk"
    assert "make room on this worker's disk" in declined["message"]
    assert "memory.db cannot be written: disk I/O error" in declined["message"]
    ask_ticket(scene, 2)
    running.wait_for("receipt")
    running.stop()
    assert all(record.exc_info is None for record in caplog.records)
