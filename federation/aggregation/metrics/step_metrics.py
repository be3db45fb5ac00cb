"""The metrics of a step that follow from Gram matrices: of the round's updates, and of the objectives."""

import numpy as np

from federation.aggregation.diagnostics import conflicts
from federation.aggregation.interface import Matrix, Objectives
from federation.aggregation.metrics import metrics


def agreement(K: Matrix, updates: int) -> dict[str, float]:
    """Conflicts and stationarity of the round's own updates.

    Args:
        K: the Gram matrix of the combined rows, shape (m, m); those of earlier rounds come last.
        updates: the number of rows of this round.
    """
    own = K[:updates, :updates]
    return {**conflicts(own), **metrics.stationarity(own)}


def of_objectives(decided: Objectives | None) -> dict[str, float]:
    """The metrics of the objectives that a rule has weighed; none for a rule that weighs none."""
    if decided is None:
        return {}
    numbers = {f"weight/{name}": value for name, value in zip(decided.names, decided.weights.tolist(), strict=True)}
    if decided.divergence is not None:
        numbers["preference/divergence"] = decided.divergence
    if decided.gram is not None:
        numbers |= {f"objective/{name}": value for name, value in conflicts(decided.gram).items()}
    gram = decided.gram if decided.exact is None else decided.exact
    if gram is not None and np.isfinite(gram).all():
        numbers["objective/stationarity"] = metrics.length(gram, decided.weights)
    return numbers
