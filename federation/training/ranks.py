"""The processes of one training on one machine, as torchrun starts them, and what they tell each other.

Headers are JSON and vectors float32, so that nothing that arrives is executed.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from federation.vectors import Vector
from federation.work.base import WorkError
from federation.work.minibatch_sizes import shares

# A process waits for its next order as long as the worker has none: days. A process that ends is noticed at once.
_WAIT = timedelta(days=365)
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True)
class Ranks:
    """This process, `rank` from 0, and the others: `count` in all.

    What fails because another process has ended is a WorkError with the reason `trainer:died`.
    """

    rank: int
    count: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Ranks | None":
        """Reads the environment that torchrun gives to its processes; None for a process alone."""
        if "TORCHELASTIC_RUN_ID" not in environment or environment["WORLD_SIZE"] == "1":
            return None
        return cls(int(environment["RANK"]), int(environment["WORLD_SIZE"]))

    def meet(self) -> None:
        """Connects the processes: NCCL between GPUs, gloo over loopback otherwise."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", _LOOPBACK)
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=_WAIT)

    def leave(self) -> None:
        """Ends the connections."""
        dist.destroy_process_group()

    def device(self, name: str) -> str:
        """The device of this process, where the owner named one for all: a GPU each, or the CPU.

        Raises:
            ValueError: "cuda:N", or fewer GPUs than processes.
        """
        gpus = torch.cuda.device_count()
        if name == "cpu" or (name == "auto" and gpus == 0):
            return "cpu"
        if name not in ("auto", "cuda"):
            raise ValueError(f"device {name!r} is for one process: with {self.count} processes, use auto, cpu or cuda")
        if gpus < self.count:
            raise ValueError(f"{self.count} processes need a GPU each, and there are {gpus}")
        return f"cuda:{self.rank}"

    def part(self, samples: Tensor, *, even: bool) -> Tensor:
        """This process's part of a minibatch, which may be empty; `even` is that of `shares`."""
        return torch.split(samples, list(shares(len(samples), self.count, even=even)))[self.rank]

    def add(self, tensor: Tensor) -> None:
        """Adds up a tensor over all processes, in place; each gets the same bytes."""
        with _died():
            dist.all_reduce(tensor)

    def agree(self, decision: bool) -> bool:
        """The decision of process 0."""
        flag = torch.tensor([decision])
        with _died():
            dist.broadcast(flag, 0)
        return bool(flag.item())

    def any(self, decision: bool) -> bool:
        """True if one of the processes has decided so."""
        flag = torch.tensor([int(decision)])
        with _died():
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def tell(self, header: Mapping[str, Any], vector: Vector | None = None) -> None:
        """Process 0 tells the others an order, and a vector with it."""
        text = json.dumps({**header, "floats": 0 if vector is None else len(vector)}).encode()
        with _died():
            dist.broadcast(torch.tensor([len(text)]), 0)
            dist.broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8), 0)
            if vector is not None:
                dist.broadcast(torch.from_numpy(np.array(vector, dtype=np.float32)), 0)

    def hear(self) -> tuple[dict[str, Any], Vector]:
        """Receives the message of process 0."""
        size = torch.zeros(1, dtype=torch.int64)
        with _died():
            dist.broadcast(size, 0)
            text = torch.empty(int(size.item()), dtype=torch.uint8)
            dist.broadcast(text, 0)
            header = json.loads(text.numpy().tobytes())
            vector = torch.empty(header["floats"])
            if header["floats"]:
                dist.broadcast(vector, 0)
        return header, vector.numpy()


@contextmanager
def _died() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        line = (str(error) or type(error).__name__).splitlines()[0]
        ended = "another process of the training has ended"
        raise WorkError(f"{ended}: {line}", reason="trainer:died", wire=ended) from error
