"""The common code of algorithms for objectives: the clients' shares in objectives, and weights from their Gram matrix.

With the indicator matrix A (client i serves objective k or does not), an objective is the mean over its clients,
F_k = sum_i p_ik f_ik with p_ik = p_i / P_k for those that serve it, where p is the prior (1/m, or by samples) and P_k
the share of all who do (Yang et al., 2023, section 3).
"""

import math
from abc import ABC
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from federation.aggregation.base import Rule
from federation.aggregation.interface import HyperparameterError, Matrix, Objectives, Rows, TooFewUpdatesError, Vector
from federation.aggregation.phase_kinds import GradientsPhase
from federation.aggregation.phases import AlgorithmPhase, PhaseReply, Replies, RoundContext, Selected
from federation.aggregation.qp import min_norm, not_negative
from federation.aggregation.rules import torchjd
from federation.aggregation.rules.find_weights import find_weights
from federation.sketches import sketch
from federation.sketches.base import ClientSketch, Message
from federation.spec.computation import Ability
from federation.spec.options import option

RAW = "pgd-raw"
_NONE: Mapping[Any, Any] = MappingProxyType({})
WEIGHTS = (
    'how the weights of the objectives are found from their Gram matrix: "exact" is the min-norm point, "pgd" some '
    'steps towards it from the last round\'s weights, "pgd-raw" the same steps on the matrix as it was estimated, '
    'neither divided by the gradients\' lengths nor made positive semi-definite, "torchjd:NAME" a weighting of TorchJD'
)
SCOPE = (
    'the columns in the Gram matrix of the objectives: "all", or "encoder" without the heads, which no two '
    "objectives share"
)
EXACT = (
    "measure objective/stationarity on the gradients of the clients' whole training splits, which every client sends "
    "in a phase of its own: a vector of the model's size for each objective"
)


@dataclass(frozen=True, kw_only=True)
class MeasuredRule(Rule, ABC):
    """A rule for objectives whose stationarity can be measured on exact gradients."""

    exact_stationarity: bool = option(False, EXACT)

    @property
    def measures_samples(self) -> bool:
        return super().measures_samples or self.exact_stationarity

    def needs(self, objectives: tuple[str, ...]) -> frozenset[Ability]:
        return super().needs(objectives) | ({Ability.GRADIENTS} if self.exact_stationarity else set())


