"""Devices, seeds and deterministic kernels, so that the same work gives the same bytes."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
def deterministic(device: torch.device, seed: int) -> Iterator[None]:
    """Seeded generators, deterministic kernels and float32 inside; torch's global state as it was outside."""
    cudnn = torch.backends.cudnn
    was = (torch.get_deterministic_debug_mode(), cudnn.deterministic, cudnn.benchmark)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), _whole_float32():
        seed_torch(device, seed)
        # The same switch as torch.use_deterministic_algorithms, which would import the compiler (seconds) for it.
        torch.set_deterministic_debug_mode("error")
        cudnn.deterministic, cudnn.benchmark = True, False
        try:
            yield
        finally:
            mode, cudnn.deterministic, cudnn.benchmark = was
            torch.set_deterministic_debug_mode(mode)


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
