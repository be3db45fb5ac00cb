"""Starts two processes of `fedpareto worker trainer`, as torchrun does, with one import of PyTorch in place of three.

Both processes are forks of this one, which has the store at which they meet.
"""

import os
import sys

import torch.distributed as dist

import federation.tasks.digits
import federation.tasks.networks
import federation.training.torch_trainer  # noqa: F401 - what the forks would import
from federation.training.trainer_process import serve

COUNT = 2


def train(rank: int, port: int) -> None:
    """The process of a rank, from the moment at which the store has its port."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": COUNT, "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "two", "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ |= {name: str(value) for name, value in environment.items()}
    serve("", os.environ)


def main() -> int:
    """Starts both, and ends them when one has failed. Returns the exit code."""
    reader, writer = os.pipe()
    started = []
    for rank in range(COUNT):
        if (child := os.fork()) == 0:  # before the store starts its threads
            os.close(writer)
            train(rank, int.from_bytes(os.read(reader, 2)))
            return 0
        started.append(child)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writer, store.port.to_bytes(2) * COUNT)
    while started:
        ended, status = os.wait()
        started.remove(ended)
        if status:
            for child in started:
                os.kill(child, 9)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
