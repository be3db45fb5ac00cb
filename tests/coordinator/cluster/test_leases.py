"""Several coordinators on one PostgreSQL: one of them conducts a run, and a write of any other is refused."""

import ast
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import select, text, update
from sqlalchemy.exc import DBAPIError

import coordinator.rounds
from coordinator.clock import utc_now
from coordinator.cluster.leases import NO_LEASE, Lease, OneConductor, SharedLeases, database_time
from coordinator.cluster.registry import CoordinatorFacts, Registry
from coordinator.ownership import CoordinatorHomeError
from coordinator.rounds.fleets.base import Fenced, RunFacts
from federation.digests import digest
from storage.database import Database, DatabaseBusy, Duty
from storage.faults import StorageFault, fault_of
from storage.models import CoordinatorProcess, Run, note_model
from storage.states import RunState
from tests.running import wait_for
from tests.stage import spec

LEASE = timedelta(seconds=30)
MODEL = digest(b"model")


@pytest.fixture(scope="module")
def url(url: str) -> str:
    """The database with its tables and a model."""
    with closing(Database.open(url)) as database:
        database.migrate()
        with database.begin() as session:
            note_model(session, MODEL, size=1, parameters=1, created=utc_now())
    return url


@pytest.fixture
def shared(url: str) -> Iterator[Database]:
    """A database with one run, "run"."""
    database, document = Database.open(url, idle_seconds=1.0), spec("study", "task")
    with database.begin() as session:
        session.execute(text("TRUNCATE coordinators"))
        session.execute(text("DELETE FROM runs"))
        row = Run(run_id="run", name="study", state=RunState.RUNNING, spec=document, spec_digest=digest(document))
        row.initial_model = row.model = MODEL
        row.submitted_by, row.created = "operator", utc_now()
        session.add(row)
    yield database
    database.close()


def ended_lease(database: Database) -> None:
    """The lease of the run is over, as after a death."""
    with database.begin() as session:
        session.execute(update(Run).values(lease_until=database_time(-timedelta(milliseconds=1))))


def test_one_of_several_takes_a_run_and_another_only_when_the_lease_is_over(shared: Database) -> None:
    ann, ben = (SharedLeases(shared, name, duration=LEASE) for name in ("ann", "ben"))
    assert (ann.take("run"), ben.take("run")) == (Lease("ann", 1), None)
    ended_lease(shared)
    assert (ben.take("run"), ann.take("run")) == (Lease("ben", 2), None)


def test_a_coordinator_that_slept_past_its_lease_writes_nothing(shared: Database) -> None:
    ann, ben = (SharedLeases(shared, name, duration=LEASE) for name in ("ann", "ben"))
    lease = ann.take("run") or NO_LEASE
    facts = RunFacts.load(shared, "run", lease)
    with shared.begin() as session:
        facts.running(session)
    ended_lease(shared)
    assert ben.take("run") == Lease("ben", 2)
    with pytest.raises(Fenced, match="has epoch 2, that of this process had 1"), shared.begin() as session:
        facts.running(session).reason = "too late"
    assert ann.renew({"run": lease}) == {"run"}
    ann.release("run", lease)
    with shared.read() as session:
        run = session.get_one(Run, "run")
        assert (run.reason, run.conductor, run.epoch) == ("", "ben", 2)


def test_a_lease_that_was_released_can_be_taken_at_once_and_a_renewed_one_stays(shared: Database) -> None:
    ann, ben = (SharedLeases(shared, name, duration=LEASE) for name in ("ann", "ben"))
    lease = ann.take("run") or NO_LEASE
    ended_lease(shared)
    assert ann.renew({"run": lease}) == set()
    assert ben.take("run") is None
    ann.release("run", lease)
    assert ben.take("run") == Lease("ben", 2)


