"""What all threads of a process share: random generators, and the switches of PyTorch and NumPy.

A notebook has set some of the switches, and may simulate on several threads at once. `alone` gives one thread its turn.
`ordinary` also sets the switches as a new process has them, and puts them back.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np


class _Turn:
    """The turn of one thread, which may take it again inside. A forked process begins with a turn of its own."""

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)  # the thread that has the turn is not in the child

    def _renew(self) -> None:
        self._lock = threading.RLock()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Waits for the turn. Inside, no other thread seeds generators, or sets switches, that this one uses."""
        lock = self._lock
        with lock:
            yield


alone = _Turn().alone


@contextmanager
def ordinary_numpy() -> Iterator[None]:
    """Inside, an overflow gives infinity and an underflow 0, as rules and attacks expect: `np.seterr` has no effect."""
    with np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"):
        yield


@contextmanager
def ordinary(threads: int | None = None) -> Iterator[None]:
    """`alone` and `ordinary_numpy`, with PyTorch's switches as in a new process; afterwards they are as they were.

    They are gradients, autocast, the search for anomalies, the default device and type, deterministic algorithms, and
    the precision of products of matrices. `threads` are CPU threads of torch; None leaves their number. Nothing is
    imported: where PyTorch has not been, nobody has set its switches.
    """
    with alone(), ordinary_numpy(), ExitStack() as stack:
        if "torch" in sys.modules:
            _set_switches(threads, stack)
        yield


def _set_switches(threads: int | None, stack: ExitStack) -> None:
    """Sets PyTorch's switches; the stack puts them back."""
    import torch  # noqa: PLC0415 - this waits for another thread that imports it

    stack.enter_context(torch.inference_mode(mode=False))  # this enables gradients, too
    if torch.get_default_device().type != "cpu":
        stack.enter_context(torch.device("cpu"))
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            stack.callback(torch.set_autocast_enabled, kind, True)
            torch.set_autocast_enabled(kind, False)
    if torch.is_anomaly_enabled():
        stack.callback(torch.set_anomaly_enabled, True, torch.is_anomaly_check_nan_enabled())
        torch.set_anomaly_enabled(False)

    def matmul_precision() -> str:
        try:
            return torch.get_float32_matmul_precision()
        except RuntimeError:  # somebody has chosen by PyTorch's newer switches, which do not mix with this one
            return "highest"

    switches: tuple[tuple[Callable[[], Any], Callable[[Any], Any], Any], ...] = (
        (torch.get_default_dtype, torch.set_default_dtype, torch.float32),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0),
        (matmul_precision, torch.set_float32_matmul_precision, "highest"),
        (torch.get_num_threads, torch.set_num_threads, threads or torch.get_num_threads()),
    )
    for get, change, value in switches:
        if (was := get()) != value:
            change(value)
            stack.callback(change, was)
