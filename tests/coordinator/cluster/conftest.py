"""The database of these tests."""

from collections.abc import Iterator

import pytest

from tests.conftest import Postgres, postgresql_database


@pytest.fixture(scope="module")
def url(postgres: Postgres) -> Iterator[str]:
    """An empty database on PostgreSQL, which the tests of a module share."""
    with postgresql_database(postgres) as made:
        yield made