def test_a_row_that_stays_locked_is_waited_for_only_for_a_part_of_the_lease(shared: Database) -> None:
    ann = SharedLeases(shared, "ann", duration=timedelta(milliseconds=600))
    lease = ann.take("run") or NO_LEASE
    with shared.begin() as session:
        session.get_one(Run, "run", with_for_update=True)
        assert ann.renew({"run": lease}) == set()


def test_a_lease_whose_row_is_locked_for_a_moment_is_renewed(shared: Database) -> None:
    ann, ben = (SharedLeases(shared, name, duration=LEASE) for name in ("ann", "ben"))
    lease = ann.take("run") or NO_LEASE
    ended_lease(shared)
    with ThreadPoolExecutor(1) as pool:
        with shared.begin() as session:
            session.get_one(Run, "run", with_for_update=True)
            renewed = pool.submit(ann.renew, {"run": lease})
            wait_for(lambda: shows(shared, WAITS), "the renewal to wait for the row")
        assert renewed.result() == set()
    assert ben.take("run") is None


WAITS, HOLDS = "wait_event_type = 'Lock'", "backend_xid IS NOT NULL"  # a lock


def shows(database: Database, condition: str) -> bool:
    """Whether PostgreSQL shows a session of this database that is like that."""
    found = f"SELECT count(*) FROM pg_stat_activity WHERE {condition} AND datname = current_database()"
    with database.read() as session:
        return bool(session.scalar(text(found)))


def test_the_transaction_of_a_frozen_process_does_not_keep_others_from_the_run(shared: Database) -> None:
    ann, ben = (SharedLeases(shared, name, duration=timedelta(milliseconds=1)) for name in ("ann", "ben"))
    lease = ann.take("run") or NO_LEASE
    facts = RunFacts.load(shared, "run", lease)

    def freeze() -> None:
        with shared.begin() as session:
            facts.running(session).reason = "frozen"
            assert ben.take("run") == Lease("ben", 2)  # it waits for the row until the server ends this transaction

    with pytest.raises(DBAPIError, check=lambda error: fault_of(error) is StorageFault.DATABASE):
        freeze()
    with shared.read() as session:
        assert session.get_one(Run, "run").reason == ""


def test_a_transaction_that_broke_off_within_a_message_is_ended_and_another_coordinator_takes_the_run(
    shared: Database, url: str
) -> None:
    ben = SharedLeases(shared, "ben", duration=timedelta(milliseconds=1))
    options = "-c idle_in_transaction_session_timeout=1"
    with psycopg.connect(url, options=options) as frozen, ThreadPoolExecutor(1) as pool:
        frozen.pgconn.enter_pipeline_mode()
        frozen.pgconn.send_query_params(b"UPDATE runs SET reason = 'frozen'", None)
        frozen.pgconn.send_flush_request()  # and no end of the message, after which the limit would count
        frozen.pgconn.flush()
        wait_for(lambda: shows(shared, HOLDS), "the run to be locked")
        taken = pool.submit(ben.take, "run")
        wait_for(lambda: shows(shared, WAITS), "the other coordinator to wait for the row")
        assert wait_for(ben.end_silent_transactions, "the transaction to be ended") == 1
        assert taken.result() == Lease("ben", 1)
        frozen.close()
    assert ben.end_silent_transactions() == 0


def test_runs_are_unclaimed_after_two_leases(shared: Database) -> None:
    leases = SharedLeases(shared, "ann", duration=LEASE)
    found = select(Run.run_id).where(leases.unclaimed())
    with shared.begin() as session:
        assert session.scalars(found).all() == []
        session.execute(update(Run).values(lease_until=database_time(-2 * LEASE)))
        assert session.scalars(found).all() == ["run"]


def test_alone_every_run_may_be_conducted_and_nothing_is_written(shared: Database) -> None:
    leases = OneConductor()
    with shared.begin() as session:
        RunFacts.load(shared, "run", leases.take("run") or Lease("none")).running(session)
    leases.release("run", NO_LEASE)
    with shared.read() as session:
        assert session.get_one(Run, "run").epoch == 0


# --- the coordinators


