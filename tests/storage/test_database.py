import math
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import datetime, timedelta, timezone
from hashlib import sha256
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import (
    JSON,
    Float,
    MetaData,
    inspect,
    select,
    text,
)
from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, StatementError

from storage import migrations
from storage.database import Database, DatabaseBusy, DatabaseIncompatible
from storage.models import AttendanceRow, AuditEntry, Base, Client, Model, Round, Run
from storage.revisions import known_revisions
from storage.states import ClientState, RoundState, RunState
from tests.few import few_of
from tests.paths import ROOT
from tests.storage.scene import NOON, run_row
from tests.waiting import wait_for

BOTH_DATABASES = True
# For tests that start interpreters, or whose SQL is the same.
ON_SQLITE = pytest.mark.parametrize("database_url", few_of(("sqlite", "postgresql"), "sqlite"), indirect=True)
DIGEST = "blake3:" + "0" * 64


def model(digest: str = DIGEST) -> Model:
    return Model(digest=digest, size=1, parameters=1, created=NOON)


# Transactions


def test_a_transaction_is_kept_when_its_block_ends_and_undone_when_it_raises_and_its_objects_stay_readable(
    database: Database,
) -> None:
    with database.begin() as session:
        kept = model()
        session.add(kept)
    assert kept.digest == DIGEST

    def fail() -> None:
        with database.begin() as session:
            session.add(model("blake3:" + "1" * 64))
            session.flush()
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        fail()
    with database.read() as session:
        assert session.scalars(select(Model.digest)).all() == [DIGEST]


def test_a_snapshot_takes_no_writing(database: Database) -> None:
    with database.read() as session:
        session.add(model())
        with pytest.raises(DBAPIError, match=r"read-?only"):
            session.flush()
    with database.begin() as session:  # and the connection is as good as before
        session.add(model())


def test_a_snapshot_does_not_wait_for_a_writer_and_does_not_change(database: Database) -> None:
    with database.read() as reader:
        assert reader.scalars(select(Model.digest)).all() == []
        with database.begin() as session:
            session.add(model())
            session.flush()
            with database.read() as another:
                assert another.scalars(select(Model.digest)).all() == []
        assert reader.scalars(select(Model.digest)).all() == []
    with database.read() as reader:
        assert reader.scalars(select(Model.digest)).all() == [DIGEST]


def test_threads_on_two_databases_of_one_file_read_and_then_write_the_same_row_and_lose_nothing_and_never_deadlock(
    database: Database, database_url: str
) -> None:
    with database.begin() as session:
        session.add(AuditEntry(at=NOON, actor="a", action="count", times=0))

    def count(one: Database) -> None:
        with one.begin() as session:
            session.scalars(select(AuditEntry).with_for_update()).one().times += 1

    with closing(Database.open(database_url)) as second, ThreadPoolExecutor(8) as pool:
        list(pool.map(count, [database, second] * 100))
    with database.read() as session:
        assert session.scalars(select(AuditEntry.times)).one() == 200


def test_a_transaction_inside_a_transaction_of_the_same_thread_is_an_error_at_once(tmp_path: Path) -> None:
    with closing(Database.open(f"sqlite:///{tmp_path / 'test.db'}")) as database:
        with database.begin(), pytest.raises(RuntimeError, match="pass the session on"), database.begin():
            pass
        with database.begin() as session:
            session.execute(text("SELECT 1"))


def test_foreign_keys_are_enforced(database: Database) -> None:
    with pytest.raises(IntegrityError), database.begin() as session:
        session.add(run_row("r1", DIGEST))


def test_what_is_written_is_read_back_the_same(database: Database) -> None:
    east = datetime(2026, 5, 4, 14, 0, 0, 123456, tzinfo=timezone(timedelta(hours=5)))
    state = {"z": [1, 2.5, {"deep": None}], "a": 0.1 + 0.2, "é": "\x00😀", "big": 2**60}
    metrics = {"loss": math.inf, "worst": -math.inf, "odd": math.nan, "x": 0.1}
    with database.begin() as session:
        session.add(model())
        session.add(run_row("r1", DIGEST, state_data=state, started=east))
        session.flush()
        first = Round(run_id="r1", number=0, state=RoundState.OPEN, base_model=DIGEST, wanted=1, started=NOON)
        first.metrics = metrics
        session.add(first)
    with database.read() as session:
        found = session.get_one(Run, "r1")
        its_round = session.scalars(select(Round).where(Round.run_id == found.run_id)).one()
    assert found.started == east
    assert found.state is RunState.RUNNING
    assert found.state_data == state
    assert list(found.state_data) == list(state), "replay depends on the order"
    assert math.isnan(its_round.metrics.pop("odd"))
    assert its_round.metrics == {"loss": math.inf, "worst": -math.inf, "x": 0.1}


