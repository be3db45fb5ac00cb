"""FedCMOO and FedCMOO-Pref (Askin et al., 2025, "Federated Communication-Efficient Multi-Objective Optimization")."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from federation.aggregation.answers import asked, gram_matrix
from federation.aggregation.base import Opened, conclude
from federation.aggregation.diagnostics import describe
from federation.aggregation.interface import (
    Combination,
    HyperparameterError,
    Matrix,
    Objectives,
    Rows,
    TooFewUpdatesError,
)
from federation.aggregation.phase_kinds import GradientsPhase, ResidualsPhase, TrainingPhase
from federation.aggregation.phases import (
    AlgorithmPhase,
    PhaseReply,
    PrivateSetting,
    Replies,
    RoundContext,
    RoundGenerator,
    Selected,
    Step,
)
from federation.aggregation.rules.objectives import (
    RAW,
    SCOPE,
    WEIGHTS,
    ObjectiveRule,
    ObjectiveService,
    exact_gradients,
    one_each,
    reweighted,
    training,
)
from federation.aggregation.rules.preference import check_cvxpy, check_preference, preferred
from federation.aggregation.secure.objectives import combined_step, mean_of
from federation.owners_code import is_owners_class
from federation.plugins import CodeOrigin
from federation.sketches import SKETCHES, load, origin, sketch
from federation.sketches.base import ClientSketch, LinearSketch, Message, Sketch, SketchError, clip_to_psd
from federation.sketches.draws import own_seed, shared_seed
from federation.sketches.svd import TwoWaySvd
from federation.spec.computation import Ability
from federation.spec.objective_names import JOINT, width
from federation.spec.options import option
from federation.work.jacobian.work import BUDGET, ENCODER, SKETCH
from federation.work.secure.sessions import JACOBIAN, TRAIN

_ROUNDING = 1.001  # of products and norms that were sent in float32


@dataclass(frozen=True)
class Estimate:
    """The Gram matrix that is estimated from a round's sketches.

    Attributes:
        replies: to the first question, by the clients that may train.
        service: the objectives that they serve.
        gram: of these objectives, (M, M), symmetric; positive semi-definite unless the weights are found from the
            estimate as it is.
        consulted: every reply that the estimate was made from.
    """

    replies: Replies
    service: ObjectiveService
    gram: Matrix
    consulted: tuple[PhaseReply, ...]


@dataclass(frozen=True, kw_only=True)
class Conversation(ObjectiveRule, ABC):
    """The rounds of the FedCMOO family: Jacobian, weights back, training on the weighted sum, plain average."""

    measures: ClassVar[bool] = False  # True if the weights depend on losses
    private: ClassVar[Opened] = "sum"

    scope: Literal["all", "encoder"] = option(ENCODER, SCOPE)
    sketch: str = option(SKETCH, f"the sketch of their Jacobians that clients send: {', '.join(SKETCHES)}")
    budget: float = option(BUDGET, "the floats of a sketch, as a share of the columns in `scope`")
    unbiased: bool = option(
        False,
        "estimate the Gram matrix from two further, independent choices of clients, whose products are unbiased (the "
        "theory version, section 5); for sketches that are linear",
    )
    latecomers: bool = option(False, "selected clients that missed the Jacobian are asked to train, too")

    @property
    def measures_samples(self) -> bool:
        return True

    def needs(self, objectives: tuple[str, ...]) -> frozenset[Ability]:
        twice = {Ability.REPEATABLE} if issubclass(load(self.sketch), TwoWaySvd) else set()
        return super().needs(objectives) | {Ability.WEIGHTS, Ability.GRADIENTS} | twice

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            load(self.sketch)
            checked = sketch(self.sketch, d=1, objectives=("loss",), budget=self.budget)
        except SketchError as error:
            raise HyperparameterError(f"sketch: {error}") from error
        if self.unbiased and not isinstance(checked, LinearSketch):
            able = ", ".join(name for name, kind in SKETCHES.items() if issubclass(kind, LinearSketch))
            raise HyperparameterError(f"unbiased: {self.sketch} is not linear; it goes with {able}")

    def origins(self) -> tuple[CodeOrigin, ...]:
        sketch_origin = origin(self.sketch)
        return () if sketch_origin is None else (sketch_origin,)

    @abstractmethod
    def choose(self, estimate: Estimate, losses: Mapping[str, float], context: RoundContext) -> Objectives:
        """The weights of the objectives, from their Gram matrix and the losses that were measured."""

    def combine(self, rows: Rows) -> Combination:
        """The plain average of the updates, which descend the weighted sum already."""
        return conclude(rows.gram, rows.prior, rows.prior)

    def round(self, context: RoundContext) -> RoundGenerator:
        if context.private is not None:
            return (yield from self._private_round(context, context.private))
        exact = yield from exact_gradients(context, self.exact_stationarity)
        gradients = yield from self._gradients(context)
        service = gradients.service
        if not service.objectives:
            raise TooFewUpdatesError("no objective has gradients in this round")
        losses = service.mean((reply.client_id, reply.losses) for reply in gradients.replies)
        chosen = replace(self.choose(gradients, losses, context), exact=exact.of(service.objectives))
        scaled = chosen.weights * self.scales(gradients.gram)
        weights = dict(zip(service.objectives, scaled.tolist(), strict=True))
        answered: dict[str, Selected | PhaseReply] = {reply.client_id: reply for reply in gradients.replies}
        able = {**context.selected, **answered} if self.latecomers else answered
        share, busy = training(weights, able, context)
        replies = yield TrainingPhase(weights=share, from_jacobian=True, measure=not self.measures, clients=busy)
        combination = replace(
            self._average(replies, share, weights, context),
            state=service.state_after(context, chosen.weights),
            objectives=chosen,
        )
        return Step(replies, combination, consulted=(*exact.replies, *gradients.consulted))

    def _private_round(self, context: RoundContext, private: PrivateSetting) -> RoundGenerator:
        """Two sessions: the mean sketch of the gradients, and the mean update on the weighted sum."""
        names, seed = context.objectives, shared_seed(context.seed, context.number)
        coder = sketch(self.sketch, d=width(self.columns(context)), objectives=names, budget=self.budget)
        lengths = coder.rows(names)
        size = sum(length for _, length in lengths)
        mean, first = yield from mean_of(context, private, JACOBIAN, size, measure=self.measures)
        ends = np.cumsum([length for _, length in lengths])[:-1]
        message = dict(zip((name for name, _ in lengths), np.split(mean, ends), strict=True))
        total = ClientSketch(names, np.ones(len(names)), message)
        G = estimated(coder, names, lambda: coder.gram([total], names, shared_seed=seed))
        ready, service = first.cohort.replies, ObjectiveService.among(first.survivors, context)
        estimate = Estimate(ready, service, G if self.weights == RAW else clip_to_psd(G), first.consulted)
        losses = service.mean((reply.client_id, reply.losses) for reply in ready if reply.client_id in service.prior)
        chosen = self.choose(estimate, losses, context)
        weights = dict(zip(names, (chosen.weights * self.scales(G)).tolist(), strict=True))
        update, second = yield from mean_of(context, private, TRAIN, context.parameters, weights=weights)
        state = service.state_after(context, chosen.weights)
        answer = Combination(np.ones(1), np.ones(1), state, {}, objectives=chosen)
        return combined_step(answer, update, [first, second])

    def _average(
        self, replies: Replies, share: Mapping[str, float], weights_wanted: Mapping[str, float], context: RoundContext
    ) -> Combination:
        """The average of the bounded updates, where each objective is to have the weight in `weights_wanted`.

        An update is about as long as the sum of `share`, the weights of the objectives in the client's loss.
        """
        rows = replies.rows(context)
        served = [reply.objectives for reply in replies]
        loads = [sum(share.get(name, 0.0) for name in names) for names in served]
        norms = {
            (client, JOINT): norm / load if load > 0 else 0.0
            for client, norm, load in zip(rows.clients, rows.norms.tolist(), loads, strict=True)
        }
        scale = np.array(list(self.factors(norms).values()))
        prior = reweighted(rows.prior, served, share, weights_wanted)
        total = float(prior.sum())
        answer = self.decide(replace(rows, gram=rows.gram * scale * scale[:, None], prior=prior / total))
        coefficients = answer.coefficients * scale * total
        diagnostics = answer.diagnostics | describe(rows.gram, coefficients, answer.weights)
        return replace(answer, coefficients=coefficients, diagnostics=diagnostics)

    def _gradients(self, context: RoundContext) -> Generator[AlgorithmPhase, Replies, Estimate]:
        """The phases before the training: the sketches, and further replies for the estimate."""
        coder = sketch(self.sketch, d=width(self.columns(context)), objectives=context.objectives, budget=self.budget)
        encoder_only = self.scope == ENCODER
        ask = GradientsPhase(sketch=self.sketch, budget=self.budget, encoder_only=encoder_only, measure=self.measures)
        seed = shared_seed(context.seed, context.number)
        replies = yield ask
        service = ObjectiveService.among(replies, context)
        consulted = list(replies)

        def sketches(
            sketched: Replies, service: ObjectiveService, again: Mapping[str, Message] | None = None
        ) -> Iterator[ClientSketch]:
            factors = self.factors(gradient_norms(sketched, coder, seed))
            return (service.sketch(reply, factors, (again or {}).get(reply.client_id, {})) for reply in sketched)

        if self.unbiased and isinstance(coder, LinearSketch):
            first = yield replace(ask, measure=False, clients=context.draw("jacobian-1"))
            second = yield replace(ask, measure=False, clients=context.draw("jacobian-2"))
            in_first, in_second = ObjectiveService.among(first, context), ObjectiveService.among(second, context)
            both = tuple(
                name for name in service.objectives if name in in_first.objectives and name in in_second.objectives
            )
            service = service.only(both, "no client of an independent choice serves it")
            linear = coder
            G = estimated(
                linear,
                both,
                lambda: linear.cross_gram(
                    sketches(first, in_first), sketches(second, in_second), both, shared_seed=seed
                ),
            )
            consulted += [*first, *second]
        elif isinstance(coder, TwoWaySvd):
            reference = coder.reference(
                sketches(replies, service),
                service.objectives,
                shared_seed=seed,
                own_seed=own_seed(context.seed, context.number, ""),
            )
            clients = tuple(reply.client_id for reply in replies)
            lost = yield ResidualsPhase(
                gradients=ask, reference=reference, objectives=service.objectives, clients=clients
            )
            lengths = np.linalg.norm(coder.vectors(reference, len(service.objectives), shared_seed=seed), axis=1)
            again = residuals(lost, gradient_norms(replies, coder, seed), lengths)
            G = coder.gram(sketches(replies, service, again), service.objectives, shared_seed=seed)
            consulted += lost
        else:
            served = service.objectives
            G = estimated(coder, served, lambda: coder.gram(sketches(replies, service), served, shared_seed=seed))
        if service.objectives and self.weights != RAW:
            G = clip_to_psd(G)
        return Estimate(replies, service, G, tuple(consulted))


@dataclass(frozen=True, kw_only=True)
class FedCMOO(Conversation):
    """One joint trajectory for each client, on weights that the server finds from sketches of the Jacobians.

    Clients send a sketch of their gradients; the server estimates the Gram matrix of the objectives, finds weights
    (Algorithm 2: `pgd` tracks the min-norm point slowly, from the last round's weights), and every client trains on the
    weighted sum, the first step with the gradients that it has already. The upload is that of a model and a sketch,
    whatever the number of objectives.
    """

    name = "fedcmoo"

    weights: str = option("pgd", WEIGHTS)

    def choose(self, estimate: Estimate, losses: Mapping[str, float], context: RoundContext) -> Objectives:
        G, service = estimate.gram, estimate.service
        weights = self.weigh(G, service.weights_before(context), context)
        return service.weighed(weights, gram=clip_to_psd(G), mode=self.weights)


@dataclass(frozen=True, kw_only=True)
class FedCMOOPref(Conversation):
    """FedCMOO towards losses in a given proportion (appendix C; the linear programme of Mahapatra and Rajan, 2020).

    It reads the losses that clients report: their means decide where the model is on the front.
    """

    name = "fedcmoo-pref"
    measures = True

    preference: tuple[float, ...] = option(
        (), "r, a positive number for each objective: the aim is r_1 F_1 = ... = r_M F_M; empty: equal numbers"
    )
    threshold: float = option(
        0.01, "the divergence (KL) above which the losses are balanced; below it all are lowered", "[0, inf]"
    )
    slack: float = option(
        0.0,
        "objectives whose r_k F_k is within this share of the largest count as the worst; 0 is the worst alone",
        "[0, 1]",
    )
    minimum: float = option(
        0.2, "each weight is at least this much of 1/M: lambda <- (1 - minimum) lambda + minimum / M", "[0, 1]"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_cvxpy()
        if self.preference:
            check_preference(np.array(self.preference))

    def cautions(self) -> tuple[str, ...]:
        return (
            *super().cautions(),
            f"{self.name} aims by the losses that clients report: one that inflates its own bends the proportion",
        )

    def fit(self, objectives: tuple[str, ...]) -> None:
        one_each("preference", self.preference, objectives)

    def choose(self, estimate: Estimate, losses: Mapping[str, float], context: RoundContext) -> Objectives:
        G, service = estimate.gram, estimate.service
        unreported = [name for name in service.objectives if name not in losses]
        if unreported:
            raise TooFewUpdatesError(f"no client reported a loss of {', '.join(unreported)}")
        proportions = dict(zip(context.objectives, self.preference or (1.0,) * len(context.objectives), strict=True))
        F = np.array([losses[name] for name in service.objectives])
        solution = preferred(
            G,
            F / max(1.0, np.abs(F).max()),  # only their proportions count, and a claim may be of any size
            np.array([proportions[name] for name in service.objectives]),
            threshold=self.threshold,
            slack=self.slack,
            minimum=self.minimum,
        )
        return service.weighed(
            solution.weights,
            gram=clip_to_psd(G),
            mode=solution.mode,
            notes=tuple(filter(None, (solution.note,))),
            divergence=solution.divergence,
        )


def estimated(coder: Sketch, objectives: tuple[str, ...], ask: Callable[[], Matrix]) -> Matrix:
    """A Gram matrix (M, M) that a sketch estimates; a sketch that is not built in is asked twice, as a rule is.

    Raises:
        PluginError, SketchError: as `answers.asked`.
    """
    if not is_owners_class(type(coder)):
        return ask()
    return asked(f"sketch {coder.name!r}", "gram", ask, partial(gram_matrix, count=len(objectives)))


def gradient_norms(replies: Replies, coder: Sketch, shared_seed: int) -> dict[tuple[str, str], float]:
    """The norms of the clients' gradients, estimated from their sketches, by (client, objective)."""
    norms: dict[tuple[str, str], float] = {}
    for reply in replies:
        client_sketch = ClientSketch(reply.objectives, np.ones(len(reply.objectives)), reply.arrays())
        ask = partial(coder.gram, [client_sketch], reply.objectives, shared_seed=shared_seed)
        squares = np.diag(estimated(coder, reply.objectives, ask))
        lengths = np.sqrt(np.maximum(squares, 0.0)).tolist()
        norms |= {(reply.client_id, name): length for name, length in zip(reply.objectives, lengths, strict=True)}
    return norms


def residuals(
    replies: Replies, norms: Mapping[tuple[str, str], float], lengths: NDArray[np.float64]
) -> dict[str, Message]:
    """The second leg by client, cut to the bound of Cauchy and Schwarz, which no honest client exceeds.

    The replies are inner products of the client's remainder (beside its sketch) and the reference, (M_i, M) row by row.
    `norms` are those of the gradients, by (client, objective), and `lengths` those of the reference's rows, (M,).
    """
    bounded: dict[str, Message] = {}
    for reply in replies:
        own_norms = np.array([norms[reply.client_id, name] for name in reply.objectives])
        bound = (_ROUNDING * np.outer(own_norms, lengths)).reshape(-1)
        bounded[reply.client_id] = {
            name: np.clip(values, -bound, bound).astype(np.float32) for name, values in reply.arrays().items()
        }
    return bounded
