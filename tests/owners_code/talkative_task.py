"""A task that prints wherever its code is called, also past Python's streams, as a library in C does."""

import os
from typing import Any

import torch

from federation.tasks import DataSource, Pool
from federation.tasks.digits import Digits


def talk(place: str) -> None:
    print("talkative:", place)
    os.write(1, f"talkative: {place}, from C\n".encode())


talk("import")


class Talkative(Digits):
    """The digits."""

    def pool(self, source: DataSource) -> Pool:
        talk("pool")
        return super().pool(source)

    def model(self) -> torch.nn.Module:
        talk("model")
        return super().model()

    def losses(self, output: Any, y: Any) -> Any:
        talk("losses")
        return super().losses(output, y)

    def correct(self, output: Any, y: Any) -> Any:
        talk("correct")
        return super().correct(output, y)