def test_json_takes_no_nan_and_times_need_a_zone(database: Database) -> None:
    with database.begin() as session:
        session.add(model())
    with pytest.raises((StatementError, ValueError), match="not JSON compliant"), database.begin() as session:
        session.add(run_row("r1", DIGEST, state_data={"x": math.nan}))
    with pytest.raises(StatementError, match="naive"), database.begin() as session:
        session.add(run_row("r1", DIGEST, started=datetime(2026, 1, 1)))


def test_free_text_of_strangers_is_cut_to_its_column(database: Database) -> None:
    with database.begin() as session:
        stranger = Client(client_id="c", state=ClientState.ACTIVE, signing_key=b"k", key_id="k", enrolled=NOON)
        stranger.device = "\0" + "x" * 999
        session.add(stranger)
    with database.read() as session:
        assert session.scalars(select(Client.device)).one() == "\ufffd" + "x" * 198 + "…"


# Opening


def test_postgresql_urls_need_not_name_the_driver_and_messages_hide_the_password() -> None:
    for scheme in ("postgresql", "postgresql+psycopg"):
        database = Database.open(f"{scheme}://user:secret@nowhere.invalid/name")
        assert database.engine.dialect.driver == "psycopg"
        assert database.url == "postgresql://user:***@nowhere.invalid/name"


@pytest.mark.parametrize(
    "url", ["", "nonsense", "mysql://x/y", "sqlite://", "sqlite:///:memory:", "sqlite:///x.db?mode=ro"]
)
def test_other_urls_are_refused_with_what_to_use(url: str) -> None:
    with pytest.raises(ValueError, match="sqlite:///FILE"):
        Database.open(url)


def test_sqlite_is_durable_checks_references_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "test.db"
    database = Database.open(f"sqlite:///{path}")
    database.migrate()
    with database.begin() as session:
        session.add(model())
        pragmas = {
            name: session.scalar(text(f"PRAGMA {name}"))
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
        assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 30_000}
        assert {p.stat().st_mode & 0o777 for p in tmp_path.glob("test.db*")} == {0o600}
    database.close()


# Migrations


def differences(database: Database) -> list[Any]:
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return list(compare_metadata(context, Base.metadata))


def test_the_comparison_of_migrations_and_models_sees_lengths_indexes_and_constraints(database: Database) -> None:
    with database.engine.begin() as connection:
        connection.execute(text("DROP INDEX ix_runs_state"))
    if database.engine.dialect.name == "postgresql":
        with database.engine.begin() as connection:
            connection.execute(text("ALTER TABLE runs ALTER COLUMN state TYPE varchar(17)"))
            connection.execute(text("ALTER TABLE clients DROP CONSTRAINT uq_clients_key_id"))
    found = [entry[0] if isinstance(entry, tuple) else entry[0][0] for entry in differences(database)]
    expected = (
        ["add_index"] if database.engine.dialect.name == "sqlite" else ["add_index", "add_constraint", "modify_type"]
    )
    assert sorted(found) == sorted(expected)


def reflected(database: Database) -> dict[str, Any]:
    """What a database says that it has, names of constraints included, without trusting Alembic's eyes."""
    inspector = inspect(database.engine)
    tables = sorted(set(inspector.get_table_names()) - {"alembic_version"})

    def kind(column: Any) -> str:
        # The one thing that reflection cannot spell the same for both: JSON and double precision.
        return {JSON: "JSON", Float: "FLOAT"}.get(type(column["type"])) or str(column["type"])

    def options_as_text(index: Any) -> str:
        options = {name: str(option) for name, option in index.get("dialect_options", {}).items()}
        return repr({**index, "dialect_options": options})

    return {
        table: {
            "columns": sorted((c["name"], kind(c), c["nullable"]) for c in inspector.get_columns(table)),
            "primary key": inspector.get_pk_constraint(table),
            "foreign keys": sorted(map(repr, inspector.get_foreign_keys(table))),
            "unique": sorted(map(repr, inspector.get_unique_constraints(table))),
            "checks": sorted(map(repr, inspector.get_check_constraints(table))),
            "indexes": sorted(map(options_as_text, inspector.get_indexes(table))),
        }
        for table in tables
    }


