"""Devices, seeds and deterministic kernels, so that the same work gives the same bytes where PyTorch can do that."""

import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TextIO, TypeVar

import torch

LOGGER = logging.getLogger("fedpareto.training")
T = TypeVar("T")

# What PyTorch says of an operation without a deterministic kernel. The last form is that of CUDA's matrix products
# where the owner's CUBLAS_WORKSPACE_CONFIG does not allow them.
_SAYS = (
    r"(\w[\w +-]{0,120}?) (?:does not have a deterministic implementation|defaults to a non-deterministic algorithm)"
    r"|this operation is not deterministic because it uses (\w+)"
)


def seed_torch(device: torch.device, seed: int) -> None:
    """Seeds the generators that a model on this device draws from."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


@contextmanager
def _whole_float32() -> Iterator[None]:
    """Convolutions and recurrent layers in float32 inside; otherwise cuDNN may round their inputs to TF32 (10 bits)."""
    cudnn = torch.backends.cudnn
    try:
        was = cudnn.allow_tf32
    except RuntimeError:  # the owner's code has chosen by PyTorch's newer switches, which do not mix with this one
        was = False
    if was:
        cudnn.allow_tf32 = False
    try:
        yield
    finally:
        if was:
            cudnn.allow_tf32 = True


@contextmanager
def deterministic(device: torch.device, seed: int, mode: str = "error") -> Iterator[None]:
    """Seeded generators, deterministic kernels and float32 inside; torch's global state as it was outside.

    An operation without a deterministic kernel is an error, or in the mode "warn" a warning.
    """
    cudnn = torch.backends.cudnn
    was = (torch.get_deterministic_debug_mode(), cudnn.deterministic, cudnn.benchmark)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), _whole_float32():
        seed_torch(device, seed)
        # The same switch as torch.use_deterministic_algorithms, which would import the compiler (seconds) for it.
        torch.set_deterministic_debug_mode(mode)
        cudnn.deterministic, cudnn.benchmark = True, False
        try:
            yield
        finally:
            before, cudnn.deterministic, cudnn.benchmark = was
            torch.set_deterministic_debug_mode(before)


def without_kernel(error: BaseException) -> str:
    """The operation without a deterministic kernel, if that is why an exception was raised; empty otherwise."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, Exception) and (said := re.search(_SAYS, str(cause))):
            return said[1] or said[2]
        cause = cause.__cause__ or cause.__context__
    return ""


class Kernels:
    """Decides for all work on one model which kernels it uses: only deterministic ones, until an operation has none.

    Then the work begins again in PyTorch's mode "warn", in which operations with a deterministic kernel still use it,
    and later work begins in this mode. No work begins in it before, because attention on CUDA is deterministic in the
    mode "error" alone.

    Attributes:
        repeatable: False once an operation had no deterministic kernel.
        operations: those that had none, by the names that PyTorch gives them.
        speaks: False in a process whose log nobody needs.
    """

    def __init__(self, device: torch.device, task: str) -> None:
        self.repeatable, self.speaks = True, True
        self.operations: frozenset[str] = frozenset()
        self._device, self._task = device, task
        self._shown: set[tuple[str, str, int]] = set()  # other warnings, each of which is shown once

    def run(self, seed: int, work: Callable[[], T]) -> T:
        """Does work with seeded generators. It may be called twice, so it must start afresh in each call."""
        found = set[str]()
        if self.repeatable:
            try:
                with deterministic(self._device, seed):
                    return work()
            except Exception as error:
                if not (operation := without_kernel(error)):
                    raise
                self.repeatable, found = False, {operation}
        with deterministic(self._device, seed, "warn"), self._noting(found):
            return work()

    @contextmanager
    def _noting(self, found: set[str]) -> Iterator[None]:
        """Adds the operations of which PyTorch warns inside to those that were found, and logs the new ones."""
        known = self.operations
        show = warnings.showwarning

        def note(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if said := re.search(_SAYS, str(message)):
                found.add(said[1] or said[2])
            elif (other := (str(message), filename, lineno)) not in self._shown:  # Python forgets that it has shown it
                self._shown.add(other)
                show(message, category, filename, lineno, file, line)

        with warnings.catch_warnings():
            warnings.filterwarnings("always", f".*({_SAYS})")
            warnings.showwarning = note
            try:
                yield
            finally:
                self.operations = known | found
                if self.speaks and found - known:
                    log_operations(self._task, self._device.type, found - known)


def log_operations(task: str, device: str, operations: Collection[str]) -> None:
    """Logs operations without a deterministic kernel, and what follows from them."""
    LOGGER.warning(
        "task %s: PyTorch has no deterministic kernel for %s on this device (%s). The work goes on with another one. "
        "If it is done again, the last digits of its result may differ, so its replies are marked unrepeatable",
        task,
        ", ".join(sorted(operations)),
        device,
    )


def pick_device(name: str = "auto") -> str:
    """The device to train on: "auto" (CUDA where there is one, else the CPU), "cpu", "cuda" or "cuda:N".

    Apple's GPUs are not offered: they lack deterministic kernels, such as max pooling.

    Raises:
        ValueError: not such a device, or not here.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", name) is None:
        raise ValueError(f"no device {name!r}: use auto, cpu, cuda or cuda:N")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"cannot use device {name!r}: {str(error).splitlines()[0]}") from error
    return name


def describe_device(name: str) -> str:
    """A device for people: "cuda NVIDIA H200", "cpu"."""
    return f"{name} {torch.cuda.get_device_name(name)}" if torch.device(name).type == "cuda" else name
