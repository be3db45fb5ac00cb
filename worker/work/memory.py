"""The worker's memory of rounds: the values that work keeps between phases, and the questions that it answered.

Values live in memory, or, if they must survive a restart, encrypted in the worker's home. They are erased when work
of a later attempt or round of the run arrives, or a day after the last deadline. Values of a private round are erased
when it is over, or a day after the first reply in it. That day is by this machine's own clock, which no coordinator can
set. The ledger of answered questions stays.
"""

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from federation.digests import digest
from federation.v1.common_pb2 import AssignmentManifest
from federation.work.base import Memory
from federation.work.secure.journal import session_names
from worker.ledgers.ledger_file import LedgerFile
from worker.site.assignment_checks import CheckedAssignment, Declined

KEPT_AFTER_DEADLINE = timedelta(days=1)
# Each phase is asked for when the one before has ended, at its deadline at the latest, and after the coordinator has
# computed with its replies.
NEXT_QUESTION_WITHIN = timedelta(minutes=5)
MAX_ATTEMPTS = 1000  # that are remembered
EARLIEST = datetime.min.replace(tzinfo=UTC)
_NONCE_BYTES = 12
MIGRATIONS = (
    (
        """
        CREATE TABLE kept (
            run TEXT, round INTEGER, attempt INTEGER, name TEXT, value BLOB, deadline TEXT,
            PRIMARY KEY (run, round, attempt, name)
        ) WITHOUT ROWID
        """,
        """
        CREATE TABLE ends (
            run TEXT, round INTEGER, attempt INTEGER, names TEXT, at TEXT, PRIMARY KEY (run, round, attempt, names)
        ) WITHOUT ROWID
        """,
        """
        CREATE TABLE answered (
            run TEXT, round INTEGER, attempt INTEGER, question TEXT, asked TEXT,
            PRIMARY KEY (run, round, attempt, question)
        ) WITHOUT ROWID
        """,
    ),
)

_ADVICE = "move it away; rounds that are under way are then answered anew, so do it only between rounds"

_KEPT = "SELECT run, round, attempt, max(deadline) FROM kept GROUP BY 1, 2, 3"

Key = tuple[str, int, int]  # run, round, attempt


