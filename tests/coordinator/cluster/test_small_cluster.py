"""Two coordinators and three workers; `test_three_coordinators.py` has the long forms."""

import secrets
from collections.abc import Iterator

import psycopg
import pytest

from tests.conftest import Postgres
from tests.coordinator.cluster.scene import REFUSED, SETTINGS, Scene
from tests.soak.cluster import CLIENTS, OPEN, cluster


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, postgres: Postgres) -> Iterator[Scene]:
    name = f"cluster_{secrets.token_hex(8)}"
    with psycopg.connect(postgres.get_uri(), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}")
    directory, url = tmp_path_factory.mktemp("cluster"), postgres.get_uri(database=name)
    with cluster(directory, url, ("one", "two"), CLIENTS[:3], **SETTINGS) as made:
        yield Scene(made)


@pytest.mark.full  # `test_leases.py` and `test_two_coordinators.py` have forms in one process
def test_a_conductor_that_sleeps_past_its_lease_changes_nothing_and_the_other_coordinator_goes_on(scene: Scene) -> None:
    log, problems = scene.oversleep(scene.cluster.coordinators["one"], OPEN)
    assert problems == []
    assert REFUSED in log
