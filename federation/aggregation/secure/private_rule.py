"""The private round of a rule over clients: the sum that it needs, and the step from the sum (section 6).

Members make vectors of length at most 1. A rule whose coefficients do not depend on the updates needs mode `sum`; the
others find them from the Gram matrix of the members' sketches. Coefficients c go out as a = c / sum |c|, and the step
is sum |c| times R / sum_V |a|, where R = sum_V a_i u_i.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from federation.aggregation.diagnostics import describe
from federation.aggregation.interface import Combination, Matrix, Rows, TooFewUpdatesError, Vector
from federation.aggregation.phases import (
    PrivateSetting,
    Replies,
    RoundContext,
    RoundGenerator,
    Setting,
    Step,
    Waiting,
)
from federation.aggregation.secure.gram import positive
from federation.aggregation.secure.session import secure_sum
from federation.aggregation.secure.settled import Cohort, Sum, invitation
from federation.digests import derived_seed
from federation.secure.bounds import EVALUATION, INTEGERS
from federation.secure.thresholds import LARGEST, ONE, SMALLEST_MGDA, assumed, smallest_cohort
from federation.spec.task_metrics import MetricKind
from federation.work.secure.allowed import run_bounds
from federation.work.secure.sessions import EVALUATE, STATISTICS, TRAIN, Unspecified, session_terms

_FIXED = {EVALUATE: EVALUATION, STATISTICS: INTEGERS}  # bounds that do not depend on the algorithm


class DecidingRule(Protocol):
    """A rule over clients, as `private_round` uses it; see `federation.aggregation.base.Rule`."""

    @property
    def name(self) -> str: ...

    @property
    def private(self) -> str | None: ...

    def usable(self, replies: Replies) -> Replies: ...

    def decide(self, rows: Rows) -> Combination: ...


def private_round(rule: DecidingRule, context: RoundContext, private: PrivateSetting) -> RoundGenerator:
    """One round of a rule over clients.

    Raises:
        Voided, TooFewUpdatesError: as `secure_sum`.
        Waiting: every group of members that could be left out has been left out.
    """
    decided: dict[str, Any] = {}

    def decide(cohort: Cohort) -> Vector | None:
        norms = np.ones(len(cohort.replies))
        if not private.clip:  # a vector that is only shortened to the clip has its own length
            norms = np.array([reply.metrics.get("norm", 1.0) for reply in cohort.replies])
        usable = rule.usable(cohort.replies)
        # Section 6: G and the sum are of all of W. Coefficients of some members would be read as those of others.
        if len(usable) < len(cohort.replies):
            raise TooFewUpdatesError(f"{rule.name} needs the numbers of all {len(cohort.replies)} members")
        combination = rule.decide(usable.rows(context, *_seen(rule, cohort, norms)))
        # Section 6: unit vectors are summed, so the length of a row goes into its coefficient: else all updates would
        # count as equally long.
        factors = combination.coefficients * norms
        size = float(np.abs(factors).sum())
        decided.update(combination=combination, size=size)
        # `not size > 0`: NaN gives no direction, either. Without coefficients, nobody is asked to mask, and no sum of
        # the model is spent.
        return None if not size > 0 or combination.diagnostics.get("stationary") else factors

    members = invited(context, private)
    setting = make_setting(context, private, TRAIN, context.parameters, members, measure=True)
    total = yield from secure_sum(setting, decide)
    if not total.record.coefficients:
        return _no_step(total, decided["combination"])
    return _step(total, decided["combination"], decided["size"] * (private.clip or 1.0))


def _step(total: Sum, combination: Combination, size: float) -> Step:
    """The step that the sum becomes, over the members V whose vectors are in it.

    The weight of a member is its part of the coefficients, which all members have signed.
    """
    # Section 2.6: the signed coefficients of V, not those of the rule: so a verifier gets the same step without the
    # rule's rounding.
    parts = np.abs(total.weights)
    vector = total.vector(size / float(parts.sum()))
    measured = {
        "direction_norm": float(np.linalg.norm(vector)),
        "private/members": float(len(total.record.survivors)),
        "private/rule_share": total.share,
        "private/blur": total.record.agreed.blur,
    }
    answer = replace(
        combination,
        coefficients=np.ones(1),
        weights=parts / parts.sum(),
        diagnostics=_known(total, combination) | measured,
    )
    return Step(
        replies=total.survivors,
        combination=answer,
        consulted=total.consulted,
        combined=vector,
        sessions=(total.record,),
        named=total.named,
    )


def _no_step(total: Sum, combination: Combination) -> Step:
    """A stationary step: nothing was summed. Its replies are those of W to READY."""
    replies = total.cohort.replies
    own_envelopes = {reply.envelope for reply in replies}
    diagnostics = _known(total, combination) | {"stationary": 1.0}
    return Step(
        replies=replies,
        combination=replace(combination, coefficients=np.zeros(1), diagnostics=diagnostics),
        consulted=tuple(reply for reply in total.consulted if reply.envelope not in own_envelopes),
        combined=total.vector(0.0),
        sessions=(total.record,),
    )


def _known(total: Sum, combination: Combination) -> dict[str, float]:
    """The diagnostics of a rule and of its coefficients, without those of inner products that it did not see."""
    if total.cohort.gram is None:
        hidden = ("conflict", "descent")
        return {name: value for name, value in combination.diagnostics.items() if not name.startswith(hidden)}
    if not total.record.coefficients:
        return combination.diagnostics
    # As signed, after they were moved to suit the members: the rule's own would describe a step that was not made.
    coefficients = np.array(total.record.coefficients, np.float64) / ONE
    parts = np.abs(coefficients) / np.abs(coefficients).sum()
    return combination.diagnostics | describe(positive(total.cohort.gram), coefficients, parts)


def _seen(rule: DecidingRule, cohort: Cohort, norms: Vector) -> tuple[Matrix, float | None]:
    """The Gram matrix that a rule sees, and its largest weight."""
    if rule.private == "sum" or cohort.gram is None:
        return np.diag(norms**2), None
    # Section 1: with fewer, the cap is near 1/m, and a rule would have hardly any choice.
    if len(cohort.members) < SMALLEST_MGDA:
        raise TooFewUpdatesError(f"a private round of {rule.name} needs {SMALLEST_MGDA} members")
    # Section 3.5, rule 4: the cap goes to the rule: members decline larger weights.
    return positive(cohort.gram) * np.outer(norms, norms), cohort.thresholds.cap


def make_setting(
    context: RoundContext,
    private: PrivateSetting,
    phase: str,
    length: int,
    members: Sequence[str],
    *,
    measure: bool = False,
    weights: Mapping[str, float] | None = None,
    metrics: Sequence[MetricKind] = (),
) -> Setting:
    """The setting of a session.

    Args:
        context: of the round.
        private: of the round.
        phase: the kind of work that makes the vectors, as of `session_terms`.
        length: coordinates of a vector.
        members: the members that are invited.
        measure: as of `Unspecified`.
        weights: as of `Unspecified`.
        metrics: as of `Unspecified`.
    """
    free = Unspecified(
        nonce=b"",  # `settle` gives it: nobody else can derive it
        base_model=private.origin.base_model,
        invited=invitation({name: private.keys[name] for name in members}),
        measure=measure,
        weights=weights,
        metrics=tuple(metrics),
    )
    terms = session_terms(private.spec, phase, private.origin, context.objectives, context.number, length, free)
    return replace(
        private.settle(phase, terms),
        specification=private.document,
        bounds=_FIXED.get(phase) or run_bounds(private.spec),
        effective_members=private.spec.privacy.effective_members,
    )


def invited(context: RoundContext, private: PrivateSetting) -> tuple[str, ...]:
    """The round's clients that serve all objectives, without those that were named as cheaters; at most `LARGEST`.

    After each blind failure, one group is left out.

    The groups are disjoint, drawn by the run's seed, and as large as the assumed colluders allow: a cheater that a
    check did not name is in one of them.

    Raises:
        TooFewUpdatesError: fewer members than a session needs.
        Waiting: every group has been left out once.
    """
    present = drawn(
        context,
        [
            name
            for name, client in context.selected.items()
            # Section 4: who was named as a cheater is not invited again; a member without a key could not be verified.
            if name in private.keys and name not in private.named and client.objectives == context.objectives
        ],
    )
    least = smallest_cohort(private.mode, assumed(len(private.keys)))
    # Section 3, rule 1: members would decline a smaller cohort, one after the other.
    if len(present) < least:
        raise TooFewUpdatesError(
            f"{len(present)} members can be invited; a private round in mode {private.mode} of {len(private.keys)} "
            f"members needs {least}"
        )
    if not private.blind:
        return tuple(present)
    # Section 4: as many as can be left out at once, so that few attempts find the group with the cheater.
    size = len(present) - least
    order = _shuffled(context, "groups", present)
    start = size * (private.blind - 1)
    # Section 4: each group was left out once. A further attempt would only ask members for one more session.
    if size == 0 or start >= len(order):
        raise Waiting(
            "a check of the private round fails with each group left out, and names nobody: find out who sends "
            "vectors that are too long, revoke them, and resume the run"
        )
    left_out = order[start : start + size]
    return tuple(name for name in present if name not in left_out)


def drawn(context: RoundContext, names: Iterable[str]) -> list[str]:
    """At most `LARGEST` of these members, drawn by the run's seed and the round, sorted."""
    return sorted(_shuffled(context, "invited", names)[:LARGEST])


def _shuffled(context: RoundContext, purpose: str, names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: derived_seed(f"{purpose}\0{context.seed}\0{context.number}\0{name}"))
