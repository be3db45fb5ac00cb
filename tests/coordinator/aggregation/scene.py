"""A zoo of update matrices, and where the reference vectors are."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.paths import REFERENCES

Matrix = NDArray[np.float64]

REFERENCE = REFERENCES

KINDS = (
    "random",
    "nearly parallel",
    "parallel",
    "duplicated",
    "conflicting",
    "opposite",
    "badly scaled",
    "wildly scaled",
    "zero rows",
    "low rank",
    "shifted",
    "orthogonal",
)


def reference(name: str) -> list[dict[str, Any]]:
    """The cases of a file of reference vectors; skips where they are not at hand."""
    path = REFERENCE / f"{name}.json"
    if not path.exists():
        pytest.skip(f"no reference vectors beside the project: {path} does not exist")
    cases: list[dict[str, Any]] = json.loads(path.read_text())["cases"]
    return cases


def matrix(kind: str, m: int, d: int, seed: int) -> Matrix:
    """Updates (m, d) of one kind."""
    rng = np.random.default_rng([seed, m, d, KINDS.index(kind)])
    U = rng.standard_normal((m, d))
    common = rng.standard_normal(d)
    match kind:
        case "nearly parallel":
            return common + 1e-4 * U
        case "parallel":
            return common * rng.uniform(0.1, 10, (m, 1))
        case "duplicated":
            return U[rng.integers(0, (m + 1) // 2, m)]
        case "conflicting":
            return np.sign(rng.standard_normal((m, 1))) * common + 0.1 * U
        case "opposite":
            return np.where(np.arange(m)[:, None] % 2 == 0, common, -common) * rng.uniform(0.1, 10, (m, 1))
        case "badly scaled":
            return (common + U) * 10.0 ** rng.uniform(-3, 3, (m, 1))
        case "wildly scaled":
            return U * 10.0 ** rng.uniform(-10, 10, (m, 1))
        case "zero rows":
            return U * (rng.random((m, 1)) < 0.7)
        case "low rank":
            return rng.standard_normal((m, 2)) @ rng.standard_normal((2, d))
        case "shifted":
            return U + 3 * common
        case "orthogonal":
            return np.eye(m, max(m, d)) * rng.uniform(0.5, 2, (m, 1))
    return U


zoo = st.builds(matrix, st.sampled_from(KINDS), st.integers(1, 9), st.integers(1, 12), st.integers(0, 10**6))
