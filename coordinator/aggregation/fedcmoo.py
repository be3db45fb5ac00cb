"""FedCMOO and FedCMOO-Pref (Askin et al., 2025, "Federated Communication-Efficient Multi-Objective Optimization")."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregation.base import describe
from coordinator.aggregation.bounds import factors
from coordinator.aggregation.fedavg import FedAvg
from coordinator.aggregation.objectives import (
    RAW,
    ObjectiveRule,
    Service,
    reweighted,
    training,
    weights_after,
    weights_before,
)
from coordinator.aggregation.phases import (
    Gradients,
    Phase,
    Replies,
    Reply,
    Residuals,
    RoundContext,
    RoundGenerator,
    Selected,
    Step,
    Training,
)
from coordinator.aggregation.preference import preferred, require_cvxpy
from coordinator.aggregation.rules import (
    Combination,
    HyperparameterError,
    Matrix,
    Objectives,
    Rows,
    TooFewUpdatesError,
    Vector,
)
from coordinator.aggregation.stationarity import exact_gradients
from federation.objectives import width
from federation.plugins import Origin
from federation.sketches import (
    SKETCHES,
    ClientSketch,
    LinearSketch,
    Sketch,
    SketchError,
    TwoWaySvd,
    clip_to_psd,
    load,
    origin,
    sketch,
)
from federation.sketches.base import Message
from federation.sketches.seeds import own_seed, shared_seed
from federation.vectors import RowFile

SKETCH_HELP = f"what clients send of their Jacobians: {', '.join(SKETCHES)}"
BUDGET_HELP = "the floats of that, as a share of the columns that count (scope)"
UNBIASED_HELP = (
    "estimate the Gram matrix from two further, independent choices of clients, whose products are unbiased (the "
    "theory version, section 5); for sketches that are linear"
)
_ROUNDING = 1.001  # of products and norms that were sent in float32
LATECOMERS_HELP = "selected clients that missed the Jacobian are asked to train, too"


@dataclass(frozen=True)
class Weighed:
    """The weights of one round, and how they were found.

    Attributes:
        weights: lambda, shape (M,).
        mode: how.
        notes: what an operator should know.
        divergence: of the losses from the preference; None where there is none.
    """

    weights: Vector
    mode: str
    notes: tuple[str, ...] = ()
    divergence: float | None = None


@dataclass(frozen=True)
class Estimate:
    """What the round's gradients came to.

    Attributes:
        replies: to the first question, by those who may train.
        service: who serves what among them.
        gram: the estimated Gram matrix of its objectives, (M, M), symmetric; positive semi-definite unless the weights
            are found from the estimate as it is.
        consulted: every reply that the estimate was made from.
    """

    replies: Replies
    service: Service
    gram: Matrix
    consulted: tuple[Reply, ...]


@dataclass(frozen=True, kw_only=True)
class Conversation(ObjectiveRule, ABC):
    """The rounds of the FedCMOO family: Jacobian, weights back, training on the weighted sum, plain average."""

    measures: ClassVar[bool] = False  # whether the weights depend on losses

    scope: str = field(default="encoder", metadata=ObjectiveRule.__dataclass_fields__["scope"].metadata)
    sketch: str = field(default="count", metadata={"help": SKETCH_HELP})
    budget: float = field(default=0.1, metadata={"help": BUDGET_HELP})
    unbiased: bool = field(default=False, metadata={"help": UNBIASED_HELP})
    latecomers: bool = field(default=False, metadata={"help": LATECOMERS_HELP})

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            load(self.sketch)
            made = sketch(self.sketch, d=1, objectives=("loss",), budget=self.budget)
        except SketchError as error:
            raise HyperparameterError(f"sketch: {error}") from error
        if self.unbiased and not isinstance(made, LinearSketch):
            able = ", ".join(name for name, kind in SKETCHES.items() if issubclass(kind, LinearSketch))
            raise HyperparameterError(f"unbiased: {self.sketch} is not linear; it goes with {able}")

    def origins(self) -> tuple[Origin, ...]:
        """The sketch, if it is a plug-in."""
        found = origin(self.sketch)
        return () if found is None else (found,)

    @abstractmethod
    def choose(self, G: Matrix, losses: Mapping[str, float], service: Service, context: RoundContext) -> Weighed:
        """The weights of the objectives of `service`, from their Gram matrix and the losses that were measured."""

    def combine(self, rows: Rows) -> Combination:
        """The plain average of the updates, which descend the weighted sum already."""
        return FedAvg().combine(rows)

    def round(self, context: RoundContext) -> RoundGenerator:
        """See the class."""
        exact = yield from exact_gradients(context, self.exact_stationarity)
        gradients = yield from self._gradients(context)
        service = gradients.service
        if not service.objectives:
            raise TooFewUpdatesError("no objective has gradients in this round")
        losses = service.mean((reply.client_id, reply.losses) for reply in gradients.replies)
        chosen = self.choose(gradients.gram, losses, service, context)
        scaled = chosen.weights * self.scales(gradients.gram)
        wanted = dict(zip(service.objectives, scaled.tolist(), strict=True))
        answered = {reply.client_id: Selected(reply.samples, reply.objectives) for reply in gradients.replies}
        able = {**context.selected, **answered} if self.latecomers else answered
        share, busy = training(wanted, able, context)
        replies = yield Training(weights=share, from_jacobian=True, measure=not self.measures, clients=busy)
        combination = dataclasses.replace(
            self._average(replies, share, wanted, context),
            state=weights_after(context.state, context.objectives, service.objectives, chosen.weights),
            objectives=Objectives(
                names=service.objectives,
                weights=chosen.weights,
                gram=clip_to_psd(gradients.gram),
                mode=chosen.mode,
                left_out=service.left_out,
                notes=chosen.notes,
                divergence=chosen.divergence,
                exact=exact.of(service.objectives),
            ),
        )
        return Step(replies, combination, consulted=(*exact.replies, *gradients.consulted))

    def _average(
        self, replies: Replies, share: Mapping[str, float], wanted: Mapping[str, float], context: RoundContext
    ) -> Combination:
        """The average of the bounded updates.

        Args:
            replies: the updates.
            share: the weight of each objective in a client's loss; an update is about as long as their sum.
            wanted: the weight that each objective is to have in the step.
            context: of the round.
        """
        rows = replies.rows(context)
        served = [reply.objectives for reply in replies]
        loads = [sum(share.get(name, 0.0) for name in names) for names in served]
        norms = {
            client: norm / load if load > 0 else 0.0
            for client, norm, load in zip(rows.clients, rows.norms.tolist(), loads, strict=True)
        }
        bounded = factors(norms, self.bound, self.bound_norm)
        scale = np.array([bounded[client] for client in rows.clients])
        prior = reweighted(rows.prior, served, share, wanted)
        total = float(prior.sum())
        answer = self.decide(dataclasses.replace(rows, gram=rows.gram * scale * scale[:, None], prior=prior / total))
        coefficients = answer.coefficients * scale * total
        diagnostics = answer.diagnostics | describe(rows.gram, coefficients, answer.weights)
        return dataclasses.replace(answer, coefficients=coefficients, diagnostics=diagnostics)

    def _gradients(self, context: RoundContext) -> Generator[Phase, Replies, Estimate]:
        """The phases before the training: everybody's sketches, and what the estimate needs besides."""
        made = sketch(self.sketch, d=width(self.columns(context)), objectives=context.objectives, budget=self.budget)
        ask = Gradients(
            sketch=self.sketch,
            budget=self.budget,
            encoder_only=self.scope == "encoder",
            measure=self.measures,
        )
        seed = shared_seed(context.seed, context.number)
        replies = yield ask
        service = Service.among(replies, context)
        consulted = list(replies)

        def sketches(
            given: Replies, service: Service, again: Mapping[str, Message] | None = None
        ) -> Iterator[ClientSketch]:
            norms = gradient_norms(given, made, seed)
            return weighed(given, service, self.factors(norms), again or {})

        if self.unbiased and isinstance(made, LinearSketch):
            first = yield dataclasses.replace(ask, measure=False, clients=context.draw("jacobian-1"))
            second = yield dataclasses.replace(ask, measure=False, clients=context.draw("jacobian-2"))
            one, other = Service.among(first, context), Service.among(second, context)
            both = tuple(name for name in service.objectives if name in one.objectives and name in other.objectives)
            service = service.only(both, "no client of an independent choice serves it")
            G = made.cross_gram(sketches(first, one), sketches(second, other), both, shared_seed=seed)
            consulted += [*first, *second]
        elif isinstance(made, TwoWaySvd):
            reference = made.reference(
                sketches(replies, service),
                service.objectives,
                shared_seed=seed,
                own_seed=own_seed(context.seed, context.number, ""),
            )
            clients = tuple(reply.client_id for reply in replies)
            lost = yield Residuals(gradients=ask, reference=reference, objectives=service.objectives, clients=clients)
            lengths = np.linalg.norm(made.vectors(reference, len(service.objectives), shared_seed=seed), axis=1)
            again = residuals(lost, gradient_norms(replies, made, seed), lengths)
            G = made.gram(sketches(replies, service, again), service.objectives, shared_seed=seed)
            consulted += lost
        else:
            G = made.gram(sketches(replies, service), service.objectives, shared_seed=seed)
        if service.objectives and self.weights != RAW:
            G = clip_to_psd(G)
        return Estimate(replies, service, G, tuple(consulted))


