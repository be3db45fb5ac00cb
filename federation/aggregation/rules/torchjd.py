"""The weightings of TorchJD (Quinton and Rey, 2024, "Jacobian Descent For Multi-Objective Optimization") as rules.

Every aggregator of TorchJD that is a function of the Gram matrix, and of nothing else, becomes "torchjd:<its name in
lower case>". Nothing here is loaded before such a rule is named: TorchJD comes with PyTorch.
"""

import dataclasses
import inspect
from abc import ABC
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from federation.aggregation.base import Rule, conclude
from federation.aggregation.interface import Combination, HyperparameterError, Rows, check_updates
from federation.aggregation.qp import UnsolvedError
from federation.plugins import CodeOrigin
from federation.process.shared_state import ordinary
from federation.spec.options import option

PREFIX = "torchjd:"
SUMMARY = "A weighting of TorchJD, such as torchjd:upgrad; an unknown NAME lists them."

# Of parameters without a default in TorchJD; for c and alpha, the first values in their papers.
_DEFAULTS: Mapping[tuple[str, str], Any] = MappingProxyType(
    {("CAGrad", "c"): 0.4, ("FairGrad", "alpha"): 2.0, ("Krum", "n_byzantine"): 1}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TorchJD(Rule, ABC):
    """A weighting of TorchJD.

    It sees K scaled such that the mean squared norm of the updates is 1, and the prior where it takes a preference
    vector. Its weights are the coefficients of the updates: some of TorchJD's aggregators (pcgrad) add up rather than
    average, and need a smaller server.learning_rate. Its random numbers are seeded by `seed` and the round, and it is
    made anew in each round, so that a round that is computed again gives the same bytes.

    Attributes:
        aggregator: TorchJD's class.
    """

    private = "gram"
    aggregator: ClassVar[Any]

    seed: int = option(0, "with the round, the seed of the weighting's random numbers", "[0, inf)")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._make(np.ones(1))

    @property
    def origin(self) -> CodeOrigin:
        """The class and the version of TorchJD."""
        kind = self.aggregator
        return CodeOrigin("algorithm", f"{kind.__module__}:{kind.__qualname__}", "torchjd", version("torchjd"))

    def combine(self, rows: Rows) -> Combination:
        """The weights of TorchJD as coefficients.

        Raises:
            UnsolvedError: TorchJD failed, or its weights are not finite.
            TooFewUpdatesError: Krum's bound on the number of attackers does not hold.
        """
        import torch  # noqa: PLC0415 - only where it is named

        scale, m = float(np.diag(rows.gram).mean()), len(rows.prior)
        byzantine = getattr(self, "n_byzantine", None)
        if byzantine is not None:
            check_updates(m, 2 * byzantine + 3, f"{self.name} with n_byzantine = {byzantine}")
        if scale == 0 or m == 1:
            return conclude(rows.gram, rows.prior, rows.prior)
        seed = int(np.random.SeedSequence([self.seed, rows.round]).generate_state(1, np.uint64)[0] >> np.uint64(1))
        try:
            with ordinary(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                aggregator = self._make(rows.prior)
                weights = aggregator.gramian_weighting(torch.from_numpy(rows.gram / scale))
                weights = weights.detach().numpy().astype(np.float64)
        except Exception as error:  # its solvers raise exceptions of any class
            raise UnsolvedError(f"{self.name}: {error}") from error
        if not np.isfinite(weights).all():
            raise UnsolvedError(f"{self.name}: the weights of TorchJD are not finite")
        shares = np.maximum(weights, 0.0)
        return conclude(rows.gram, weights, shares / shares.sum() if shares.any() else rows.prior)

    def _make(self, prior: NDArray[np.float64]) -> Any:
        import torch  # noqa: PLC0415 - only where it is named

        own = {field.name for field in dataclasses.fields(TorchJD)}
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in own}
        parameters = inspect.signature(self.aggregator).parameters
        if "pref_vector" in parameters:
            values["pref_vector"] = torch.from_numpy(prior.copy())
        try:
            return self.aggregator(**values)
        except ImportError as error:
            raise HyperparameterError(f"name: {self.name} needs more than is installed: {error}") from error
        except ValueError as error:
            raise HyperparameterError(f"{self.name}: {error}") from error


def rule(name: str) -> type[TorchJD]:
    """The algorithm of a name that begins with "torchjd:".

    Raises:
        HyperparameterError: TorchJD is not installed, or has no such aggregator; the message names those that it has.
    """
    rules, refused = _catalogue()
    if name in rules:
        return rules[name]
    if name in refused:
        raise HyperparameterError(f"name: {name} cannot be used: {refused[name]}")
    raise HyperparameterError(f"name: no algorithm {name!r}; of TorchJD, there are {', '.join(rules)}")


@cache
def _catalogue() -> tuple[dict[str, type[TorchJD]], dict[str, str]]:
    """The rules by name, and the reasons why other aggregators cannot be used, by name."""
    try:
        import torchjd  # noqa: PLC0415 - only where it is named
        from torchjd import aggregation  # noqa: PLC0415
    except ImportError:
        raise HyperparameterError(
            'name: TorchJD is not installed here: pip install "fedpareto[torch,torchjd]"'
        ) from None
    bases = (aggregation.Aggregator, aggregation.WeightedAggregator, aggregation.GramianWeightedAggregator)
    rules: dict[str, type[TorchJD]] = {}
    refused: dict[str, str] = {}
    for kind in vars(aggregation).values():
        if not inspect.isclass(kind) or not issubclass(kind, aggregation.Aggregator) or kind in bases:
            continue
        name = PREFIX + kind.__name__.lower()
        if kind is aggregation.NashMTL:
            refused[name] = "it often stops before it converges when norms differ; nash-mtl solves the same equation"
        elif issubclass(kind, torchjd.Stateful):
            refused[name] = "it remembers things between steps that the record of a run does not hold"
        elif not issubclass(kind, aggregation.GramianWeightedAggregator):
            refused[name] = "it is no function of the Gram matrix of the updates"
        else:
            rules[name] = _algorithm(name, kind)
    return rules, refused


def _algorithm(name: str, kind: Any) -> type[TorchJD]:
    """A dataclass with a field for each of the aggregator's parameters that a run specification can hold."""
    fields = []
    for parameter in inspect.signature(kind, eval_str=True).parameters.values():
        default = _DEFAULTS.get((kind.__name__, parameter.name), parameter.default)
        if type(default) in (bool, int, float, str):
            fields.append((parameter.name, type(default), option(default, f"of TorchJD's {kind.__name__}")))
    namespace = {"name": name, "aggregator": kind, "__doc__": f"{kind.__name__} of TorchJD.", "__module__": __name__}
    return dataclasses.make_dataclass(
        kind.__name__, fields, bases=(TorchJD,), namespace=namespace, frozen=True, kw_only=True
    )
