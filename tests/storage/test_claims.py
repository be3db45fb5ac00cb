"""Two coordinators with one bucket and one PostgreSQL: a collection of one keeps what the other one claims."""

import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.exc import OperationalError

from coordinator.home import open_blobs
from coordinator.settings import Settings
from federation.digests import digest
from federation.trust.certificates import make_ca
from federation.trust.keys import new_tls_key
from storage.blobs import BlobMissing, BlobStoreUnavailable
from storage.database import Database
from storage.faults import StorageFault, fault_of
from storage.models import BlobClaim
from storage.objects.bucket import Object
from storage.objects.claims import FileClaims
from storage.objects.store import ObjectStore
from storage.retention import Collection, collect
from storage.table_claims import TableClaims
from tests.conftest import Postgres, postgresql_database
from tests.storage import buckets
from tests.storage.buckets import BUCKET, Storage, environment
from tests.storage.scene import date_back, stored
from tests.waiting import wait_for

DATA = b"the payload of a reply"
NAME = digest(DATA)
GRACE = 3600.0
_OF_BLOBS = """
FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE locktype = 'advisory' AND objsubid = 2 AND datname = current_database()
"""


@dataclass
class One:
    """A coordinator: its connections to the database that they share, and its store with a cache of its own."""

    database: Database
    blobs: ObjectStore

    def collect(self) -> Collection:
        return collect(self.database, self.blobs, now=datetime.now(UTC), grace_seconds=GRACE)

    def claims(self) -> list[str]:
        with self.database.read() as session:
            return sorted(session.scalars(select(BlobClaim.digest)))

    def await_locks(self, state: str) -> None:
        """Returns when the lock of a blob is "granted" or "NOT granted" to a session."""
        count = text(f"SELECT count(*) {_OF_BLOBS} AND {state}")

        def there() -> bool:
            with self.database.read() as session:
                return bool(session.scalar(count))

        wait_for(there, f"a lock of a blob that is {state}", 30)


storage = buckets.storage  # a fixture


@pytest.fixture(scope="module")
def url(postgres: Postgres) -> Iterator[str]:
    with postgresql_database(postgres) as made:
        with closing(Database.open(made)) as database:
            database.migrate()
        yield made


@pytest.fixture
def coordinators(url: str, storage: Storage, tmp_path: Path) -> Iterator[Callable[[], One]]:
    """Starts coordinators of one federation."""
    prefix = secrets.token_hex(8)
    with ExitStack() as stack:

        def made() -> One:
            database = stack.enter_context(closing(Database.open(url)))
            claims = TableClaims(database)
            return One(database, storage.store(tmp_path / secrets.token_hex(4), prefix, claims=claims))

        yield made
    with closing(Database.open(url)) as database, database.begin() as session:
        session.execute(text("TRUNCATE blob_claims"))


@pytest.fixture
def first(coordinators: Callable[[], One]) -> One:
    return coordinators()


@pytest.fixture
def second(coordinators: Callable[[], One]) -> One:
    return coordinators()


def put_old(one: One, at: float = 0.0) -> None:
    one.blobs.put(DATA)
    date_back(one.blobs, NAME, at)