@dataclass(frozen=True, kw_only=True)
class FedCMOO(Conversation):
    """One joint trajectory for each client, on weights that the server finds from sketches of the Jacobians.

    Clients send a sketch of their gradients; the server estimates the Gram matrix of the objectives, finds weights
    (Algorithm 2: `pgd` tracks the min-norm point slowly, from the last round's weights), and everybody trains on the
    weighted sum, the first step with the gradients that are there already. The upload is that of a model and a sketch,
    whatever the number of objectives.
    """

    name: ClassVar[str] = "fedcmoo"

    weights: str = field(default="pgd", metadata=ObjectiveRule.__dataclass_fields__["weights"].metadata)

    def choose(self, G: Matrix, losses: Mapping[str, float], service: Service, context: RoundContext) -> Weighed:
        """See the base."""
        before = weights_before(context.state, context.objectives, service.objectives)
        return Weighed(self.weigh(G, before, context), self.weights)


PREFERENCE_HELP = "r, a positive number for each objective: r_1 F_1 = ... = r_M F_M is aimed at; none is equal ones"
THRESHOLD_HELP = "the divergence (KL) from which on balance comes first; below, all losses descend"
SLACK_HELP = "objectives whose r_k F_k is within this share of the largest count as the worst; 0 is the worst alone"
MINIMUM_HELP = "each weight is at least this much of 1/M: lambda <- (1 - minimum) lambda + minimum / M"


