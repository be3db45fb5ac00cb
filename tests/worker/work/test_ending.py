"""Code of an owner's that ends the process, by an exception or without one: at the start, in a lane, before a restart.

The worker tells what happened, and goes on where it can.
"""

import json
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from federation.monitoring.events import Events
from federation.owners_code import LOGGED
from federation.plugins import PluginError
from federation.tasks import DataError, DataSource, Part, TaskError, task
from federation.training import TrainingStopped
from federation.training.reasons import NOT_ASKED
from federation.training.torch_trainer import TorchTrainer
from federation.training.trainers import TrainerChoice
from federation.trust.envelope import sign
from federation.v1.common_pb2 import AssignmentManifest
from federation.work.base import Lane
from fedpareto import simulate
from fedpareto.cli import main as command
from fedpareto.simulation import SimulationError
from tests.command_lines import failure
from tests.few import few_of
from tests.harness import Process
from tests.owners_code.ending import TASKS, TRAINERS, WHY, exits
from tests.paths import OWNERS_CODE
from tests.worker.scene import ALLOWED, KEY, Scene, training
from tests.worker.work.scene import scene as members
from worker.home import WorkerHomeError
from worker.service import prepare_offers
from worker.site.assignment_checks import CheckedAssignment, Declined
from worker.site.roster import RosterError
from worker.threads import WorkerEndedError, WorkerThreads
from worker.work.begun import DIED, MAX_NOTES, BegunWork
from worker.work.own_errors import SILENT

SPEC = 'name = "ends"\ntask = "TASK"\nrounds = 1\nalgorithm.name = "fedavg"\nsimulation.clients = 2\ntrain.steps = 1\n'

REHEARSED = [name for name in (*TASKS, *TRAINERS) if name != "buffers"]  # PyTorch's trainer asks its module for them
SIMULATED = [name for name in (*TASKS, *TRAINERS) if name not in ("load", "sample", "try_out", "close")]


@pytest.fixture(autouse=True)
def _code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(OWNERS_CODE)


# --- at the start


def owned(name: str) -> tuple[str, str]:
    """The task and the trainer of which one ends the process."""
    return ("ending:Tiny", f"ending:{name}") if name in TRAINERS else (f"ending:{name}", "torch")


@pytest.mark.parametrize("name", few_of(REHEARSED, "init", "sample", "prepare", "close"))
def test_a_command_fails_in_words_whichever_of_its_owners_methods_ends_the_process(name: str) -> None:
    learned, trainer = owned(name)
    failed = failure("worker", "run", "--rehearse", "--task", learned, "--set", f"trainer={trainer}")
    assert failed.code == 1
    assert f"SystemExit: {WHY}" in failed.message
    assert "ending.py, line" in failed.message


@pytest.mark.parametrize("name", few_of(SIMULATED, "losses", "train"))
def test_so_does_a_simulation(name: str) -> None:
    learned, trainer = owned(name)
    with pytest.raises((TaskError, PluginError, DataError, SimulationError), match=f"SystemExit: {WHY}"):
        simulate(SPEC.replace("TASK", learned), trainer=trainer, threads=1, progress=lambda _: None)


def test_a_command_says_what_ended_it_where_nothing_else_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def program() -> Any:
        return lambda: exec(compile("raise SystemExit(0)", __file__, "exec"))

    monkeypatch.setattr(command, "program", program)
    with pytest.raises(SystemExit, check=lambda ended: ended.code == 1):
        command.main()
    assert "code of your own tried to end the command: SystemExit: 0" in capsys.readouterr().err


# --- in a lane


class Raising(TorchTrainer):
    """Raises what a test says when it trains, or when it is asked for its samples."""

    in_training: BaseException | None = None
    when_asked: BaseException | None = None

    def train(self, *given: Any) -> Any:
        if self.in_training is not None:
            raise self.in_training
        return super().train(*given)

    @property
    def samples(self) -> int:
        if self.when_asked is not None:
            raise self.when_asked
        return super().samples


def raising() -> Raising:
    digits = task("digits")
    return Raising(digits, digits.load(DataSource(part=Part(0, 8))), "cpu", 1)


