"""Algorithms by name, and the schedule of the server's step."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, Union, get_args, get_origin

from coordinator.aggregation import torchjd
from coordinator.aggregation.afl import AFL
from coordinator.aggregation.base import Algorithm, HyperparameterError
from coordinator.aggregation.centred_clipping import CentredClipping
from coordinator.aggregation.coordinate_wise import Median, TrimmedMean
from coordinator.aggregation.dual_cone import DualCone
from coordinator.aggregation.fedavg import FedAvg
from coordinator.aggregation.fedavg_n import FedAvgN
from coordinator.aggregation.fedcmoo import FedCMOO, FedCMOOPref
from coordinator.aggregation.fedfa import FedFa
from coordinator.aggregation.fedfv import FedFV
from coordinator.aggregation.fedmgda import FedMGDA
from coordinator.aggregation.fedmgda_auto import FedMGDAAuto
from coordinator.aggregation.fedmgda_plus import FedMGDAPlus
from coordinator.aggregation.fsmgda import FSMGDA
from coordinator.aggregation.geometric_median import GeometricMedian
from coordinator.aggregation.krum import Krum, MultiKrum
from coordinator.aggregation.nash_mtl import NashMTL
from coordinator.aggregation.norm_clipping import NormClipping
from coordinator.aggregation.pre import Stages
from coordinator.aggregation.q_fedavg import QFedAvg
from coordinator.aggregation.scalarised import Scalarised

__all__ = [
    "Algorithm",
    "HyperparameterError",
    "algorithm",
    "algorithms",
    "common_hyperparameters",
    "hyperparameters",
    "server_rate",
]

_ALGORITHMS: Mapping[str, type[Algorithm]] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            FedAvg,
            FedAvgN,
            FedMGDA,
            FedMGDAPlus,
            FedMGDAAuto,
            DualCone,
            NashMTL,
            QFedAvg,
            AFL,
            FedFa,
            FedFV,
            Krum,
            MultiKrum,
            Median,
            TrimmedMean,
            GeometricMedian,
            CentredClipping,
            NormClipping,
            Scalarised,
            FSMGDA,
            FedCMOO,
            FedCMOOPref,
        )
    }
)
_DECAY_ROUNDS = 100


def algorithms() -> dict[str, type[Algorithm]]:
    """Every algorithm by its name; those of TorchJD, which are made when they are named, are not among them."""
    return dict(_ALGORITHMS)


def algorithm(name: str, values: Mapping[str, Any] = MappingProxyType({})) -> Algorithm:
    """An algorithm with its hyper-parameters, its own and those of the stages before it.

    A key that both know, such as `byzantine`, is for both.

    Raises:
        HyperparameterError: no such algorithm, no such hyper-parameter, or a value that it cannot have; the message
            names the key and what exists.
    """
    if name.startswith(torchjd.PREFIX):
        kind: type[Algorithm] | None = torchjd.rule(name)
    else:
        kind = _ALGORITHMS.get(name)
    if kind is None:
        there = ", ".join([*_ALGORITHMS, f"{torchjd.PREFIX}NAME"])
        raise HyperparameterError(f"name: no algorithm {name!r}; there are {there}")
    own = {field.name: field for field in hyperparameters(kind)}
    common = {field.name: field for field in common_hyperparameters()}
    chosen: dict[str, Any] = {}
    staging: dict[str, Any] = {}
    for key, value in values.items():
        if key not in own | common:
            raise HyperparameterError(f"{key}: {name} has no such hyper-parameter; it has {', '.join(own | common)}")
        if key in own:
            chosen[key] = _typed(key, value, own[key].type)
        if key in common:
            staging[key] = _typed(key, value, common[key].type)
    stages = Stages(**staging)
    for key in staging.keys() - own.keys() - {"pre"}:
        if common[key].metadata["stage"] not in stages.pre:
            raise HyperparameterError(f'{key}: only for the stage "{common[key].metadata["stage"]}", which pre lacks')
    return kind(**chosen, stages=stages)


def hyperparameters(kind: type[Algorithm]) -> tuple[dataclasses.Field[Any], ...]:
    """An algorithm's own hyper-parameters; each says in `metadata["help"]` what it does."""
    return tuple(field for field in dataclasses.fields(kind) if field.name != "stages")


def common_hyperparameters() -> tuple[dataclasses.Field[Any], ...]:
    """Those that every algorithm takes: `pre`, and those of its stages."""
    return dataclasses.fields(Stages)


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
    """A value of a field's type; integers are numbers, too.

    Raises:
        HyperparameterError: it has another type.
    """
    if kind == tuple[float, ...] and isinstance(value, list | tuple):
        return tuple(_typed(f"{key}[{at}]", item, float) for at, item in enumerate(value))
    for choice in get_args(kind) if get_origin(kind) is Union else (kind,):
        if _fits(value, choice):
            return tuple(value) if isinstance(value, list) else float(value) if choice is float else value
    raise HyperparameterError(f"{key} must be {_expected(kind)}; got {value!r}")


def _fits(value: Any, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind == tuple[str, ...]:
        return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    return value in get_args(kind) if get_origin(kind) is Literal else type(value) is kind


def _expected(kind: Any) -> str:
    if get_origin(kind) is Union:
        return " or ".join(map(_expected, get_args(kind)))
    if get_origin(kind) is Literal:
        return " or ".join(f'"{value}"' for value in get_args(kind))
    return {
        float: "a number",
        bool: "true or false",
        int: "an integer",
        str: "text",
        tuple[str, ...]: "a list of texts",
        tuple[float, ...]: "a list of numbers",
    }[kind]