@dataclass(frozen=True, kw_only=True)
class FedCMOOPref(Conversation):
    """FedCMOO towards losses in a given proportion (appendix C; the linear programme of Mahapatra and Rajan, 2020).

    It reads the losses that clients report: their means decide where the model is on the front.
    """

    name: ClassVar[str] = "fedcmoo-pref"
    measures: ClassVar[bool] = True

    preference: tuple[float, ...] = field(default=(), metadata={"help": PREFERENCE_HELP})
    threshold: float = field(default=0.01, metadata={"help": THRESHOLD_HELP})
    slack: float = field(default=0.0, metadata={"help": SLACK_HELP})
    minimum: float = field(default=0.2, metadata={"help": MINIMUM_HELP})

    def __post_init__(self) -> None:
        super().__post_init__()
        require_cvxpy()
        if self.preference and not (np.isfinite(self.preference).all() and min(self.preference) > 0):
            raise HyperparameterError(f"preference must be positive numbers; got {list(self.preference)}")
        for key in ("threshold", "slack", "minimum"):
            value = getattr(self, key)
            if not 0 <= value <= (np.inf if key == "threshold" else 1):
                raise HyperparameterError(f"{key} is out of range: {value}")

    def cautions(self) -> tuple[str, ...]:
        """See the base; and losses are read with the gradients."""
        return (
            *super().cautions(),
            f"{self.name} aims by the losses that clients report: one that inflates its own bends the proportion",
        )

    def fit(self, objectives: tuple[str, ...]) -> None:
        """See the base."""
        if self.preference and len(self.preference) != len(objectives):
            raise HyperparameterError(
                f"preference: {len(self.preference)} numbers for {len(objectives)} objectives: {', '.join(objectives)}"
            )

    def choose(self, G: Matrix, losses: Mapping[str, float], service: Service, context: RoundContext) -> Weighed:
        """See the base."""
        untold = [name for name in service.objectives if name not in losses]
        if untold:
            raise TooFewUpdatesError(f"no client reported a loss of {', '.join(untold)}")
        given = dict(zip(context.objectives, self.preference or (1.0,) * len(context.objectives), strict=True))
        F = np.array([losses[name] for name in service.objectives])
        found = preferred(
            G,
            F / max(1.0, np.abs(F).max()),  # only their proportions count, and a claim may be of any size
            np.array([given[name] for name in service.objectives]),
            threshold=self.threshold,
            slack=self.slack,
            minimum=self.minimum,
        )
        return Weighed(found.weights, found.mode, tuple(filter(None, (found.note,))), found.divergence)


