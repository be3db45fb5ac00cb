"""Private rounds of the algorithms over objectives: sums of what all members send, weighted by the prior.

Every member serves all objectives. What a member sends is clipped to `privacy.clip`, as one vector: the updates of all
objectives, the sketches of all gradients, or one update.
"""

from collections.abc import Generator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from federation.aggregation.interface import Combination, Vector
from federation.aggregation.phases import AlgorithmPhase, PrivateSetting, Replies, RoundContext, Step
from federation.aggregation.secure.private_rule import invited, make_setting
from federation.aggregation.secure.session import secure_sum
from federation.aggregation.secure.settled import Cohort, Sum


def mean_of(
    context: RoundContext,
    private: PrivateSetting,
    phase: str,
    length: int,
    *,
    measure: bool = False,
    weights: Mapping[str, float] | None = None,
) -> Generator[AlgorithmPhase, Replies, tuple[NDArray[np.float32], Sum]]:
    """The mean of the members' vectors, weighted by the prior, (length,), and the session.

    The arguments are those of `make_setting`.

    Raises:
        Voided, Waiting, TooFewUpdatesError: as `secure_sum` and `invited`.
    """

    def prior(cohort: Cohort) -> Vector:
        return cohort.replies.prior(context.prior)

    members = invited(context, private)
    setting = make_setting(context, private, phase, length, members, measure=measure, weights=weights)
    total = yield from secure_sum(setting, prior)
    # Section 2.6: over the weights of V: members that were lost after MASK are not in the sum.
    return total.vector(private.clip / float(total.weights.sum())), total


def combined_step(
    combination: Combination, combined: NDArray[np.float64] | NDArray[np.float32], sums: Sequence[Sum]
) -> Step:
    """The step along a vector that is combined already; the last of the sums has the members that are in it."""
    last = sums[-1]
    weights: Vector = last.weights / last.weights.sum()
    vector = np.asarray(combined, dtype=np.float32)
    diagnostics = combination.diagnostics | {
        "direction_norm": float(np.linalg.norm(vector)),
        "private/members": float(len(weights)),
        "private/blur": last.record.agreed.blur,
    }
    return Step(
        replies=last.survivors,
        combination=Combination(np.ones(1), weights, combination.state, diagnostics, objectives=combination.objectives),
        # Protocol, Private rounds, 3: each reply of each session once. A verifier repeats the sessions with them, and
        # refuses one that enters nothing.
        consulted=tuple(
            reply for total in sums for reply in (*total.consulted, *(() if total is last else total.survivors))
        ),
        combined=vector,
        sessions=tuple(total.record for total in sums),
        named={name: why for total in sums for name, why in total.named.items()},
    )
