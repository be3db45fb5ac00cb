"""Workers in threads of this process, and a scripted coordinator that asks them for work."""

import io
import json
import random
import resource
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from federation.digests import digest
from federation.monitoring.events import Events
from federation.sketches import sketch
from federation.spec.objective_names import Targets
from federation.spec.train_section import LocalSgd
from federation.statistics.scale import ScaleLayer
from federation.tasks import DataSource, Part, initial_model, task
from federation.training.trainer import Trainer
from federation.trust.envelope import sign
from federation.trust.key_chain import CoordinatorKeys
from federation.trust.member_files import MemberFiles
from federation.v1.common_pb2 import AssignmentManifest, EvaluateWork, JacobianWork, Row, SignedEnvelope
from federation.vectors import Layout, Tensor, to_bytes
from federation.work.base import Result, Shape
from federation.work.site import Site
from fedpareto.cli.main import app
from tests.harness import Process, wait_for
from tests.scripted import CLIENT, FEDERATION, ScriptedCoordinator, assignment, files_in, opened, scripted
from tests.trained import train
from tests.works import set_train, set_work
from worker.config import Notify
from worker.connection.attendance import AttendanceError
from worker.event_counts import EventCounts
from worker.home import MEMBER_FILE, WorkerHome
from worker.notifier import Notifier
from worker.service import Worker, prepare_offers
from worker.site.assignment_checks import Declined, check_assignment
from worker.site.policy_file import Policy, PolicyError, WorkLimits
from worker.site.run_requests import RunRequest

SOURCE = DataSource(part=Part(0, 8))
DOCUMENT = b'name = "trial"\ntask = "digits"\nrounds = 2\nalgorithm.name = "fedavg"\n'
"""The specification of a run that asks."""


def run_request(run: str = "run-1", **changes: Any) -> RunRequest:
    """A run as a worker keeps it after it has asked."""
    fields = {"spec": digest(DOCUMENT), "initial_model": digest(b"model"), "name": "trial", "task": "digits"}
    fields |= {"submitted_by": "alice", "asked": "2026-01-01T00:00:00+00:00", "owner": "", "words": "", "decided": ""}
    return RunRequest(run=run, **(fields | {"document": DOCUMENT} | changes))


KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
LAYOUT = Layout((Tensor("weight", (4,)),))


class Trained:
    shape, samples = Shape(LAYOUT, ("left", "right"), ("left", "right")), 50
    buffers: frozenset[str] = frozenset()
    scale_layer: ScaleLayer | None = None
    unfit = ""


ALLOWED: Any = {"digits": Trained()}


def training(**changes: Any) -> AssignmentManifest:
    """An assignment to train a small model, with these fields of the work changed."""
    made = assignment(LAYOUT, bytes(LAYOUT.file_bytes), 3)
    set_train(made, **changes)
    return made


def reason(
    asked: AssignmentManifest,
    newest: int | None = None,
    site: Site = Site(),  # noqa: B008 - frozen
    kept: Sequence[RunRequest] = (),
    **limits: Any,
) -> str:
    """Why an assignment is declined; empty when it is not. `kept` is the run, with each specification that asked."""

    class Member:
        federation_id, client_id = FEDERATION, CLIENT
        coordinator = CoordinatorKeys(FEDERATION, KEY.public_key())

    try:
        check_assignment(
            sign(asked, KEY),
            member=Member(),  # type: ignore[arg-type]
            offers=ALLOWED,
            limits=WorkLimits(**limits),
            site=site,
            newest_round=lambda run: newest,
            now=datetime.now(UTC),
            consent=lambda _: kept,
        )
    except Declined as declined:
        return declined.reason
    return ""


def gradients(batch_size: int) -> AssignmentManifest:
    """An assignment to give the gradients of both objectives."""
    asked = training()
    del asked.rows[:]
    set_work(asked, JacobianWork(batch_size=batch_size, objectives=("left", "right"), sketch="exact", budget=1))
    rows = sketch("exact", d=LAYOUT.size, objectives=("left", "right")).rows(("left", "right"))
    asked.rows.extend(Row(name=name, dtype="F32", length=length) for name, length in rows)
    return asked


