"""An evaluation as a session of the mode `sum`: the mean of each metric over the members, and no member's own."""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from coordinator.aggregation.phases import Phase, Replies, RoundContext
from coordinator.aggregation.rules import TooFewUpdatesError, Vector
from coordinator.aggregation.secure.session import secure_sum
from coordinator.aggregation.secure.settled import Cohort
from coordinator.aggregation.secure.step import drawn, make_setting
from federation.secure.thresholds import Mode
from federation.work.evaluate.work import Evaluate
from federation.work.secure.vector import metric_means, metric_names


@dataclass(frozen=True)
class Means:
    """The mean of each metric over the members that report it, and how many members took part."""

    metrics: dict[str, float]
    members: int


def evaluation(context: RoundContext, asked: Evaluate, clients: Sequence[str]) -> Generator[Phase, Replies, Means]:
    """One evaluation of the model that `context.private` names.

    A metric is known only if t + 3 members report it: the mean over fewer would say too much of one of them.

    Raises:
        Voided, TooFewUpdatesError: as `secure_sum`.
    """
    private = context.private
    if private is None:
        raise ValueError("the run has no private rounds")
    who = drawn(context, (name for name in clients if name in private.keys and name not in private.named))
    if not who:
        raise TooFewUpdatesError("no member can evaluate")
    length = 2 * len(metric_names(asked, context.objectives))
    clip = math.sqrt(length)  # no vector of entries in [0, 1] is longer
    quiet = replace(private, disclose=())  # no member shows a number of its own
    setting = make_setting(context, quiet, Mode.SUM, lambda _: asked, length, clip=clip, purpose="evaluation", who=who)

    def equal(cohort: Cohort) -> Vector:
        return np.full(len(cohort.members), 1 / len(cohort.members))

    total = yield from secure_sum(setting, equal)
    members = len(total.record.survivors)
    sums = total.vector(clip * members / float(total.weights.sum())).astype(float)
    return Means(metric_means(sums, asked, context.objectives, total.cohort.thresholds.t + 3), members)
