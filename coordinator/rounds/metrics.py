"""What a round is judged by (ALGORITHMS section 9): over clients, not over samples."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np


def accuracies(values: Sequence[float], name: str = "accuracy") -> dict[str, float]:
    """Average, spread and tails of the clients' accuracies (section 9.1).

    The worst and best 5 % are given in both ways in use: the mean of the floor(0.05 N), at least one, lowest and
    highest (FedFV's tables; `worst5`, `best5`), and the 5th and 95th percentile (FedMGDA+ table 8; `p5`, `p95`).
    Standard deviation and variance are those of the population.

    Args:
        values: one accuracy per client, in [0, 1].
        name: what the keys begin with.
    """
    if not values:
        return {}
    a = np.sort(np.asarray(values, dtype=np.float64))
    tail = max(1, int(0.05 * len(a)))
    return {
        f"{name}/mean": float(a.mean()),
        f"{name}/std": float(a.std()),
        f"{name}/variance": float(a.var()),
        f"{name}/worst": float(a[0]),
        f"{name}/best": float(a[-1]),
        f"{name}/worst5": float(a[:tail].mean()),
        f"{name}/best5": float(a[-tail:].mean()),
        f"{name}/p5": float(np.percentile(a, 5)),
        f"{name}/p95": float(np.percentile(a, 95)),
    }


def improved(before: Mapping[str, float], after: Mapping[str, float], participants: Iterable[str]) -> float | None:
    """The share of participants whose training loss did not rise in the round (section 9.2), in [0, 1].

    Ties count as improved, a non-finite loss does not. None when no participant has both losses.
    """
    pairs = [(before[client], after[client]) for client in participants if client in before and client in after]
    if not pairs:
        return None
    return sum(bool(np.isfinite(a) and a <= b) for b, a in pairs) / len(pairs)