def registry(database: Database, name: str, *, keys: str = "keys", settings: str = "settings") -> Registry:
    facts = CoordinatorFacts(name, "fedpareto", digest(keys.encode()), digest(settings.encode()), utc_now())
    return Registry(database, facts, lease=LEASE, clock=utc_now)


@pytest.mark.parametrize("differs", ["keys", "settings"])
def test_a_coordinator_with_other_keys_or_settings_than_a_living_one_does_not_start(
    shared: Database, differs: str
) -> None:
    registry(shared, "ann").enter()
    with pytest.raises(CoordinatorHomeError, match=f"with other {differs}"):
        registry(shared, "ben", **{differs: "others"}).enter()
    with shared.begin() as session:
        session.execute(update(CoordinatorProcess).values(last_seen=database_time(-LEASE)))
    registry(shared, "ben", **{differs: "others"}).enter()


def test_a_sign_of_life_tells_how_far_the_clock_is_ahead(shared: Database) -> None:
    made = registry(shared, "ann")
    assert made.give_sign() is None  # it has not entered
    made.enter()
    assert abs(made.give_sign() or timedelta()) < timedelta(seconds=1)
    for hours in (-1, 1):
        ahead = Registry(shared, made._facts, lease=LEASE, clock=lambda: utc_now() + timedelta(hours=hours)).give_sign()  # noqa: B023
        assert ahead is not None
        assert abs(ahead - timedelta(hours=hours)) < timedelta(seconds=1)
    made.leave()
    assert made.give_sign() is None


def test_a_duty_is_done_by_one_at_a_time(shared: Database, url: str) -> None:
    with closing(Database.open(url)) as other:
        with shared.turn(Duty.COLLECTION, 60) as mine, other.turn(Duty.COLLECTION, 60) as theirs:
            assert (mine, theirs) == (True, False)
            with other.turn(Duty.ALERTS, 60) as another:
                assert another
        with other.turn(Duty.COLLECTION, 60) as later:
            assert later


def test_coordinators_share_the_lock_and_whoever_needs_the_database_alone_is_refused(url: str) -> None:
    ann, ben, restore = (Database.open(url) for _ in range(3))
    ann.lock_exclusive()
    with pytest.raises(DatabaseBusy):
        ben.lock_shared()
    ann.lock_shared()  # gives up the exclusive one
    ben.lock_shared()
    with pytest.raises(DatabaseBusy, match="in use by another process: pid"):
        restore.lock_exclusive()
    for database in (ann, ben):
        database.close()
    restore.lock_exclusive()
    restore.close()


# --- every write


# Transactions in `coordinator/rounds` that no conductor makes: by file and function, with who does.
_OTHERS = {
    ("run_commands.py", "submit"): "an administrator",
    ("runs/run_states.py", "end_revoked"): "an administrator, or the housekeeper",
    ("replies/group_commit.py", "_commit_all"): "a member",
    ("replies/group_commit.py", "_commit_alone"): "a member",
    ("replies/intake.py", "decline"): "a member",
    ("housekeeping.py", "_note_seen"): "the housekeeper",
    ("fleets/attendances.py", "_write"): "the thread that notes who attends",
    ("fleets/attendances.py", "_write_again"): "the thread that notes who attends",
}
_CHECKS = ("running(session)", "locked(session)")


def test_every_transaction_of_a_conductor_begins_with_the_comparison_of_the_lease() -> None:
    root, found, unchecked = Path(coordinator.rounds.__file__).parent, 0, set()
    for path in sorted(root.rglob("*.py")):
        source = path.read_text()
        for function in [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]:
            for block in [node for node in ast.walk(function) if isinstance(node, ast.With)]:
                if not any(ast.unparse(item.context_expr).endswith(".begin()") for item in block.items):
                    continue
                found += 1
                if not any(check in ast.unparse(block.body[0]) for check in _CHECKS):
                    unchecked.add((str(path.relative_to(root)), function.name))
    assert found > 12
    assert unchecked == _OTHERS.keys()
