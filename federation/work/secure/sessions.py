"""The sessions of a run's private rounds: their terms and their work, from the specification, the round and the phase.

The coordinator makes terms with `session_terms`, members and verifiers compare what they see with it. A *phase* is the
kind of work that makes the vectors. `Unspecified` has what the specification leaves open.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from federation.secure.evaluation import clip as evaluation_clip
from federation.secure.thresholds import Mode
from federation.spec.objective_names import JOINT, Targets, joint_target, separate_targets
from federation.spec.run_sections import PrivacySpec
from federation.spec.run_spec import RunSpec
from federation.spec.sharing import Unshared
from federation.spec.task_metrics import MetricKind
from federation.work.base import Origin, Work
from federation.work.evaluate.work import Evaluate
from federation.work.jacobian.work import BUDGET, ENCODER, SKETCH, Jacobian
from federation.work.secure.allowed import is_unknown
from federation.work.secure.terms import Invited, SessionTerms
from federation.work.statistics.work import Statistics
from federation.work.train.work import Train

TRAIN, JACOBIAN, EVALUATE, STATISTICS = Train.name, Jacobian.name, Evaluate.name, Statistics.name
_SUMS = (EVALUATE, STATISTICS)  # whose mode, clip and blur do not depend on the run
_WITH_JACOBIAN = ("fedcmoo", "fedcmoo-pref")


@dataclass(frozen=True, kw_only=True)
class Unspecified:
    """The values of a session that do not follow from the specification.

    Attributes:
        nonce: 16 bytes.
        base_model: the digest of the model; members see no sum, so they cannot know it.
        invited: the members, which must be in each member's roster.
        measure: True if members measure the base model first; without disclosed numbers nothing of it is sent.
        weights: of the objectives, where the algorithm finds them from a sum that members do not see; else None.
        metrics: of an evaluation, besides loss and accuracy, where the specification names none.
        asked: work for which the owner of a member allows the algorithm by name, which the member does not know; else
            None. Only its targets, or its sketch, are taken from there.
    """

    nonce: bytes
    base_model: str
    invited: tuple[Invited, ...]
    measure: bool = False
    weights: Mapping[str, float] | None = None
    metrics: tuple[MetricKind, ...] = ()
    asked: Work | None = None


def phases(spec: RunSpec) -> tuple[str, ...]:
    """The phases of the sessions of one attempt at a round, without the evaluation; none of a run that evaluates."""
    if not spec.trains:
        return (STATISTICS,) if spec.describes else ()
    return (JACOBIAN, TRAIN) if spec.algorithm.name in _WITH_JACOBIAN else (TRAIN,)


def finds_weights(spec: RunSpec) -> bool:
    """True if the algorithm finds the weights of the objectives from a sum that members do not see."""
    return spec.algorithm.name in _WITH_JACOBIAN


def session_terms(
    spec: RunSpec, phase: str, origin: Origin, objectives: Sequence[str], round_: int, length: int, free: Unspecified
) -> SessionTerms:
    """The terms of a session.

    Args:
        spec: of the run.
        phase: one of `phases`, or "evaluate" of a run that does not describe data.
        origin: the run, as its assignments repeat it; `federation_id`, `run_id` and the digest of the specification are
            taken from it.
        objectives: of the task, all of which every member serves.
        round_: from 0.
        length: the number of coordinates of the vector that the work gives.
        free: the values that do not follow from the specification.

    Raises:
        ValueError: the specification asks for no private rounds, or its weights are not one for each objective.
    """
    privacy, sums = spec.privacy, phase in _SUMS
    if privacy.secure == "off":
        raise ValueError("the specification asks for no private rounds")
    # Section 3, rule 4: an evaluation discloses nothing, whatever the run does. "evaluation" is no number of a
    # training.
    disclosed = set() if sums else set(privacy.disclose) - {"evaluation"}
    return SessionTerms(
        nonce=free.nonce,
        federation_id=origin.federation_id,
        run_id=origin.run_id,
        round=round_,
        # Sections 2b and 2e: the mode, clip and blur of an evaluation and of statistics are fixed: with those of the
        # run, metrics would be sketched or blurred.
        mode=Mode.SUM if sums else Mode(privacy.secure),
        base_model=free.base_model,
        spec=origin.spec,
        task=spec.task,
        length=length,
        clip=_clip(phase, length, privacy),
        blur=0.0 if sums else privacy.blur,
        disclose=tuple(sorted(disclosed)),
        invited=free.invited,
        work=session_work(spec, phase, objectives, round_, free),
        seed=spec.seed,
        unshared=Unshared.of(spec.parameters),
    )


def _clip(phase: str, length: int, privacy: PrivacySpec) -> float:
    if phase == STATISTICS:
        return 0.0
    return evaluation_clip(length, privacy.evaluation_noise) if phase == EVALUATE else privacy.clip


def session_work(spec: RunSpec, phase: str, objectives: Sequence[str], round_: int, free: Unspecified) -> Work:
    """The work that makes the vectors of a session; arguments and errors are those of `session_terms`."""
    if phase == EVALUATE:
        return Evaluate(splits=spec.evaluated, metrics=spec.evaluate.kinds or free.metrics)
    if phase == STATISTICS:
        return Statistics.of(spec)
    if phase == JACOBIAN:
        return _jacobian(spec, objectives, free)
    work = Train.of(spec, round_, _targets(spec, objectives, free))
    # Section 8: free to leave a measurement out, never to ask for one that the specification does not have.
    return replace(work, measure=free.measure and work.measure)


def _jacobian(spec: RunSpec, objectives: Sequence[str], free: Unspecified) -> Jacobian:
    """The sketch of gradients that the algorithm asks for."""
    # Section 8: of a plug-in that the owner allows, only the sketch is free: batch size and objectives stay those of
    # the specification.
    if isinstance(free.asked, Jacobian):
        return replace(free.asked, batch_size=spec.train.batch_size, objectives=tuple(objectives))
    chosen = spec.algorithm.hyperparameters
    return Jacobian(
        sketch=chosen.get("sketch", SKETCH),
        budget=chosen.get("budget", BUDGET),
        batch_size=spec.train.batch_size,
        objectives=tuple(objectives),
        encoder_only=chosen.get("scope", ENCODER) == ENCODER,
        measure=free.measure,
    )


def _targets(spec: RunSpec, objectives: Sequence[str], free: Unspecified) -> Targets:
    """The losses that the rows of a training descend."""
    name, chosen = spec.algorithm.name, spec.algorithm.hyperparameters
    # Section 8: likewise the targets alone, or the coordinator could also choose steps and rate, and so what an update
    # shows.
    if isinstance(free.asked, Train):
        return free.asked.targets
    if name == "fsmgda":
        return separate_targets(objectives)
    if name == "scalarised":
        return joint_target(objectives, _proportions(chosen.get("weights", ()), objectives))
    return joint_target(objectives, free.weights if finds_weights(spec) else None)


def _proportions(weights: Sequence[float], objectives: Sequence[str]) -> dict[str, float]:
    """The weights of the objectives, divided by their sum; without those that are 0."""
    given = tuple(weights) or (1.0,) * len(objectives)
    return {name: weight / sum(given) for name, weight in zip(objectives, given, strict=True) if weight > 0}


# --- what a member or a verifier sees


def difference(
    spec: RunSpec, terms: SessionTerms, origin: Origin, objectives: Sequence[str], length: int, *, by_name: bool = False
) -> str:
    """The text on a field of terms that differs from the specification; empty if there is none.

    Args:
        spec: of the run.
        terms: as they were sent.
        origin: as of `session_terms`.
        objectives: as of `session_terms`.
        length: as of `session_terms`.
        by_name: True if the member's owner allows the algorithm by its name. Of an algorithm that is not known here,
            the phase, its targets and its sketch are then not compared.
    """
    phase = terms.work.name
    # Section 8: both. An owner who names a built-in algorithm does not free its terms.
    unknown = by_name and spec.trains and is_unknown(spec)
    allowed = (JACOBIAN, TRAIN) if unknown else phases(spec)
    # Section 8: a phase that the algorithm does not have is one more sum of the same model.
    if phase not in (allowed if spec.describes else (*allowed, EVALUATE)):
        what = (
            f"the algorithm {spec.algorithm.name}"
            if spec.trains
            else f"a run that only {'describes data' if spec.describes else 'measures models'}"
        )
        return f"{what} has no session of the kind {phase}"
    weights = _weights(terms.work) if phase == TRAIN and finds_weights(spec) else None
    # Section 8: free values, but no others than weights: negative or infinite ones train on something else.
    if weights is not None and not _possible(weights, objectives):
        return f"the weights {dict(weights)} are not finite, negative, all 0, or not one for each objective"
    free = Unspecified(
        nonce=terms.nonce,
        base_model=terms.base_model,
        invited=terms.invited,
        measure=getattr(terms.work, "measure", False),
        weights=weights,
        metrics=getattr(terms.work, "metrics", ()),
        asked=terms.work if unknown else None,
    )
    try:
        expected = session_terms(spec, phase, origin, objectives, terms.round, length, free)
    except ValueError as error:
        return str(error)
    # Section 8: all fields of the dataclass, so one that is added later is compared without a further line.
    return _first_difference("", expected, terms)


def _first_difference(place: str, expected: object, actual: object) -> str:
    for item in fields(expected):  # type: ignore[arg-type] # both are terms, or work of one kind
        wanted, given = getattr(expected, item.name), getattr(actual, item.name)
        if wanted == given:
            continue
        if isinstance(wanted, Work) and type(wanted) is type(given):
            return _first_difference(f"{item.name}.", wanted, given)
        return f"the specification asks for another {place}{item.name}: {str(wanted)[:100]}, not {str(given)[:100]}"
    return ""


def _weights(work: Work) -> Mapping[str, float]:
    """The weights of the objectives in the one row of a training; none where there are other rows."""
    targets = work.targets if isinstance(work, Train) else {}
    # Other rows have no weights. The empty ones are then refused as impossible.
    return targets[JOINT] if list(targets) == [JOINT] else {}


def _possible(weights: Mapping[str, float], objectives: Sequence[str]) -> bool:
    values = weights.values()
    return sorted(weights) == sorted(objectives) and all(0 <= value < math.inf for value in values) and any(values)
