"""What two private evaluations of nearly equal models, the second without one member, show of this member.

    python -m leakage.evaluations

It measures what docs/member/privacy.md says ("Differences between evaluations"). The members hold digits whose labels
are dealt by Dirichlet(0.3). The coordinator reads its sums with t members that give it their noise. It measures a
trained model, and for the label histogram ten models that always predict one class: of these, a member's accuracy is
the share of the class, and its loss, clipped to 10, is 10 times the share of the others. It knows how values are spread
over members, and moves its estimates towards the mean by as much as the noise makes it worth while.

Vectors, noise, coefficients and rounding are those of `federation.secure`; masks cancel exactly, and are left out.
"""

import sys

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from federation.secure.evaluation import clip, deviation, noise
from federation.secure.thresholds import ONE, Mode, Thresholds
from leakage import labels
from leakage.federation import CLASSES, AttackedFederation, Reals
from leakage.specification import LeakageSpecification, View
from leakage.views import weighted_sum

SIGMAS = (0.0, 0.03, 0.1, 0.3, 1.0)
BLIND = 1e6  # noise that hides everything
PAIRS = (1, 10, 50)
SEEDS = (0, 1, 2)
ENTRIES = 2 + 2 * CLASSES  # the loss and the accuracy of the trained model, then of each constant one
LARGEST_LOSS = 10.0


def federation(members: int, seed: int) -> AttackedFederation:
    """Members with equally many digits."""
    colluders = Thresholds(members, Mode.SUM).t
    made = {"name": "evaluations", "seed": seed, "members": members, "colluders_at_most": colluders}
    return AttackedFederation(LeakageSpecification(attack="labels", view=View.NOTHING, **made))


def vectors(made: AttackedFederation) -> Reals:
    """What each member measures, over the largest values, (m, ENTRIES)."""
    w, rows = made.model(made.specification.rounds), []
    for x, y, shares in zip(made.members.x, made.members.y, made.members.histograms, strict=True):
        with torch.no_grad():
            logits = made.network.logits(w, x)
        loss, right = float(cross_entropy(logits, y)), float((logits.argmax(1) == y).float().mean())
        rows.append([min(loss, LARGEST_LOSS) / LARGEST_LOSS, right, *(1 - shares), *shares])
    return np.array(rows)


def total(values: Reals, cohort: Thresholds, sigma: float, draws: Reals) -> Reals:
    """The sum of members' vectors as the coordinator unmasks it, (n,); `draws` is the noise of each, (m, n)."""
    bound, a = clip(values.shape[1], sigma), (ONE // len(values)) / ONE
    noisy = (values + deviation(sigma, cohort) * draws) / bound
    return np.asarray(weighted_sum(noisy, np.full(len(noisy), a)) * bound / a)


def measured(made: AttackedFederation, sigma: float, pairs: int) -> Reals:
    """The guesses from this number of pairs of evaluations, and what noise costs.

    Returns:
        The error of a member's accuracy, in points, and of its loss; the total-variation distance of the guessed label
        histogram; how often the most frequent label is right, %; the error of the mean accuracy, in points, and of the
        mean loss. Errors are root mean squares over members and draws.
    """
    values, m = vectors(made), made.specification.members
    whole, less = Thresholds(m, Mode.SUM), Thresholds(m - 1, Mode.SUM)
    random = np.random.default_rng([made.specification.seed, m, pairs])
    errors, histograms, costs = [], [], []
    spread, mean = values.std(0), values.mean(0)
    for victim in range(made.targets):
        others, differences = np.delete(values, victim, 0), []
        for _ in range(pairs):
            first, second = _draws(m, random), _draws(m - 1, random)
            costs.append(total(values, whole, sigma, first) / m - mean)
            first[made.targets :] = second[made.targets - 1 :] = 0  # colluders subtract their own
            differences.append(total(values, whole, sigma, first) - total(others, less, sigma, second))
        size = np.sqrt(deviation(sigma, whole) ** 2 * made.targets + deviation(sigma, less) ** 2 * (made.targets - 1))
        share = spread**2 / (spread**2 + size**2 / pairs + 1e-12)
        guess = mean + share * (np.mean(differences, 0) - mean)
        errors.append(guess - values[victim])
        inverted, shares = np.split(guess[2:], 2)
        histograms.append(((1 - inverted) + shares) / 2)
    scores = labels.scores(labels.on_simplex(np.array(histograms)), values[: made.targets, 2 + CLASSES :])
    (loss, accuracy), (lost, missed) = (np.sqrt(np.mean(np.square(item)[:, :2], 0)) for item in (errors, costs))
    guessed = (scores["labels/distance"], scores["labels/top"])
    return np.array([100 * accuracy, LARGEST_LOSS * loss, *guessed, 100 * missed, LARGEST_LOSS * lost])


def _draws(members: int, random: np.random.Generator) -> Reals:
    return np.array([noise(random.bytes(32), bytes(32), ENTRIES) for _ in range(members)])


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    _write("Members", "Sigma", "Pairs", "Accuracy", "Loss", "Histogram", "Top label", "Mean accuracy", "Mean loss")
    _write(*["---"] * 9)
    for members in (10, 20):
        federations = [federation(members, seed) for seed in SEEDS]
        for sigma in (*SIGMAS, BLIND):
            for pairs in PAIRS if 0 < sigma < BLIND else (1,):
                means = np.mean([measured(made, sigma, pairs) for made in federations], 0)
                shown = "nothing is seen" if sigma == BLIND else f"{sigma:g}"
                _write(members, shown, pairs, *(f"{value:.3g}" for value in means))


def _write(*cells: object) -> None:
    sys.stdout.write(f"| {' | '.join(map(str, cells))} |\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
