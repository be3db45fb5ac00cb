"""What a round came to: each client's share in the step, and the scores of the model after it."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator.aggregation.base import conflicts
from coordinator.aggregation.direction import Direction
from coordinator.aggregation.phases import Replies, Reply, Step
from coordinator.rounds import metrics
from coordinator.rounds.revoked import REVOKED
from storage.models import Assignment, AssignmentState, Evaluation, Input, Model, Phase, Round, Update
from storage.records import ObjectivesRecord

SCORED = ("test", "validation", "train")  # the first split that somebody measured is what a round is judged by
_ANSWERED = (AssignmentState.FULFILLED, AssignmentState.REJECTED)


@dataclass(frozen=True)
class Share:
    """One client's part in a step; sums over its rows where it sent several.

    Attributes:
        norm: the length of its update (of the sum of its rows).
        weight: lambda.
        coefficient: c; NaN where the direction is made coordinate by coordinate.
        cosine: between its update and the direction; 0 where either has no length.

    What is not known is NaN.
    """

    norm: float
    weight: float
    coefficient: float
    cosine: float


def shares(step: Step, direction: Direction) -> dict[str, Share]:
    """Each client's share in the step, whose direction has been measured, in the order of the rows.

    Of a step that is combined already only the weights are known.
    """
    if step.combined is not None:
        weighed = zip(step.replies, step.combination.weights.tolist(), strict=True)
        return {reply.client_id: Share(math.nan, weight, math.nan, math.nan) for reply, weight in weighed}
    gram, answer = step.gram, step.combination
    coefficients = np.full(len(gram), np.nan) if answer.coordinates is not None else answer.coefficients
    found = {}
    start = 0
    for reply in step.replies:
        rows = slice(start, start + len(reply.rows))
        start = rows.stop
        norm = float(np.sqrt(max(float(gram[rows, rows].sum()), 0.0)))
        length = norm * direction.norm
        found[reply.client_id] = Share(
            norm=norm,
            weight=float(answer.weights[rows].sum()),
            coefficient=float(coefficients[rows].sum()),
            cosine=float(direction.products[rows].sum()) / length if length > 0 else 0.0,
        )
    return found


def agreement(step: Step) -> dict[str, float]:
    """How far the round's own updates are from agreeing, whatever the rule made of them: conflicts, stationarity."""
    if step.combined is not None:
        return {}
    own = len(step.replies.updates)
    K = step.gram[:own, :own]
    return {**conflicts(K), **metrics.stationarity(K)}


def weights(step: Step) -> dict[str, float]:
    """The weights of the objectives; none where the rule does not know them."""
    found = step.combination.objectives
    return {} if found is None else dict(zip(found.names, found.weights.tolist(), strict=True))


def objectives(step: Step, names: tuple[str, ...]) -> tuple[ObjectivesRecord | None, dict[str, float]]:
    """What a round of a run with several objectives knew of them: for its record, and as metrics.

    Args:
        step: of the round.
        names: of the run's objectives.
    """
    if len(names) < 2:
        return None, {}
    told: dict[str, dict[str, float]] = {name: {} for name in names}
    for reply in (*step.consulted, *step.replies):
        for name in names:
            if name in reply.objectives and name in reply.losses:
                told[name].setdefault(reply.client_id, reply.losses[name])
    counts = {name: sum(name in reply.objectives for reply in step.replies) for name in names}
    with np.errstate(over="ignore"):  # claims, of any size
        means = {name: float(np.mean(list(values.values()))) for name, values in told.items() if values}
    losses = {name: value for name, value in means.items() if math.isfinite(value)}
    record = ObjectivesRecord(names=names, clients=counts, losses=losses)
    found = step.combination.objectives
    if found is None:
        return record, {}
    cosines = None
    numbers = {f"weight/{name}": value for name, value in weights(step).items()}
    if found.divergence is not None:
        numbers["preference/divergence"] = found.divergence
    if found.gram is not None:
        lengths = np.sqrt(np.maximum(np.diag(found.gram), 0.0))
        scale = np.outer(lengths, lengths)
        products = np.divide(found.gram, scale, out=np.zeros_like(found.gram), where=scale > 0)
        cosines = np.clip(products, -1.0, 1.0).tolist()
        numbers |= {f"objective/{name}": value for name, value in conflicts(found.gram).items()}
    gram = found.gram if found.exact is None else found.exact
    if gram is not None and np.isfinite(gram).all():
        numbers["objective/stationarity"] = metrics.length(gram, found.weights)
    weighed = replace(
        record,
        weights=weights(step),
        mode=found.mode,
        left_out=dict(found.left_out),
        notes=found.notes,
        cosines=cosines,
    )
    return weighed, numbers


def evaluations(round_id: int, model: str, replies: Replies, splits: tuple[str, ...]) -> list[Evaluation]:
    """What every client measured, split by split, as rows of the database."""
    return [
        Evaluation(
            round_id=round_id,
            client_id=reply.client_id,
            model=model,
            split=split,
            loss=reply.metrics.get(f"{split}/loss"),
            accuracy=_accuracy(reply, split),
            objectives={
                f"{kind}/{name}": reply.metrics[f"{split}/{kind}/{name}"]
                for kind in ("loss", "accuracy")
                for name in reply.objectives
                if f"{split}/{kind}/{name}" in reply.metrics
            },
            samples=int(min(max(reply.metrics.get(f"{split}/samples", 0.0), 0.0), 2.0**53)),  # a claim, of any size
        )
        for reply in replies
        for split in splits
    ]


