"""The database of these tests, and two coordinators on it."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from coordinator.home import CoordinatorHome
from tests.conftest import Postgres, postgresql_database
from tests.running import Clock, Running, made_home
from tests.stage import Stage


@pytest.fixture(scope="module")
def url(postgres: Postgres) -> Iterator[str]:
    """An empty database on PostgreSQL, which the tests of a module share."""
    with postgresql_database(postgres) as made:
        yield made


@pytest.fixture(scope="module")
def pair(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stage, Running]]:
    """The first coordinator, with players, and the second one, whose directory has the same keys."""
    directory, clock = tmp_path_factory.mktemp("pair"), Clock()
    settings: dict[str, Any] = {"database": url, "blobs": str(directory / "blobs"), "heartbeat_seconds": 300.0}
    home = made_home(directory / "first", now=clock(), lease_seconds=1.5, **settings)
    shutil.copytree(directory / "first", directory / "second")
    first = Stage(Running(home, clock))
    second = Running(CoordinatorHome.load(directory / "second"), clock)
    yield first, second
    first.clear()
    second.stop()
    first.stop()


@pytest.fixture
def first(pair: tuple[Stage, Running]) -> Iterator[Stage]:
    yield pair[0]
    pair[0].clear()


@pytest.fixture
def second(pair: tuple[Stage, Running]) -> Running:
    return pair[1]
