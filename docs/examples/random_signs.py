"""A sketch of one's own."""

from dataclasses import dataclass

import numpy as np

from fedpareto import LinearSketch


@dataclass(frozen=True, kw_only=True)
class RandomSigns(LinearSketch):
    """k = floor(budget d / M) inner products of each gradient with random signs, divided by sqrt(k)."""

    @property
    def k(self):
        return max(1, int(self.budget * self.d) // len(self.objectives))

    def layout(self, served):
        return (("products", served * self.k),)

    def message(self, A, shared_seed, own_seed):
        signs = np.random.default_rng(shared_seed).choice([-1.0, 1.0], (self.k, self.d))
        return {"products": A @ signs.T / np.sqrt(self.k)}

    def vectors(self, message, served, *, shared_seed):
        return message["products"].reshape(served, self.k)
