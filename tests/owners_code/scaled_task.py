"""Digits with a first layer that standardises; where fedpareto has no such layer, the network begins behind it."""

import torch

import fedpareto
from federation.tasks.digits import Digits


class Scaled(Digits):
    """A layer of eight units in front of the classifier."""

    def model(self) -> torch.nn.Module:
        layers = [torch.nn.Linear(64, 8), torch.nn.ReLU(), torch.nn.Linear(8, 10)]
        if hasattr(fedpareto, "Standardise"):
            layers.insert(0, fedpareto.Standardise([f"x{number}" for number in range(64)]))
        made = torch.nn.Sequential()
        for layer in layers:
            made.add_module(type(layer).__name__ + str(len(made)), layer)
        return made
