"""The selection of a round: seeded, so that it can be repeated from the record."""

import math
from collections.abc import Mapping

import numpy as np

from federation.digests import digest
from federation.spec.run_sections import Quorum, SelectionSpec


def wanted(spec: SelectionSpec, pool: int) -> int:
    """The number of replies that a round wants out of `pool` clients: at least one, at most all of them.

    The fraction p of N clients is max(1, ceil(p N)), with a guard against 0.1 * 30 = 3.0000000000000004.
    """
    if spec.method == "all":
        return pool
    if spec.method == "fraction":
        return min(pool, max(1, math.ceil(spec.fraction * pool - 1e-9)))
    return min(pool, spec.count)


def asked(spec: SelectionSpec, pool: int) -> int:
    """The number of clients asked so that the wanted number answers, over-selection included."""
    return min(pool, math.ceil(wanted(spec, pool) * spec.over_selection - 1e-9))


def quorum(rule: Quorum, want: int) -> int:
    """The number of `want` replies that a round needs, at least one; with fewer at the deadline it is skipped."""
    return want // 2 + 1 if rule == "majority" else max(1, math.ceil(rule * want - 1e-9))


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
    count = asked(spec, len(pool))
    if count >= len(pool):
        return pool
    named = {*spec.always, *spec.required}
    always = [client for client in pool if client in named]
    others = [client for client in pool if client not in named]
    chance = None
    if spec.by == "samples":
        sizes = np.array([samples[client] for client in others], dtype=np.float64)
        chance = sizes / sizes.sum()
    size = max(0, count - len(always))
    places = generator(seed, round_number, purpose).choice(len(others), size=size, replace=False, p=chance)
    return sorted([*always, *(others[int(index)] for index in places)])
