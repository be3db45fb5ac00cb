"""The database: one way to open, migrate, lock and use SQLite and PostgreSQL, with the same behaviour on both."""

import errno
import fcntl
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, make_url, text
from sqlalchemy.exc import ArgumentError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session

from federation.errors import Error
from federation.monitoring.tally import MonitoredKind, MonitoredNumber, Tally
from federation.process.shared_state import alone
from storage.connections.engines import BUSY_SECONDS, postgresql_engines, sqlite_engine
from storage.connections.written_tables import WrittenTables
from storage.revisions import incompatibility, pending_revisions

ENTRY_KEY = "entry_key"  # in the `info` of a session: the key of the MACs of the audit log, or None
TRANSACTION_SECONDS = MonitoredNumber(
    "fedpareto_database_seconds",
    "Seconds of transactions, with their wait for a turn and for the server.",
    MonitoredKind.DURATION,
    ("kind",),
    (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0),
)
LOCK_KEY = 0x66656470617265  # "fedpare": our advisory lock in a PostgreSQL database; + a Duty, those of duties
_LOCK_HOLDERS = """
SELECT pid, application_name FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE locktype = 'advisory' AND granted AND objsubid = 1
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
AND classid = CAST(:high AS bigint) AND objid = CAST(:low AS bigint)
"""


class Duty(IntEnum):
    """What one coordinator of a database does at a time; the value distinguishes the locks."""

    MIGRATION = 1
    COLLECTION = 2  # of blobs that nothing needs
    ALERTS = 3
    NUMBERS = 4  # of the whole federation, for /metrics


class DatabaseBusy(Error, RuntimeError):
    """Another process (or another `Database` of this one) holds the lock."""


class DatabaseMissing(Error, FileNotFoundError):
    """The database does not exist."""


class DatabaseIncompatible(Error, RuntimeError):
    """A newer or an unreleased version of this program made the database, and this one cannot upgrade it."""


class DatabaseTooOld(Error, RuntimeError):
    """The database has not been migrated to the schema of this version."""


# Faults of the database, not of the caller: a broken connection, a deadlock, a full disk. The transaction had no
# effect, and may succeed later.
UNAVAILABLE = (DatabaseBusy, InterfaceError, OperationalError, PoolTimeoutError)


