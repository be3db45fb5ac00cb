"""The sequencer: gives entries their places in the log, one after the other, and signs checkpoints.

It looks twice a second whether this process has recorded entries, and now and then for those of other processes. A
batch of entries and the checkpoint that covers them are one transaction: an entry with a place that no checkpoint
covers was not made by a coordinator. After a batch that was not committed, the tree is read anew.

Several coordinators of a database take turns: a batch locks the federation's row, and continues the log only if the
tree has all entries of the log. A coordinator that is behind, also one that was frozen, first reads what the others
have chained.
"""

import logging
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from time import monotonic

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from coordinator.audit.checkpoints import LogError, LogKey, newest_signed, note, noted
from coordinator.fault_state import FaultState
from federation.record import log_entries
from federation.record.log_entries import FIRST, LogEntry
from federation.record.merkle import Tree
from federation.v1.common_pb2 import LogHead
from storage import audit
from storage.database import UNAVAILABLE, Database
from storage.faults import explain_fault
from storage.models import AuditEntry, Checkpoint, Federation

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
UNTOLD_SECONDS = 5.0  # between two looks at the database although this process, which is alone with it, wrote nothing
SHOW_SECONDS = 60.0  # the longest time until a checkpoint is shown to members, and kept
BATCH = 5000  # entries that one transaction chains
_TOLD_AT_A_TIME = 500  # entries
_SHOWN = (log_entries.STEPPED, log_entries.MEASURED, log_entries.DESCRIBED)  # the checkpoints after these are kept


class _Behind(Exception):
    """Another coordinator has continued the log."""


