"""The random generators of a training that a library draws from as it likes."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from federation.training.generators import generators_kept


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the global generators of Python, NumPy and PyTorch, and gives them back their states afterwards.

    `seed` is that of a plan, 0 to 2^63 - 1.
    """
    with generators_kept():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        yield
