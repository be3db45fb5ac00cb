"""Threads that wait for the database or the disk, so that the event loop never waits."""

import asyncio
import ctypes
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial, wraps
from typing import Any, BinaryIO, Concatenate, ParamSpec, TypeVar

from sqlalchemy.orm import Session

from storage.database import Database

P = ParamSpec("P")
T = TypeVar("T")
_M_ARENA_MAX = -8  # of <malloc.h>


class ThreadPool:
    """Runs functions in the threads of an executor.

    Args:
        database: for `read` and `write`.
        executor: has the threads.
    """

    def __init__(self, database: Database, executor: Executor) -> None:
        self.database = database
        self.executor = executor

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls `function` in a thread; its lines of the log are about the caller's assignment."""
        call = partial(copy_context().run, function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self.executor, call)

    async def read_file(self, file: BinaryIO, offset: int, buffer: memoryview) -> memoryview:
        """Fills a buffer from `offset` of a file on: at once if memory has the bytes, otherwise in a thread.

        Returns the part that it filled: less than all at the end of the file, and perhaps before.
        """
        try:
            count = os.preadv(file.fileno(), [buffer], offset, os.RWF_NOWAIT)
        except OSError:  # the bytes are on the disk, or the file system cannot tell
            count = await self.run(os.preadv, file.fileno(), [buffer], offset)
        return buffer[:count]

    async def read(self, function: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls `function` in a thread with a session that reads."""

        def read() -> T:
            with self.database.read() as session:
                return function(session, *args, **kwargs)

        return await self.run(read)

    async def write(self, function: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls `function` in a thread with a session whose transaction is committed when it returns."""

        def write() -> T:
            with self.database.begin() as session:
                return function(session, *args, **kwargs)

        return await self.run(write)


async def wait_ended(task: "asyncio.Future[T]") -> T:
    """Waits for the end of a task, also if the caller is cancelled meanwhile, even several times; returns its result.

    Raises:
        CancelledError: the caller was cancelled; the task has ended by now.
    """
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # looked at, or asyncio would log it
        raise cancelled
    return task.result()


def to_the_end(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Lets a coroutine function run to its end when its caller is cancelled: what it changed then takes effect."""

    @wraps(function)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return await wait_ended(asyncio.create_task(function(*args, **kwargs)))

    return run


def all_started(count: int, prefix: str) -> ThreadPoolExecutor:
    """An executor whose threads have started, so that their number does not depend on the calls that came so far."""
    executor, barrier = ThreadPoolExecutor(count, thread_name_prefix=prefix), threading.Barrier(count)
    for started in [executor.submit(barrier.wait) for _ in range(count)]:
        started.result()
    return executor


def share_heap() -> None:
    """Lets all threads of this process use one heap.

    glibc gives each of the first threads a heap of its own, and each heap keeps the most that its thread ever needed. A
    coordinator that serves for days has some 20 threads. C libraries without this setting are left as they are. Call it
    before the first thread starts.
    """
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
