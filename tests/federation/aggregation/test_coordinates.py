"""Median and trimmed mean, coordinate by coordinate: as NumPy has them, robust, streamed, behind stages."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from federation.aggregation.gram import trimmed_mean
from federation.aggregation.interface import Coordinates
from federation.aggregation.pre import STAGES, apply
from federation.aggregation.streaming import Row
from fedpareto.offline_aggregation import TooFewUpdatesError, aggregate
from tests.federation.aggregation.peak_memory import check_bounded
from tests.federation.aggregation.scene import Vector, drawn, need_gpu, rows_of, stored
from tests.few import few_of
from tests.running import command

shapes = st.tuples(st.integers(1, 12), st.integers(1, 60), st.integers(0, 999))


def trimmed(U: NDArray[np.floating[Any]], f: int) -> Vector:
    mean: Vector = np.sort(U.astype(np.float64), axis=0)[f : len(U) - f].mean(axis=0)
    return mean


def streamed(
    matrix: Vector, trim: int, rows: list[Row], *, workers: int | None = None, device: str = "cpu"
) -> tuple[Vector, Vector]:
    parts = list(trimmed_mean(matrix, trim, rows, workers=workers, device=device))
    blocks, products = [part.block for part in parts], [part.products for part in parts]
    return np.concatenate(blocks), np.sum(products, axis=0)


@given(shapes)
def test_the_median_is_numpys(shape: tuple[int, int, int]) -> None:
    U = drawn(*shape)
    np.testing.assert_allclose(aggregate("median", U).direction, np.median(U.astype(np.float64), axis=0), rtol=1e-15)


@given(shapes, st.integers(0, 5))
def test_the_trimmed_mean_is_that_of_sorted_columns(shape: tuple[int, int, int], f: int) -> None:
    U = drawn(*shape)
    if len(U) <= 2 * f:
        with pytest.raises(TooFewUpdatesError, match=f"byzantine = {f} needs at least {2 * f + 1} updates; there are"):
            aggregate("trimmed-mean", U, byzantine=f)
        return
    result = aggregate("trimmed-mean", U, byzantine=f)
    np.testing.assert_allclose(result.direction, trimmed(U, f), rtol=1e-12, atol=1e-15)
    assert result.coefficients is None
    np.testing.assert_allclose(result.weights, 1 / len(U))


@given(shapes, st.sampled_from(["median", "trimmed-mean"]), st.integers(0, 99))
def test_the_order_of_the_clients_does_not_matter_to_the_last_bit(
    shape: tuple[int, int, int], name: str, seed: int
) -> None:
    U = drawn(max(3, shape[0]), *shape[1:])
    order = np.random.default_rng(seed).permutation(len(U))
    assert aggregate(name, U).direction.tobytes() == aggregate(name, U[order]).direction.tobytes()


@given(st.integers(1, 4), st.integers(0, 999), st.floats(1, 1e6))
def test_a_minority_cannot_leave_the_range_of_the_honest(f: int, seed: int, size: float) -> None:
    honest = drawn(f + 2, 20, seed).astype(np.float64)
    U = np.concatenate([honest, size * np.random.default_rng(seed + 1).standard_normal((f, 20))])
    for direction in (aggregate("median", U).direction, aggregate("trimmed-mean", U, byzantine=f).direction):
        assert (direction >= honest.min(axis=0) - 1e-12).all()
        assert (direction <= honest.max(axis=0) + 1e-12).all()


def test_what_is_known_of_the_direction_is_measured_on_it() -> None:
    U = drawn(7, 5000).astype(np.float64) + 0.3
    result = aggregate("trimmed-mean", U, byzantine=2, measure=True)
    norm = np.linalg.norm(result.direction)
    cosines = U @ result.direction / np.linalg.norm(U, axis=1) / norm
    assert result.diagnostics["direction_norm"] == pytest.approx(norm, rel=1e-12)
    assert result.diagnostics["descent_min"] == pytest.approx(cosines.min(), rel=1e-9)
    assert result.diagnostics["descent_share"] == (cosines >= 0).mean()
    assert result.diagnostics["entropy"] == pytest.approx(np.log(7))
    assert result.diagnostics["stationary"] == 0


def test_a_direction_of_zero_is_stationary() -> None:
    u = drawn(1, 30)[0]
    result = aggregate("median", [u, np.zeros(30), -u])
    assert not result.direction.any()
    assert result.diagnostics["stationary"] == 1
    assert result.diagnostics["direction_norm"] == 0


@pytest.mark.parametrize("more", [{}, {"pre": ["normalize"]}])
@pytest.mark.parametrize("name", ["median", "trimmed-mean"])
def test_one_huge_update_does_not_make_the_direction_of_the_others_look_like_zero(
    name: str, more: dict[str, Any]
) -> None:
    U = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32)
    U[3] *= np.float32(1e30)
    result = aggregate(name, U, **more)
    assert result.diagnostics["stationary"] == 0
    assert np.linalg.norm(result.direction) > 0.1


def test_a_row_that_is_not_finite_is_dropped_and_the_rest_is_counted_anew() -> None:
    U = drawn(4, 10).astype(np.float64)
    U[1, 3] = np.inf
    result = aggregate("trimmed-mean", U, byzantine=1)
    assert result.dropped == (1,)
    np.testing.assert_allclose(result.direction, trimmed(U[[0, 2, 3]], 1))
    assert result.weights.tolist() == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])
    with pytest.raises(TooFewUpdatesError, match="there are 2"):
        aggregate("trimmed-mean", U[:3], byzantine=1)


@pytest.mark.parametrize(
    "pre", [["normalize"], ["clip"], ["nnm"], ["bucket"], ["normalize", "nnm"], ["clip", "bucket"]]
)
def test_stages_come_first(pre: list[str]) -> None:
    U = drawn(9, 400, seed=3).astype(np.float64) * np.arange(1, 10)[:, None]
    mixed = apply([STAGES[name]() for name in pre], rows_of(U)).matrix @ U
    result = aggregate("median", U, pre=pre)
    np.testing.assert_allclose(result.direction, np.median(mixed, axis=0), rtol=1e-9, atol=1e-12)
    assert result.weights.sum() == pytest.approx(1)
    assert result.coefficients is None


SIZES = [(1, 70_001), (3, 200_001), (50, 100_001), (300, 20_001)]


@pytest.mark.parametrize("size", few_of(SIZES, SIZES[0]))
def test_files_and_arrays_give_the_same_bytes_on_any_number_of_threads(tmp_path: Path, size: tuple[int, int]) -> None:
    m, U = size[0], drawn(*size)
    rows = stored(tmp_path, U)
    mixing = np.random.default_rng(1).standard_normal((m, m))
    for matrix in (np.eye(m), mixing):
        direction, products = streamed(matrix, (m - 1) // 4, rows, workers=1)
        np.testing.assert_allclose(direction, trimmed(matrix @ U.astype(np.float64), (m - 1) // 4), atol=1e-10)
        np.testing.assert_allclose(products, U.astype(np.float64) @ direction, rtol=1e-9, atol=1e-7)
        for workers, given_ in ((2, rows), (5, rows), (None, list(U))):
            again = streamed(matrix, (m - 1) // 4, given_, workers=workers)
            assert (again[0].tobytes(), again[1].tobytes()) == (direction.tobytes(), products.tobytes())


COMPUTATION = """
blocks = (part.block for part in trimmed_mean(np.eye(m), 2, rows))
slots = {"first": rows[0], "second": rows[1]}
apply_step(rows[0], 1.0, blocks, len, optimizer=FedAdam(), before=slots, after={"first": len, "second": len})
"""


@pytest.mark.full
def test_memory_grows_neither_with_rows_nor_with_their_length(tmp_path: Path) -> None:
    check_bounded(COMPUTATION, tmp_path, 2_000_000)


def test_the_gpu_agrees_with_the_cpu() -> None:
    need_gpu()
    U = drawn(9, 100_001)
    for matrix in (np.eye(9), np.random.default_rng(1).standard_normal((6, 9))):
        here, there = streamed(matrix, 2, list(U)), streamed(matrix, 2, list(U), device="cuda")
        np.testing.assert_allclose(there[0], here[0], atol=1e-12)
        np.testing.assert_allclose(there[1], here[1], rtol=1e-9, atol=1e-7)


def test_what_makes_no_sense_is_refused() -> None:
    rows: list[Row] = list(drawn(3, 4))
    with pytest.raises(ValueError, match=r"shape \(3, 2\) for 3 rows"):
        streamed(np.ones((3, 2)), 0, rows)
    for refused in (lambda: streamed(np.eye(3), 2, rows), lambda: Coordinates(np.eye(4), 2)):
        with pytest.raises(ValueError, match="2 cannot be left out at each end"):
            refused()


def test_the_command_line_shows_that_there_are_no_coefficients(tmp_path: Path) -> None:
    np.savez(tmp_path / "u.npz", updates=drawn(3, 5))
    arguments = ("aggregate", tmp_path / "u.npz", "--algorithm", "median")
    shown = command(*arguments).output
    assert [line.split() for line in shown.splitlines()[1:4]] == [[str(i), "0.333333", "-"] for i in range(3)]
    assert json.loads(command(*arguments, "--json").output)["coefficients"] is None
