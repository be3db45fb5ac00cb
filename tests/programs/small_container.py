"""Runs `fedpareto` where /dev/shm is as small as in a container: python small_container.py SIZE worker run ...

It ends with the code 77 where this process may not mount a file system: SIZE is that of `mount -o size=SIZE`.
"""

import ctypes
import os
import sys
from collections.abc import Callable

from fedpareto.cli.entry import main

CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000
NOT_ALLOWED = 77


def mount_shared_memory(size: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    calls: tuple[Callable[[], int], ...] = (
        lambda: libc.unshare(CLONE_NEWNS),
        lambda: libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None),
        lambda: libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, f"size={size}".encode()),
    )
    for call in calls:
        if call():
            print(os.strerror(ctypes.get_errno()), file=sys.stderr)
            sys.exit(NOT_ALLOWED)


if __name__ == "__main__":  # the processes that read samples import this file
    mount_shared_memory(sys.argv.pop(1))
    main()
