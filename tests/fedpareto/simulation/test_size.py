"""The cost of a simulation grows with its clients, and not with their square; and a cluster has the loop's result."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Engine, event

from federation.tasks import Dataset
from fedpareto import simulate
from tests.fedpareto.simulation import scene
from tests.fedpareto.simulation.scene import spec

one_thread = scene.one_thread  # a fixture


@pytest.fixture
def statements() -> Iterator[list[str]]:
    """The SQL statements of a test."""
    sent: list[str] = []

    def listen(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        sent.append(statement)

    event.listen(Engine, "before_cursor_execute", listen)
    yield sent
    event.remove(Engine, "before_cursor_execute", listen)


def cost(clients: int, monkeypatch: pytest.MonkeyPatch, statements: list[str]) -> dict[str, int]:
    """What two rounds cost in which a tenth of the clients train and all are evaluated: counts, not times."""
    lengths, calls = 0, 0
    plain = Dataset.__len__

    def length(self: Dataset) -> int:
        nonlocal lengths
        lengths += 1
        return plain(self)

    def profile(frame: FrameType, kind: str, _argument: object) -> None:
        nonlocal calls
        code: CodeType = frame.f_code
        calls += kind == "call" and "simulation" in code.co_filename

    statements.clear()
    monkeypatch.setattr(Dataset, "__len__", length)
    sys.setprofile(profile)
    try:
        done = simulate(spec(rounds=2, clients=clients, partition="iid", fraction=0.1), device="cpu", backend="loop")
    finally:
        sys.setprofile(None)
        monkeypatch.setattr(Dataset, "__len__", plain)
    assert done.state == "COMPLETED"
    return {"lengths": lengths, "calls": calls, "statements": len(statements)}


def test_the_cost_of_a_round_grows_with_the_clients_and_not_with_their_square(
    monkeypatch: pytest.MonkeyPatch, statements: list[str]
) -> None:
    few, many = (cost(clients, monkeypatch, statements) for clients in (20, 80))
    assert {name: round(many[name] / few[name], 1) for name in few if many[name] > 4.5 * few[name]} == {}


@pytest.mark.full
@pytest.mark.timeout(300)
def test_two_machines_of_a_ray_cluster_compute_what_the_loop_computes(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    from ray.cluster_utils import Cluster

    small = spec(rounds=2, clients=4)
    loop = simulate(small, home=tmp_path / "loop", device="cpu", backend="loop")
    head: dict[str, Any] = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        spread = simulate(small, home=tmp_path / "ray", device="cpu", backend="ray", ray_address=cluster.address)
        assert len(cluster.list_all_nodes()) == 2
    finally:
        ray.shutdown()
        cluster.shutdown()
    np.testing.assert_array_equal(spread.model, loop.model)
