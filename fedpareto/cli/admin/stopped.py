"""Commands that only show the record, while the coordinator of this machine does not run: they read its directory."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from coordinator.ownership import CoordinatorHomeError
from coordinator.services.record_calls import RecordCalls
from coordinator.services.stopped import ElsewhereError, stopped_record
from federation.refusals import Refusal
from federation.text import escaped_lines
from federation.trust.keys import IdentityError
from fedpareto.cli.failure import CommandFailure, failing, not_served
from storage.blobs import BlobCorrupt, BlobMissing, BlobStoreUnavailable
from storage.database import DatabaseIncompatible, DatabaseTooOld
from storage.faults import explain_fault


@contextmanager
def reading(centre: Path) -> Iterator[Callable[..., Any]]:
    """The calls of the Admin service on the record in a coordinator's directory, as `AdminSession.call` makes them.

    Raises:
        CommandFailure: the record cannot be read, or a call inside fails or needs a coordinator that serves.
    """
    try:
        with (
            failing(CoordinatorHomeError, IdentityError, DatabaseIncompatible),
            stopped_record(centre, clock=lambda: datetime.now(UTC)) as record,
            _loop_of_its_own() as run,
        ):
            calls = _Calls(centre, record, run)
            try:
                yield calls.call
            finally:
                calls.close()
    except (ElsewhereError, DatabaseTooOld) as error:
        raise not_served(centre, str(error)) from None
    except Refusal as refusal:
        raise CommandFailure(escaped_lines(f"{refusal.message} [{refusal.reason}]")) from None
    except (SQLAlchemyError, BlobCorrupt, BlobMissing, BlobStoreUnavailable) as error:
        raise CommandFailure(f"the record in {centre} cannot be read: {explain_fault(error)}") from error


@contextmanager
def _loop_of_its_own() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Runs coroutines on a thread of its own: the caller's may have an event loop that runs, as in a notebook."""
    with ThreadPoolExecutor(1) as thread:
        runner = asyncio.Runner()
        try:
            yield lambda answer: thread.submit(runner.run, answer).result()
        finally:
            thread.submit(runner.close).result()


class _Calls:
    """The calls of a record, from any thread. All other calls need a coordinator that serves."""

    def __init__(self, centre: Path, record: RecordCalls, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._centre = centre
        self._record = record
        self._in_loop = run
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Lets a call end, and no other begin."""
        with self._lock:
            self._closed = True

    def _run(self, answer: Coroutine[Any, Any, Any]) -> Any:
        with self._lock:
            if self._closed:
                answer.close()
                raise RuntimeError("the record is not read any more")
            return self._in_loop(answer)

    def call(self, kind: str, method: str, *, response_deserializer: Callable[[bytes], Any], **_: Any) -> Any:
        """A function that makes a call; arguments as of `AdminSession.call`."""
        name = method.rpartition("/")[2]
        answer = getattr(self._record, name, None)

        def call(request: Any, **_: Any) -> Any:
            if answer is None:
                raise not_served(self._centre)
            if kind == "unary_unary":
                return response_deserializer(self._run(answer(request, None)).SerializeToString())
            return map(response_deserializer, self._stream(answer(request, None)))

        return call

    def _stream(self, messages: AsyncIterator[Any]) -> Iterator[bytes]:
        while (message := self._run(_next_of(messages))) is not None:
            yield message.SerializeToString()


async def _next_of(messages: AsyncIterator[Any]) -> Any:
    return await anext(messages, None)