def gradient_norms(replies: Replies, made: Sketch, shared_seed: int) -> dict[tuple[str, str], float]:
    """The norm of each client's gradient of each of its objectives, as its sketch tells it, by (client, objective)."""
    norms: dict[tuple[str, str], float] = {}
    for reply in replies:
        own = ClientSketch(reply.objectives, np.ones(len(reply.objectives)), _arrays(reply))
        squares = np.diag(made.gram([own], reply.objectives, shared_seed=shared_seed))
        lengths = np.sqrt(np.maximum(squares, 0.0)).tolist()
        norms |= {(reply.client_id, name): length for name, length in zip(reply.objectives, lengths, strict=True)}
    return norms


def weighed(
    replies: Replies,
    service: Service,
    bounded: Mapping[tuple[str, str], float],
    again: Mapping[str, Message],
) -> Iterator[ClientSketch]:
    """What each client says of its Jacobian, one client after the other.

    Args:
        replies: to the first leg.
        service: who serves what among them.
        bounded: what multiplies each gradient, by (client, objective).
        again: the rows of the second leg, by client.
    """
    for reply in replies:
        weights = [
            service.weight(reply.client_id, name) * bounded[reply.client_id, name]
            if name in service.objectives
            else 0.0
            for name in reply.objectives
        ]
        yield ClientSketch(reply.objectives, np.array(weights), {**_arrays(reply), **again.get(reply.client_id, {})})


def residuals(
    replies: Replies, norms: Mapping[tuple[str, str], float], lengths: NDArray[np.float64]
) -> dict[str, Message]:
    """The second leg by client, within the inequality of Cauchy and Schwarz, which no honest client exceeds.

    Args:
        replies: each with the inner products of what its sketch left out and the reference, (M_i, M) row by row.
        norms: of the gradients, by (client, objective).
        lengths: of the reference's rows, shape (M,).
    """
    found: dict[str, Message] = {}
    for reply in replies:
        own = np.array([norms[reply.client_id, name] for name in reply.objectives])
        most = (_ROUNDING * np.outer(own, lengths)).reshape(-1)
        found[reply.client_id] = {
            name: np.clip(values, -most, most).astype(np.float32) for name, values in _arrays(reply).items()
        }
    return found


def _arrays(reply: Reply) -> dict[str, NDArray[np.float32]]:
    return {
        name: row.read() if isinstance(row, RowFile) else np.asarray(row, dtype=np.float32)
        for name, row in zip(reply.names, reply.rows, strict=True)
    }