def policy_refused(path: Path, text: str) -> str:
    """Writes a policy that cannot be used; returns the message of its error."""
    path.write_text(text)
    with pytest.raises(PolicyError) as caught:
        Policy.load(path)
    return str(caught.value)


def soon(*_: float) -> float:
    """The pause before a worker tries again."""
    return 0.01


def notifier(
    events: Events, *command: str, seconds: float = 30, environment: Mapping[str, str] | None = None
) -> Notifier:
    """What tells an owner, without pauses between two commands."""
    return Notifier(
        Notify(command=command, seconds=seconds),
        events,
        federation_id=FEDERATION,
        client_id=CLIENT,
        environment={"PATH": "/usr/bin:/bin", **(environment or {})},
        pause=0.0,
    )


class Running:
    """A worker in a thread."""

    def __init__(
        self,
        home: WorkerHome,
        member: MemberFiles,
        offers: dict[str, Trainer],
        *,
        policy: Policy | None = None,
        uniform: Callable[[float, float], float] | None = None,
        notify: Sequence[str] = (),
        **options: Any,
    ) -> None:
        home.directory.mkdir(exist_ok=True)
        self.out = io.StringIO()
        self.home = home
        self.member = member
        self.failure: Exception | None = None
        events = Events(self.out, home.directories)
        self.counts = EventCounts()
        events.listen(self.counts.hear)
        self.notifier = notifier(events, *notify)
        self.worker = Worker(
            home=home,
            member=member,
            offers=offers,
            device="cpu",
            events=events,
            uniform=uniform or random.Random(0).uniform,
            policy=policy or Policy.load(home.policy),
            **options,
        )
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            with self.notifier:
                self.worker.run()
        except Exception as error:
            self.failure = error

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.out.getvalue().splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in lines if line["event"] == name]

    def wait_for(self, name: str, count: int = 1) -> list[dict[str, Any]]:
        def there() -> list[dict[str, Any]] | None:
            found = self.events(name)
            return found if len(found) >= count else None

        try:
            return wait_for(there, f"event {name}", 60)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.out.getvalue()} {self.failure!r}") from None

    def ended(self) -> str:
        """Waits until the worker has given up attending; returns its error."""
        self.thread.join(60)
        assert isinstance(self.failure, AttendanceError)
        return str(self.failure)

    def spooled(self) -> list[str]:
        return files_in(self.home.spool)

    def wait_spooled(self) -> None:
        """Waits until no reply waits for its receipt."""
        wait_for(lambda: not self.spooled(), "the spool to empty")

    def stop(self) -> None:
        self.worker.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()