class Sequencer:
    """Chains and signs the log in a thread.

    Args:
        database: the record; this process has its lock, alone or with other coordinators. What it records gets
            a MAC by the key's `entry_key`.
        key: signs.
        directory: the coordinator's, where the newest checkpoint that members may have seen is noted.
        faults: notes faults of the disk and the database.
        clock: the time, aware.
        listener: called with the entries of the log in their order, each once and verified: at the start with all, then
            with each batch.
    """

    def __init__(
        self,
        database: Database,
        key: LogKey,
        directory: Path,
        *,
        faults: FaultState,
        clock: Callable[[], datetime],
        listener: Callable[[Sequence[LogEntry]], None] = lambda entries: None,
    ) -> None:
        self._database = database
        self._key = key
        self._entry_key = database.entry_key = key.entry_key
        self._directory = directory
        self._faults = faults
        self._clock = clock
        self._listener = listener
        self._told = 0  # the number of entries that the listener has heard of
        self._turn = threading.RLock()  # guards the tree and the values derived from it
        self._stale = True
        self._tree = Tree(self._leaves)
        self._last = FIRST  # the leaf of the last entry
        self._newest = b""  # the checkpoint over the whole tree, a serialized envelope
        self._shown = LogHead()  # the log head that members get
        self._shown_size = 0
        self._shown_at = -SHOW_SECONDS  # by the monotonic clock
        self._proof = lru_cache(maxsize=64)(self._prove)
        self._read_at: int | None = None  # the changes of the log by this process before the last look at the database
        self._looked = -UNTOLD_SECONDS  # when that was, by the monotonic clock
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sequencer", daemon=True)

    def start(self) -> None:
        """Chains the entries recorded before, shows them, and goes on in a thread.

        Raises:
            LogError: the log differs from what was signed.
        """
        self.sequence(show=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, and chains all that was recorded."""
        self._stopping.set()
        if not self._thread.is_alive():
            return
        self._thread.join()
        if self._faults.gone() is not None:
            return  # its directory would not have the checkpoint
        try:
            self.sequence(show=True)
        except UNAVAILABLE as error:
            log.warning("could not chain the end of the audit log: %s", explain_fault(error))

    def sequence(self, *, show: bool = False) -> int:
        """Chains the waiting entries and returns their number. With `show` members get the newest checkpoint.

        Raises:
            LogError: the log differs from what was signed.
        """
        count = 0
        with self._turn:
            if self._stale:
                self._load()
            try:
                while self._waits():
                    with suppress(_Behind):
                        count += self._batch(show)
            except BaseException:
                self._stale = True
                raise
            if self._shown_size < self._tree.size and (show or self._due):
                self._show()
        return count

    @property
    def newest(self) -> bytes:
        """The checkpoint over all entries that have a place, a serialized envelope; empty before the first."""
        with self._turn:
            return self._newest

    def head(self, since: int) -> LogHead:
        """The newest checkpoint for members, with the proof that it continues the one of this size where it does.

        A member may have seen a newer one at another coordinator: then this coordinator reads on, and shows it too.
        """
        with self._turn:
            if since > self._shown_size and self._database.serves_many:
                self._catch_up(since)
            head = LogHead()
            head.CopyFrom(self._shown)
            if 0 < since <= self._shown_size:
                head.since = since
                head.consistency.extend(self._proof(since, self._shown_size))
            return head

    def digest(self, entries: int) -> str:
        """The digest of the first entries: the root over them."""
        with self._turn:
            return f"sha256:{self._tree.root(entries).hex()}"

    @property
    def shown_size(self) -> int:
        """The number of entries in the newest checkpoint for members."""
        return self._shown_size

    @property
    def _due(self) -> bool:
        return monotonic() - self._shown_at >= SHOW_SECONDS

    def _prove(self, first: int, second: int) -> list[bytes]:
        return self._tree.consistency(first, second)

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_SECONDS) and self._faults.gone() is None:
            if not self._may_wait():
                continue
            try:
                self.sequence()
            except LogError as error:
                log.error("audit log: %s", error)
            except Exception as error:
                if self._faults.note(error) is None:
                    log.exception("the audit log could not be chained; it is tried again")

    def _may_wait(self) -> bool:
        """False if entries cannot wait: this process has recorded none since the last look, and no other one could."""
        changes, due = self._changes(), self._shown_size < self._tree.size and self._due
        return changes is None or changes != self._read_at or due or monotonic() - self._looked >= UNTOLD_SECONDS

    def _changes(self) -> int | None:
        return self._database.changes(AuditEntry.__tablename__)

    def _waits(self) -> bool:
        """True if entries have no place yet, after the tree was brought up to date with the other coordinators."""
        self._read_at, self._looked = self._changes(), monotonic()
        with self._database.read() as session:
            waits = audit.any_unchained(session)
            behind = self._database.serves_many and audit.size(session) != self._tree.size
        if behind:
            self._continue(self._tree, self._last)
        return waits

    def _batch(self, show: bool) -> int:
        """Chains some entries. A checkpoint that members were never shown is replaced by the next one.

        Raises:
            _Behind: another coordinator was faster.
        """
        before = self._tree.size
        with self._database.begin() as session:
            if self._database.serves_many:
                session.execute(select(Federation.federation_id).with_for_update())
                if audit.size(session) != before:
                    raise _Behind
            entries = self._genuine(session)
            if not entries:
                return 0
            leaves, batch = list[tuple[int, int, bytes]](), list[LogEntry]()
            for entry in entries:
                placed = replace(entry, number=self._tree.size)
                self._last = placed.leaf(self._last)
                self._tree.append(self._last)
                leaves.append((entry.entry_id, placed.number, self._last))
                batch.append(placed)
            audit.chain(session, leaves)
            session.execute(delete(Checkpoint).where(Checkpoint.size == before, ~Checkpoint.shown))
            envelope = self._key.sign(self._tree.size, self._tree.root(), self._clock())
            newest = envelope.SerializeToString(deterministic=True)
            shows = show or self._due or any(entry.action in _SHOWN for entry in entries)
            session.add(Checkpoint(size=self._tree.size, envelope=newest, shown=shows))
        self._newest = newest
        self._listener(batch)
        self._told = self._tree.size
        if shows:
            self._note_shown()
        return len(entries)

    def _genuine(self, session: Session) -> list[LogEntry]:
        """The next entries with the MAC of this coordinator. Others are removed, and a new entry reports each."""
        used, entries = audit.used_macs(session), []
        for entry, mac in audit.unchained(session, BATCH):
            if audit.has_mac(entry, mac, self._entry_key) and mac not in used:
                used.add(mac)
                entries.append(entry)
                continue
            description = f"{entry.action!r} by {entry.actor!r} about {entry.subject!r} at {entry.at.isoformat()}"
            log.error("audit log: row %d was inserted or changed by somebody else: %s", entry.entry_id, description)
            audit.remove(session, entry.entry_id)
            audit.record(
                session,
                at=self._clock(),
                actor="coordinator",
                action=audit.TAMPERED,
                subject=f"row {entry.entry_id}",
                detail=f"{description}: {entry.detail}",
                digest=entry.digest,
                times=entry.times,
            )
        return entries

    def _show(self) -> None:
        """Shows members the newest checkpoint, unless another coordinator has just replaced it."""
        with self._database.begin() as session:
            newest = update(Checkpoint).where(Checkpoint.size == self._tree.size).values(shown=True)
            kept = session.execute(newest.returning(Checkpoint.size)).one_or_none() is not None
        if kept:
            self._note_shown()

    def _note_shown(self) -> None:
        """Shows members a checkpoint that the database keeps.

        It is noted first: no member has seen a newer one here than the directory has.
        """
        note(self._directory, self._newest)
        self._shown = LogHead()
        self._shown.checkpoint.MergeFromString(self._newest)
        self._shown_size, self._shown_at = self._tree.size, monotonic()

    def _catch_up(self, size: int) -> None:
        """Shows the newest checkpoint if another coordinator has shown one over at least `size` entries.

        A member chooses `size`: without such a checkpoint it changes nothing.
        """
        with self._database.read() as session:
            shown = session.scalar(select(func.max(Checkpoint.size)).where(Checkpoint.shown)) or 0
        with suppress(LogError):  # the thread tells of it
            while self._shown_size < size <= shown:  # again if another one has replaced the checkpoint meanwhile
                self.sequence(show=True)
                if self._tree.size < size:
                    return  # entries are missing

    def _leaves(self, start: int, stop: int) -> Sequence[bytes]:
        with self._database.read() as session:
            return audit.chained_leaves(session, start, stop)

    def _load(self) -> None:
        """Reads the tree, and compares it with the signed checkpoints."""
        self._continue(Tree(self._leaves), FIRST, witness=noted(self._directory))
        self._proof.cache_clear()
        if self._newest:
            self._show()
        self._stale = False

    def _continue(self, tree: Tree, last: bytes, *, witness: bytes | None = None) -> None:
        """Reads what follows the last leaf of a tree, and compares all with the newest checkpoint and a witness's.

        Raises:
            LogError: the log differs from what was signed.
        """
        with self._database.read() as session:
            size, newest = audit.size(session), newest_signed(session)
            for leaf in audit.read_leaves(session, tree.size, size):
                tree.append(leaf)
                last = leaf
        if tree.size != size:
            raise LogError(
                f"the last entry is number {size - 1}, and {tree.size} are there: some were removed. {_CHANGED}"
            )
        signed = 0
        for where, envelope in (("its database", newest), ("its directory", witness)):
            if envelope is not None:
                signed = max(signed, self._check_continues(tree, where, envelope))
        if tree.size > signed:
            raise LogError(f"{tree.size - signed} entries were inserted after the last one that was signed. {_CHANGED}")
        self._tell(size)
        self._tree, self._last, self._newest = tree, last, newest or b""

    def _tell(self, size: int) -> None:
        """Passes new entries up to this number to the listener, after it has compared each with its leaf."""
        while self._told < size:
            previous = self._leaves(self._told - 1, self._told)[0] if self._told else FIRST
            number = self._told
            try:
                with self._database.read() as session:
                    entries = audit.chained(session, self._told, min(_TOLD_AT_A_TIME, size - self._told))
                for entry in entries:
                    number = entry.entry.number
                    if entry.entry.leaf(previous) != entry.leaf:
                        raise ValueError(f"{entry.entry.action!r} by {entry.entry.actor!r}")
                    previous = entry.leaf
            except (ArithmeticError, AttributeError, TypeError, ValueError, struct.error) as error:
                what = f"entry {number} of the audit log, or one soon after it, is not what its leaf was made of"
                raise LogError(f"{what}: {error}. {_CHANGED}") from None
            if not entries:
                return
            self._listener([entry.entry for entry in entries])
            self._told += len(entries)

    def _check_continues(self, tree: Tree, where: str, envelope: bytes) -> int:
        """The size of a checkpoint, which the tree must continue."""
        manifest = self._key.open(envelope)
        command = "`fedpareto coordinator restored`, which tells the members"
        remedy = f"If a backup was restored, run {command}. If not: {_CHANGED}"
        if tree.size < manifest.size:
            raise LogError(
                f"the database has {tree.size} entries of the audit log, and the newest checkpoint in {where} was "
                f"signed over {manifest.size}: entries were removed. {remedy}"
            )
        if not manifest.size or tree.root(manifest.size) != manifest.root:
            raise LogError(
                f"the first {manifest.size} entries of the audit log are not those that the newest checkpoint in "
                f"{where} was signed over. {remedy}"
            )
        return manifest.size


_CHANGED = (
    "somebody has changed the database: keep a copy of it, and restore the newest backup; `fedpareto coordinator "
    "check` names the entry"
)
