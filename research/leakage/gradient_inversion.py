"""Gradient inversion: the images that the coordinator reconstructs from one view, and how good they are."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap
from torch.nn.functional import normalize

from federation.digests import derived_seed
from fedpareto.experiments.result_store import Measures
from leakage import images, views
from leakage.accounting import noise_multiplier
from leakage.attack import LeakageAttack
from leakage.federation import unit_rows
from leakage.specification import View

_SHOWN = 6  # images whose pixels are kept for the figure
_INK = 16


class GradientInversion(LeakageAttack):
    """Reconstructions of the images of one batch of each member."""

    def measures(self) -> tuple[Measures, list[Measures]]:
        """How good the reconstructions are, and a row for each of the first ones; see `laboratory.measure`."""
        x, y = self.federation.pool.x, self.federation.pool.y.long()
        chosen = self._batches("first")
        attacked = chosen[: self.federation.targets]
        if self.specification.view is View.NOTHING:
            found = self.federation.means(x[self.federation.shadow])[y[attacked]]
        elif self.specification.view is View.RANDOM:
            found = torch.rand((*attacked.shape, x.shape[1]), generator=self._generator("images"))
        else:
            found = self._invert(chosen)
        ordered = torch.cat([images.matched(*item) for item in zip(found, x[attacked], y[attacked], strict=True)])
        indices = attacked.ravel()
        true, names = x[indices], y[indices]
        ratios, hits = images.decibels(ordered, true), images.recognised(ordered, indices, x, y)
        rows = [
            {
                "round": float(i),
                "label": float(names[i]),
                "psnr": float(ratios[i]),
                "found": float(hits[i]),
                **_grey("true", true[i]),
                **_grey("pixel", ordered[i]),
            }
            for i in range(min(len(indices), _SHOWN))
        ]
        final = {"images/psnr": float(np.mean(ratios)), "images/found": 100 * float(np.mean(hits))}
        if self.specification.epsilon is not None:
            final |= {"epsilon": self.specification.epsilon, "noise": self._sigma_of_a_step}
        return final, rows

    def _invert(self, chosen: NDArray[np.int64]) -> Tensor:
        federation, specification = self.federation, self.specification
        w, network, targets = federation.model(self.number), federation.network, federation.targets
        pool_x, pool_y = federation.pool.x, federation.pool.y.long()
        clip = None if specification.epsilon is None else specification.train.clip

        def explain(images_: Tensor, labels_: Tensor) -> Tensor:
            return images.gradients(network, w, images_, labels_, clip)

        seen = vmap(explain)(pool_x[chosen], pool_y[chosen])
        units = unit_rows(seen.double().numpy())
        labels_ = pool_y[chosen[:targets]]
        explained: Callable[[Tensor, Tensor], Tensor] = explain
        if specification.view is View.UPDATE:
            observed = seen[:targets]
            if clip is not None:
                noise = torch.randn(observed.shape, generator=self._generator("noise"))
                observed = observed + self._sigma_of_a_step * clip / specification.batch * noise
        elif specification.view is View.SKETCH:
            S, _, _ = self.session(self.number)
            observed = torch.from_numpy(views.sketches(S, units[:targets])).float()
            matrix = torch.from_numpy(S).float()
            explained = lambda images_, labels_: matrix @ explain(images_, labels_)  # noqa: E731
        elif specification.view is View.PRIVATE:
            S, digest, secrets = self.session(self.number)
            honest = len(units) - specification.colluders
            own = views.private_round(units, S, secrets, digest, targets, None).a[:honest]
            observed = torch.from_numpy(views.weighted_sum(units[:honest], own)).float()[None]
            a, labels_ = torch.from_numpy(own).float(), pool_y[chosen[None, :honest]]
            explained = lambda images_, labels_: a @ normalize(vmap(explain)(images_, labels_))  # noqa: E731
        else:
            again = self._batches("second")
            others = unit_rows(vmap(explain)(pool_x[again], pool_y[again]).double().numpy())
            rows = [self.difference(units, others, target)[2] for target in range(targets)]
            observed = torch.from_numpy(np.stack(rows)).float()
        effort = (specification.restarts, specification.iterations)
        found = images.inverted(observed, explained, labels_, *effort, self._generator("images"))
        return found[0, :targets] if specification.view is View.PRIVATE else found

    def _batches(self, name: str) -> NDArray[np.int64]:
        """The indices of a batch of each member, (m, n)."""
        random = np.random.default_rng(derived_seed(f"{self.specification.seed} {name} {self.specification.batch}"))
        indices = self.federation.member_indices
        return np.stack([random.choice(own, self.specification.batch, replace=False) for own in indices])

    @property
    def _sigma_of_a_step(self) -> float:
        """Sigma with which the one step is (epsilon, delta)-private; 0 without epsilon."""
        rate = self.specification.batch / self.federation.members.y.shape[1]
        return noise_multiplier(self.specification.epsilon, rate, 1, self.specification.train.delta)

    def _generator(self, name: str) -> torch.Generator:
        specification = self.specification
        return torch.Generator().manual_seed(derived_seed(f"{specification.seed} {name} {specification.batch}"))


def _grey(name: str, image: Tensor) -> Measures:
    return {f"{name}/{i}": float(round(_INK * float(value))) for i, value in enumerate(image)}
