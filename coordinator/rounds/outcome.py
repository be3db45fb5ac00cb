"""What a round came to: each client's share in the step, and the scores of the model after it."""

from dataclasses import dataclass

import numpy as np

from coordinator.aggregation.phases import Replies, Step
from coordinator.rounds import metrics
from storage.models import Evaluation


@dataclass(frozen=True)
class Share:
    """One client's part in a step; sums over its rows where it sent several.

    Attributes:
        norm: the length of its update (of the sum of its rows).
        weight: lambda.
        coefficient: c.
        cosine: between its update and the step c U; 0 where either has no length.
    """

    norm: float
    weight: float
    coefficient: float
    cosine: float


def shares(step: Step) -> dict[str, Share]:
    """Each client's share in the step, from K alone, in the order of the rows."""
    gram, coefficients = step.replies.gram, step.combination.coefficients
    products = gram @ coefficients
    length = np.sqrt(max(float(coefficients @ products), 0.0))
    found = {}
    start = 0
    for reply in step.replies:
        rows = slice(start, start + len(reply.rows))
        start = rows.stop
        norm = float(np.sqrt(max(float(gram[rows, rows].sum()), 0.0)))
        found[reply.client_id] = Share(
            norm=norm,
            weight=float(step.combination.weights[rows].sum()),
            coefficient=float(coefficients[rows].sum()),
            cosine=float(products[rows].sum()) / (norm * length) if norm * length > 0 else 0.0,
        )
    return found


def evaluations(round_id: int, model: str, replies: Replies, splits: tuple[str, ...]) -> list[Evaluation]:
    """What every client measured, split by split, as rows of the database."""
    return [
        Evaluation(
            round_id=round_id,
            client_id=reply.client_id,
            model=model,
            split=split,
            loss=reply.metrics.get(f"{split}/loss"),
            accuracy=reply.metrics.get(f"{split}/accuracy"),
            samples=int(min(max(reply.metrics.get(f"{split}/samples", 0.0), 0.0), 2.0**53)),  # a claim, of any size
        )
        for reply in replies
        for split in splits
    ]


def scores(replies: Replies) -> dict[str, float]:
    """The clients' test accuracies (validation or train where a task holds no test split) and their mean losses."""
    found: dict[str, float] = {}
    for split in ("test", "validation", "train"):
        values = [reply.metrics[f"{split}/accuracy"] for reply in replies if f"{split}/accuracy" in reply.metrics]
        if values:
            found |= metrics.accuracies(values)
            break
    for split in ("train", "validation", "test"):
        losses = [reply.metrics[f"{split}/loss"] for reply in replies if f"{split}/loss" in reply.metrics]
        if losses:
            found[f"loss/{split}"] = float(np.mean(losses))
    found["evaluated"] = float(len(replies))
    return found