class Panic(BaseException):
    """As other languages raise it."""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (SystemExit(WHY), f"SystemExit: {WHY}"),
        (SystemExit(0), "SystemExit: 0"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (Panic("index out of bounds"), "Panic: index out of bounds"),
        (TrainingStopped(), NOT_ASKED),
    ],
)
def test_what_would_end_a_lane_is_declined_and_the_worker_goes_on(
    scene: Scene, error: BaseException, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = raising()
    scene.attending(offers={"digits": trainer})
    trainer.in_training = error
    scene.assign()
    line = Raising.train.__code__.co_firstlineno + 2
    where = f"{type(error).__name__} at {__name__}:{line}; {LOGGED}"
    told = NOT_ASKED if isinstance(error, TrainingStopped) else where
    assert scene.declined() == ("assignment-0", "failed", told)
    trainer.in_training = None
    scene.receipts(1, 1)
    if not isinstance(error, TrainingStopped):
        assert f"assignment assignment-0: {message}" in caplog.messages


def test_the_owner_is_told_once_of_an_accuracy_that_is_no_share(scene: Scene) -> None:
    trainer = raising()
    trainer.task.correct = lambda output, y: 100.0 * (output.argmax(dim=1) == y)  # type: ignore[method-assign]
    running = scene.attending(offers={"digits": trainer})
    for number in range(2):
        scene.evaluate("test", number=number)
        running.wait_for("receipt", number + 1)
    (told,) = running.events("metric")
    assert told["metric"] == "test/accuracy"
    assert "an accuracy is a share in [0, 1], so it is left out" in told["message"]


def test_what_would_end_the_attendance_is_declined_without_its_text(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = raising()
    scene.attending(offers={"digits": trainer})
    trainer.when_asked = SystemExit(WHY)
    scene.assign()
    assert scene.declined() == ("assignment-0", "failed", SILENT)
    trainer.when_asked = None
    scene.receipts(1, 1)
    assert f"an assignment cannot be checked: SystemExit: {WHY}" in caplog.messages


@pytest.mark.parametrize(
    ("work", "says"),
    [(lambda: sys.exit(0), "SystemExit: 0"), (lambda: None, "the lane thread has ended, and nobody asked it to")],
)
def test_threads_that_end_by_themselves_are_a_failure(work: Callable[[], None], says: str) -> None:
    with WorkerThreads() as threads:
        threads.start("lane", work)
        threads.wait()
    assert isinstance(threads.failure, WorkerEndedError)
    assert says in str(threads.failure)


class Waiting:
    """The work of a thread, until it is stopped; `ended` has the names of those that were, in their order."""

    def __init__(self, name: str, ended: list[str]) -> None:
        self.name, self.ended, self.stopped = name, ended, threading.Event()

    def begin(self, threads: WorkerThreads) -> None:
        threads.start(self.name, partial(self.stopped.wait, 60), self.stop)

    def stop(self) -> None:
        self.ended.append(self.name)
        self.stopped.set()


def test_threads_that_have_begun_end_in_reverse_order_if_another_cannot_begin() -> None:
    ended, threads = list[str](), WorkerThreads()
    with suppress(RuntimeError), threads:
        for name in ("attendance", "submission"):
            Waiting(name, ended).begin(threads)
        threads.start("policy", partial(threads.ending.wait, 60))
        raise RuntimeError
    assert ended == ["submission", "attendance"]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("worker-")]
    assert threads.failure is None


@pytest.mark.parametrize("name", ["roster", "rounds", "privacy", "progress", "log", "memory", "begun", "runs"])
def test_a_worker_that_cannot_be_made_closes_its_files_and_its_trainers(scene: Scene, name: str) -> None:
    trainer, closed = raising(), list[bool]()
    trainer.close = lambda: closed.append(True)  # type: ignore[method-assign]
    directory = scene.home.directory
    directory.mkdir(exist_ok=True)
    getattr(scene.home, name).write_bytes(b"damaged" * 100)
    with pytest.raises((WorkerHomeError, RosterError), match=r"damaged|TOML"):
        scene.start(offers={"digits": trainer})
    assert closed == [True]
    assert not [file.path for file in psutil.Process().open_files() if Path(file.path).is_relative_to(directory)]


def test_trainers_are_closed_if_a_later_task_cannot_be_offered() -> None:
    trainers = {"ending:Tiny": TrainerChoice("ending:close")}
    with pytest.raises(PluginError, match=f"closing it failed: SystemExit: {WHY}") as caught:
        prepare_offers(["ending:Tiny", "no-such-task"], DataSource(), device="cpu", threads=1, trainers=trainers)
    assert "no-such-task" in repr(caught.value.__cause__.__context__)  # type: ignore[union-attr]


def test_a_worker_that_is_asked_to_end_says_what_could_not_be_closed(scene: Scene) -> None:
    trainer = raising()
    trainer.close = exits  # type: ignore[method-assign]
    running = scene.attending(offers={"digits": trainer})
    running.stop()
    assert isinstance(running.failure, PluginError)
    assert f"closing it failed: SystemExit: {WHY}" in str(running.failure)


# --- without an exception


def test_work_in_which_the_process_dies_is_tried_once_more_and_then_declined(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = tmp_path / "ending"
    monkeypatch.setenv("ENDING", str(word))
    word.write_text("exit")
    command = ["-m", "fedpareto", "worker", "run", "--home", scene.joined(), "--set", "threads=1", "--set", "part=1/8"]
    command += ["--task", "digits", "--set", "trainer=ending:Ending", "--code", str(OWNERS_CODE)]
    worker = Process(command, tmp_path / "worker.log")
    scene.assign()
    line = exits.__code__.co_firstlineno + 1
    assert scene.declined() == ("assignment-0", "failed", f"SystemExit at ending:{line}; {LOGGED}")
    scene.coordinator.open.clear()
    word.write_text("die")
    scene.assign(1)
    worker.popen.wait(60)
    noted = scene.home.begun.read_text()
    assert json.loads(noted) == {"format": 1, "work": {"assignment-1": {"tries": 1, "session": None}}}
    running = scene.start()
    running.wait_for("receipt")
    assert (len(running.events("crashed")), scene.home.begun.exists()) == (1, False)
    running.stop()
    scene.coordinator.open.clear()
    scene.home.begun.write_text(noted.replace("assignment-1", "assignment-2").replace('"tries": 1', '"tries": 2'))
    scene.assign(2)
    scene.attending()
    assert scene.declined(2) == ("assignment-2", "crashed", f"{DIED}; it was tried 2 times")
    scene.receipts(1, 3)


FEDERATED = """\
task = "two-digits"
rounds = 1
algorithm.name = "fedavg-n"
selection = { minimum = 5, quorum = 0.6, pool = "enrolled", grace_seconds = 60.0 }
train.steps = 1
evaluate = { every = 0, splits = ["test"] }
privacy.secure = "MODE"
"""


@pytest.mark.full
def test_in_a_federation_a_member_declines_or_in_private_rounds_counts_and_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = tmp_path / "ending"
    monkeypatch.setenv("ENDING", str(word))
    word.write_text("exit")
    with members(tmp_path, 5, policy="") as made:
        fed, me = made.fed, made.clients[0]
        fed.workers[me].stop()

        def start() -> Process:
            return made.work(me, "--set", "trainer=ending:Ending", "--code", str(OWNERS_CODE))

        def declined(run: str) -> str:
            first = "select phase_id from phases join rounds using (round_id) where run_id = :run and phases.number = 0"
            query = f"select reason from assignments where client_id = :client and phase_id in ({first})"
            return str(fed.query(query, client=me, run=run)[0][0])

        worker = start()
        fed.attending(me)
        run = fed.completed("exits", FEDERATED.replace("MODE", "off"))
        assert declined(run) == "failed"
        for name, mode in (("dies", "off"), ("dies-in-private", "sum")):
            word.write_text("die")
            run = fed.submit(name, FEDERATED.replace("MODE", mode))
            for _ in range(2):
                worker.popen.wait(60)
                worker = start()
            fed.wait_completed(run)
            assert declined(run) == ("crashed" if mode == "off" else "")
            assert worker.popen.poll() is None
        assert "two-digits: 1 computation of private rounds failed in a row" in fed.fedpareto(
            "worker", "failures", "--home", str(fed.directory / me)
        )
        assert worker.stop() == 0
        assert fed.admin("audit", "verify")["problems"] == []


class Owner:
    """A worker's notes over several processes, of which each dies in the work that it has begun."""

    def __init__(self, home: Path) -> None:
        self.path = home / "begun.json"
        self.stack = ExitStack()

    def notes(self) -> BegunWork:
        return BegunWork(self.path, Events())

    def dies(self, order: CheckedAssignment) -> BegunWork:
        """A process begins the work and dies in it."""
        notes = self.notes()
        notes.check_tries(order)
        self.stack.enter_context(notes.noted(order))
        return notes


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    return Owner(tmp_path)


def order_of(asked: AssignmentManifest, **work: Any) -> CheckedAssignment:
    made: Any = SimpleNamespace(**{"lane": Lane.COMPUTE, "conceals": False, "session_vector": lambda: None, **work})
    return CheckedAssignment(sign(asked, KEY), asked, made, ALLOWED["digits"].shape, (), datetime.now(UTC))


def test_the_note_of_work_that_ends_is_gone_and_that_of_another_process_counts(owner: Owner) -> None:
    order = order_of(training())
    for raised in (None, ValueError(), SystemExit(), TrainingStopped()):
        with suppress(BaseException), owner.notes().noted(order) as died:
            assert (died, owner.path.exists()) == (False, True)
            if raised is not None:
                raise raised
        assert not owner.path.exists()
    owner.dies(order)
    with owner.notes().noted(order):  # the second try succeeds
        pass
    assert not owner.path.exists()


def test_a_worker_that_is_asked_to_end_takes_back_the_notes_of_what_it_is_doing(owner: Owner) -> None:
    order = order_of(training())
    owner.dies(order).stop()
    assert not owner.path.exists()
    owner.dies(order)
    owner.dies(order).stop()
    owner.dies(order)
    with pytest.raises(Declined, match=f"crashed: {DIED}; it was tried 2 times"):
        owner.dies(order)


def test_messages_of_a_protocol_are_not_noted_and_notes_are_bounded(owner: Owner) -> None:
    with owner.notes().noted(order_of(training(), lane=Lane.PROTOCOL)) as died:
        assert (died, owner.path.exists()) == (False, False)
    for number in range(MAX_NOTES + 5):
        asked = training()
        asked.assignment_id = f"assignment-{number}"
        owner.dies(order_of(asked))
    kept = json.loads(owner.path.read_text())["work"]
    assert (len(kept), f"assignment-{MAX_NOTES + 4}" in kept) == (MAX_NOTES, True)


def test_a_damaged_file_of_notes_is_told_with_what_to_do(owner: Owner) -> None:
    owner.path.write_text('{"format": 1, "work": {"assignment-0": {"tries": "many"}}}')
    with pytest.raises(
        WorkerHomeError, match=r"begun\.json is damaged .*: move it away; work in which the last process"
    ):
        owner.notes()