def test_the_migrated_schema_reads_back_as_the_one_that_the_models_create(database: Database) -> None:
    migrated = reflected(database)
    with database.engine.begin() as connection:
        migrations.downgrade(connection, "base")
        Base.metadata.create_all(connection)
    assert reflected(database) == migrated


def test_downgrading_to_base_leaves_nothing_and_upgrading_again_works(database: Database) -> None:
    with database.engine.begin() as connection:
        migrations.downgrade(connection, "base")
    left = MetaData()
    left.reflect(database.engine)
    assert set(left.tables) <= {"alembic_version"}
    database.migrate()
    assert differences(database) == []


def test_migrating_twice_and_by_several_at_once_changes_nothing(database_url: str) -> None:
    databases = [Database.open(database_url) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(Database.migrate, databases))
    databases[0].migrate()
    assert differences(databases[0]) == []
    for database in databases:
        database.close()


def test_connections_that_are_the_first_of_a_file_at_once_are_all_served(tmp_path: Path) -> None:
    together = Barrier(4)

    def read_first(file: Path) -> None:
        database = Database.open(f"sqlite:///{file}", durable=False)
        together.wait()
        with database.read() as session:
            assert session.scalar(text("PRAGMA journal_mode")) == "wal"
        database.close()

    with ThreadPoolExecutor(4) as pool:
        for number in range(50):
            list(pool.map(read_first, [tmp_path / f"{number}.db"] * 4))


UNRELEASED = r", which an unreleased version .* fedpareto \d.* does not upgrade it\. .* init"


@ON_SQLITE
@pytest.mark.parametrize(
    ("revision", "why"),
    [("9999", r".*a newer version made it"), ("0001", UNRELEASED), ("0002.0123456789abcdef", UNRELEASED)],
)
def test_a_database_of_a_newer_or_an_unreleased_version_is_refused_with_the_remedy_and_left_alone(
    database: Database, revision: str, why: str
) -> None:
    with database.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :name"), {"name": revision})
    for check in (database.migrate, database.check_known, database.check_current):
        with pytest.raises(DatabaseIncompatible, match=f"revision {revision}{why}"):
            check()
    with database.engine.begin() as connection:
        assert connection.scalar(text("SELECT version_num FROM alembic_version")) == revision


@ON_SQLITE
def test_the_migrations_make_exactly_the_tables_of_the_models(database: Database) -> None:
    expected = reflected(database)
    with database.engine.begin() as connection:
        migrations.downgrade(connection, "base")
        Base.metadata.create_all(connection)
    assert reflected(database) == expected
    assert differences(database) == []


def test_members_of_version_0_1_0_attend_and_are_not_paused(database: Database) -> None:
    with database.begin() as session:
        key = {"signing_key": bytes(32), "key_id": "0" * 64}
        session.add(Client(client_id="ann", state=ClientState.ACTIVE, enrolled=NOON, **key))
    with database.engine.begin() as connection:
        migrations.downgrade(connection, "0002")
        columns = "client_id, coordinator, stream, since, last_seen"
        values = "'ann', 'one', 1, '2026-01-01 12:00:00+00:00', '2026-01-01 12:00:00+00:00'"
        connection.execute(text(f"INSERT INTO attendances ({columns}) VALUES ({values})"))
    database.migrate()
    with database.read() as session:
        row = session.get_one(AttendanceRow, "ann")
    assert (row.coordinator, row.stream, row.paused) == ("one", 1, False)


RELEASED = {
    "0002_the_first_tables.py": "bbd34e538eb4cb13bb5dc6c49e71678dffea336fbe6e556ef43922ae512b839b"
}  # the migrations of released versions: no change reaches users


