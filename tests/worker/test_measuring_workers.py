"""Real workers in runs that measure models or describe data, killed at each point of their work."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from federation.tasks import initial_model, task
from federation.vectors import to_bytes
from tests.harness import federation, wait_for
from tests.verification.independent_verifier import verify as verify_independently
from tests.worker.work.scene import Members
from worker.ledgers.left_reading import read_left

pytestmark = pytest.mark.full
CLIENTS = tuple(f"client-{number}" for number in range(5))
POINTS = ("trained", "spooled", "recording", "recorded", "before-receipt", "after-receipt")
DESCRIBES = 'task = "digits"\nkind = "statistics"\nselection.minimum = 5\n[statistics]\nopen = true\nbins = 4\n'
MEASURES = 'task = "digits"\nkind = "evaluate"\nselection.minimum = 5\nevaluate = { splits = ["test"] }\n'


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Members]:
    with federation(tmp_path_factory.mktemp("measuring")) as fed:
        fed.serve()
        made = Members(fed, CLIENTS, task="digits")
        made.enrol("[statistics]\nopen = true\n")
        for client in CLIENTS:
            made.work(client)
        fed.attending(*CLIENTS)
        yield made


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("kind", ["evaluate", "statistics"])
def test_a_worker_that_is_killed_at_each_point_counts_once(
    scene: Members, tmp_path: Path, kind: str, point: str
) -> None:
    fed, victim = scene.fed, CLIENTS[0]
    model = tmp_path / "model.safetensors"
    model.write_bytes(to_bytes(*initial_model(task("digits"), 1)))
    options = ("--model", str(model)) if kind == "evaluate" else ()
    fed.workers[victim].stop()
    dying = scene.work(victim, crash=point)
    run = fed.submit(f"{kind}-{point}", MEASURES if kind == "evaluate" else DESCRIBES, *options)
    dying.wait_killed()
    scene.work(victim)
    fed.wait_completed(run)
    left = fed.directory / victim / "left.db"
    # The run may end before the worker that starts anew has its receipt.
    wait_for(lambda: [row.telling.state for row in read_left(left, run=run).rows] == ["accepted"], "the receipt")
    path = tmp_path / "run.fedpareto"
    fed.admin("bundle", run, "--payloads", "--yes", "--out", str(path), "--force")
    assert verify_independently(path).missing == []
    for client in CLIENTS:
        fed.fedpareto("worker", "verify", str(path), "--home", str(fed.directory / client))
        rows = read_left(fed.directory / client / "left.db", run=run).rows
        assert [row.telling.state for row in rows] == ["accepted"]
    (phase,) = fed.admin("round", run, "0")["phases"]
    assert (phase["kind"], phase["asked"], phase["replied"]) == (kind, 5, 5)
    if kind == "statistics":
        told = json.loads(fed.fedpareto("admin", "statistics", run, "--json", "--home", str(fed.home / "admin")))
        assert "client-0" in json.dumps(told)
