"""Label inference: the histograms that the coordinator guesses from one view, and how good they are."""

from collections.abc import Callable

import numpy as np
import torch

from fedpareto.experiments.result_store import Measures
from leakage import labels, views
from leakage.accounting import epsilon
from leakage.attack import LeakageAttack
from leakage.federation import CLASSES, Reals, unit_rows
from leakage.labels import OpenedSession, RidgeRegression
from leakage.specification import View

_DRAWS = 100  # of random histograms


class LabelInference(LeakageAttack):
    """Guesses of label histograms."""

    def measures(self) -> Measures:
        """How good the guesses are; see `laboratory.measure`."""
        guess: dict[View, Callable[[], Reals]] = dict.fromkeys((View.UPDATE, View.SKETCH), self._from_updates)
        guess |= {View.BIAS: self._from_bias, View.GRAM: self._from_gram, View.PRIVATE: self._from_private_rounds}
        guess[View.NOTHING] = lambda: np.tile(self.federation.population, (self.federation.targets, 1))
        view, truth = self.specification.view, self.federation.members.histograms[: self.federation.targets]
        if view is View.RANDOM:
            draws = self.random.dirichlet(np.full(CLASSES, self.specification.alpha), _DRAWS * len(truth))
            return labels.scores(draws, np.tile(truth, (_DRAWS, 1)))
        if view in (View.DIFFERENCE, View.NEXT):
            guesses, cosine = self._from_differences()
            return {**labels.scores(guesses, truth), "cosine": cosine}
        final = labels.scores(guess[view](), truth)
        if view is View.UPDATE and self.specification.trained:
            final["accuracy"] = 100 * self.federation.accuracy(self.number, self.specification.epsilon)
        return {**final, **self._epsilon_of_sessions}

    def _units(self, number: int, visit: int = 0, epsilon: float | None = None) -> list[Reals]:
        """The updates of members and of shadow clients, divided by their lengths."""
        return [unit_rows(self.federation.updates(number, visit, epsilon, shadow=made)) for made in (False, True)]

    def _from_bias(self) -> Reals:
        federation, train = self.federation, self.specification.train
        x, y = federation.pool.x[federation.shadow], federation.pool.y[federation.shadow]
        guesses = []
        for number in self.numbers:
            with torch.no_grad():
                errors = torch.softmax(federation.network.logits(federation.model(number), x), 1)
            errors -= torch.nn.functional.one_hot(y, CLASSES)
            steps = federation.updates(number)[: federation.targets, -CLASSES:]
            by_label = federation.means(errors).double().numpy()
            guesses.append(labels.from_bias(steps / (train.learning_rate * train.steps), by_label))
        return np.asarray(np.mean(guesses, axis=0))

    def _from_updates(self) -> Reals:
        """The mean guess over the rounds, from the updates or sketches of members and of shadow clients."""
        federation, guesses = self.federation, []
        for number in self.numbers:
            seen = self._units(number, epsilon=self.specification.epsilon)
            if self.specification.view is View.SKETCH:
                S, _, _ = self.session(number)
                seen = [views.sketches(S, units) for units in seen]
            regression = RidgeRegression.trained(seen[1], federation.shadow_members.histograms)
            guesses.append(regression.raw(seen[0][: federation.targets]))
        return labels.on_simplex(np.mean(guesses, axis=0))

    def _from_gram(self) -> Reals:
        federation, probes = self.federation, self.specification.probes
        rounds, own, shadow_probed = [], [], []
        for session, number in enumerate(self.numbers):
            units, shadow = self._units(number)
            if probes:
                directions = self._probes(shadow, probes, session)
                own.append(units[: federation.targets] @ directions.T)
                shadow_probed.append(shadow @ directions.T)
            else:
                linear = _linear_model(shadow, federation.shadow_members.histograms, shadow)
                rounds.append(OpenedSession(units @ units.T, *linear))
        if probes:
            return self._regression_on_probes(shadow_probed).guess(np.hstack(own))
        return labels.fitted(rounds, len(federation.members), None, self.specification.seed)[: federation.targets]

    def _probes(self, features: Reals, count: int, session: int) -> Reals:
        """The coordinator's vectors in a session, (count, f), chosen with half of the shadow clients."""
        half = len(features) // 2
        regression = RidgeRegression.trained(features[:half], self.federation.shadow_members.histograms[:half])
        return regression.probes(features[:half], count, session * count)

    def _regression_on_probes(self, probed: list[Reals]) -> RidgeRegression:
        """Trained on the other half: inner products of the first one with its own vectors are too telling."""
        features = np.hstack(probed)
        half = len(features) // 2
        return RidgeRegression.trained(features[half:], self.federation.shadow_members.histograms[half:])

    def _from_private_rounds(self) -> Reals:
        federation, t = self.federation, self.specification.colluders
        histograms = federation.shadow_members.histograms
        opened, probed, shadow_probed = [], [], []
        for session, number in enumerate(self.numbers):
            units, shadow = self._units(number)
            S, digest, secrets = self.session(number)
            X = views.sketches(S, shadow)
            probes = self._probes(X, 2 * t, session) if t else None
            seen = views.private_round(units, S, secrets, digest, federation.targets, probes)
            honest = federation.targets if t else len(units)
            a = seen.a[:honest]
            regression = RidgeRegression.trained(shadow, histograms)
            mixture = a.sum() * regression.raw(seen.total[None] / a.sum())[0]
            total = (a, mixture, np.linalg.norm(a) * regression.deviation)
            linear = _linear_model(shadow, histograms, X)
            opened.append(OpenedSession(seen.gram[:honest, :honest], *linear, total))
            if probes is not None:
                probed.append(seen.probed)
                noise = views.opening_noise(secrets[:honest], digest + b"shadow", len(S), 100)
                draws = self.random.choice(noise[np.triu_indices(100)], size=(len(X), len(probes)))
                shadow_probed.append(X @ probes.T + draws)
        start = None
        if t:
            from_probes = self._regression_on_probes(shadow_probed)
            start = (from_probes.guess(np.hstack(probed)), from_probes.deviation)
        return labels.fitted(opened, len(opened[0].gram), start, self.specification.seed)[: federation.targets]

    def _from_differences(self) -> tuple[Reals, float]:
        """Guesses from R minus the R of a session without the member, whose other members trained anew."""
        federation = self.federation
        later = self.number + (self.specification.view is View.NEXT)
        (first, shadow), (second, again) = self._units(self.number), self._units(later, visit=1)
        guesses, cosines = [], []
        for target in range(federation.targets):
            a, b, difference = self.difference(first, second, target)
            draws = [self.random.choice(len(again), len(a), replace=False) for _ in again]
            rests = np.stack([a @ shadow[others] - b @ again[others] for others in draws])
            regression = RidgeRegression.trained(shadow + rests, federation.shadow_members.histograms)
            guesses.append(regression.guess(difference[None])[0])
            cosines.append(unit_rows(difference[None])[0] @ first[target])
        return np.stack(guesses), float(np.mean(cosines))

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


def _linear_model(units: Reals, histograms: Reals, X: Reals) -> tuple[Reals, float]:
    """M M', (10, 10), for u = h M, and the deviation from it of inner products of X, the updates or their sketches."""
    M = np.linalg.lstsq(histograms, units, rcond=None)[0]
    metric: Reals = M @ M.T
    errors = (X @ X.T - histograms @ metric @ histograms.T)[np.triu_indices(len(X), 1)]
    return metric, float(errors.std())
