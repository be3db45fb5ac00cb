"""An evaluation as a session of the mode `sum`: the mean of each metric over the members, and no member's own."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from federation.aggregation.interface import TooFewUpdatesError, Vector
from federation.aggregation.phases import AlgorithmPhase, Replies, RoundContext
from federation.aggregation.secure.private_rule import drawn, make_setting
from federation.aggregation.secure.session import secure_sum
from federation.aggregation.secure.settled import Cohort
from federation.secure.evaluation import clip, common, deviation_of_mean
from federation.work.evaluate.work import Evaluate
from federation.work.secure.vector import entries, metric_means


@dataclass(frozen=True)
class Means:
    """The mean of each metric that all members compute.

    Attributes:
        metrics: the means.
        members: the number that took part.
        noise: the standard deviation of the noise on a mean, relative to the largest value of the metric.
        left_out: a text on the metrics that some members compute and others do not; empty where there are none.
    """

    metrics: dict[str, float]
    members: int
    noise: float
    left_out: str = ""


def evaluation(
    context: RoundContext, work: Evaluate, clients: Sequence[str]
) -> Generator[AlgorithmPhase, Replies, Means]:
    """One evaluation of the model that `context.private` names.

    Members sum the metrics that all members of W compute, and no others: a metric of few members is theirs alone.

    Raises:
        Voided, TooFewUpdatesError: as `secure_sum`; also if there is no metric that all members compute.
    """
    private = context.private
    if private is None:
        raise ValueError("the run has no private rounds")
    # Section 4: a member that was named as a cheater stays out of evaluations, too.
    drawn_members = drawn(context, (name for name in clients if name in private.keys and name not in private.named))
    if not drawn_members:
        raise TooFewUpdatesError("no member can evaluate")
    names = [kind.name for kind in entries(work, context.objectives)]
    sigma = private.spec.privacy.evaluation_noise
    bound = clip(len(names), sigma)
    setting = make_setting(context, private, work.name, len(names), drawn_members, metrics=work.metrics)

    def equal(cohort: Cohort) -> Vector:
        # Section 3, rule 4: before MASK, where the session counts: members evaluate a model once, and this would use it
        # up for nothing.
        if not any(_summed(cohort)):
            raise TooFewUpdatesError(f"every metric lacks a member. {_left_out(names, cohort)}")
        # Section 3.5, rule 4: members accept equal coefficients alone.
        return np.full(len(cohort.members), 1 / len(cohort.members))

    total = yield from secure_sum(setting, equal)
    members, cohort = len(total.record.survivors), total.cohort
    sums = total.vector(bound * members / float(total.weights.sum())).astype(float)
    return Means(
        metric_means(sums, members, _summed(cohort), work, context.objectives),
        members,
        deviation_of_mean(sigma, cohort.thresholds, members),
        _left_out(names, cohort),
    )


def _summed(cohort: Cohort) -> bytes:
    """A byte for each metric: 1 if all members of W compute it."""
    # Section 2b: from the signed replies of W, as each member computes it. Otherwise the means would be of other
    # entries.
    return common([reply.statement.measured for reply in cohort.replies])


def _left_out(names: Sequence[str], cohort: Cohort) -> str:
    measured = {reply.client_id: reply.statement.measured for reply in cohort.replies}
    partial = [
        index
        for index, computed in enumerate(zip(*measured.values(), strict=True))
        if 0 < sum(computed) < len(computed)
    ]
    without = [name for name, computed in measured.items() if not all(computed[index] for index in partial)]
    if not partial:
        return ""
    metrics = ", ".join(names[index] for index in partial)
    return f"left out are {metrics}: not every one is computed by {', '.join(without)}"
