"""The shared memory through which reading processes hand batches over: what a pass takes, and what is free.

A container has 64 MB of it unless it is given more. PyTorch drops a batch that does not fit, and waits for ever.
"""

import logging
import math
import os
from collections.abc import Collection

import torch

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - no file is made there by name
_log = logging.getLogger(__name__)
_PAGE = 4096  # bytes
_AHEAD = 2  # batches that PyTorch lets each process read ahead


def free_bytes() -> int | None:
    """What is free; None on a system without such a directory, which has no limit of this kind."""
    try:
        status = os.statvfs(SHARED_MEMORY)
    except (AttributeError, OSError):
        return None
    return status.f_bavail * status.f_frsize


def pass_bytes(part_bytes: Collection[int], batch: int, batches: int, processes: int) -> int:
    """The most that one pass takes.

    Args:
        part_bytes: the bytes of the parts of one sample: features and labels.
        batch: the number of samples in the largest batch.
        batches: the number of batches in the pass.
        processes: the number of processes that read.
    """
    together = min(batches, _AHEAD * processes + 1)  # one is in use
    return together * trainers_here() * sum(math.ceil(part * batch / _PAGE) * _PAGE for part in part_bytes)


def warn(shortage: str) -> None:
    """Says that the reading processes do without shared memory, why, and how to give them more."""
    free = free_bytes() or 0
    _log.warning(
        "%s has %.1f MB free, and %s: the processes that read the data send it through pipes instead, which is "
        "slower. Give the container more of it: docker run --shm-size=1g, shm_size in a file of Docker Compose, or in "
        "Kubernetes an emptyDir with medium: Memory at %s; or read with fewer processes (loader_workers)",
        SHARED_MEMORY,
        free / 1e6,
        shortage,
        SHARED_MEMORY,
    )


def trainers_here() -> int:
    """The trainers of this machine that read the same samples at the same time, for themselves (processes)."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
