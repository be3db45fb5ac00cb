"""The common code of algorithms for objectives: whose gradients count for which objective, and the weights from G.

With the indicator matrix A (client i serves objective k or does not), an objective is the mean over its clients,
F_k = sum_i p_ik f_ik with p_ik = p_i / P_k for those that serve it, where p is the prior (1/m, or by samples) and P_k
the share of all who do (Yang et al., 2023, section 3).
"""

import math
from abc import ABC
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coordinator.aggregation import torchjd
from coordinator.aggregation.base import Rule
from coordinator.aggregation.bounds import BOUNDS, factors
from coordinator.aggregation.find_weights import find_weights
from coordinator.aggregation.phases import Replies, RoundContext, Selected
from coordinator.aggregation.qp import min_norm
from coordinator.aggregation.rules import HyperparameterError, Matrix, Rows, TooFewUpdatesError, Vector

SCOPES = ("all", "encoder")
RAW = "pgd-raw"
WEIGHTS = ("exact", "pgd", RAW)
WEIGHTS_HELP = (
    'how the weights of the objectives are found from their Gram matrix: "exact" is the min-norm point, "pgd" some '
    'steps towards it from the last round\'s weights, "pgd-raw" the same steps on the matrix as it was estimated, '
    'neither divided by the gradients\' lengths nor made positive semi-definite, "torchjd:NAME" a weighting of TorchJD'
)
SCOPE_HELP = (
    'which columns the Gram matrix of the objectives is made of: "all", or "encoder" without the heads, which no two '
    "objectives share"
)
NORMALISE_HELP = "make the gradients of all objectives equally long, here and in the step: no loss counts by its scale"
BOUND_HELP = (
    'what bounds each client\'s gradients and updates: "clip" shortens those longer than bound_norm medians of their '
    'objective, "normalise" gives all the median norm, "none" takes them as they come (the papers)'
)
BOUND_NORM_HELP = "of clip, at least 1: in medians of the norms"
BETA_HELP = "the step of pgd"
STEPS_HELP = "the number of steps of pgd"
EXACT_HELP = (
    "measure objective/stationarity on the gradients of the clients' whole training splits, which every client sends "
    "in a phase of its own: as many models as it has objectives"
)


