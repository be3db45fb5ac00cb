"""What the services share: the next message of a stream, and work that would block the event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from functools import partial
from typing import ParamSpec, TypeVar

FIRST_MESSAGE_SECONDS = 20.0
NEXT_CHUNK_SECONDS = 60.0

P = ParamSpec("P")
T = TypeVar("T")


async def next_message(requests: AsyncIterator[T], seconds: float) -> T | None:
    """The next message; None when the caller has finished its side or says nothing for `seconds`."""
    try:
        # Not wait_for, which in Python 3.11 forgets that the call was ended when a message arrives at the same moment.
        async with asyncio.timeout(seconds):
            return await anext(requests)
    except (StopAsyncIteration, TimeoutError):
        return None


class Threads:
    """Where the services wait for the database and the disk, so that the event loop never does.

    Args:
        executor: has the threads.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls `function` in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, partial(function, *args, **kwargs))
