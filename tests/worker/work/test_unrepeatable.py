"""Members whose tasks have operations without a deterministic kernel take part, and their replies say so."""

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from federation.spec.computation import Ability
from federation.training.torch_trainer import TorchTrainer
from tests.harness import Federation, federation, wait_for
from tests.owners_code.unpooled_task import Rounded
from tests.paths import OWNERS_CODE
from tests.worker.scene import Scene
from tests.worker.work.scene import POLICY, Members

pytestmark = pytest.mark.usefixtures("code")
CLIENTS = tuple(f"m{number}" for number in range(5))
UNPOOLED, ROUNDED = "unpooled_task:Unpooled", "unpooled_task:Rounded"
SPEC = """\
task = "{task}"
rounds = {rounds}
algorithm = {algorithm}
selection.minimum = {members}
train = {{ steps = 2, batch_size = 20, precision = "{precision}" }}
evaluate = {{ every = 1, splits = ["test"] }}
"""
FEDAVG = '{ name = "fedavg-n" }'
TWO_WAY = '{ name = "fedcmoo", sketch = "svd-two-way" }'
NOTHING_FOR = "PyTorch has no deterministic kernel for "


def spec(task: str = UNPOOLED, algorithm: str = FEDAVG, precision: str = "float32", **more: Any) -> str:
    given = {"rounds": 1, "members": len(CLIENTS), **more}
    return SPEC.format(task=task, algorithm=algorithm, precision=precision, **given)


@pytest.fixture(scope="module")
def code() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDPARETO_CODE", str(OWNERS_CODE))
        yield


@contextmanager
def working(directory: Path, clients: tuple[str, ...], *tasks: str) -> Iterator[Federation]:
    with federation(directory) as fed:
        fed.serve()
        members = Members(fed, clients)
        members.enrol(POLICY)
        more = [part for task in tasks[1:] for part in ("--task", task)]
        for number, client in enumerate(clients, 1):
            fed.work(client, "--set", f"part={number}/{len(clients)}", *more, task=tasks[0])
        fed.attending(*clients)
        yield fed


def marks(fed: Federation, run: str) -> list[bool]:
    """The mark `unrepeatable` of each reply, in the order of the rounds."""
    return [
        bool(row[0])
        for row in fed.query(
            "select r.unrepeatable from replies r join assignments a on a.assignment_id = r.assignment_id "
            "join phases p on p.phase_id = a.phase_id join rounds o on o.round_id = p.round_id "
            "where o.run_id = :run order by o.number, p.number",
            run=run,
        )
    ]


def reasons(fed: Federation, run: str) -> set[str]:
    return {
        row[0]
        for row in fed.query(
            "select a.reason from assignments a join phases p on p.phase_id = a.phase_id "
            "join rounds o on o.round_id = p.round_id where o.run_id = :run",
            run=run,
        )
    }


def abilities(fed: Federation, task: str) -> Mapping[str, bool]:
    """Which clients say that they can repeat the work of a task."""
    return {
        client["client_id"]: Ability.REPEATABLE in offered.get("abilities", [])
        for client in fed.admin("clients")["clients"]
        for offered in client["tasks"]
        if offered["task"] == task
    }


def test_a_worker_answers_with_a_mark_once_its_trainer_cannot_repeat_its_work(scene: Scene) -> None:
    learned = Rounded()
    learned.name = "digits"
    scene.offers = {"digits": TorchTrainer(learned, scene.offers["digits"].data, "cpu", 1)}
    running = scene.start()
    for number, precision in enumerate(("float32", "bf16", "float32")):
        scene.train(number, precision=precision)
        running.wait_for("receipt", number + 1)
    assert [submission.manifest.unrepeatable for submission in scene.coordinator.submissions] == [False, True, True]
    running.wait_for("attending", 2)  # it attends anew, and tells the coordinator
    assert [Ability.REPEATABLE in hello.tasks[0].abilities for hello in scene.coordinator.hellos] == [True, False]
    scene.train(3)
    running.wait_for("receipt", 4)


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with working(tmp_path_factory.mktemp("five"), CLIENTS, UNPOOLED, ROUNDED) as fed:
        yield fed


@pytest.mark.full
def test_members_train_and_their_replies_are_marked(five: Federation) -> None:
    assert abilities(five, UNPOOLED) == dict.fromkeys(CLIENTS, False)  # the start check has found it
    run = five.completed("segments", spec(rounds=2))
    assert marks(five, run) == [True] * 20
    assert [five.workers[client].text.count(f"{NOTHING_FOR}max_unpool") for client in CLIENTS] == [1] * 5


@pytest.mark.full
def test_what_the_start_check_does_not_meet_is_found_in_a_round(five: Federation) -> None:
    assert all(abilities(five, ROUNDED).values())
    plain, mixed = (five.completed(name, spec(ROUNDED, precision=name)) for name in ("float32", "bf16"))
    assert not any(marks(five, plain))
    assert marks(five, mixed) == [True] * 10
    for client in CLIENTS:
        assert five.workers[client].text.count(f"{NOTHING_FOR}undetermined_backward") == 1
    wait_for(lambda: not any(abilities(five, ROUNDED).values()), "the members to attend anew")


@pytest.mark.full
@pytest.mark.parametrize("task", [UNPOOLED, ROUNDED])
@pytest.mark.parametrize(
    ("algorithm", "privacy"),
    [(FEDAVG, 'secure = "sum"'), ('{ name = "fedcmoo", bound = "none" }', 'secure = "sum", clip = 1.0')],
    ids=["mean", "objectives"],
)
def test_members_train_in_private_rounds(five: Federation, algorithm: str, privacy: str, task: str) -> None:
    name = f"private-{algorithm[10:15]}-{task[-1].lower()}"
    run = five.completed(name, spec(task, algorithm, precision="bf16") + f"privacy = {{ {privacy} }}\n")
    assert any(marks(five, run))
    assert reasons(five, run) == {""}


@pytest.mark.full
def test_members_train_with_noise_and_spend_each_training_once(five: Federation) -> None:
    noise = 'privacy.sample_noise = 1.0\nselection.members = ["m0"]\n'
    run = five.completed("noise", spec(rounds=2, members=1) + noise)
    assert marks(five, run) == [True] * 4
    with closing(sqlite3.connect(five.directory / "m0" / "privacy.db")) as ledger:
        assert ledger.execute("select count(*) from spent where run = ?", [run]).fetchone() == (2,)


@pytest.mark.full
def test_of_the_sketches_only_one_that_asks_twice_needs_more(five: Federation) -> None:
    once = five.completed("once", spec(algorithm='{ name = "fedcmoo", sketch = "svd" }'))
    assert all(marks(five, once))
    path = five.directory / "twice.toml"
    path.write_text('name = "twice"\n' + spec(algorithm=TWO_WAY) + "limits.skipped_rounds = 1\n")
    warned = five.admin("submit", str(path))["warnings"]
    assert any("m0, m1, m2, m3, m4" in line and "repeat" in line for line in warned), warned
    run = five.query("select run_id from runs where name = 'twice'")[0][0]
    assert five.wait_ended(run) == "FAILED"
    assert "ability:repeatable" in reasons(five, run)
