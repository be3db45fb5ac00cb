import os

# Before NumPy, which reads these once: threads of models as small as these wait for each other, in every process.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import gc
import multiprocessing
import secrets
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psycopg
import pytest
import typer.testing
from hypothesis import settings
from typer.testing import CliRunner

from federation.transport.tls import require_tls13
from fedpareto.processes import forked
from storage.blob_directory import DirectoryStore
from storage.database import Database
from tests.command_documents import check_suits
from tests.copied_tables import copying
from tests.few import FEW_EXAMPLES

if TYPE_CHECKING:
    from tests.harness import Federation
    from tests.running import Running
    from tests.stage import Stage

pytest_plugins = ["tests.costs", "tests.deadline", "tests.distribution", "tests.timeouts"]
TEMPORARY_BYTES = 4 << 30  # what temporary files of the tests may take; `make test-full` takes 2 GB


def in_memory(directory: Path) -> bool:
    """Whether this directory, of a file system in memory, can take the tests' temporary files."""
    try:
        system = os.statvfs(directory)
    except OSError:
        return False
    usable = os.access(directory, os.W_OK) and not system.f_flag & os.ST_NOEXEC
    return usable and system.f_bavail * system.f_frsize >= TEMPORARY_BYTES


gc.disable()  # until the tests are collected: what is imported stays
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # as the command sets it; gRPC reads these once
# gRPC's handlers of forks end the children with a segmentation fault now and then; none of them goes on with a channel.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
require_tls13()  # before a test imports gRPC
settings.register_profile("few", max_examples=FEW_EXAMPLES, deadline=None)  # make test
settings.register_profile("full", deadline=None)  # make test-full
settings.register_profile("fuzz", max_examples=10_000, deadline=None)  # make fuzz
# A shell ignores interrupts in what it starts in the background, and children inherit that; tests send interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
if in_memory(Path("/dev/shm")):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")  # of tmp_path: thousands of commits need no disk
typer.testing._get_command = cache(typer.testing._get_command)  # type: ignore[attr-defined]  # a command is loaded once


def _compared(function: Callable[..., Any], arguments_of: Callable[..., Sequence[str]]) -> Callable[..., Any]:
    """What runs a command; its output with --json is compared with the schema."""

    def run(*arguments: Any, **settings: Any) -> Any:
        done = function(*arguments, **settings)
        check_suits(arguments_of(*arguments, **settings), getattr(done, "exit_code", None) or 0, done.stdout)
        return done

    return run


CliRunner.invoke = _compared(CliRunner.invoke, lambda runner, app, arguments=(), **_: arguments)  # type: ignore[method-assign]
forked.completed = _compared(forked.completed, lambda arguments, **_: arguments)
Database.migrate = copying(Database.migrate)  # type: ignore[assignment,method-assign]


def pytest_configure(config: pytest.Config) -> None:
    """Without the long tests, each property gets a third of the inputs that hypothesis draws by itself."""
    if config.option.hypothesis_profile is None:
        settings.load_profile("few" if config.option.markexpr == "not full" else "full")


def pytest_collection_finish() -> None:
    """Collects garbage rarely, and never looks through what collecting the tests has imported."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    gc.enable()


def pytest_unconfigure() -> None:
    """Kills what a failed test has left running; Python would wait for it."""
    for process in multiprocessing.active_children():
        process.kill()


class Postgres(Protocol):
    def get_uri(self, database: str | None = None) -> str: ...

    def get_pid(self) -> int | None: ...


@pytest.fixture(scope="session")
def postgres(request: pytest.FixtureRequest, testrun_uid: str) -> Iterator[Postgres]:
    """One PostgreSQL server for all pytest processes of this run, started by the first test that asks."""
    from tests.costs import SERVER, cpu_seconds
    from tests.postgresql import server_at

    directory = Path(tempfile.gettempdir()) / f"fedpareto-postgres-{testrun_uid}"
    directory.mkdir(mode=0o755, exist_ok=True)
    # This server need not survive a loss of power.
    with server_at(directory, "fsync", "synchronous_commit", "full_page_writes", "autovacuum") as server:
        yield server
        request.config.stash[SERVER] = cpu_seconds(server.get_pid())


@contextmanager
def empty_database(request: pytest.FixtureRequest, directory: Path) -> Iterator[str]:
    """The URL of an empty database on the back end that the fixture's parameter names."""
    if request.param == "sqlite":
        yield f"sqlite:///{directory / 'test.db'}"
        return
    with postgresql_database(request.getfixturevalue("postgres")) as url:
        yield url


@contextmanager
def postgresql_database(server: Postgres) -> Iterator[str]:
    """The URL of an empty database of this server."""
    name = f"test_{secrets.token_hex(8)}"
    with psycopg.connect(server.get_uri(), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name} STRATEGY FILE_COPY")  # half of the other one's cost
        yield server.get_uri(database=name)
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database of its own, on each back end."""
    with empty_database(request, tmp_path) as url:
        yield url


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """A migrated database, on each back end."""
    database = Database.open(database_url)
    database.migrate()
    yield database
    database.close()


@pytest.fixture
def blobs(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "blobs")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Databases: SQLite; PostgreSQL in `make test-full`, and where a module says `BOTH_DATABASES = True`.

    The fixture `served` is on PostgreSQL only if a module has said something of `BOTH_DATABASES`.
    """
    both = getattr(metafunc.module, "BOTH_DATABASES", None)
    back_ends = ["sqlite", pytest.param("postgresql", marks=() if both else pytest.mark.full)]
    chosen = {mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")}  # by the test itself
    fixtures = {"_module_stage", "database_url"} | ({"served"} if both is not None else set())
    for fixture in fixtures & set(metafunc.fixturenames) - chosen:
        scope: Any = "function" if fixture == "database_url" else "module"
        metafunc.parametrize(fixture, back_ends, indirect=True, scope=scope)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator["Running"]:
    """A coordinator in this process with the `SETTINGS` of the module, whose tests share it."""
    from tests.running import running

    directory, settings = tmp_path_factory.mktemp("served"), getattr(request.module, "SETTINGS", {})
    with ExitStack() as stack:
        if hasattr(request, "param"):
            settings = settings | {"database": stack.enter_context(empty_database(request, directory))}
        yield stack.enter_context(running(directory / "home", **settings))


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Federation"]:
    """A federation whose coordinator has a process of its own; the tests of a module share it."""
    from tests.harness import federation

    with federation(tmp_path_factory.mktemp("federation")) as made:
        made.serve()
        yield made


@pytest.fixture(scope="module")
def _module_stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator["Stage"]:
    from tests.stage import stage

    directory = tmp_path_factory.mktemp("stage")
    with empty_database(request, directory) as url, stage(directory / "coordinator", url) as made:
        yield made


@pytest.fixture
def stage(_module_stage: "Stage") -> Iterator["Stage"]:
    """A coordinator in this process and clients played by hand; shared by a module's tests."""
    yield _module_stage
    _module_stage.clear()