@contextmanager
def in_thread(function: Callable[[], object]) -> Iterator[Future[object]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(function)


@contextmanager
def slow_deletion(one: One, monkeypatch: pytest.MonkeyPatch) -> Iterator[Future[object]]:
    """A deletion of an old blob whose request to the bucket lasts until the block ends."""
    asked, answered, delete = threading.Event(), threading.Event(), one.blobs._bucket.delete

    def late(key: str) -> None:
        asked.set()
        answered.wait()
        delete(key)

    monkeypatch.setattr(one.blobs._bucket, "delete", late)
    with in_thread(lambda: one.blobs.delete(NAME, older_than=1.0)) as deletion:
        try:
            assert asked.wait(30)
            yield deletion
        finally:
            answered.set()


@pytest.mark.parametrize("way", ["put", "claim"])
def test_what_one_coordinator_stores_or_claims_is_kept_by_the_collection_of_another_one_until_it_is_old(
    first: One, second: One, way: str
) -> None:
    put_old(first)
    first.blobs.put(DATA) if way == "put" else first.blobs.claim(NAME)
    assert second.blobs.stat(NAME) == first.blobs.stat(NAME)
    assert list(second.blobs.scan()) == [first.blobs.stat(NAME)]
    assert second.collect() == Collection(kept=1, deleted=0, freed=0)
    date_back(first.blobs, NAME)
    assert second.collect() == Collection(kept=0, deleted=1, freed=len(DATA))
    assert first.claims() == []
    with pytest.raises(BlobMissing, match=NAME):
        first.blobs.claim(NAME)
    assert first.blobs.put(DATA) == NAME
    assert second.blobs.read(NAME) == DATA


def test_a_deletion_waits_for_a_claim_under_way_and_then_keeps_the_blob(
    first: One, second: One, coordinators: Callable[[], One]
) -> None:
    put_old(first)
    with ExitStack() as stack:
        # Another transaction has locked the row: the claim waits between its lock and its time.
        with coordinators().database.begin() as session:
            session.scalars(select(BlobClaim).with_for_update()).one()
            claim = stack.enter_context(in_thread(lambda: first.blobs.claim(NAME)))
            first.await_locks("granted")
            deletion = stack.enter_context(in_thread(lambda: second.blobs.delete(NAME, older_than=1.0)))
            first.await_locks("NOT granted")
            assert not claim.done()
        claim.result(30)
        assert deletion.result(30) is None
    assert second.blobs.read(NAME) == DATA


@pytest.mark.parametrize("way", ["put", "claim"])
def test_what_claims_a_blob_waits_for_a_deletion_under_way_which_has_no_transaction(
    first: One, second: One, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    put_old(first)
    with ExitStack() as stack:
        with slow_deletion(second, monkeypatch) as deletion:
            with first.database.read() as session:
                assert session.scalars(text(f"SELECT DISTINCT state {_OF_BLOBS} AND granted")).all() == ["idle"]
            claim = stack.enter_context(in_thread(lambda: getattr(first.blobs, way)(DATA if way == "put" else NAME)))
            first.await_locks("NOT granted")
            first.blobs.put(b"another blob")  # does not wait
        assert deletion.result(30) == len(DATA)
        if way == "put":
            assert claim.result(30) == NAME
            assert second.blobs.read(NAME) == DATA
        else:
            with pytest.raises(BlobMissing, match=NAME):
                claim.result(30)


def test_a_claim_that_has_waited_too_long_for_a_deletion_says_so(
    first: One, second: One, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_old(first)
    with slow_deletion(second, monkeypatch) as deletion:
        with pytest.raises(BlobStoreUnavailable, match=f"blob {NAME}, .* is being deleted") as caught:
            TableClaims(first.database, wait_seconds=0.01).note(NAME)
        assert fault_of(caught.value) is StorageFault.BLOB_STORE
    assert deletion.result(30) == len(DATA)


def test_a_deletion_that_has_lost_its_lock_removes_nothing(
    first: One, second: One, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_old(first)
    head = second.blobs._bucket.head

    def frozen(key: str) -> Object | None:
        with first.database.begin() as session:  # as the server does after DELETION_SECONDS
            assert session.scalar(text(f"SELECT pg_terminate_backend(pid) {_OF_BLOBS} AND granted"))
        first.blobs.claim(NAME)
        return head(key)

    monkeypatch.setattr(second.blobs._bucket, "head", frozen)
    with pytest.raises(OperationalError, check=lambda error: fault_of(error) is StorageFault.DATABASE):
        second.blobs.delete(NAME, older_than=1.0)
    monkeypatch.undo()
    assert first.claims() == [NAME]
    assert second.blobs.read(NAME) == DATA


def test_a_blob_is_not_claimed_while_the_bucket_may_yet_remove_it_after_a_deletion_that_broke_off(
    first: One, second: One, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_old(first)
    with slow_deletion(second, monkeypatch) as deletion:
        with first.database.begin() as session:
            assert session.scalar(text(f"SELECT pg_terminate_backend(pid) {_OF_BLOBS} AND granted"))
        for access in (first.blobs.claim, lambda _: first.blobs.put(DATA)):
            with pytest.raises(BlobStoreUnavailable, match="is being deleted"):
                access(NAME)
        assert first.collect() == Collection(kept=1, deleted=0, freed=0)
        assert first.claims() == [NAME]
    with pytest.raises(OperationalError):
        deletion.result(30)
    with first.database.begin() as session:
        session.execute(update(BlobClaim).values(deletion_ends=datetime.now(UTC) - timedelta(seconds=1)))
    with pytest.raises(BlobMissing):
        first.blobs.claim(NAME)
    assert first.blobs.put(DATA) == NAME
    assert second.blobs.read(NAME) == DATA
    assert second.collect().kept == 1


def test_the_ages_of_blobs_survive_the_restart_of_a_coordinator_without_its_cache(
    first: One, coordinators: Callable[[], One]
) -> None:
    put_old(first, 1_000_000.5)
    restarted = coordinators()
    assert [blob.modified for blob in restarted.blobs.scan()] == [1_000_000.5]
    assert restarted.blobs.delete(NAME, older_than=1_000_000.5) is None
    assert restarted.blobs.delete(NAME, older_than=1_000_001.0) == len(DATA)


def test_a_collection_forgets_old_claims_also_of_blobs_that_are_not_stored_and_keeps_young_ones(
    first: One, second: One
) -> None:
    absent, young = digest(b"never stored"), first.blobs.put(DATA)
    with pytest.raises(BlobMissing):
        first.blobs.claim(absent)
    date_back(first.blobs, absent)
    assert first.claims() == sorted([absent, young])
    second.collect()
    assert first.claims() == [young]


def test_claims_and_deletions_at_the_same_time_lose_no_blob_that_was_claimed(first: One, second: One) -> None:
    first.blobs.put(DATA)
    for _ in range(20):
        date_back(first.blobs, NAME)
        with in_thread(lambda: second.blobs.delete(NAME, older_than=1.0)) as deletion:
            try:
                first.blobs.claim(NAME)
            except BlobMissing:
                assert deletion.result(30) == len(DATA)
                first.blobs.put(DATA)
        assert stored(first.blobs) == [NAME]


def test_claims_are_in_the_table_where_several_coordinators_can_serve_and_else_in_the_cache(
    first: One, storage: Storage, tmp_path: Path
) -> None:
    chosen = Settings.check({"federation_id": "test", "blobs": f"s3://{BUCKET}/x"}, "test")
    ca = make_ca(new_tls_key(), "test", datetime.now(UTC))
    with environment(storage.environment), closing(Database.open(f"sqlite:///{tmp_path / 'test.db'}")) as sqlite:
        kinds = []
        for database in (first.database, sqlite, None):
            blobs = open_blobs(tmp_path, chosen, ca, database)
            assert isinstance(blobs, ObjectStore)
            kinds.append(type(blobs._claims))
    assert kinds == [TableClaims, FileClaims, FileClaims]