def _accuracy(reply: Reply, split: str, objective: str = "") -> float | None:
    """The accuracy that a client claims; None where it claims none, or one that is no share."""
    value = reply.metrics.get(f"{split}/accuracy/{objective}".removesuffix("/"), math.nan)
    return value if 0 <= value <= 1 else None


def scores(replies: Replies, names: tuple[str, ...]) -> dict[str, float]:
    """The clients' test accuracies (validation or train where a task holds no test split) and their mean losses.

    Args:
        replies: to the evaluation.
        names: of the run's objectives; with several, each has its own.
    """
    found: dict[str, float] = {}
    for split in SCORED:
        claimed = [_accuracy(reply, split) for reply in replies]
        values = [value for value in claimed if value is not None]
        if values:
            found |= metrics.accuracies(values)
            found |= _by_objective(replies, names, split)
            break
    for name in names if len(names) > 1 else ():
        for split in SCORED:
            if values := _measured(_serving(replies, name), f"{split}/loss/{name}"):
                found[f"loss/{split}/{name}"] = float(np.mean(values))
    losses = {split: _measured(replies, f"{split}/loss") for split in SCORED}
    found |= {f"loss/{split}": float(np.mean(values)) for split, values in losses.items() if values}
    judged = next((values for values in losses.values() if values), [])
    if judged and "accuracy/mean" not in found:
        found |= {"loss/worst": max(judged), "loss/jain": metrics.jain(judged)}
    found["evaluated"] = float(len(replies))
    return found


def _by_objective(replies: Replies, names: tuple[str, ...], split: str) -> dict[str, float]:
    found = {}
    for name in names if len(names) > 1 else ():
        claimed = [_accuracy(reply, split, name) for reply in _serving(replies, name)]
        if values := [value for value in claimed if value is not None]:
            found[f"accuracy/objective/{name}"] = float(np.mean(values))
    return found


def _serving(replies: Replies, objective: str) -> list[Reply]:
    """The replies of those that serve an objective: a worker may measure others too, which count for nothing."""
    return [reply for reply in replies if objective in reply.objectives]


def _measured(replies: Iterable[Reply], name: str) -> list[float]:
    return [reply.metrics[name] for reply in replies if name in reply.metrics]


def improved(session: Session, current: Round, replies: Replies) -> dict[str, float]:
    """The share of the round's participants whose training loss did not rise, from what they measured before it.

    Who measured the new model and found no finite loss got worse.
    """
    updates = session.scalars(
        select(Update)
        .join(Assignment)
        .join(Phase)
        .where(
            Phase.round_id == current.round_id,
            Phase.attempt == current.attempt,
            Phase.decides,
            Update.accepted,
            Assignment.reason != REVOKED,
        )
    )
    name, count = "train/loss", "train/samples"
    before = {update.client_id: update.metrics[name] for update in updates if name in update.metrics}
    after = {
        reply.client_id: reply.metrics.get(name, math.inf)
        for reply in replies
        if name in reply.metrics or reply.metrics.get(count, 0) > 0
    }
    share = metrics.improved(before, after, before)
    return {} if share is None else {"improved": share}


def traffic(session: Session, round_id: int) -> dict[str, float]:
    """The bytes of updates and models of a round that ends, as far as the record knows (section 9.8).

    Args:
        session: an open transaction.
        round_id: the round.
    """
    sent = dict(
        session.execute(
            select(Update.accepted, func.sum(Update.payload_bytes))
            .join(Assignment)
            .join(Phase)
            .where(Phase.round_id == round_id)
            .group_by(Update.accepted)
        ).all()
    )
    answered = (
        select(Assignment.client_id, Assignment.base_model)
        .join(Phase)
        .where(Assignment.state.in_(_ANSWERED))
        .distinct()
    )
    pairs = {(client, model) for client, model in session.execute(answered.where(Phase.round_id == round_id))}
    models = {model for _, model in pairs}
    before = answered.where(Phase.round_id < round_id, Assignment.base_model.in_(models))
    pairs -= {(client, model) for client, model in session.execute(before)}
    sizes = dict(session.execute(select(Model.digest, Model.size).where(Model.digest.in_(models))).all())
    inputs = select(func.sum(Input.size)).join(Assignment).join(Phase)
    further = session.scalar(inputs.where(Phase.round_id == round_id, Assignment.state.in_(_ANSWERED))) or 0
    refused = float(sent.get(False) or 0)
    return {
        "bytes/up": float(sent.get(True) or 0) + refused,
        "bytes/refused": refused,
        "bytes/down": float(sum(sizes[model] for _, model in pairs) + further),
    }


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """The measured numbers that JSON can hold."""
    return {name: float(value) for name, value in values.items() if math.isfinite(value)}
