"""What several threads hand in at the same time is written in one transaction."""

import threading
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Generic, TypeVar, cast

from sqlalchemy.orm import Session

from storage.database import UNAVAILABLE, Database

LOCK_SECONDS = 2.0  # the longest wait of a group for the locks of another transaction
ALONE_SECONDS = 0.05  # likewise of an item that is tried alone, if its group has waited this long already
PAUSES = (0.5, 1.5)  # seconds, before an item whose row is still locked is tried again
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


_LOCKED = "55P03"  # a lock was not given in time
# Two transactions that cannot follow each other, that waited for each other, and the first.
_CONFLICTS = frozenset({"40001", "40P01", _LOCKED})


class GroupCommit(Generic[ItemT, ResultT]):
    """Commits items in groups, without a timer: the thread whose turn it is takes all that wait.

    An item that is alone waits for no other one. Each item has its own result. If the transaction of a group fails,
    each of its items is tried in a transaction of its own, so that none fails for another one's fault; so it is if the
    group and another transaction waited for each other's rows, and if another transaction keeps rows of it locked for
    `LOCK_SECONDS`: a coordinator that is frozen keeps them for half a lease. An item whose row is still locked then is
    tried again after each of `PAUSES`, while others take their turns. If the database cannot be written, all that wait
    are told so at once, and may try again.

    Args:
        database: in which they are written.
        write: writes items in an open transaction and returns their results, in their order. It may be called again
            with the same items: also if it is not known whether an earlier transaction was committed.
    """

    def __init__(self, database: Database, write: Callable[[Session, Sequence[ItemT]], Sequence[ResultT]]) -> None:
        self._database = database
        self._write = write
        self._turn = threading.Lock()
        self._waiting_lock = threading.Lock()  # held while the list of waiting items changes
        self._waiting: list[_Place[ItemT, ResultT]] = []

    def commit(self, item: ItemT) -> ResultT:
        """The result of an item, once it is committed.

        Raises:
            Exception: that of its transaction; nothing of the item is written then, or it is not known.
        """
        place = self.hand_in(item)
        with self._turn:
            if not place.ended:
                self._commit_all(place)
        for pause in PAUSES:
            if not _is_conflict(place.error):
                break
            sleep(pause)
            with self._turn:
                self._commit_alone(place, ALONE_SECONDS)
        return place.outcome()

    def hand_in(self, item: ItemT) -> "_Place[ItemT, ResultT]":
        """Lets an item wait for the next one that is committed, which takes it along."""
        place = _Place[ItemT, ResultT](item)
        with self._waiting_lock:
            self._waiting.append(place)
        return place

    def _commit_all(self, own: "_Place[ItemT, ResultT]") -> None:
        """Commits all that wait once this process may write; `own` is among them."""
        group: list[_Place[ItemT, ResultT]] = []
        try:
            with self._database.begin() as session:
                self._database.limit_waits(session, LOCK_SECONDS)
                with self._waiting_lock:
                    group, self._waiting = self._waiting, []
                results = self._write(session, [place.item for place in group])
        except Exception as error:
            if isinstance(error, UNAVAILABLE) and not _is_conflict(error):
                with self._waiting_lock:
                    group, self._waiting = [*group, *self._waiting], []
                for place in group:
                    place.error = error
                return
            if not group:  # it was not its turn to write; the others ask for theirs
                with self._waiting_lock:
                    self._waiting.remove(own)
            locked = _sql_state(error) == _LOCKED
            if not group or (len(group) == 1 and (locked or not _is_conflict(error))):
                own.error = error
                return
        else:
            for place, result in zip(group, results, strict=True):
                place.result = result
            return
        # After a deadlock the other transaction goes on, and soon ends. All items together wait for it once.
        until = monotonic() + (0.0 if locked else LOCK_SECONDS)
        for place in group:
            self._commit_alone(place, max(ALONE_SECONDS, until - monotonic()))

    def _commit_alone(self, place: "_Place[ItemT, ResultT]", seconds: float) -> None:
        """Commits an item in a transaction of its own, which waits at most `seconds` for the locks of another one."""
        try:
            with self._database.begin() as session:
                self._database.limit_waits(session, seconds)
                (result,) = self._write(session, [place.item])
        except Exception as error:
            place.error = error
        else:
            place.result, place.error = result, None


def _sql_state(error: Exception | None) -> str:
    """The code of PostgreSQL's error; empty if it is none."""
    return getattr(getattr(error, "orig", None), "sqlstate", None) or ""


def _is_conflict(error: Exception | None) -> bool:
    """True if PostgreSQL ended a transaction because of another one, and not because it cannot be written."""
    return _sql_state(error) in _CONFLICTS


class _Place(Generic[ItemT, ResultT]):
    """An item that waits, and what has become of it."""

    def __init__(self, item: ItemT) -> None:
        self.item = item
        self.result: ResultT | None = None
        self.error: Exception | None = None

    @property
    def ended(self) -> bool:
        """True if it has a result or an error."""
        return self.result is not None or self.error is not None

    def outcome(self) -> ResultT:
        """The result of an item that has ended; raises its error."""
        if self.error is not None:
            raise self.error
        return cast(ResultT, self.result)
