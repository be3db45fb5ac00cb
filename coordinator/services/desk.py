"""What the calls of administrators share: who calls, and threads for the database."""

import logging
from collections.abc import Callable
from concurrent.futures import Executor
from datetime import datetime, timedelta
from typing import Any, TypeAlias, TypeVar

import grpc
from sqlalchemy.exc import SQLAlchemyError

from coordinator.members.access import Access
from coordinator.members.administrators import note_seen
from coordinator.services.calls import Threads
from federation.identity import Role
from storage.database import Database, DatabaseBusy

log = logging.getLogger(__name__)

SEEN_EVERY = timedelta(minutes=1)  # how often it is noted that an administrator calls

T = TypeVar("T")
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Desk:
    """Where administrators' calls come in.

    Args:
        database: where facts are kept.
        access: who calls.
        executor: threads for the database and the disk, so that the event loop never waits for either.
        clock: the time, aware.
    """

    def __init__(
        self, *, database: Database, access: Access, executor: Executor, clock: Callable[[], datetime]
    ) -> None:
        self._database = database
        self._access = access
        self._executor = executor
        self._in_thread = Threads(executor).run
        self._clock = clock
        self._seen: dict[str, datetime] = {}  # serial number of a certificate -> when that was noted last

    async def _authorise(self, context: Context, role: Role) -> str:
        """How the record names the caller, who must hold the role."""
        caller = await self._access.caller(context, kind="admin", role=role)
        serial, now = caller.identity.serial, self._clock()
        if serial not in self._seen or abs(now - self._seen[serial]) >= SEEN_EVERY:
            self._seen[serial] = now
            self._executor.submit(self._note_seen, serial, now)  # which the answer does not wait for
        return caller.actor

    def _note_seen(self, serial: str, now: datetime) -> None:
        try:
            with self._database.begin() as session:
                note_seen(session, serial, now)
        except (SQLAlchemyError, DatabaseBusy) as error:  # what was asked for matters more
            log.warning("could not note that the administrator with certificate %s has called: %s", serial, error)

    async def _read(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        def read() -> T:
            with self._database.read() as session:
                return function(session, *arguments, **keywords)

        return await self._in_thread(read)

    async def _write(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        def write() -> T:
            with self._database.begin() as session:
                return function(session, *arguments, **keywords)

        return await self._in_thread(write)