class Database:
    """A connection pool, and transactions as `with database.begin() as session`; for several threads.

    SQLite: write-ahead log, foreign keys on, and a transaction takes the write lock when it begins, so two threads
    cannot deadlock by upgrading. PostgreSQL: READ COMMITTED. Code that reads a row in order to change it takes the row
    lock (`with_for_update`), which does nothing on SQLite. Objects stay readable after their transaction.

    Attributes:
        entry_key: of the MACs of the audit log, see `storage.audit`; with None entries have none.
        tally: counts the transactions, and what the other parts of the process count.
    """

    def __init__(self, engine: Engine, reader: Engine) -> None:
        self.entry_key: bytes | None = None
        self.tally = Tally()
        self._engine = engine
        self._reader = reader  # its transactions only read
        self._sqlite = engine.dialect.name == "sqlite"
        # SQLite's own queue polls with growing pauses; writers of this process queue here instead.
        self._writers = threading.Lock()
        self._writing_thread: int | None = None
        self._written = WrittenTables(engine)
        self._lock_file: int | None = None
        self._lock_connection: Connection | None = None
        self._shared = False  # the lock is shared with other coordinators
        self._name = f"pid {os.getpid()} on {socket.gethostname()}"[:54] + f" {secrets.token_hex(4)}"

    @classmethod
    def open(
        cls, url: str, *, durable: bool = True, create: bool = True, idle_seconds: float | None = None
    ) -> "Database":
        """Opens a database; changes nothing in it (see `migrate`).

        Args:
            url: `sqlite:///relative.db`, `sqlite:////absolute.db` or `postgresql://user:password@host/name`.
            create: if true, a missing SQLite file is created, with mode 0600; not again if it is removed later.
            durable: if true, a commit survives a loss of power (SQLite); otherwise only the death of the process.
            idle_seconds: how long a transaction that writes may do nothing (PostgreSQL). The server then ends it, so
                that the locks of a process that is frozen do not stay. None is no limit.

        Raises:
            ValueError: another kind of URL, or SQLite in memory, which threads cannot share.
            DatabaseMissing: the SQLite file does not exist, and `create` is false.
            FileNotFoundError: the directory of the SQLite file does not exist.
        """
        try:
            parsed = make_url(url)
        except ArgumentError as error:
            raise ValueError(f"not a database URL: {url!r}; expected sqlite:///FILE or postgresql://...") from error
        backend = parsed.get_backend_name()
        if backend == "sqlite":
            return cls(*_open_sqlite(parsed, durable, create))
        if backend in {"postgresql", "postgres"}:
            return cls(*postgresql_engines(parsed.set(drivername="postgresql+psycopg"), idle_seconds))
        raise ValueError(f"no support for {backend!r} databases; use sqlite:///FILE or postgresql://...")

    @classmethod
    def open_to_read(cls, url: str) -> "Database":
        """Opens a SQLite file for reading only, also while a coordinator uses it.

        Raises:
            ValueError: another kind of URL.
            DatabaseMissing: the file does not exist.
        """
        path = _sqlite_path(make_url(url), create=False)
        reader = sqlite_engine(path, durable=False, mode="ro")
        return cls(reader, reader)

    @property
    def url(self) -> str:
        """The URL of the database without the password, for messages."""
        return self._engine.url.set(drivername=self._engine.dialect.name).render_as_string(hide_password=True)

    @property
    def directory(self) -> Path | None:
        """The directory of the database's file; None with PostgreSQL."""
        return Path(str(self._engine.url.database)).parent if self._sqlite else None

    @property
    def serves_many(self) -> bool:
        """True if several coordinators may serve this database at the same time: PostgreSQL."""
        return not self._sqlite

    def changes(self, *tables: str) -> int | None:
        """How often transactions of this process have changed these tables; None if other processes may, too.

        What was read after a call may be used again for as long as further calls return the same number. A process that
        has a SQLite file for itself may so remember rows that commands beside it do not change.
        """
        return None if self.serves_many else self._written.count(tables)

    @property
    def engine(self) -> Engine:
        """The engine, for tasks that sessions cannot do (schema tools, tests)."""
        return self._engine

    @contextmanager
    def begin(self) -> Iterator[Session]:
        """One transaction: committed when the block ends, rolled back when it raises.

        Keep it short, and do not nest it: on SQLite there is one writer at a time.

        Raises:
            RuntimeError: this thread is in a transaction already (SQLite).
            DatabaseBusy: others have written for `BUSY_SECONDS` without a gap (SQLite).
        """
        timing, info = self.tally.timing(TRANSACTION_SECONDS, "write"), {ENTRY_KEY: self.entry_key}
        with (
            timing,
            self._writing(),
            Session(self._engine, expire_on_commit=False, info=info) as session,
            session.begin(),
        ):
            yield session

    def limit_waits(self, session: Session, seconds: float) -> None:
        """Bounds how long each statement of a transaction waits for the locks of another one (PostgreSQL).

        It then fails with OperationalError. SQLite has one writer at a time, and so no such wait.
        """
        if not self._sqlite:
            session.connection().exec_driver_sql(f"SET LOCAL lock_timeout = {max(1, round(1000 * seconds))}")

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A consistent snapshot to read from, without waiting for writers; writing in it is an error."""
        timing = self.tally.timing(TRANSACTION_SECONDS, "read")
        with timing, Session(self._reader, expire_on_commit=False) as session:
            yield session

    def migrate(self) -> None:
        """Brings the schema to the newest version; an empty database gets all tables.

        Raises:
            DatabaseIncompatible: this version does not know the schema.
        """
        # The turn comes first: who waits for it within a transaction would keep the file locked.
        with alone(), self._writing(), self._engine.begin() as connection:
            if not self._sqlite:
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": LOCK_KEY + Duty.MIGRATION})
            self._check_known(connection)
            if pending_revisions(connection):
                from storage import migrations  # noqa: PLC0415 - Alembic is only needed here

                migrations.upgrade(connection)

    def check_known(self) -> None:
        """Checks that this version knows the schema, or can upgrade it.

        Raises:
            DatabaseIncompatible: a newer or an unreleased version made it.
        """
        with self._reader.connect() as connection:
            self._check_known(connection)

    def check_current(self) -> None:
        """Compares the schema with that of this version.

        Raises:
            DatabaseIncompatible: a newer or an unreleased version made it.
            DatabaseTooOld: `migrate` has not been called since an older version made it.
        """
        with self._reader.connect() as connection:
            self._check_known(connection)
            if pending_revisions(connection):
                raise DatabaseTooOld(f"the database {self.url} is of an older version")

    def _check_known(self, connection: Connection) -> None:
        if (reason := incompatibility(connection)) is not None:
            raise DatabaseIncompatible(f"the database {self.url} {reason}")

    def lock_exclusive(self) -> None:
        """Makes this the only process on the database until `close` or the end of the process, `kill -9` included.

        Raises:
            DatabaseBusy: another process has the lock, or coordinators share it; the message names one.
        """
        if self._lock_file is not None or self._lock_connection is not None:
            return
        if self._sqlite:
            self._lock_file = self._lock_sqlite()
        else:
            self._lock_connection = self._lock_postgresql(shared=False)

    def lock_shared(self) -> None:
        """Makes this one of the coordinators on the database, until `close` or the end of the process.

        A process that has the exclusive lock gives it up for the shared one; no other can take it in between.

        Raises:
            DatabaseBusy: another process has the exclusive lock; the message names it.
            ValueError: a SQLite database has one coordinator.
        """
        if self._sqlite:
            raise ValueError(f"{self.url} is a file, which one coordinator serves")
        if self._lock_connection is None:
            self._lock_connection = self._lock_postgresql(shared=True)
        elif not self._shared:
            self._lock_connection.execute(text("SELECT pg_advisory_lock_shared(:key)"), {"key": LOCK_KEY})
            self._lock_connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": LOCK_KEY})
        self._shared = True

    def holds_lock(self) -> bool:
        """True if this database holds its lock; PostgreSQL releases it when its connection breaks."""
        if self._lock_connection is None:
            return self._lock_file is not None
        try:
            self._lock_connection.execute(text("SELECT 1"))
        except SQLAlchemyError:
            return False
        return True

    def keep_lock(self) -> bool:
        """Takes the lock again, exclusive or shared as it was, if its connection broke. Returns True if it had to.

        Raises:
            DatabaseBusy: another process has the lock.
            OperationalError: the database does not answer.
        """
        if self.holds_lock():
            return False
        self._drop_lock_connection()
        if self._shared:
            self.lock_shared()
        else:
            self.lock_exclusive()
        return True

    @contextmanager
    def turn(self, duty: Duty, seconds: int) -> Iterator[bool]:
        """Does what one coordinator does at a time. The value is False if another one has its turn.

        If this process is frozen, the turn ends after these seconds at most. With SQLite there is no other coordinator.
        """
        with self.turns(duty, seconds) as mine:
            yield mine()

    @contextmanager
    def turns(self, duty: Duty, seconds: int) -> Iterator[Callable[[], bool]]:
        """Like `turn`, for a duty that lasts: the value takes the turn if it is free, and says if this process has it.

        It must be called more often than every `seconds`; once the turn has ended it raises OperationalError.
        """
        if self._sqlite:
            yield lambda: True
            return
        with self.locking_session(seconds) as connection:
            lock = text("SELECT pg_try_advisory_lock(:key)"), {"key": LOCK_KEY + duty}
            yield lambda: bool(connection.scalar(*lock))

    @contextmanager
    def locking_session(self, seconds: int) -> Iterator[Connection]:
        """A session of PostgreSQL without transactions. It takes advisory locks, which it releases when the block ends.

        The server ends it, and releases the locks, when it has done nothing for these seconds, since its process is
        frozen. Its statements then raise OperationalError.
        """
        with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(
                text("SELECT set_config('idle_session_timeout', :limit, false)"), {"limit": f"{seconds}s"}
            )
            try:
                yield connection
            finally:
                with suppress(SQLAlchemyError):  # the server may have ended the session
                    connection.execute(text("SELECT pg_advisory_unlock_all()"))
                    connection.execute(text("RESET idle_session_timeout"))

    def close(self) -> None:
        """Releases the lock and closes every connection; may be called twice."""
        if self._lock_connection is not None:
            with suppress(SQLAlchemyError):  # at once, so that the next coordinator can start
                self._lock_connection.execute(text("SELECT pg_advisory_unlock_all()"))
            self._drop_lock_connection()
        self._reader.dispose()
        self._engine.dispose()
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def _drop_lock_connection(self) -> None:
        if self._lock_connection is not None:
            with suppress(SQLAlchemyError):  # only a broken connection is dropped
                self._lock_connection.invalidate()
            with suppress(SQLAlchemyError):
                self._lock_connection.close()
            self._lock_connection = None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        if not self._sqlite:
            yield
            return
        thread = threading.get_ident()
        if self._writing_thread == thread:
            raise RuntimeError("a transaction inside a transaction of the same thread: pass the session on instead")
        if not self._writers.acquire(timeout=BUSY_SECONDS):
            raise DatabaseBusy(f"no turn to write to {self.url} for {BUSY_SECONDS:.0f} seconds")
        self._writing_thread = thread
        try:
            with self._written.noted():
                yield
        finally:
            self._writing_thread = None
            self._writers.release()

    def _lock_sqlite(self) -> int:
        # A separate file: SQLite locks the database file with POSIX locks, which any close() of that file would drop.
        path = Path(f"{self._engine.url.database}.lock")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace").strip()
            os.close(descriptor)
            raise self._busy(holder or "a process that has just started") from None
        os.ftruncate(descriptor, 0)
        with suppress(OSError):  # on a full disk the lock file does not name its holder
            os.pwrite(descriptor, f"{self._name}\n".encode(), 0)
        return descriptor

    def _lock_postgresql(self, *, shared: bool) -> Connection:
        lock = "pg_try_advisory_lock_shared" if shared else "pg_try_advisory_lock"
        connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        try:
            # The connection is named before it locks, so that another process can name the holder of the lock.
            connection.execute(text("SELECT set_config('application_name', :name, false)"), {"name": self._name})
            if connection.scalar(text(f"SELECT {lock}(:key)"), {"key": LOCK_KEY}):
                connection.detach()  # never back to the pool: the lock belongs to the connection
                return connection
            parameters = {"high": LOCK_KEY >> 32, "low": LOCK_KEY & 0xFFFFFFFF}
            holders = connection.execute(text(_LOCK_HOLDERS), parameters).all()
            others = [holder for holder in holders if holder.application_name != self._name]
            for holder in set(holders) - set(others):
                # Our own connection broke, and the server has not noticed it yet.
                connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": holder.pid})
            connection.invalidate()  # it carries our name: not for the pool either
            if not others:
                raise InterfaceError("the lock of a connection that has just ended", None, RuntimeError("try again"))
            raise self._busy(f"{others[0].application_name} (server process {others[0].pid})")
        except BaseException:
            connection.close()
            raise

    def _busy(self, holder: str) -> DatabaseBusy:
        return DatabaseBusy(
            f"the database {self.url} is in use by another coordinator: {holder}. Only one may run on a database; stop "
            "that one first, or give this one a database of its own."
            if self._sqlite
            else f"the database {self.url} is in use by another process: {holder}. Stop it first: every coordinator of "
            "the federation, a simulation, or a restore."
        )


def _open_sqlite(url: URL, durable: bool, create: bool) -> tuple[Engine, Engine]:
    """An engine that writes and one that only reads, each with connections of its own."""
    path = _sqlite_path(url, create=create)
    return sqlite_engine(path, durable), sqlite_engine(path, durable, query_only=True)


def _sqlite_path(url: URL, *, create: bool) -> Path:
    """The file of a URL, without symbolic links; made if it is missing and `create` is true."""
    if url.get_backend_name() != "sqlite" or not url.database or url.database == ":memory:" or url.query:
        raise ValueError(f"a SQLite database must be a plain file here: sqlite:///FILE, not {str(url)!r}")
    # Without symbolic links: the lock file, like SQLite's own files, is beside the file itself.
    path = Path(url.database).resolve()
    if not path.exists():
        if not create:
            raise DatabaseMissing(errno.ENOENT, "the database file does not exist", str(path))
        # Only a missing file is opened here: to close a SQLite file drops the locks that this process has in it.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # SQLite's own files take over the mode
    # SQLite keeps its log beside the name of the file: two names for one file would damage it.
    if (names := path.stat().st_nlink) > 1:
        raise ValueError(f"the database file {path} has {names} names (hard links): remove all of them but one")
    return path
