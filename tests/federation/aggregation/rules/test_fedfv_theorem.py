"""FedFV's theorem 3 (Wang et al., 2021): with two convex losses, projected means of gradients converge."""

import numpy as np
import pytest

from federation.aggregation.interface import Rows
from federation.aggregation.rules.fedfv import FedFV

STEPS, PAIRS, DIMENSIONS = 60, 40, 5


def rises(*, rescaled: bool) -> tuple[int, int]:
    """The steps in which the mean of two quadratic losses rises, and all steps, over random pairs of losses.

    The losses are ||A_i (w - b_i)||^2 / 2 with ||A_i|| <= 1, so L = 1, and the step is 1/2 (theorem 3: at most min(1/2,
    1/L)). Without rescaling, the direction is the projected mean itself.
    """
    random, risen = np.random.default_rng(1), 0
    for _ in range(PAIRS):
        A = random.standard_normal((2, DIMENSIONS, DIMENSIONS))
        A /= np.linalg.norm(A, ord=2, axis=(1, 2))[:, None, None]
        b, w = random.standard_normal((2, DIMENSIONS)), random.standard_normal(DIMENSIONS)
        before = np.inf
        for _ in range(STEPS):
            away = [Ai @ (w - bi) for Ai, bi in zip(A, b, strict=True)]
            losses = np.array([a @ a / 2 for a in away])
            gradients = np.array([Ai.T @ a for Ai, a in zip(A, away, strict=True)])
            if rescaled:
                rows = Rows(gram=gradients @ gradients.T, prior=np.full(2, 0.5), samples=np.ones(2), losses=losses)
                direction = FedFV(alpha=0.0).combine(rows).coefficients @ gradients
            else:
                direction = np.mean([projected(*gradients), projected(*gradients[::-1])], axis=0)
            risen += bool(losses.mean() > before + 1e-12)
            before, w = losses.mean(), w - direction / 2
    return risen, PAIRS * STEPS


def projected(g: np.ndarray, other: np.ndarray) -> np.ndarray:
    """g without what conflicts with the other gradient."""
    return g - min(0.0, float(g @ other)) / float(other @ other) * other


def test_the_mean_loss_never_rises_where_the_projected_mean_keeps_its_length() -> None:
    assert rises(rescaled=False)[0] == 0


@pytest.mark.full
def test_the_mean_loss_rises_in_many_steps_where_it_gets_the_length_of_the_mean_of_the_updates() -> None:
    risen, steps = rises(rescaled=True)
    assert (risen, steps) == (512, 2400)  # as docs/research/algorithms.md says