def test_the_migrations_of_released_versions_stay_as_they_are() -> None:
    versions = ROOT / "storage" / "migrations" / "versions"
    assert {name: sha256((versions / name).read_bytes()).hexdigest() for name in RELEASED} == RELEASED


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs Python with the packages of a made-up next version, whose models have one more column and its migration."""
    tree = tmp_path_factory.mktemp("next")
    for package in ("storage", "federation"):
        shutil.copytree(ROOT / package, tree / package)

    def run_python(*arguments: str, code: int = 0) -> str:
        command, environment = [sys.executable, *arguments], {"PYTHONPATH": str(tree)}
        done = subprocess.run(command, cwd=tree, env=environment, check=False, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        return done.stdout

    models = tree / "storage" / "models.py"
    column = 'extra: Mapped[str] = mapped_column(sa.String(8), server_default="x")'
    models.write_text(models.read_text().replace("class Model(Base):", f"class Model(Base):\n    {column}", 1))
    assert "'add_column'" in run_python("-m", "storage.migrations", "--check", code=1)
    run_python("-m", "storage.migrations", "one more column")
    assert "make the tables" in run_python("-m", "storage.migrations", "--check")
    return run_python


@ON_SQLITE
@pytest.mark.full
def test_a_column_that_is_added_gets_a_migration_which_keeps_the_rows_and_which_this_version_refuses(
    database: Database, changed: Callable[..., str]
) -> None:
    with database.begin() as session:
        session.add(model())
    script = """
import sys
from storage.database import Database
from storage.models import Model
from storage.revisions import known_revisions
database = Database.open(sys.argv[1])
database.migrate()
with database.read() as session:
    print(known_revisions(), [row.extra for row in session.query(Model)])
"""
    url = database.engine.url.render_as_string(hide_password=False)
    assert changed("-c", script, url) == f"{[*known_revisions(), f'{len(known_revisions()) + 2:04}']} ['x']\n"
    with pytest.raises(DatabaseIncompatible, match=r"revision \d+, .* a newer version made it"):
        database.check_known()


def test_a_migration_that_fails_changes_nothing(database_url: str) -> None:
    database = Database.open(database_url)
    with database.engine.begin() as connection:
        connection.execute(text("CREATE TABLE rounds (x INTEGER)"))  # in the way of the first migration
    with pytest.raises(DBAPIError, match="rounds"):
        database.migrate()
    assert inspect(database.engine).get_table_names() == ["rounds"]
    database.close()


@ON_SQLITE
@pytest.mark.full
def test_migrations_need_no_working_directory(database_url: str, tmp_path: Path) -> None:
    script = "import sys; from storage.database import Database; Database.open(sys.argv[1]).migrate()"
    command, environment = [sys.executable, "-c", script, database_url], {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    with closing(Database.open(database_url)) as database:
        assert differences(database) == []


# The exclusive lock

HOLD = """
import sys
from storage.database import Database
database = Database.open(sys.argv[1])
database.lock_exclusive()
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_second_coordinator_is_turned_away_until_the_first_is_killed(database: Database, database_url: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, database_url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(DatabaseBusy, match=rf"in use by another (coordinator|process): pid {holder.pid} on "):
            database.lock_exclusive()
        assert not database.holds_lock()
        with database.begin() as session:  # reading and writing are not hindered
            session.add(model())
        holder.send_signal(signal.SIGKILL)
    wait_for(lambda: locked(database), "the lock")  # a server needs a moment to notice a death
    assert database.holds_lock()


def locked(database: Database) -> bool:
    try:
        database.lock_exclusive()
    except (DatabaseBusy, InterfaceError):  # InterfaceError: the holder has ended between two looks at it
        return False
    return True


def test_the_lock_is_kept_between_databases_of_one_process_while_the_pool_is_busy_and_given_up_on_closing(
    database: Database, database_url: str
) -> None:
    database.lock_exclusive()
    database.lock_exclusive()

    def work(_: int) -> None:
        for _ in range(20):
            with database.read() as session:
                session.scalars(select(Model)).all()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    second = Database.open(database_url)
    with pytest.raises(DatabaseBusy):
        second.lock_exclusive()
    database.close()
    wait_for(lambda: locked(second), "the lock")
    second.close()
    second.close()


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_lost_connection_to_postgresql_is_a_lost_lock_that_can_be_seen(database: Database) -> None:
    database.lock_exclusive()
    assert database.holds_lock()
    with database.begin() as session:
        session.execute(text("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted"))
    wait_for(lambda: not database.holds_lock(), "the loss of the lock")
