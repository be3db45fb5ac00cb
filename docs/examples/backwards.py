"""An attack of one's own."""

from dataclasses import dataclass

import numpy as np

from fedpareto import Attack, option


@dataclass(frozen=True)
class Backwards(Attack):
    """Sends c times its update with the entries in reverse order."""

    factor: float = option(1.0, "c, multiplies the update", "[0, inf)")

    def on_update(self, own, *, peers, m, seed):
        return np.ascontiguousarray(own[::-1]) * np.float32(self.factor)
