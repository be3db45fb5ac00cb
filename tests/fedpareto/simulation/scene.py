"""Small simulations, by the command and in this process."""

import subprocess

import numpy as np
import pytest
import torch

from fedpareto.processes.forked import completed

SPEC = """
name = "small"
task = "digits"
rounds = {rounds}
seed = 5

[algorithm]
name = "{algorithm}"

[train]
batch_size = 20
learning_rate = 0.1

[evaluate]
every = {every}

[selection]
method = "fraction"
fraction = {fraction}

[simulation]
clients = {clients}
partition = "{partition}"
attackers = {attackers}
attack = "{attack}"
"""


def spec(**values: object) -> str:
    chosen = {
        "rounds": 3,
        "algorithm": "fedmgda+",
        "every": 1,
        "fraction": 1.0,
        "clients": 4,
        "partition": "shards:2",
        "attackers": 0,
        "attack": "",
    }
    return SPEC.format(**(chosen | values))


def run_cli(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return completed(["-m", "fedpareto", *arguments])


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Models as small as these only wait for each other's threads."""
    torch.set_num_threads(1)


def close(found: np.ndarray, expected: np.ndarray) -> None:
    # Rounding of sums in another order, carried through some dozen steps.
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * float(np.abs(expected).max()))


OBJECTIVES = """
name = "objectives"
task = "two-digits"
rounds = 3
seed = 5

[algorithm]
{algorithm}

[train]
steps = 3
batch_size = 20

[selection]
method = "count"
count = 4
over_selection = 1.5

[evaluate]
every = 0

[simulation]
clients = 6
objectives = "{objectives}"
"""