@dataclass(frozen=True, kw_only=True)
class ObjectiveRule(MeasuredRule, ABC):
    """A rule that weighs objectives, and remembers the weights: state {"weights": {objective: lambda}}."""

    weights: str = option("exact", WEIGHTS)
    scope: Literal["all", "encoder"] = option("all", SCOPE)
    normalize: bool = option(
        False, "make the gradients of all objectives equally long, here and in the step: no loss counts by its scale"
    )
    bound: Literal["clip", "normalize", "none"] = option(
        "clip",
        'what bounds each client\'s gradients and updates: "clip" shortens those longer than bound_norm medians of '
        'their objective, "normalize" gives all the median norm, "none" leaves them as they are (the papers)',
    )
    bound_norm: float = option(2.0, "the bound of clip in median norms, at least 1", "[1, inf)")
    beta: float = option(0.001, "the step of pgd", "[0, inf)")
    steps: int = option(1000, "the number of steps of pgd", "[1, inf)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights.startswith(torchjd.PREFIX):
            torchjd.rule(self.weights)
        elif self.weights not in ("exact", "pgd", RAW):
            raise HyperparameterError(f"weights must be one of exact, pgd, {RAW}, torchjd:NAME; got {self.weights!r}")
        if self.normalize and self.weights == RAW:
            raise HyperparameterError(f'normalize: "{RAW}" takes the matrix as it was estimated')

    def cautions(self) -> tuple[str, ...]:
        if self.bound != "none":
            return super().cautions()
        return (
            *super().cautions(),
            f'{self.name} with bound = "none" takes gradients as clients send them: one that scales its own decides '
            'what the objectives weigh; leave the default, bound = "clip", among members who do not trust each other',
        )

    def factors(self, norms: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
        """The factors that bound gradients (or updates) of these norms, by (client, objective).

        Norms of one objective are compared. Their median is the lower one of two, over the norms that are not zero: it
        lies within the norms of honest clients as long as these are more than half.
        """
        factors = dict.fromkeys(norms, 1.0)
        for objective in {name for _, name in norms}:
            positive = {key: norm for key, norm in norms.items() if key[1] == objective and norm > 0}
            if self.bound == "none" or not positive:
                continue
            median = sorted(positive.values())[(len(positive) - 1) // 2]
            if self.bound == "clip":
                factors |= {key: min(1.0, self.bound_norm * median / norm) for key, norm in positive.items()}
            else:
                factors |= {key: median / norm for key, norm in positive.items()}
        return factors

    def columns(self, context: RoundContext) -> tuple[slice, ...]:
        """The columns that the Gram matrix is made of."""
        return context.encoder if self.scope == "encoder" else (slice(0, context.parameters),)

    def weigh(self, G: Matrix, before: Vector, context: RoundContext) -> Vector:
        """Lambda, shape (M,), from the Gram matrix of the objectives and the weights of the last round."""
        if self.weights == RAW:
            return find_weights(G, before, beta=self.beta, steps=self.steps, raw=True)
        if self.normalize:
            lengths = np.sqrt(np.diag(G))
            inverse = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > 0)
            G = G * np.outer(inverse, inverse)
        if self.weights == "pgd":
            weights = find_weights(G, before, beta=self.beta, steps=self.steps)
        elif self.weights == "exact":
            weights = min_norm(G, prior=before).weights
        else:
            uniform = np.full(len(G), 1.0 / len(G))
            rows = Rows(gram=G, prior=uniform, samples=np.ones(len(G)), round=context.number, rounds=context.total)
            weights = torchjd.rule(self.weights)().combine(rows).weights
        shares: Vector = weights / weights.sum()
        return shares

    def scales(self, G: Matrix) -> Vector:
        """The factor of each objective besides its weight, shape (M,): 1, or with `normalize` mean length / own length.

        The mean length leaves the step about as long as without.
        """
        if not self.normalize or not (np.diag(G) > 0).all():
            return np.ones(len(G))
        lengths = np.sqrt(np.diag(G))
        scales: Vector = lengths.mean() / lengths
        return scales


@dataclass(frozen=True)
class ObjectiveService:
    """The objectives that some clients serve, and the clients' shares in them.

    Attributes:
        objectives: those that are served, in the task's order, M names.
        prior: p, by client: the weights of plain averaging.
        share: P_k of each objective, shape (M,).
        left_out: the run's other objectives, with the reason for each.
    """

    objectives: tuple[str, ...]
    prior: Mapping[str, float]
    share: Vector
    left_out: Mapping[str, str]

    @classmethod
    def of(cls, clients: Mapping[str, Selected | PhaseReply], context: RoundContext) -> "ObjectiveService":
        """The objectives of these clients."""
        size = {name: 1.0 if context.prior == "uniform" else float(entry.samples) for name, entry in clients.items()}
        prior = {name: value / sum(size.values()) for name, value in size.items()}
        share = {
            name: sum(prior[client] for client, entry in clients.items() if name in entry.objectives)
            for name in context.objectives
        }
        left_out = {name: "no client that takes part in this round serves it" for name in share if share[name] == 0}
        present = tuple(name for name in context.objectives if name not in left_out)
        return cls(present, prior, np.array([share[name] for name in present]), left_out)

    def weight(self, client: str, objective: str) -> float:
        """p_ik: the share of client i in objective k, which it serves."""
        return self.prior[client] / float(self.share[self.objectives.index(objective)])

    @classmethod
    def among(cls, replies: Replies, context: RoundContext) -> "ObjectiveService":
        """The objectives of the clients that replied."""
        return cls.of({reply.client_id: reply for reply in replies}, context)

    def only(self, objectives: tuple[str, ...], why: str) -> "ObjectiveService":
        """Without the other objectives, which are left out for this reason."""
        chosen = np.array([name in objectives for name in self.objectives], dtype=bool)
        left_out = {name: why for name in self.objectives if name not in objectives}
        return ObjectiveService(objectives, self.prior, self.share[chosen], {**self.left_out, **left_out})

    def mean(self, values: Iterable[tuple[str, Mapping[str, float]]]) -> dict[str, float]:
        """The mean of each objective over the clients that report a value, by (client, objective -> value).

        An objective without a value is left out, and one whose mean exceeds float64.
        """
        totals: dict[str, float] = dict.fromkeys(self.objectives, 0.0)
        shares: dict[str, float] = dict.fromkeys(self.objectives, 0.0)
        for client, values_of_client in values:
            for name in self.objectives:
                if name in values_of_client:
                    shares[name] += self.prior[client]
                    totals[name] += self.prior[client] * values_of_client[name]
        means = {name: totals[name] / shares[name] for name in self.objectives if shares[name] > 0}
        return {name: value for name, value in means.items() if math.isfinite(value)}

    def weights_before(self, context: RoundContext) -> Vector:
        """The last round's weights of these objectives, shape (M,), sum 1; equal ones before the first round."""
        last = self._last(context)
        shares = np.array([last[name] for name in self.objectives])
        return shares / shares.sum() if shares.sum() > 0 else np.full(len(shares), 1.0 / len(shares))

    def state_after(self, context: RoundContext, weights: Vector) -> dict[str, Any]:
        """The state for the next round: an objective that was left out keeps its share, the others have the rest."""
        left_out_shares = {name: share for name, share in self._last(context).items() if name not in self.objectives}
        rest = 1.0 - sum(left_out_shares.values())
        shares = left_out_shares | dict(zip(self.objectives, (rest * weights).tolist(), strict=True))
        return {"weights": {name: shares[name] for name in context.objectives}}

    def _last(self, context: RoundContext) -> dict[str, float]:
        last = context.state.get("weights", {})
        return {name: float(last.get(name, 1.0 / len(context.objectives))) for name in context.objectives}

    def sketch(
        self, reply: PhaseReply, factors: Mapping[tuple[str, str], float] = _NONE, again: Message = _NONE
    ) -> ClientSketch:
        """A client's sketch, further rows of it (`again`), and the weights of its gradients, times their `factors`."""
        client = reply.client_id
        weights = [
            self.weight(client, name) * factors.get((client, name), 1.0) if name in self.objectives else 0.0
            for name in reply.objectives
        ]
        return ClientSketch(reply.objectives, np.array(weights), {**reply.arrays(), **again})

    def weighed(self, weights: Vector, **found: Any) -> Objectives:
        """The record of the weights of these objectives; `found` are further fields of `Objectives`."""
        return Objectives(names=self.objectives, weights=weights, left_out=self.left_out, **found)


@dataclass(frozen=True)
class ExactGradients:
    """The gradients of the objectives at the round's model, on all of the clients' training samples.

    Attributes:
        names: the M objectives that are served.
        gram: the Gram matrix of their mean gradients over all parameters, shape (M, M).
        replies: those that it was made from.
    """

    names: tuple[str, ...] = ()
    gram: Matrix | None = None
    replies: tuple[PhaseReply, ...] = ()

    def of(self, names: tuple[str, ...]) -> Matrix | None:
        """The Gram matrix of these objectives: None where it was not asked for, NaN where one of them is unknown."""
        if self.gram is None:
            return None
        if not set(names) <= set(self.names):
            return np.full((len(names), len(names)), np.nan)
        indices = [self.names.index(name) for name in names]
        gram: Matrix = self.gram[np.ix_(indices, indices)]
        return gram


def exact_gradients(context: RoundContext, asked: bool) -> Generator[AlgorithmPhase, Replies, ExactGradients]:
    """A phase for the gradients on which Pareto stationarity is measured; no phase unless `asked`."""
    if not asked:
        return ExactGradients()
    coder = sketch("exact", d=context.parameters, objectives=context.objectives)
    replies = yield GradientsPhase(sketch=coder.name, budget=coder.budget, batch_size=0)
    service = ObjectiveService.among(replies, context)
    gram = coder.gram(map(service.sketch, replies), service.objectives, shared_seed=0)
    return ExactGradients(service.objectives, gram, tuple(replies))


def one_each(key: str, values: Sequence[float], objectives: tuple[str, ...]) -> None:
    """Raises HyperparameterError unless there are no values, or one for each objective."""
    if values and len(values) != len(objectives):
        names = ", ".join(objectives)
        raise HyperparameterError(f"{key}: {len(values)} numbers for {len(objectives)} objectives: {names}")


def training(
    wanted: Mapping[str, float], clients: Mapping[str, Selected | PhaseReply], context: RoundContext
) -> tuple[dict[str, float], tuple[str, ...]]:
    """The losses with which the mean of the clients' updates is that of sum_k wanted_k F_k.

    Returns:
        The weight of each objective in the loss of every client that serves it, wanted_k / P_k; and the clients that
        serve an objective of positive weight: the others have nothing to do.

    Raises:
        TooFewUpdatesError: there is no such client.
    """
    busy = {name: one for name, one in clients.items() if any(wanted.get(key, 0.0) > 0 for key in one.objectives)}
    if not busy:
        raise TooFewUpdatesError("no client serves an objective that weighs anything")
    service = ObjectiveService.of(busy, context)
    factors = {
        name: wanted[name] / float(share)
        for name, share in zip(service.objectives, service.share, strict=True)
        if wanted.get(name, 0.0) > 0
    }
    return factors, tuple(busy)


def reweighted(
    prior: Vector, serves: Sequence[tuple[str, ...]], factors: Mapping[str, float], wanted: Mapping[str, float]
) -> Vector:
    """The client weights c >= 0 that bring sum_i c_i factor_k [i serves k] nearest to wanted_k, shape (m,).

    `training` made the factors for the clients that were asked. Where some did not reply, their objectives would get
    too little in the mean of the others' updates. The distance is the sum of squares over objectives; of several
    minima, c is the one nearest to the prior. An objective that none of the clients serves gets nothing. `prior` and
    `serves` are of the m clients that replied.

    Raises:
        UnsolvedError: the least squares with c >= 0 do not converge.
    """
    A = np.array([[factor * (name in served) for served in serves] for name, factor in factors.items()])
    target = np.array([wanted[name] for name in factors])
    if np.abs(target - A @ prior).max(initial=0.0) <= 1e-12:
        return prior
    corrected = _nearest(A, target, prior, np.ones(len(prior), dtype=bool))
    if (corrected < 0).any():
        positive = not_negative(A, target, prior, pull=1e-4) > 0
        corrected = np.maximum(_nearest(A, target, prior, positive), 0.0)
    return corrected


def _nearest(A: Matrix, target: Vector, prior: Vector, free: NDArray[np.bool_]) -> Vector:
    """The c, 0 where it is not free, of least ||A c - target||; of several, the one nearest to the prior."""
    solution = np.zeros(len(prior))
    missing = target - A[:, free] @ prior[free]
    solution[free] = prior[free] + np.linalg.lstsq(A[:, free], missing, rcond=None)[0]
    return solution
