"""A kind of work that another package brings, through real workers, a simulation, and crashes between its phases."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.harness import Federation, federation
from tests.paths import OWNERS_CODE

CODE = OWNERS_CODE / "lottery"
CLIENTS = ("client-000", "client-001", "client-002")
SPEC = """\
task = "digits"
rounds = 2
algorithm.name = "lottery"
selection.minimum = 3
selection.pool = "enrolled"
train = { steps = 1, batch_size = 20, deadline_seconds = 120.0 }
evaluate.splits = ["train", "test"]
simulation = { clients = 3 }
"""


class Scene:
    """A federation whose processes find the other package, and its workers."""

    def __init__(self, fed: Federation) -> None:
        self.fed = fed

    def work(self, client: str, *, crash: str = "") -> None:
        part = f"{CLIENTS.index(client) + 1}/3"
        self.fed.work(client, "--set", f"part={part}", crash=crash)

    def models(self, run: str) -> list[str]:
        """The digests of the models of a run that completes, round by round."""
        self.fed.wait_completed(run)
        rows = self.fed.query("select result_model from rounds where run_id = :run order by number", run=run)
        return [digest for (digest,) in rows]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with pytest.MonkeyPatch.context() as patch, federation(tmp_path_factory.mktemp("lottery")) as fed:
        patch.setenv("FEDPARETO_CODE", str(CODE))
        fed.serve()
        scene = Scene(fed)
        for client in CLIENTS:
            fed.join(client)
            scene.work(client)
        yield scene


@pytest.fixture(scope="module")
def expected(scene: Scene) -> list[str]:
    """The models of a run to which nothing happens."""
    run = scene.fed.submit("undisturbed", SPEC)
    models = scene.models(run)
    record = scene.fed.admin("round", run, "0")
    assert [phase["kind"] for phase in record["phases"]] == ["ticket", "ticket", "train", "evaluate"]
    assert [(phase["asked"], phase["replied"]) for phase in record["phases"]] == [(3, 3), (3, 3), (2, 2), (3, 3)]
    parts = {part["client_id"]: part.get("reason", "") for part in record["participations"]}
    assert parts == {CLIENTS[0]: "not asked to train: it got as far as phase 1, ticket", CLIENTS[1]: "", CLIENTS[2]: ""}
    return models


@pytest.mark.full
def test_a_coordinator_that_dies_between_the_phases_of_a_new_kind_goes_on_to_the_same_models(
    scene: Scene, expected: list[str]
) -> None:
    fed = scene.fed
    fed.serving.stop()
    dying = fed.serve(crash="gradients-in")  # as it opens the second phase
    run = fed.submit("coordinator-dies", SPEC, crash=True)
    dying.wait_killed()
    fed.serve()
    assert scene.models(run) == expected


@pytest.mark.full
def test_a_worker_that_dies_after_its_first_answer_still_knows_its_ticket(scene: Scene, expected: list[str]) -> None:
    victim = CLIENTS[0]
    scene.fed.workers[victim].kill()
    scene.work(victim, crash="after-receipt")
    run = scene.fed.submit("worker-dies", SPEC)
    scene.fed.workers[victim].wait_killed()
    scene.work(victim)
    assert scene.models(run) == expected


@pytest.mark.full
def test_a_simulation_of_a_new_kind_gives_the_models_of_the_federation(
    scene: Scene, expected: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.toml"
    path.write_text('name = "undisturbed"\n' + SPEC)
    options = ["--home", str(tmp_path / "home"), "--backend", "loop", "--threads", "1", "--json"]
    scene.fed.fedpareto("simulate", str(path), *options)
    with closing(sqlite3.connect(tmp_path / "home" / "coordinator.db")) as database:
        assert [digest for (digest,) in database.execute("select result_model from rounds order by number")] == expected
