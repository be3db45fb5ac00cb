"""The selection of a round: seeded, so that it can be repeated from the record."""

from collections.abc import Mapping

import numpy as np

from federation.digests import digest
from federation.spec.client_sections import SelectionSpec


def generator(seed: int, round_number: int, purpose: str) -> np.random.Generator:
    """A random generator for a purpose in one round of a run with this seed."""
    return np.random.default_rng(int(digest(f"{purpose}/{seed}/{round_number}".encode())[7:39], 16))


def select(
    spec: SelectionSpec, samples: Mapping[str, int], *, seed: int, round_number: int, purpose: str = "select"
) -> list[str]:
    """The clients asked to train, ordered by name.

    They are those of `spec.always` and `spec.required` that are in the pool, and others at random.

    `samples` is the pool: client id -> training samples; clients without samples are left out. Choices for different
    purposes are independent.
    """
    pool = sorted(client for client, count in samples.items() if count > 0)
    count = spec.asked(len(pool))
    if count >= len(pool):
        return pool
    named = {*spec.always, *spec.required}
    always = [client for client in pool if client in named]
    others = [client for client in pool if client not in named]
    size = max(0, count - len(always))
    if size == 0:  # perhaps there are no others, from whom nothing can be drawn
        return always
    chance = None
    if spec.by == "samples":
        sizes = np.array([samples[client] for client in others], dtype=np.float64)
        chance = sizes / sizes.sum()
    places = generator(seed, round_number, purpose).choice(len(others), size=size, replace=False, p=chance)
    return sorted([*always, *(others[int(index)] for index in places)])
