"""FedMDFG with real workers: a crash in the middle of its line search, and the simulation of the same run."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.harness import Federation, federation

pytestmark = pytest.mark.full
CLIENTS = ("client-000", "client-001", "client-002")
SPEC = """\
task = "digits"
rounds = 2
algorithm = { name = "fedmdfg", theta = 1.0 }
selection = { minimum = 3, pool = "enrolled", quorum = 1.0 }
train = { steps = 2, batch_size = 20, deadline_seconds = 120.0 }
evaluate.splits = ["train", "test"]
simulation = { clients = 3 }
"""


def rounds_in(database: Path, name: str) -> list[tuple[str, float]]:
    """The digest of each round's model, and the step size that was chosen."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        rows = connection.execute(
            "select result_model, r.metrics from rounds r join runs using (run_id) where runs.name = ? order by number",
            (name,),
        ).fetchall()
    return [(model, json.loads(metrics)["step"]) for model, metrics in rows]


def played(fed: Federation, name: str) -> list[tuple[str, float]]:
    return rounds_in(fed.home / "coordinator.db", name)


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with federation(tmp_path_factory.mktemp("fedmdfg")) as made:
        made.serve()
        for number, client in enumerate(CLIENTS, 1):
            made.join(client)
            made.work(client, "--set", f"part={number}/{len(CLIENTS)}")
        yield made


@pytest.fixture(scope="module")
def expected(fed: Federation) -> list[tuple[str, float]]:
    """The rounds of a run to which nothing happens."""
    run = fed.completed("undisturbed", SPEC)
    record = fed.admin("round", run, "0")
    assert [phase["kind"] for phase in record["phases"]] == ["train", "search", "evaluate"]
    assert [(phase["asked"], phase["replied"]) for phase in record["phases"]] == [(3, 3)] * 3
    return played(fed, "undisturbed")


def test_a_coordinator_that_dies_in_the_middle_of_the_search_chooses_the_same_steps(
    fed: Federation, expected: list[tuple[str, float]]
) -> None:
    fed.serving.stop()
    dying = fed.serve(crash="some-trained")  # with two of three replies to the search
    run = fed.submit("coordinator-dies", SPEC, crash=True)
    dying.wait_killed()
    fed.serve()
    fed.wait_completed(run)
    assert played(fed, "coordinator-dies") == expected


def test_a_simulation_gives_the_models_of_the_federation(
    fed: Federation, expected: list[tuple[str, float]], tmp_path: Path
) -> None:
    path, home = tmp_path / "run.toml", tmp_path / "home"
    path.write_text('name = "undisturbed"\n' + SPEC)
    fed.fedpareto("simulate", str(path), "--home", str(home), "--backend", "loop", "--threads", "1", "--json")
    assert rounds_in(home / "coordinator.db", "undisturbed") == expected
