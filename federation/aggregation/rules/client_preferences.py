"""Preferences of clients: bounds on their weights, which are linear constraints of the program of the MGDA family."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from federation.aggregation.interface import TooFewUpdatesError, Vector

WORDS = 'bounds on the weights of clients, each as "clinic-a >= 0.3" or "clinic-b <= 0.1"'
MIXING = ("nnm", "bucket")  # stages after which a row is of several clients

_FORM = re.compile(r"([a-z0-9][a-z0-9.-]{0,62}) *(>=|<=) *([0-9.]+)")
_ROUNDING = 1e-12


@dataclass(frozen=True)
class ClientPreferences:
    """The least and the largest weights of some clients, by their names; between 0 and 1."""

    least: Mapping[str, float]
    largest: Mapping[str, float]

    @classmethod
    def parse(cls, texts: Sequence[str]) -> "ClientPreferences":
        """Reads bounds such as "clinic-a >= 0.3".

        Raises:
            ValueError: another form, a number outside [0, 1], two bounds of one kind for a client, bounds that cross,
                or least weights of more than 1 together.
        """
        least, largest = dict[str, float](), dict[str, float]()
        for text in texts:
            match = _FORM.fullmatch(text.strip())
            value = _number(match[3]) if match else math.nan
            if match is None or not 0 <= value <= 1:
                raise ValueError(f'preferences: {text!r} is no bound: write "clinic-a >= 0.3", with a number in [0, 1]')
            bounds = least if match[2] == ">=" else largest
            if match[1] in bounds:
                raise ValueError(f"preferences: {match[1]} has two bounds {match[2]}: give one")
            bounds[match[1]] = value
        if crossing := sorted(name for name in least.keys() & largest.keys() if least[name] > largest[name]):
            raise ValueError(f"preferences: the bounds of {crossing[0]} cross")
        if (total := math.fsum(least.values())) > 1 + _ROUNDING:
            raise ValueError(f"preferences: the least weights add up to {total:g}, more than 1")
        return cls(least, largest)

    def cautions(self) -> tuple[str, ...]:
        """A warning for the operator, where clients have a least weight."""
        named = ", ".join(f"{name} {value:g}" for name, value in sorted(self.least.items()) if value > 0)
        return (f"preferences: least weights in every step, whatever these clients send: {named}",) if named else ()

    def bounds(self, clients: Sequence[str]) -> tuple[Vector, Vector]:
        """The least and the largest weight of each of these clients, shapes (m,), (m,).

        Raises:
            TooFewUpdatesError: no weights of these clients within the bounds add up to 1.
        """
        lower = np.array([self.least.get(name, 0.0) for name in clients])
        upper = np.array([self.largest.get(name, 1.0) for name in clients])
        if upper.sum() < 1 - _ROUNDING:
            raise TooFewUpdatesError(
                f"preferences: the largest weights of the {len(clients)} clients of this round add up to "
                f"{upper.sum():g}, less than 1"
            )
        return lower, upper


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