@dataclass(frozen=True, kw_only=True)
class ObjectiveRule(Rule, ABC):
    """A rule that weighs objectives, and remembers the weights: state {"weights": {objective: lambda}}."""

    weights: str = field(default="exact", metadata={"help": WEIGHTS_HELP})
    scope: str = field(default="all", metadata={"help": SCOPE_HELP})
    normalise: bool = field(default=False, metadata={"help": NORMALISE_HELP})
    bound: str = field(default="clip", metadata={"help": BOUND_HELP})
    bound_norm: float = field(default=2.0, metadata={"help": BOUND_NORM_HELP})
    beta: float = field(default=0.001, metadata={"help": BETA_HELP})
    steps: int = field(default=1000, metadata={"help": STEPS_HELP})
    exact_stationarity: bool = field(default=False, metadata={"help": EXACT_HELP})

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise HyperparameterError(f"scope must be one of {', '.join(SCOPES)}; got {self.scope!r}")
        if self.weights.startswith(torchjd.PREFIX):
            torchjd.rule(self.weights)
        elif self.weights not in WEIGHTS:
            raise HyperparameterError(
                f"weights must be one of {', '.join(WEIGHTS)}, torchjd:NAME; got {self.weights!r}"
            )
        if self.normalise and self.weights == RAW:
            raise HyperparameterError(f'normalise: "{RAW}" takes the matrix as it was estimated')
        if self.bound not in BOUNDS:
            raise HyperparameterError(f"bound must be one of {', '.join(BOUNDS)}; got {self.bound!r}")
        if not 1 <= self.bound_norm < np.inf:
            raise HyperparameterError(f"bound_norm must be finite and at least 1; got {self.bound_norm!r}")
        if not (0 <= self.beta < np.inf and self.steps >= 1):
            raise HyperparameterError(
                f"beta and steps: a step of at least 0, and at least one; got {self.beta}, {self.steps}"
            )

    def cautions(self) -> tuple[str, ...]:
        """Adds how far a client that scales its gradients gets."""
        if self.bound != "none":
            return super().cautions()
        return (
            *super().cautions(),
            f'{self.name} with bound = "none" takes gradients as clients send them: one that scales its own decides '
            'what the objectives weigh; leave the default, bound = "clip", among members who do not trust each other',
        )

    def factors(self, norms: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
        """What bounds the gradients (or updates) of these norms, by (client, objective): compared by objective."""
        found: dict[tuple[str, str], float] = {}
        for objective in {name for _, name in norms}:
            of_one = {key: norm for key, norm in norms.items() if key[1] == objective}
            found |= factors(of_one, self.bound, self.bound_norm)
        return found

    def columns(self, context: RoundContext) -> tuple[slice, ...]:
        """The columns that the Gram matrix is made of."""
        if self.scope == "encoder":
            return context.encoder
        return (slice(0, context.parameters),)

    def weigh(self, G: Matrix, before: Vector, context: RoundContext) -> Vector:
        """Lambda, shape (M,), from the Gram matrix of the objectives and the weights of the last round."""
        if self.weights == RAW:
            return find_weights(G, before, beta=self.beta, steps=self.steps, normalise=False, psd=False)
        if self.normalise:
            lengths = np.sqrt(np.diag(G))
            inverse = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > 0)
            G = G * np.outer(inverse, inverse)
        if self.weights == "pgd":
            found = find_weights(G, before, beta=self.beta, steps=self.steps)
        elif self.weights == "exact":
            found = min_norm(G, prior=before).weights
        else:
            uniform = np.full(len(G), 1.0 / len(G))
            rows = Rows(gram=G, prior=uniform, samples=np.ones(len(G)), round=context.number, rounds=context.total)
            found = torchjd.rule(self.weights)().combine(rows).weights
        shares: Vector = found / found.sum()
        return shares

    def scales(self, G: Matrix) -> Vector:
        """What multiplies each objective besides its weight, shape (M,): 1, or what makes all gradients equally long.

        Then they have the mean length, so that the step is about as long as without.
        """
        if not self.normalise or not (np.diag(G) > 0).all():
            return np.ones(len(G))
        lengths = np.sqrt(np.diag(G))
        scales: Vector = lengths.mean() / lengths
        return scales


@dataclass(frozen=True)
class Service:
    """Who serves what among the replies to a phase.

    Attributes:
        objectives: those that somebody serves, in the task's order, M names.
        prior: p, by client: the weights of plain averaging.
        share: P_k of each objective, shape (M,).
        left_out: of the run's other objectives, why.
    """

    objectives: tuple[str, ...]
    prior: Mapping[str, float]
    share: Vector
    left_out: Mapping[str, str]

    @classmethod
    def of(cls, clients: Mapping[str, Selected], context: RoundContext) -> "Service":
        """Of these clients."""
        size = {name: 1.0 if context.prior == "uniform" else float(one.samples) for name, one in clients.items()}
        prior = {name: value / sum(size.values()) for name, value in size.items()}
        share = {
            name: sum(prior[client] for client, one in clients.items() if name in one.objectives)
            for name in context.objectives
        }
        left_out = {name: "no client that takes part in this round serves it" for name in share if share[name] == 0}
        present = tuple(name for name in context.objectives if name not in left_out)
        return cls(present, prior, np.array([share[name] for name in present]), left_out)

    def weight(self, client: str, objective: str) -> float:
        """p_ik: how much of objective k is client i, who serves it."""
        return self.prior[client] / float(self.share[self.objectives.index(objective)])

    @classmethod
    def among(cls, replies: Replies, context: RoundContext) -> "Service":
        """Of those that replied."""
        return cls.of({reply.client_id: Selected(reply.samples, reply.objectives) for reply in replies}, context)

    def only(self, objectives: tuple[str, ...], why: str) -> "Service":
        """Without the other objectives, which are left out for this reason."""
        kept = np.array([name in objectives for name in self.objectives], dtype=bool)
        left_out = {name: why for name in self.objectives if name not in objectives}
        return Service(objectives, self.prior, self.share[kept], {**self.left_out, **left_out})

    def mean(self, values: Iterable[tuple[str, Mapping[str, float]]]) -> dict[str, float]:
        """The mean of each objective over the clients that tell a value, by (client, objective -> value).

        An objective of which nobody tells anything is left out, and one whose mean no float64 can hold.
        """
        totals: dict[str, float] = dict.fromkeys(self.objectives, 0.0)
        told: dict[str, float] = dict.fromkeys(self.objectives, 0.0)
        for client, known in values:
            for name in self.objectives:
                if name in known:
                    told[name] += self.prior[client]
                    totals[name] += self.prior[client] * known[name]
        means = {name: totals[name] / told[name] for name in self.objectives if told[name] > 0}
        return {name: value for name, value in means.items() if math.isfinite(value)}