class WorkerMemory:
    """The rounds that are under way. Any thread may call.

    The database at `path` is made when it is missing. The key that encrypts values is derived from the member's signing
    key. `clock` is this machine's, aware.

    Raises:
        WorkerHomeError, OSError: see `LedgerFile`.
    """

    def __init__(
        self, path: Path, signing_key: Ed25519PrivateKey, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self.clock = clock
        derived = HKDF(SHA256(), 32, salt=None, info=b"fedpareto/v1/worker/memory")
        # Section 3, rule 2: the secrets of sessions are on the disk: in a copy of the file alone, nobody reads them.
        self._cipher = ChaCha20Poly1305(derived.derive(signing_key.private_bytes_raw()))
        self._lock = threading.RLock()
        self._values: dict[Key, dict[str, bytes]] = {}
        self._forgotten: set[tuple[Key, str]] = set()  # values to be erased, by name prefix
        self._file = LedgerFile(path, MIGRATIONS, _ADVICE)
        try:
            self._deadlines = self._kept_deadlines()
            self._newest = dict(self._deadlines)  # the deadline of the newest question in each attempt
        except BaseException:
            self._file.close()
            raise

    def _kept_deadlines(self) -> dict[Key, datetime]:
        with self._file.using() as connection:
            return _deadlines(connection.execute(_KEPT).fetchall())

    def begin(self, order: CheckedAssignment) -> Memory:
        """The memory of the attempt that an assignment belongs to; that of earlier attempts and rounds is erased.

        Raises:
            Declined: `attempt`: a later attempt at the round has begun here.
        """
        key = _key(order.manifest)
        with self._lock:
            self.end_earlier(order)
            self._deadlines[key] = max(order.deadline, self._deadlines.get(key, order.deadline))
            self._newest[key] = order.deadline
            if len(self._deadlines) > MAX_ATTEMPTS:
                self._erase(next(other for other in self._deadlines if other != key))  # the oldest
        return _AttemptMemory(self, key)

    def end_earlier(self, order: CheckedAssignment) -> None:
        """Erases the memory of earlier attempts and rounds of the run, which are over. Raises Declined: as `begin`."""
        run, round_, attempt = key = _key(order.manifest)
        with self._lock:
            for other in [other for other in self._deadlines if other[0] == run]:
                # Protocol, Attempts: an earlier attempt is over. Answered beside the later one, the same vector would
                # be in two of them.
                if other[1] == round_ and other[2] > attempt:
                    message = f"it is of attempt {attempt} at round {round_}; attempt {other[2]} has begun"
                    raise Declined("attempt", message)
                if other != key:
                    self._erase(other)

    def answered(self, order: CheckedAssignment) -> bool:
        """True if the question of an order was answered, or was about to be, by the record."""
        with self._file.using() as connection:
            # Section 3, rule 2: by the record on the disk: after a restart, too, a repeated question is known as one.
            row = connection.execute(
                "SELECT 1 FROM answered WHERE run = ? AND round = ? AND attempt = ? AND question = ?",
                (*_asked_in(order), order.work.once()),
            ).fetchone()
        return row is not None

    def answer(self, order: CheckedAssignment) -> None:
        """Records that a question is about to be answered, if its kind is answered only once.

        Raises:
            Declined: `answered`: another question was answered.
            OSError: the record cannot be written.
        """
        question = order.work.once()
        if not question:
            return
        key, asked = _asked_in(order), question_digest(order.manifest)
        with self._lock, self._file.using() as connection:
            # Section 3, rule 2: IGNORE keeps the first question, so that a different one under its name is found below.
            connection.execute("INSERT OR IGNORE INTO answered VALUES (?, ?, ?, ?, ?)", (*key, question, asked))
            (first,) = connection.execute(
                "SELECT asked FROM answered WHERE run = ? AND round = ? AND attempt = ? AND question = ?",
                (*key, question),
            ).fetchone()
        # Section 3, rule 2: two different answers to one phase are two functions of the same secrets.
        if first != asked:
            message = f"another question {question!r} was answered already"
            raise Declined("answered", message)

    def forget(self, manifest: AssignmentManifest, names: str) -> None:
        """Erases the values of an attempt whose names begin with `names`; if that fails, the next sweep tries again."""
        if names:
            with self._lock:
                # Section 3, rule 2: remembered first: if the disk fails, the next sweep erases what must not stay.
                self._forgotten.add((_key(manifest), names))
                self._forget()

    def end_session(self, session: bytes) -> None:
        """Erases the values of a private round's session in all attempts; if that fails, the next sweep tries again."""
        names = session_names(session)
        with self._lock:
            self._forgotten |= {(key, names) for key in self._deadlines}
            self._forget()

    def end_after(self, manifest: AssignmentManifest, names: str, time: timedelta) -> None:
        """Has the values of an attempt whose names begin with `names` erased after some time, by this machine's clock.

        A later call for the same names changes nothing. Raises OSError if it cannot be written.
        """
        # Section 3, rule 2: this machine's clock: with the coordinator's, it could keep a session's secrets alive.
        at = (self.clock() + time).isoformat()
        with self._lock, self._file.using() as connection:
            # Section 3, rule 2: the first end stays: asked again and again, a session would never be over.
            connection.execute("INSERT OR IGNORE INTO ends VALUES (?, ?, ?, ?, ?)", (*_key(manifest), names, at))

    def _end(self) -> None:
        """Erases what `end_after` set; values that cannot be deleted now are tried again at the next sweep."""
        with self._file.using() as connection:
            rows = connection.execute("SELECT run, round, attempt, names, at FROM ends").fetchall()
        due = [(tuple(key), names) for *key, names, at in rows if datetime.fromisoformat(at) < self.clock()]
        self._forgotten.update(due)
        self._forget()
        with suppress(OSError), self._file.using() as connection:
            for key, names in set(due) - self._forgotten:
                values = (*key, names)
                connection.execute("DELETE FROM ends WHERE run = ? AND round = ? AND attempt = ? AND names = ?", values)

    def _forget(self) -> None:
        for key, names in list(self._forgotten):
            held = self._values.get(key, {})
            for name in [name for name in held if name.startswith(names)]:
                del held[name]
            with suppress(OSError), self._file.using() as connection:
                connection.execute(
                    "DELETE FROM kept WHERE run = ? AND round = ? AND attempt = ? AND substr(name, 1, ?) = ?",
                    (*key, len(names), names),
                )
                self._forgotten.discard((key, names))

    def sweep(self, now: datetime) -> None:
        """Erases the values that are due, and those that could not be erased before.

        Due are the values of attempts whose last deadline passed a day before `now`, by the coordinator's clock, and
        those named by `end_after`.
        """
        with self._lock:
            with suppress(OSError):
                self._end()
            for key, deadline in list(self._deadlines.items()):
                if deadline + KEPT_AFTER_DEADLINE < now:
                    self._erase(key)

    def _erase(self, key: Key) -> None:
        """Erases the values of an attempt. If they cannot be deleted now, the next sweep tries again."""
        self._values.pop(key, None)
        self._newest.pop(key, None)
        try:
            with self._file.using() as connection:
                connection.execute("DELETE FROM kept WHERE run = ? AND round = ? AND attempt = ?", key)
        except OSError:
            self._deadlines[key] = EARLIEST
            return
        del self._deadlines[key]

    def erase_all(self) -> None:
        """Erases the values of all attempts. Those that cannot be deleted now stay until a later call, or a sweep."""
        with self._lock, suppress(OSError):
            self._values.clear()
            with self._file.using() as connection:
                connection.execute("DELETE FROM kept")

    @staticmethod
    def erase_kept(path: Path) -> None:
        """Erases all values in the database at `path`, whose sessions go on without this worker.

        Raises:
            WorkerHomeError, OSError: see `LedgerFile`.
        """
        if path.exists():
            with closing(LedgerFile(path, MIGRATIONS, _ADVICE)) as file, file.using() as connection:
                connection.execute("DELETE FROM kept")

    def awaits_question(self, now: datetime) -> bool:
        """True if values of a private round are kept, and its next question can still come.

        A coordinator need not say that the round is over, or that it goes on without this member, and one of version
        0.1.0 does not: no question comes long after the deadline of the last one. `now` is by the coordinator's clock.
        """
        with self._lock:
            kept = self._kept_deadlines()
            return any(self._newest.get(key, kept[key]) + NEXT_QUESTION_WITHIN > now for key in kept)

    def close(self) -> None:
        """Closes the database."""
        self._file.close()


def awaits_question(path: Path, now: datetime) -> bool:
    """As of `WorkerMemory`, of the database at `path`, whose worker does not run.

    Raises:
        WorkerHomeError, OSError: see `LedgerFile`.
    """
    with LedgerFile.reading(path, MIGRATIONS, _ADVICE) as connection:
        kept = {} if connection is None else _deadlines(connection.execute(_KEPT).fetchall())
    return any(deadline + NEXT_QUESTION_WITHIN > now for deadline in kept.values())


def _deadlines(rows: Iterable[tuple[str, int, int, str]]) -> dict[Key, datetime]:
    """The last deadline of each attempt in which values are kept, from the rows of `_KEPT`."""
    return {(run, round_, attempt): datetime.fromisoformat(deadline) for run, round_, attempt, deadline in rows}


class _AttemptMemory(Memory):
    """The memory of one attempt."""

    def __init__(self, whole: WorkerMemory, key: Key) -> None:
        self._whole = whole
        self._key = key

    def get(self, name: str) -> bytes | None:
        """A value; None if there is none. Raises WorkerHomeError if another key encrypted it."""
        whole = self._whole
        with whole._lock:
            value = whole._values.get(self._key, {}).get(name)
            if value is not None:
                return value
            with whole._file.using() as connection:
                row = connection.execute(
                    "SELECT value FROM kept WHERE run = ? AND round = ? AND attempt = ? AND name = ?",
                    (*self._key, name),
                ).fetchone()
        if row is None:
            return None
        (value,) = row
        try:
            return whole._cipher.decrypt(value[:_NONCE_BYTES], value[_NONCE_BYTES:], _bound(self._key, name))
        except InvalidTag as error:
            raise whole._file.damaged(error) from error

    def put(self, name: str, value: bytes, *, durable: bool = False) -> None:
        """Keeps a value, encrypted on the disk if it is durable.

        Raises:
            Declined: `attempt`: a later attempt or round was asked for meanwhile.
            OSError: the value cannot be written.
        """
        whole, key = self._whole, self._key
        with whole._lock:
            if not durable:
                whole._values.setdefault(key, {})[name] = value
                return
            # A new one for each write: one key encrypts all values, and a name can be written again.
            nonce = os.urandom(_NONCE_BYTES)
            encrypted = nonce + whole._cipher.encrypt(nonce, value, _bound(key, name))
            if (deadline := whole._deadlines.get(key)) is None:
                raise Declined("attempt", f"attempt {key[2]} at round {key[1]} ended while its work was done")
            row = (*key, name, encrypted, deadline.isoformat())
            with whole._file.using() as connection:
                connection.execute("INSERT OR REPLACE INTO kept VALUES (?, ?, ?, ?, ?, ?)", row)


def question_digest(manifest: AssignmentManifest) -> str:
    """The digest of the question that an assignment asks: kind, base model, seed, unshared parameters, inputs, work."""
    inputs = "".join(f"{item.name}\0{item.digest}\0" for item in manifest.inputs)
    unshared = manifest.unshared.SerializeToString(deterministic=True).hex()
    header = f"{manifest.kind}\0{manifest.base_model}\0{manifest.seed}\0{unshared}\0{inputs}"
    return digest(header.encode() + manifest.work)


def _key(manifest: AssignmentManifest) -> Key:
    return manifest.run_id, manifest.round, manifest.attempt


def _asked_in(order: CheckedAssignment) -> Key:
    """The scope within which a question is answered once: its attempt, or one scope for all attempts."""
    # Section 3, rule 2: in all attempts together: another attempt is another key, and would ask a session anew.
    return ("", 0, 0) if order.work.once_ever else _key(order.manifest)


def _bound(key: Key, name: str) -> bytes:
    """The data that authenticates a value's place: it cannot be moved to another key or name."""
    return "\0".join(map(str, (*key, name))).encode()
