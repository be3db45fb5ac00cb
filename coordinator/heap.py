"""The memory that the C library keeps for this process."""

import ctypes
from contextlib import suppress

_M_ARENA_MAX = -8  # of <malloc.h>


def share_heap() -> None:
    """Lets all threads use one heap.

    glibc gives each of the first threads a heap of its own, and each heap keeps the most that its thread ever needed. A
    coordinator that serves for days has some 20 threads. C libraries without this setting are left as they are. Call it
    before the first thread starts.
    """
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
