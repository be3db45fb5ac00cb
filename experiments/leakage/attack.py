"""One run: what the coordinator guesses from one view, and how good its guesses are."""

import time
from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from experiments.leakage import images, labels, views
from experiments.leakage.accounting import epsilon, noise_multiplier
from experiments.leakage.federation import CLASSES, Federation
from experiments.leakage.labels import Opened, Regression
from experiments.leakage.specification import Specification, View
from experiments.results import Measures
from federation.digests import derived_seed
from federation.secure import hashing

Reals = NDArray[np.float64]

_DRAWS = 100  # of random histograms
_SHOWN = 6  # images whose pixels are kept for the figure
_INK = 16

_OF_THE_FEDERATION = ("seed", "rounds", "members", "colluders_at_most", "alpha", "shadow", "shadow_clients", "train")


class Laboratory:
    """Makes runs. The federation of the last run is kept for the next one with the same seed and settings."""

    def __init__(self) -> None:
        self._key: dict[str, object] = {}
        self._federation: Federation | None = None

    def measure(self, specification: Specification) -> tuple[Measures, list[Measures]]:
        """The measures of a run, and for gradient inversion a row for each of the first images.

        Returns:
            For labels: `labels/distance`, the total-variation distance between the guessed and the true histogram, a
            mean over the attacked members; `labels/top`, how often the most frequent label is right (%); `cosine`, of
            a difference of sums with the member's update. For images: `images/psnr` (dB, at most 50);
            `images/found`, the share of reconstructions whose nearest image of the same label is the true one (%).
            `epsilon` of all rounds that are read, and `noise`, sigma; `accuracy` of the attacked trained model
            (%), or with epsilon of one that members train with DP-SGD in as many rounds, which have
            `epsilon/training`; `seconds`.
            A row of an image has its number (`round`), `label`, `psnr`, `found`, and grey levels 0 to 16: `true/N` and
            `pixel/N`.
        """
        began = time.perf_counter()
        attack = Attack(self._federation_of(specification), specification)
        final, rows = attack.on_labels() if specification.attack == "labels" else attack.on_images()
        return {**final, "seconds": time.perf_counter() - began}, rows

    def _federation_of(self, specification: Specification) -> Federation:
        key = specification.model_dump(include=set(_OF_THE_FEDERATION))
        if self._federation is None or key != self._key:
            self._key, self._federation = key, Federation(specification)
        return self._federation


