"""Digits with BatchNorm: a network that keeps buffers."""

import torch

from federation.tasks.digits import Digits


class Normed(Digits):
    """A layer of eight units and BatchNorm in front of the classifier."""

    def model(self) -> torch.nn.Module:
        made = torch.nn.Sequential()
        made.add_module("body", torch.nn.Linear(64, 8))
        made.add_module("norm", torch.nn.BatchNorm1d(8))
        made.add_module("rectifier", torch.nn.ReLU())
        made.add_module("out", torch.nn.Linear(8, 10))
        return made