def training(
    wanted: Mapping[str, float], clients: Mapping[str, Selected], context: RoundContext
) -> tuple[dict[str, float], tuple[str, ...]]:
    """What makes the mean of the clients' updates that of sum_k wanted_k F_k, whoever serves what.

    Args:
        wanted: lambda by objective.
        clients: who could train.
        context: of the round.

    Returns:
        The weight of each objective in the loss of every client that serves it, lambda_k / P_k; and the clients that
        serve an objective which weighs something: the others have nothing to do.

    Raises:
        TooFewUpdatesError: nobody has.
    """
    busy = {name: one for name, one in clients.items() if any(wanted.get(key, 0.0) > 0 for key in one.objectives)}
    if not busy:
        raise TooFewUpdatesError("no client serves an objective that weighs anything")
    service = Service.of(busy, context)
    factors = {
        name: wanted[name] / float(share)
        for name, share in zip(service.objectives, service.share, strict=True)
        if wanted.get(name, 0.0) > 0
    }
    return factors, tuple(busy)


def reweighted(
    prior: Vector, serves: Sequence[tuple[str, ...]], factors: Mapping[str, float], wanted: Mapping[str, float]
) -> Vector:
    """The client weights c that bring sum_i c_i factor_k [i serves k] nearest to wanted_k, shape (m,).

    `training` made the factors for the clients that were asked. Where one of them did not reply, the mean of the
    others' updates would give an objective that fewer now serve too little. The distance is the sum of squares over
    objectives; of several minima, c is the one nearest to the prior. An objective that no client is left to serve gets
    nothing. The prior stays where c would need a negative weight.

    Args:
        prior: of the clients that replied, shape (m,).
        serves: the objectives of each of them.
        factors: the weight of each objective in a client's loss.
        wanted: lambda by objective.
    """
    A = np.array([[factor * (name in served) for served in serves] for name, factor in factors.items()])
    missing = np.array([wanted[name] for name in factors]) - A @ prior
    if np.abs(missing).max(initial=0.0) <= 1e-12:
        return prior
    corrected: Vector = prior + np.linalg.lstsq(A, missing, rcond=None)[0]
    return prior if (corrected < 0).any() else corrected


def weights_before(state: Mapping[str, Any], objectives: tuple[str, ...], present: tuple[str, ...]) -> Vector:
    """The last round's weights of these objectives, shape (M,), sum 1; equal ones before the first round."""
    known = state.get("weights", {})
    found = np.array([float(known.get(name, 1.0 / len(objectives))) for name in present])
    return found / found.sum() if found.sum() > 0 else np.full(len(present), 1.0 / len(present))


def weights_after(
    state: Mapping[str, Any], objectives: tuple[str, ...], present: tuple[str, ...], weights: Vector
) -> dict[str, Any]:
    """The state for the next round: an objective that was left out keeps its share, the others have the rest."""
    known = state.get("weights", {})
    kept = {name: float(known.get(name, 1.0 / len(objectives))) for name in objectives if name not in present}
    rest = 1.0 - sum(kept.values())
    found = dict(zip(present, (rest * weights).tolist(), strict=True))
    return {"weights": {name: found.get(name, kept.get(name, 0.0)) for name in objectives}}
