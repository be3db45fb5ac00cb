"""Guesses of label histograms, (targets, 10), from what the coordinator sees.

- The bias of the last layer: its gradient is the mean of softmax minus label (Zhao, Mopuri and Bilen, 2020, iDLG).
- Ridge regression from observations to histograms, trained on shadow clients.
- Without a probe, a Gram matrix has no coordinates to regress on. Then histograms are fitted: a linear model M of unit
  updates, u = h M, is learned from shadow clients; the h_i of all members are those for which h_i M M' h_j explains G.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from federation.aggregation.rules.afl import onto_simplex
from leakage.federation import CLASSES, Reals, unit_rows

_PENALTIES = np.logspace(-6, 3, 28)
_FITS = 20
_ITERATIONS = 400


@dataclass(frozen=True)
class RidgeRegression:
    """Ridge regression on f features: histogram = mean + (features - centre) weights.

    Attributes:
        centre: (f,).
        weights: (f, 10).
        mean: (10,).
        deviation: of the error for a shadow client that was left out, for each label, (10,).
    """

    centre: Reals
    weights: Reals
    mean: Reals
    deviation: Reals

    @classmethod
    def trained(cls, features: Reals, histograms: Reals) -> "RidgeRegression":
        """With the penalty whose leave-one-out error is least; features (c, f), histograms (c, 10)."""
        centre, mean = features.mean(0), histograms.mean(0)
        X, Y = features - centre, histograms - mean
        values, Q = np.linalg.eigh(X @ X.T)
        values, rotated = np.maximum(values, 0.0), Q.T @ Y
        best, chosen = np.inf, (Y, Y)
        for penalty in _PENALTIES * max(float(values.max()), 1e-12):
            dual = Q @ (rotated / (values + penalty)[:, None])
            errors = dual / (np.square(Q) @ (1 / (values + penalty)))[:, None]
            if (error := float(np.square(errors).mean())) < best:
                best, chosen = error, (dual, errors)
        dual, errors = chosen
        return cls(centre, X.T @ dual, mean, errors.std(0))

    def raw(self, features: Reals) -> Reals:
        """The guesses before they are made histograms, (n, 10)."""
        return self.mean + (features - self.centre) @ self.weights

    def guess(self, features: Reals) -> Reals:
        """The nearest histograms to the guesses, (n, 10)."""
        return on_simplex(self.raw(features))

    def probes(self, features: Reals, count: int, first: int = 0) -> Reals:
        """The unit vectors whose inner products with features tell most of the histograms, (count, f).

        They are the principal directions of the regression's outputs (reduced-rank regression), in a cycle from number
        `first` on: histograms have nine degrees of freedom.
        """
        outputs = (features - self.centre) @ self.weights
        _, _, V = np.linalg.svd(outputs - outputs.mean(0), full_matrices=False)
        return unit_rows((self.weights @ V.T[:, (first + np.arange(count)) % (CLASSES - 1)]).T)


def from_bias(step: Reals, by_label: Reals) -> Reals:
    """The histograms whose mixture of gradients is nearest to the mean gradient of the last layer's bias.

    Args:
        step: the update of the bias divided by the sum of the learning rates, (n, 10).
        by_label: the mean gradient of the bias on the coordinator's images of each label, (10, 10).
    """
    one = 10 * np.abs(by_label).max()  # the weight of the equation that shares add up to 1
    A = np.vstack([by_label.T, np.full((1, CLASSES), one)])
    from scipy.optimize import nnls  # noqa: PLC0415 - loading takes 0.3 s

    return on_simplex(np.stack([nnls(A, np.append(row, one))[0] for row in step]))


@dataclass(frozen=True)
class OpenedSession:
    """What is known of one round for a fit.

    Attributes:
        gram: G, (m, m), of which the entries between different honest members are used.
        metric: M M', (10, 10).
        deviation: of an entry of G that the model explains.
        total: the coefficients a, (m,), and the coordinator's guess of sum_i a_i h_i, (10,), with its deviations,
            (10,); None if there is no sum.
    """

    gram: Reals
    metric: Reals
    deviation: float
    total: tuple[Reals, Reals, Reals] | None = None


def fitted(rounds: Sequence[OpenedSession], members: int, start: tuple[Reals, Reals] | None, seed: int) -> Reals:
    """Histograms of `members` members that explain the rounds, (members, 10).

    Args:
        rounds: what is known, of one or more rounds.
        members: the first rows of each G are fitted.
        start: guesses from probes, (members, 10), with their deviations, (10,). Without them the mean of 20 fits is
            taken, each from random histograms: many histograms explain the rounds equally well.
        seed: of these.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((_FITS, members, CLASSES), generator=generator, dtype=torch.float64)
    if start is not None:
        logits = torch.log(torch.from_numpy(start[0]) + 1e-3)[None]
    logits.requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(_ITERATIONS):
        optimizer.zero_grad()
        _misfit(logits, rounds, start).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return np.asarray(torch.softmax(logits.detach(), 2).mean(0).numpy())


def _misfit(logits: Tensor, rounds: Sequence[OpenedSession], start: tuple[Reals, Reals] | None) -> Tensor:
    """The sum of the squared standardised errors of all fits."""
    H = torch.softmax(logits, 2)
    i, j = np.triu_indices(H.shape[1], 1)
    numbers = torch.from_numpy
    total = torch.zeros((), dtype=H.dtype)
    for item in rounds:
        explained = (H @ numbers(item.metric) @ H.transpose(1, 2))[:, i, j]
        total = total + ((explained - numbers(item.gram[i, j])) / item.deviation).square().sum()
        if item.total is not None:
            a, mixture, spread = map(numbers, item.total)
            total = total + ((torch.einsum("i,fic->fc", a, H) - mixture) / spread).square().sum()
    if start is not None:
        total = total + ((H - numbers(start[0])) / numbers(start[1])).square().sum()
    return total


def on_simplex(values: Reals) -> Reals:
    """The nearest histograms, (n, 10): each row is projected onto the simplex."""
    return np.stack([onto_simplex(row) for row in values])


def scores(guesses: Reals, histograms: Reals) -> dict[str, float]:
    """The mean total-variation distance (0 to 1), and how often the most frequent label is guessed (%)."""
    distances = np.abs(guesses - histograms).sum(1) / 2
    hits = guesses.argmax(1) == histograms.argmax(1)
    return {"labels/distance": float(distances.mean()), "labels/top": 100 * float(hits.mean())}