class Scene:
    """A coordinator, and the workers of one member, all in one home."""

    def __init__(
        self,
        coordinator: ScriptedCoordinator,
        home: Path,
        offers: dict[str, Trainer],
        model: tuple[Layout, bytes],
        task: str = "digits",
    ) -> None:
        self.task = task
        self.coordinator = coordinator
        coordinator.initial_model = digest(model[1])
        self.member = coordinator.member()
        self.home = WorkerHome(home)
        self.offers = offers
        self.model = model
        self.started: list[Running] = []

    # the workers

    def start(self, **options: Any) -> Running:
        """Starts a worker; the options are those of `Running`."""
        given = {"home": self.home, "member": self.member, "offers": self.offers, "uniform": soon, **options}
        self.started.append(Running(**given))
        return self.started[-1]

    def attending(self, **options: Any) -> Running:
        """Starts a worker that attends."""
        running = self.start(**options)
        running.wait_for("attending")
        return running

    def worked(self, **options: Any) -> Running:
        """Assigns a training, and starts a worker that does it and gets its receipt."""
        self.assign()
        running = self.start(**options)
        running.wait_for("receipt")
        return running

    def joined(self) -> str:
        """Saves the membership in the home, for commands; returns the path of the home."""
        if not (self.home.directory / MEMBER_FILE).exists():
            self.member.save(self.home.directory)
        return str(self.home.directory)

    def models(self) -> list[str]:
        """The files of models that the worker has fetched."""
        return [path.name for path in self.home.cache.rglob("*") if path.is_file()]

    # what they are asked

    def order(self, number: int = 0, **changes: Any) -> AssignmentManifest:
        """An assignment to train for one step, with these fields changed."""
        return self.coordinator.assignment(*self.model, number, **{"task": self.task, **changes})

    def assign(self, number: int = 0, **changes: Any) -> SignedEnvelope:
        return self.coordinator.assign(self.order(number, **changes))

    def receipts(self, count: int, number: int = 0, **changes: Any) -> None:
        """Assigns a training. Waits until the newest worker has this number of receipts."""
        self.assign(number, **changes)
        self.started[-1].wait_for("receipt", count)

    def train(self, number: int = 0, run: str = "run-1", **fields: Any) -> AssignmentManifest:
        """Assigns a training with these fields of the work changed."""
        asked = self.order(number, run_id=run)
        set_train(asked, **fields)
        self.coordinator.assign(asked)
        return asked

    def evaluate(self, *splits: str, number: int = 0, **changes: Any) -> AssignmentManifest:
        """Assigns an evaluation."""
        asked = self.order(number, **{"max_payload_bytes": 0, **changes})
        set_work(asked, EvaluateWork(splits=splits))
        del asked.rows[:]
        self.coordinator.assign(asked)
        return asked

    # what they answer

    def declined(self, count: int = 1) -> tuple[str, str, str]:
        """Waits for so many declines; returns assignment, reason and message of the last one."""
        wait_for(lambda: len(self.coordinator.declines) >= count, "a decline", 60)
        assert len(self.coordinator.declines) == count
        last = self.coordinator.declines[-1]
        return last.assignment_id, last.reason, last.message

    def turned_down(self, asked: AssignmentManifest) -> tuple[str, str, str]:
        """Assigns what a worker declines that is started then; returns what `declined` returns."""
        self.coordinator.assign(asked)
        self.start()
        return self.declined()

    def wait_submitted(self) -> None:
        wait_for(lambda: bool(self.coordinator.submissions), "the upload")

    def reply(self, number: int = 0) -> Any:
        """The manifest of a reply that was handed in, verified with the member's key."""
        return opened(self.coordinator.submissions[number], self.member)

    def answers(self, count: int) -> list[tuple[str, str, str]]:
        """Waits for so many answers to runs that asked; returns the run, the answer and the message of each."""
        wait_for(lambda: len(self.coordinator.consents) >= count, f"{count} answers")
        return [(said.run_id, said.answer, said.message) for said in self.coordinator.consents]


Kind = TypeVar("Kind", bound=Scene)


@contextmanager
def serving(scene: Kind) -> Iterator[Kind]:
    """The scene, whose workers end at last."""
    yield scene
    for running in scene.started:
        running.stop()


@pytest.fixture(scope="module")
def offers() -> dict[str, Trainer]:
    return prepare_offers(["digits"], SOURCE, device="cpu", threads=1)[0]


@pytest.fixture(scope="module")
def model() -> tuple[Layout, bytes]:
    layout, vector = initial_model(task("digits"), 3)
    return layout, to_bytes(layout, vector)


@pytest.fixture
def coordinator() -> Iterator[ScriptedCoordinator]:
    with scripted() as made:
        yield made


@pytest.fixture
def scene(
    coordinator: ScriptedCoordinator, offers: dict[str, Trainer], model: tuple[Layout, bytes], tmp_path: Path
) -> Iterator[Scene]:
    with serving(Scene(coordinator, tmp_path / "home", offers, model)) as made:
        yield made


def trained(
    trainer: Trainer, model: tuple[Layout, bytes], *, steps: int = 1, round_: int = 0, targets: Targets | None = None
) -> Result:
    """What a worker's training on the scripted coordinator's assignment gives."""
    layout, data = model
    base = np.frombuffer(data[len(layout.header) :], dtype=np.float32)
    work = LocalSgd(steps=steps, batch_size=10, learning_rate=0.1)
    return train(trainer, base, work, seed=7, round=round_, client_id=CLIENT, targets=targets)


def command(*arguments: str, code: int = 0) -> str:
    """Runs `fedpareto worker`; returns what it prints, and its error."""
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["worker", *arguments])
    assert done.exit_code == code, done.output + str(done.exception)
    return done.output + str(done.exception or "")


@contextmanager
def files_of_at_most(count: int) -> Iterator[None]:
    """No file of this process may grow beyond a number of bytes: the kernel refuses it as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def events(worker: Process) -> list[dict[str, Any]]:
    lines = worker.text.splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
