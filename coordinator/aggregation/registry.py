"""Algorithms by name, and the schedule of the server's step."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from coordinator.aggregation.base import Algorithm, HyperparameterError
from coordinator.aggregation.fedavg import FedAvg
from coordinator.aggregation.fedavg_n import FedAvgN
from coordinator.aggregation.fedmgda import FedMGDA
from coordinator.aggregation.fedmgda_plus import FedMGDAPlus

__all__ = ["Algorithm", "HyperparameterError", "algorithm", "algorithms", "server_rate"]

_ALGORITHMS: Mapping[str, type[Algorithm]] = MappingProxyType(
    {kind.name: kind for kind in (FedAvg, FedAvgN, FedMGDA, FedMGDAPlus)}
)
_DECAY_ROUNDS = 100


def algorithms() -> dict[str, type[Algorithm]]:
    """Every algorithm by its name."""
    return dict(_ALGORITHMS)


def algorithm(name: str, hyperparameters: Mapping[str, Any] = MappingProxyType({})) -> Algorithm:
    """An algorithm with its hyper-parameters.

    Raises:
        HyperparameterError: no such algorithm, no such hyper-parameter, or a value that it cannot have; the message
            names the key and what exists.
    """
    kind = _ALGORITHMS.get(name)
    if kind is None:
        raise HyperparameterError(f"name: no algorithm {name!r}; there are {', '.join(_ALGORITHMS)}")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    values = {}
    for key, value in hyperparameters.items():
        if key not in fields:
            known = ", ".join(fields) or "none"
            raise HyperparameterError(f"{key}: {name} has no such hyper-parameter; it has {known}")
        values[key] = _typed(key, value, fields[key].type)
    return kind(**values)


def server_rate(learning_rate: float, decay: float, t: int, T: int) -> float:
    """eta_t = eta_0 beta^floor(t / 100), beta = decay^(100 / T) (FedMGDA+, section 6.1.5).

    Args:
        learning_rate: eta_0.
        decay: what is left of eta_0 after T rounds; 0 means no decay.
        t: the round, from 0.
        T: rounds of the run.
    """
    if decay == 0:
        return learning_rate
    return float(learning_rate * (decay ** (_DECAY_ROUNDS / T)) ** (t // _DECAY_ROUNDS))


def _typed(key: str, value: Any, kind: Any) -> Any:
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if type(value) is kind:
        return value
    expected = {float: "a number", bool: "true or false", int: "an integer", str: "text"}[kind]
    raise HyperparameterError(f"{key} must be {expected}; got {value!r}")
