"""What a reader makes of the sums of a plan: the members blur and round their vectors by their own code."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

from cover_search.plan import Plan
from cover_search.specification import Failure
from cover_search.target import CosineTarget
from cover_search.updates import Updates
from federation.secure.blocks import blocks, norm, scaled
from federation.secure.blur import blurred
from federation.secure.masks import masked, reals
from federation.secure.thresholds import SUM_BITS, truncated
from leakage.federation import Reals, unit_rows

_COMBINATIONS = 2**18  # of the others' signs that are weighed one by one
_PORTION = 2**21  # of them at a time, over several coordinates
_APART = 1 / 16  # of a standard deviation of the noise: coefficients that are nearer count as equal
_FLOAT32 = 2.0**-20  # relative rounding of updates that a model's float32 leaves


@dataclass(frozen=True)
class Reading:
    """Cosines with the attacked member's update: of the best linear combination of the sums, and of decoded signs."""

    linear: float
    decoded: float


@dataclass(frozen=True)
class SumReader:
    """Reads the sums of a plan. It knows coefficients, colluders' vectors, and absolute values, but no honest sign.

    Attributes:
        target: the members, and the noise.
        updates: of the members, (m, d) in each sum.
        asked: how often each sum is asked, (sums,).
        random: of the members' secrets.
        work: combinations of signs that are weighed in a reading; the coordinates for which it is not enough are left
            out.
    """

    target: CosineTarget
    updates: Updates
    asked: Sequence[int]
    random: np.random.Generator
    work: int = 2**27

    def read(self, plan: Plan) -> Reading:
        """What the reader gets of the update of the member in slot 0."""
        left, attacked = self.target.left(plan), int(plan.places[0])
        honest = [attacked, *(int(i) for i in np.flatnonzero(left.any(0)) if i != attacked)]  # with a part in a sum
        rows, true = left[:, honest], self.updates.visits[0][honest][:, :: self.updates.copies]
        sizes = _levels(true)
        seen = np.stack([self._sum(number, honest, row) for number, row in enumerate(rows)])
        variances = np.stack([self._variance(number, row, sizes) for number, row in enumerate(rows)])
        if self.target.fails != "never":
            rows[1:, 0] = 0.0
        if self.target.others_known:
            seen, rows, sizes = seen - rows[:, 1:] @ true[1:], rows[:, :1], sizes[:1]
        fitted, *_ = np.linalg.lstsq(seen.T, true[0])
        most = len(_combinations((rows * sizes.max(1))[:, 1:], np.sqrt(variances.min(1)))[1])
        read = self.random.permutation(len(true[0]))[: max(64, self.work // most)]
        decoded = sizes[0, read] * signs(seen[:, read], rows, sizes[:, read], variances[:, read])
        return Reading(_cosine(fitted @ seen, true[0]), _cosine(decoded, true[0, read]))

    def _sum(self, number: int, honest: Sequence[int], row: Reals) -> Reals:
        """The mean of the sums of one kind, and of copies, without the members' common shrinkage, (values,)."""
        vectors, size = self.updates.visits[number], self.target.deviation
        total = np.zeros(vectors.shape[1])
        for _ in range(self.asked[number]):
            words = np.zeros(len(total), np.uint32)
            for member, coefficient in zip(honest, truncated(row.tolist()), strict=True):
                fails = self.target.fails if number and member == honest[0] else "never"
                vector = answer(vectors[member], fails, self.random)
                if coefficient and vector.any():
                    v = blurred_vector(vector, size, self.random)
                    words += np.concatenate(list(masked(blocks(v), coefficient, ())))
            total += reals(words) * np.sqrt(1 + size**2) / self.asked[number]
        return np.asarray(total.reshape(-1, self.updates.copies).mean(1))

    def _variance(self, number: int, row: Reals, sizes: Reals) -> Reals:
        """Of the noise of a sum in each value, (values,): blur, a failing member's direction, and rounding."""
        parts = np.square(row[:, None] * sizes)
        noise = self.target.deviation**2 * parts
        if number and self.target.fails == "zero":
            noise[0] = 0.0
        if number and self.target.fails == "random":
            noise[0] = row[0] ** 2 / (sizes.shape[1] * self.updates.copies)
        blur = noise.sum(0) / (self.updates.copies * self.asked[number])
        return np.asarray(blur + _FLOAT32**2 * parts.sum(0) + len(row) * 2.0 ** (-2 * SUM_BITS) / 12)


def answer(vector: Reals, fails: Failure, random: np.random.Generator) -> Reals:
    """A member's vector (d,), or what it answers in place of it if its computation fails."""
    if fails == "never":
        return vector
    return unit_rows(random.normal(size=(1, len(vector))))[0] if fails == "random" else np.zeros_like(vector)


def blurred_vector(vector: Reals, size: float, random: np.random.Generator) -> Reals:
    """v, (d,): a member's vector with its noise, at the same length. Its secret of the session is random.

    Args:
        vector: u.
        size: the deviation of the noise, relative to each coordinate.
        random: makes the secret.
    """
    b = np.concatenate(list(blurred(blocks(vector), random.bytes(32), bytes(32), size)))
    return np.concatenate(list(scaled(blocks(b), norm(blocks(vector)) / norm(blocks(b)))))


def signs(seen: Reals, rows: Reals, sizes: Reals, variances: Reals) -> Reals:
    """The posterior mean of the sign of the first member's value, (values,), over all signs of the other members.

    Args:
        seen: sums of each value, (sums, values).
        rows: coefficients, (sums, members).
        sizes: absolute values, (members, values).
        variances: of Gaussian noise, (sums, values).
    """
    means = np.empty(seen.shape[1])
    patterns, which = np.unique(sizes, axis=1, return_inverse=True)
    for number, pattern in enumerate(patterns.T):
        own, places = (rows * pattern)[:, 0], np.flatnonzero(which == number)
        parts, logs, rest = _combinations((rows * pattern)[:, 1:], np.sqrt(variances[:, places].min(1)))
        for some in np.array_split(places, max(1, len(places) * len(logs) // _PORTION)):
            noise = variances[:, some] + rest[:, None]
            plus, minus = (_log_density(seen[:, some] - sign * own[:, None], parts, logs, noise) for sign in (1, -1))
            means[some] = np.tanh((plus - minus) / 2)
    return means


def _combinations(weights: Reals, noise: Reals) -> tuple[Reals, Reals, Reals]:
    """The sums of weights with either sign, (sums, n), the logarithms of their numbers, (n,), and a variance, (sums,).

    Of k members with the same weights only the number of negative signs counts. The smallest weights, with which there
    would be too many combinations, count as Gaussian noise of this variance.
    """
    step = (_APART * noise)[:, None]
    distinct, counts = np.unique(np.rint(weights / step), axis=1, return_counts=True)
    order = np.argsort(-np.square(distinct).sum(0), kind="stable")
    parts, logs, rest = np.zeros((len(weights), 1)), np.zeros(1), np.zeros(len(weights))
    for weight, count in zip((distinct[:, order] * step).T, counts[order].tolist(), strict=True):
        if not weight.any():
            continue
        if len(logs) * (count + 1) > _COMBINATIONS:
            rest += count * np.square(weight)
            continue
        steps = count - 2.0 * np.arange(count + 1)
        ways = np.log([float(comb(count, k)) for k in range(count + 1)])
        parts = (parts[:, :, None] + weight[:, None, None] * steps).reshape(len(weights), -1)
        logs = (logs[:, None] + ways).ravel()
    return parts, logs, rest


def _log_density(seen: Reals, parts: Reals, logs: Reals, variances: Reals) -> Reals:
    """Of the noise and the others' part together, up to a constant, (values,)."""
    exponents = logs - sum(
        np.square(seen[number, :, None] - parts[number]) / (2 * variances[number, :, None])
        for number in range(len(seen))
    )
    largest = exponents.max(1)
    return np.asarray(largest + np.log(np.exp(exponents - largest[:, None]).sum(1)))


def _levels(values: Reals) -> Reals:
    """The absolute values, of which every member has one and zero, without rounding of models, (members, values)."""
    used = values != 0
    return np.asarray(used * (np.abs(values).sum(1) / used.sum(1))[:, None])


def _cosine(a: Reals, b: Reals) -> float:
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return abs(float(a @ b)) / lengths if lengths > 0 else 0.0
