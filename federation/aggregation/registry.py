"""Algorithms by name."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

from federation.aggregation.base import Algorithm
from federation.aggregation.hyperparameters import Hyperparameter, hyperparameters, typed
from federation.aggregation.interface import HyperparameterError
from federation.aggregation.pre import STAGES, Stage
from federation.aggregation.rules import torchjd
from federation.aggregation.rules.adafed import AdaFed
from federation.aggregation.rules.afl import AFL
from federation.aggregation.rules.clipping import CentredClipping, NormClipping
from federation.aggregation.rules.coordinate_wise import Median, TrimmedMean
from federation.aggregation.rules.dual_cone import DualCone
from federation.aggregation.rules.fedavg import FedAvg, FedAvgN
from federation.aggregation.rules.fedcmoo import FedCMOO, FedCMOOPref
from federation.aggregation.rules.fedfa import FedFa
from federation.aggregation.rules.fedfv import FedFV
from federation.aggregation.rules.fedmdfg import FedMDFG
from federation.aggregation.rules.fedmgda import FedMGDA, FedMGDAAuto, FedMGDAPlus
from federation.aggregation.rules.fsmgda import FSMGDA
from federation.aggregation.rules.geometric_median import GeometricMedian
from federation.aggregation.rules.krum import Krum, MultiKrum
from federation.aggregation.rules.nash_mtl import NashMTL
from federation.aggregation.rules.q_fedavg import QFedAvg
from federation.aggregation.rules.scalarised import Scalarised
from federation.plugins import CodeOrigin, PluginError, Plugins
from federation.text import did_you_mean

T = TypeVar("T")

# The built-in ones; those of TorchJD are made when they are named.
ALGORITHMS: Mapping[str, type[Algorithm]] = MappingProxyType(
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
            AdaFed,
            FedFa,
            FedFV,
            FedMDFG,
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


_RULES: Plugins[Algorithm] = Plugins(
    "algorithm", "fedpareto.rules", Algorithm, "fedpareto.Rule", (*ALGORITHMS, f"{torchjd.PREFIX}NAME")
)
_STAGES: Plugins[Stage] = Plugins("stage", "fedpareto.stages", Stage, "fedpareto.Stage", tuple(STAGES))


@dataclass(frozen=True)
class ListedRule:
    """A rule or a stage in a list for users: a summary in one line, or the reason why it cannot be used.

    `hyperparameters` are its own; `package` contains it, and is empty for a built-in rule.
    """

    name: str
    summary: str
    hyperparameters: tuple[Hyperparameter, ...]
    package: str = ""


def algorithm(name: str, values: Mapping[str, Any] = MappingProxyType({})) -> Algorithm:
    """An algorithm with its hyper-parameters, its own and those of the stages before it.

    A key that several of them have, such as `byzantine`, is set for all of these.

    Args:
        name: of a built-in algorithm, of an entry point of `fedpareto.rules`, or `module:Class`.
        values: its hyper-parameters, `pre`, and the hyper-parameters of the stages in `pre`.

    Raises:
        HyperparameterError: no such algorithm, no such hyper-parameter, or a value that it cannot have (the message
            names the key and what exists); or the code of a plug-in raised an exception.
    """
    rule, stages = _kind(name), _stage_kinds(values.get("pre", ()))
    of_rule = _fields(_RULES, "name", name, rule)
    of_stages = {stage: _fields(_STAGES, "pre", stage, kind) for stage, kind in stages.items()}
    accepted = {key for fields in (of_rule, *of_stages.values()) for key in fields}
    for key in values.keys() - accepted - {"pre"}:
        common = {parameter.name: parameter for parameter in common_hyperparameters()}
        if key in common:
            names = " or ".join(f'"{stage}"' for stage in common[key].stages)
            raise HyperparameterError(f"{key}: only for the stage {names}, which pre lacks")
        accepted_names = ", ".join(dict.fromkeys([*of_rule, *common, *accepted]))
        near = did_you_mean(key, [*of_rule, *common, *accepted])
        raise HyperparameterError(f"{key}: {name} has no such hyper-parameter{near or ';'} it has {accepted_names}")
    before = tuple(
        _made(_STAGES, "pre", stage, kind, _values(stage, of_stages[stage], values)) for stage, kind in stages.items()
    )
    return _made(_RULES, "name", name, rule, {**_values(name, of_rule, values), "stages": before})


@contextmanager
def rule_code(rule: Algorithm, doing: str) -> Iterator[None]:
    """Turns an exception in the code of an algorithm into a HyperparameterError that says where it was raised."""
    with _explained("name"), _RULES.code(rule.name, doing, HyperparameterError):
        yield


def origins(rule: Algorithm) -> tuple[CodeOrigin, ...]:
    """The code that makes the steps: that of the algorithm, then that of each stage and sketch that is a plug-in."""
    of_rule = rule.origin if isinstance(rule, torchjd.TorchJD) else _RULES.origin(rule.name, type(rule))
    plugged = tuple(_STAGES.origin(stage.name, type(stage)) for stage in rule.stages if stage.name not in STAGES)
    return (of_rule, *plugged, *rule.origins())


def common_hyperparameters() -> tuple[Hyperparameter, ...]:
    """The hyper-parameters that every algorithm takes: `pre`, and those of the built-in stages."""
    help_text = f"stages before the rule, in order, of: {', '.join(STAGES)}"
    common = {"pre": Hyperparameter("pre", tuple[str, ...], (), help_text)}
    for stage, kind in STAGES.items():
        for parameter in hyperparameters(kind):
            takers = (*common[parameter.name].stages, stage) if parameter.name in common else (stage,)
            common[parameter.name] = replace(parameter, stages=takers)
    return tuple(common.values())


def listed() -> tuple[ListedRule, ...]:
    """Every algorithm that has a name here: the built-in ones, then those of entry points, which are imported."""
    built_in = (ListedRule(name, _summary(kind), hyperparameters(kind)) for name, kind in ALGORITHMS.items())
    return (*built_in, *_listed(_RULES))


def listed_stages() -> tuple[ListedRule, ...]:
    """The stages of entry points, which are imported."""
    return _listed(_STAGES)


def names() -> tuple[str, ...]:
    """The names of the listed algorithms; imports no plug-in."""
    return (*ALGORITHMS, *(offer.name for offer in _RULES.offers()))


def _kind(name: str) -> type[Algorithm]:
    if name.startswith(torchjd.PREFIX):
        return torchjd.rule(name)
    with _explained("name"):
        return ALGORITHMS[name] if name in ALGORITHMS else _RULES.find(name)


def _stage_kinds(pre: Any) -> dict[str, type[Stage]]:
    """The classes of the stages that `pre` names, in order."""
    stages = typed("pre", pre, tuple[str, ...])
    if len(set(stages)) < len(stages):
        raise HyperparameterError(f"pre: each stage at most once; got {list(stages)}")
    with _explained("pre"):
        return {name: STAGES[name] if name in STAGES else _STAGES.find(name) for name in stages}


def _fields(plugins: Plugins[T], key: str, name: str, kind: type[T]) -> dict[str, Hyperparameter]:
    """The hyper-parameters of a rule or a stage by name."""
    with _explained(key), plugins.code(name, "reading its hyper-parameters", HyperparameterError):
        return {parameter.name: parameter for parameter in hyperparameters(kind)}


def _values(name: str, fields: Mapping[str, Hyperparameter], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of one rule's or stage's hyper-parameters, each of its type."""
    for key, parameter in fields.items():
        if parameter.default is MISSING and key not in values:
            raise HyperparameterError(f"{key}: {name} needs a value for it")
    return {key: typed(key, values[key], parameter.type) for key, parameter in fields.items() if key in values}


def _made(plugins: Plugins[T], key: str, name: str, kind: type[T], values: Mapping[str, Any]) -> T:
    with _explained(key), plugins.code(name, f"making {kind.__name__}", HyperparameterError):
        instance = kind(**values)
    object.__setattr__(instance, "name", name)  # it is frozen, and a plug-in has the name in the specification
    return instance


def _listed(plugins: Plugins[T]) -> tuple[ListedRule, ...]:
    rules = []
    for offer in plugins.offers():
        try:
            kind = plugins.find(offer.name)
            with plugins.code(offer.name, "reading its hyper-parameters"):
                rules.append(ListedRule(offer.name, _summary(kind), hyperparameters(kind), offer.package))
        except PluginError as error:
            rules.append(ListedRule(offer.name, f"cannot be used: {error}", (), offer.package))
    return tuple(rules)


def _summary(kind: type) -> str:
    return (kind.__doc__ or "").partition("\n")[0]


@contextmanager
def _explained(key: str) -> Iterator[None]:
    """Turns a PluginError into a HyperparameterError that begins with the key of the specification."""
    try:
        yield
    except PluginError as error:
        raise HyperparameterError(f"{key}: {error}") from error
