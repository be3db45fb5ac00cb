"""A zoo of update matrices, the reference vectors, and rows and replies that are made of updates."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray

from federation.aggregation.base import Rule
from federation.aggregation.interface import Objectives, Rows
from federation.aggregation.phases import PhaseReply, Replies, RoundGenerator, Step
from federation.aggregation.registry import algorithm
from federation.aggregation.secure.settled import Cohort
from federation.aggregation.streaming import Row
from federation.secure.thresholds import Mode, Thresholds
from federation.vectors import update_layout, update_rows, write_vectors
from fedpareto.offline_aggregation import Aggregate
from tests.paths import REFERENCES

Matrix = NDArray[np.float64]
Vector = NDArray[np.float64]

KINDS = (
    *("random", "nearly parallel", "parallel", "duplicated", "conflicting", "opposite"),
    *("badly scaled", "wildly scaled", "zero rows", "low rank", "shifted", "orthogonal"),
)


def reference(name: str) -> list[dict[str, Any]]:
    """The cases of a file of reference vectors; skips where they are not at hand."""
    path = REFERENCES / f"{name}.json"
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

MILD = ["random", "nearly parallel", "conflicting", "badly scaled", "low rank", "shifted", "orthogonal"]
crowds = st.builds(matrix, st.sampled_from(MILD), st.integers(5, 9), st.integers(1, 12), st.integers(0, 10**6))


def losses(U: Matrix) -> Vector:
    return np.linspace(0.1, 3.0, len(U))


def drawn_losses(m: int, seed: int) -> Vector:
    return np.random.default_rng(seed).uniform(0.1, 3.0, m)


def drawn(m: int, d: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((m, d)).astype(np.float32)


def coefficients_of(result: Aggregate) -> Vector:
    """Of the updates; a coordinate-wise rule has none."""
    assert result.coefficients is not None
    return result.coefficients


def norms(U: NDArray[np.floating[Any]]) -> Vector:
    found: Vector = np.linalg.norm(U, axis=1)
    return found


def rows_of(U: Matrix, **changed: Any) -> Rows:
    """What a rule is given of updates (m, d): a uniform prior, and one sample each."""
    m = len(U)
    return Rows(**{"gram": U @ U.T, "prior": np.full(m, 1 / m), "samples": np.ones(m), **changed})


def stored(directory: Path, U: NDArray[np.float32]) -> list[Row]:
    """Updates (m, d) in files, as a round has them."""
    rows: list[Row] = []
    for i, u in enumerate(U):
        path = directory / f"{i}.safetensors"
        write_vectors(path, update_layout([("loss", len(u))]), u)
        rows.append(update_rows(path)["loss"])
    return rows


def reply(client: str, *rows: NDArray[Any], **changed: Any) -> PhaseReply:
    facts: dict[str, Any] = {"samples": 1, "losses": {}, "metrics": {}, **changed}
    return PhaseReply(client_id=client, rows=tuple(row.astype(np.float32) for row in rows), **facts)


def last(conversation: RoundGenerator, replies: Replies) -> Step:
    """The step that these replies, to what was asked last, lead to."""
    with pytest.raises(StopIteration) as end:
        conversation.send(replies)
    step = end.value.value
    assert isinstance(step, Step)
    return step


def direction(step: Step) -> Vector:
    return np.asarray(step.combination.coefficients @ np.array(step.rows, dtype=np.float64))


def gram_of(found: Objectives) -> Matrix:
    assert found.gram is not None
    return found.gram


def objectives_of(step: Step) -> Objectives:
    assert step.combination.objectives is not None
    return step.combination.objectives


def rule_named(name: str, **hyperparameters: Any) -> Rule:
    """A rule whose rounds have one phase, in which everybody trains."""
    rule = algorithm(name, hyperparameters)
    assert isinstance(rule, Rule)
    return rule


def stepped(conversation: RoundGenerator, replies: Replies) -> Step:
    """The step of a round with one phase."""
    next(conversation)
    return last(conversation, replies)


def printed(program: str, *arguments: str, threads: tuple[str, ...]) -> set[str]:
    """What a Python program prints with each number of threads of the library below NumPy."""
    command = [sys.executable, "-c", program, *arguments]
    environments = [os.environ | {"OPENBLAS_NUM_THREADS": number} for number in threads]
    return {
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        for environment in environments
    }


def need_gpu() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")


def cohort(m: int, W: int, mode: Mode, samples: Sequence[int] | None = None) -> Cohort:
    """W of m members that are ready, with their samples."""
    counts = samples or [100] * W
    replies = [reply(f"silo-{i:03}", samples=counts[i]) for i in range(W)]
    return Cohort(thresholds=Thresholds(m, mode), replies=Replies(replies), gram=None)