class Attack:
    """The attack of one specification on a federation."""

    def __init__(self, federation: Federation, specification: Specification) -> None:
        self.federation = federation
        self.specification = specification
        self.number = specification.rounds if specification.trained else 0

    # --- labels

    def on_labels(self) -> tuple[Measures, list[Measures]]:
        """The measures of guessed label histograms."""
        guess: dict[View, Callable[[], Reals]] = {
            View.NOTHING: lambda: np.tile(self.federation.population, (self.federation.targets, 1)),
            View.BIAS: self._from_bias,
            View.UPDATE: self._from_updates,
            View.SKETCH: self._from_sketches,
            View.GRAM: self._from_gram,
            View.PRIVATE: self._from_private_rounds,
        }
        view = self.specification.view
        if view is View.RANDOM:
            draws = self._random.dirichlet(
                np.full(CLASSES, self.specification.alpha), size=(_DRAWS, self.federation.targets)
            )
            return labels.scores(draws.reshape(-1, CLASSES), np.tile(self._truth, (_DRAWS, 1))), []
        if view in (View.DIFFERENCE, View.NEXT):
            guesses, cosine = self._from_differences()
            return {**labels.scores(guesses, self._truth), "cosine": cosine}, []
        final = labels.scores(guess[view](), self._truth)
        if view is View.UPDATE and self.specification.trained:
            final["accuracy"] = 100 * self.federation.accuracy(self.number, self.specification.epsilon)
        return {**final, **self._epsilon_of_sessions}, []

    @property
    def _truth(self) -> Reals:
        return self.federation.members.histograms[: self.federation.targets]

    @property
    def _numbers(self) -> range:
        return range(self.number, self.number + self.specification.sessions)

    @cached_property
    def _random(self) -> np.random.Generator:
        return np.random.default_rng([self.specification.seed, 2])

    def _from_bias(self) -> Reals:
        federation, train = self.federation, self.specification.train
        x, y = federation.pool.x[federation.shadow], federation.pool.y[federation.shadow]
        guesses = []
        for number in self._numbers:
            with torch.no_grad():
                errors = torch.softmax(federation.network.logits(federation.model(number), x), 1)
            errors -= torch.nn.functional.one_hot(y, CLASSES)
            by_label = torch.stack([errors[y == label].mean(0) for label in range(CLASSES)]).double().numpy()
            steps = federation.updates(number).raw[: federation.targets, -CLASSES:]
            guesses.append(labels.from_bias(steps / (train.learning_rate * train.steps), by_label))
        mean: Reals = np.mean(guesses, axis=0)
        return mean

    def _from_updates(self) -> Reals:
        federation, guesses = self.federation, []
        for number in self._numbers:
            shadow = federation.shadow_updates(number, epsilon=self.specification.epsilon)
            units = federation.updates(number, epsilon=self.specification.epsilon).units
            regression = Regression.trained(shadow.units, shadow.histograms)
            guesses.append(regression.raw(units[: federation.targets]))
        return labels.on_simplex(np.mean(guesses, axis=0))

    def _from_sketches(self) -> Reals:
        guesses = []
        for number in self._numbers:
            own, shadow = self._sketches(number)
            regression = Regression.trained(shadow, self.federation.shadow_members.histograms)
            guesses.append(regression.raw(own[: self.federation.targets]))
        return labels.on_simplex(np.mean(guesses, axis=0))

    def _from_gram(self) -> Reals:
        federation, probes = self.federation, self.specification.probes
        if not probes:
            rounds = []
            for number in self._numbers:
                units, shadow = federation.updates(number).units, federation.shadow_updates(number)
                metric, deviation = _linear_model(shadow.units, shadow.histograms)
                rounds.append(Opened(units @ units.T, metric, deviation, np.zeros(len(units)), None, np.ones(CLASSES)))
            fitted = labels.fitted(rounds, len(federation.members), None, self.specification.seed)
            return fitted[: federation.targets]
        own, shadow_features = [], []
        for session, number in enumerate(self._numbers):
            shadow = federation.shadow_updates(number)
            regression = Regression.trained(shadow.units, shadow.histograms)
            directions = regression.probes(shadow.units, probes, session * probes)
            own.append(federation.updates(number).units[: federation.targets] @ directions.T)
            shadow_features.append(shadow.units @ directions.T)
        regression = Regression.trained(np.hstack(shadow_features), federation.shadow_members.histograms)
        return regression.guess(np.hstack(own))

    def _from_private_rounds(self) -> Reals:
        federation, t = self.federation, self.specification.colluders
        histograms = federation.shadow_members.histograms
        opened, probed, shadow_probed = [], [], []
        for session, number in enumerate(self._numbers):
            units, shadow = federation.updates(number).units, federation.shadow_updates(number)
            digest, secrets = self._session(number)
            S = self._sketch_matrix(number)
            X = views.sketches(S, shadow.units)
            probes = Regression.trained(X, histograms).probes(X, 2 * t, session * 2 * t) if t else None
            seen = views.private_round(units, S, secrets, digest, federation.targets, probes)
            metric, deviation = _linear_model(shadow.units, histograms, X)
            honest = federation.targets if t else len(units)
            a = seen.a[:honest]
            regression = Regression.trained(shadow.units, histograms)
            mixture = a.sum() * regression.raw(seen.total[None] / a.sum())[0]
            spread = np.linalg.norm(a) * regression.deviation
            opened.append(Opened(seen.gram[:honest, :honest], metric, deviation, a, mixture, spread))
            if probes is not None:
                probed.append(seen.probed)
                noise = views.opening_noise(secrets[:honest], digest + b"shadow", len(S), 100)
                draws = self._random.choice(noise[np.triu_indices(100)], size=(len(X), len(probes)))
                shadow_probed.append(X @ probes.T + draws)
        start = None
        if t:
            from_probes = Regression.trained(np.hstack(shadow_probed), histograms)
            start = (from_probes.guess(np.hstack(probed)), from_probes.deviation)
        fitted = labels.fitted(opened, len(opened[0].a), start, self.specification.seed)
        return fitted[: federation.targets]

    def _from_differences(self) -> tuple[Reals, float]:
        """Guesses from R minus the R of a session without the member, whose other members trained anew."""
        federation = self.federation
        later = self.number + (self.specification.view is View.NEXT)
        first, second = federation.updates(self.number).units, federation.updates(later, visit=1).units
        shadow = federation.shadow_updates(self.number)
        again = federation.shadow_updates(later, visit=1).units
        guesses, cosines = [], []
        for target in range(federation.targets):
            a, b, difference = self._difference(first, second, target)
            draws = [self._random.choice(len(again), len(a), replace=False) for _ in again]
            rests = np.stack([a @ shadow.units[others] - b @ again[others] for others in draws])
            regression = Regression.trained(shadow.units + rests, shadow.histograms)
            guesses.append(regression.guess(difference[None])[0])
            cosines.append(_units(difference[None])[0] @ first[target])
        return np.stack(guesses), float(np.mean(cosines))

    def _difference(self, first: Reals, second: Reals, target: int) -> tuple[Reals, Reals, Reals]:
        """R minus a multiple of the R of a second session without the target, divided by the target's coefficient.

        The colluders' own parts of both sums are known, and subtracted.

        Returns:
            The coefficients of the other honest members in the two sums, and the difference,
            u_target + sum_j a_j u_j - sum_j b_j u'_j, (d,).
        """
        m = len(first)
        rest = [member for member in range(m) if member != target]
        a = self._coefficients(first)
        b = np.zeros(m)
        b[rest] = self._coefficients(second[rest])
        if self.specification.colluders:
            a[-self.specification.colluders :] = b[-self.specification.colluders :] = 0.0
        b *= (a.sum() - a[target]) / b.sum()
        difference = (views.weighted_sum(first, a) - views.weighted_sum(second, b)) / a[target]
        honest = [member for member in rest if a[member]]
        return a[honest] / a[target], b[honest] / a[target], difference

    def _coefficients(self, units: Reals) -> Reals:
        if self.specification.equal_weights:
            return np.full(len(units), 1 / len(units))
        return views.coefficients(units @ units.T, len(units))

    @property
    def _epsilon_of_sessions(self) -> Measures:
        if self.specification.epsilon is None:
            return {}
        train, federation = self.specification.train, self.federation
        sigma = federation.noise_multiplier(self.specification.epsilon)

        def total(rounds: int) -> float:
            return epsilon(sigma, federation.sampling_rate, train.steps * rounds, train.delta)

        training = {"epsilon/training": total(self.number)} if self.number else {}
        return {"epsilon": total(self.specification.sessions), "noise": sigma, **training}

    # --- images

    def on_images(self) -> tuple[Measures, list[Measures]]:
        """The measures of gradient inversion, and the first images."""
        federation, targets = self.federation, self.federation.targets
        chosen = self._batches("first")
        x, y = federation.pool.x, federation.pool.y.long()
        if self.specification.view is View.NOTHING:
            found = self._mean_images(y[chosen[:targets]])
        elif self.specification.view is View.RANDOM:
            found = torch.rand((*chosen[:targets].shape, x.shape[1]), generator=self._generator("images"))
        else:
            found = self._invert(chosen)
        ratios, hits, rows = [], [], list[Measures]()
        for batch, indices in zip(found, chosen, strict=False):
            true = x[indices]
            ordered = images.matched(batch, true, y[indices])
            ratios.append(images.decibels(ordered, true))
            hits.append(images.recognised(ordered, indices, x, y))
            for position in range(len(indices)):
                if len(rows) < _SHOWN:
                    rows.append(
                        {
                            "round": float(len(rows)),
                            "label": float(y[indices[position]]),
                            "psnr": float(ratios[-1][position]),
                            "found": float(hits[-1][position]),
                            **_grey("true", true[position]),
                            **_grey("pixel", ordered[position]),
                        }
                    )
        final = {"images/psnr": float(np.mean(ratios)), "images/found": 100 * float(np.mean(hits))}
        return {**final, **self._epsilon_of_a_step}, rows

    def _invert(self, chosen: NDArray[np.int64]) -> Tensor:
        federation, specification = self.federation, self.specification
        w, network, targets = federation.model(self.number), federation.network, federation.targets
        x, y = federation.pool.x[chosen], federation.pool.y.long()[chosen]
        clip = None if specification.epsilon is None else specification.train.clip

        def explain(images_: Tensor, labels_: Tensor) -> Tensor:
            return images.gradients(network, w, images_, labels_, clip)

        seen = vmap(explain)(x, y)
        units = _units(seen.double().numpy())
        labels_ = y[:targets]
        explained: Callable[[Tensor, Tensor], Tensor] = explain
        if specification.epsilon is not None:
            deviation = self._sigma_of_a_step * specification.train.clip / specification.batch
            observed = seen[:targets] + deviation * torch.randn(
                seen[:targets].shape, generator=self._generator("noise")
            )
        elif specification.view is View.UPDATE:
            observed = seen[:targets]
        elif specification.view is View.SKETCH:
            S = self._sketch_matrix(self.number)
            observed = torch.from_numpy(views.sketches(S, units[:targets])).float()
            matrix = torch.from_numpy(S).float()
            explained = lambda images_, labels_: matrix @ explain(images_, labels_)  # noqa: E731
        elif specification.view is View.PRIVATE:
            digest, secrets = self._session(self.number)
            seen_by_all = views.private_round(units, self._sketch_matrix(self.number), secrets, digest, targets, None)
            honest = len(units) - specification.colluders
            total = views.weighted_sum(units[:honest], seen_by_all.a[:honest])
            a = torch.from_numpy(seen_by_all.a[:honest]).float()
            observed, labels_ = torch.from_numpy(total).float()[None], y[None, :honest]
            explained = lambda images_, labels_: a @ _directions(vmap(explain)(images_, labels_))  # noqa: E731
        else:
            again = self._batches("second")
            second = vmap(explain)(federation.pool.x[again], federation.pool.y.long()[again])
            others = _units(second.double().numpy())
            rows = [self._difference(units, others, target)[2] for target in range(targets)]
            observed = torch.from_numpy(np.stack(rows)).float()
        problem = images.Problem(observed, explained, labels_)
        found = images.inverted(problem, specification.restarts, specification.iterations, self._generator("images"))
        return found[0, :targets] if specification.view is View.PRIVATE else found

    def _batches(self, name: str) -> NDArray[np.int64]:
        """The indices of a batch of each member, (m, n)."""
        random = np.random.default_rng(derived_seed(f"{self.specification.seed} {name} {self.specification.batch}"))
        indices = self.federation.member_indices
        return np.stack([random.choice(own, self.specification.batch, replace=False) for own in indices])

    def _mean_images(self, labels_: Tensor) -> Tensor:
        """The mean of the coordinator's images of each label."""
        federation = self.federation
        x, y = federation.pool.x[federation.shadow], federation.pool.y[federation.shadow]
        means = torch.stack([x[y == label].mean(0) for label in range(CLASSES)])
        return means[labels_]

    @cached_property
    def _sigma_of_a_step(self) -> float:
        assert self.specification.epsilon is not None  # noqa: S101
        rate = self.specification.batch / self.federation.members.y.shape[1]
        return noise_multiplier(self.specification.epsilon, rate, 1, self.specification.train.delta)

    @property
    def _epsilon_of_a_step(self) -> Measures:
        if self.specification.epsilon is None:
            return {}
        return {"epsilon": self.specification.epsilon, "noise": self._sigma_of_a_step}

    # --- sessions

    def _session(self, number: int) -> tuple[bytes, list[bytes]]:
        """The digest of the session at a model, and the secrets of its members."""
        random = np.random.default_rng([self.specification.seed, 3, number])
        return hashing.session(f"{self.specification.seed} {number}".encode()), [
            random.bytes(32) for _ in range(len(self.federation.members))
        ]

    def _sketch_matrix(self, number: int) -> Reals:
        digest, _ = self._session(number)
        return views.sketch_matrix(digest, len(self.federation.network.start), self.specification.rows)

    def _sketches(self, number: int) -> tuple[Reals, Reals]:
        """The sketches of members and of shadow clients."""
        S = self._sketch_matrix(number)
        own, shadow = self.federation.updates(number), self.federation.shadow_updates(number)
        return views.sketches(S, own.units), views.sketches(S, shadow.units)

    def _generator(self, name: str) -> torch.Generator:
        specification = self.specification
        return torch.Generator().manual_seed(derived_seed(f"{specification.seed} {name} {specification.batch}"))


def _linear_model(units: Reals, histograms: Reals, sketches: Reals | None = None) -> tuple[Reals, float]:
    """M M', (10, 10), for u = h M, and the deviation of inner products of updates, or of their sketches, from it."""
    M = np.linalg.lstsq(histograms, units, rcond=None)[0]
    metric: Reals = M @ M.T
    X = units if sketches is None else sketches
    errors = (X @ X.T - histograms @ metric @ histograms.T)[np.triu_indices(len(X), 1)]
    return metric, float(errors.std())


def _units(vectors: Reals) -> Reals:
    divided: Reals = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return divided


def _directions(vectors: Tensor) -> Tensor:
    divided: Tensor = vectors / vectors.norm(dim=1, keepdim=True)
    return divided


def _grey(name: str, image: Tensor) -> Measures:
    return {f"{name}/{i}": float(round(_INK * float(value))) for i, value in enumerate(image)}
