"""The operations on d numbers: exact, reproducible, and small."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from federation.aggregation.gram import apply_step, combine, gram
from federation.aggregation.streaming import Row
from federation.vectors import RowFile
from tests.federation.aggregation.peak_memory import check_bounded
from tests.federation.aggregation.scene import drawn, need_gpu, printed, stored
from tests.few import few_of

SIZES = [(1, 200_001), (3, 200_001), (50, 150_001), (300, 20_001)]


def joined(coefficients: NDArray[np.float64], rows: list[Row], workers: int | None = None) -> NDArray[np.float64]:
    return np.concatenate(list(combine(coefficients, rows, workers=workers)))


@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(1, 3000), st.integers(0, 999))
def test_integers_give_the_exact_gram_matrix_and_direction(m: int, d: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    whole = rng.integers(-100, 100, (m, d))
    rows: list[Row] = list(whole.astype(np.float32))
    c = rng.integers(-5, 5, m)
    np.testing.assert_array_equal(gram(rows), whole @ whole.T)
    np.testing.assert_array_equal(joined(c.astype(np.float64), rows), c @ whole)


@pytest.mark.parametrize("size", few_of(SIZES, SIZES[0], SIZES[2]))
def test_files_and_arrays_give_the_same_bytes_on_any_number_of_threads(tmp_path: Path, size: tuple[int, int]) -> None:
    m, U = size[0], drawn(*size)
    rows = stored(tmp_path, U)  # 300 files are more than are kept open
    c = np.random.default_rng(1).standard_normal(m)
    K, direction = gram(rows, workers=1), joined(c, rows, workers=1)
    np.testing.assert_allclose(K, U.astype(np.float64) @ U.T.astype(np.float64), rtol=1e-11, atol=1e-8)
    np.testing.assert_allclose(direction, c @ U.astype(np.float64), atol=1e-11)
    for workers in (2, 5):
        assert gram(rows, workers=workers).tobytes() == K.tobytes()
        assert joined(c, rows, workers=workers).tobytes() == direction.tobytes()
    assert gram(list(U)).tobytes() == K.tobytes()
    assert joined(c, list(U)).tobytes() == direction.tobytes()


@pytest.mark.full
def test_the_bytes_do_not_depend_on_the_threads_of_the_library_below(tmp_path: Path) -> None:
    rows = stored(tmp_path, drawn(20, 300_001))
    program = (
        "import sys, hashlib\nfrom pathlib import Path\nimport numpy as np\n"
        "from federation.aggregation.gram import gram, combine, trimmed_mean\n"
        "from federation.vectors import update_rows\n"
        "rows = [update_rows(Path(p))['loss'] for p in sys.argv[1:]]\n"
        "d = np.concatenate(list(combine(np.arange(1.0, 21.0), rows)))\n"
        "U = np.random.default_rng(0).standard_normal((120, 30_001)).astype(np.float32)\n"
        "W = np.random.default_rng(1).standard_normal((60, 120))\n"
        "parts = [*trimmed_mean(W, 20, list(U), workers=1)]\n"
        "t = b''.join(one.tobytes() for part in parts for one in (part.block, part.products))\n"
        "print(hashlib.sha256(gram(rows).tobytes() + d.tobytes() + t).hexdigest())\n"
    )
    paths = [str(row.file) for row in rows if isinstance(row, RowFile)]
    assert len(printed(program, *paths, threads=("1", "2", "4"))) == 1


def test_k_is_symmetric_to_the_last_bit() -> None:
    K = gram(list(drawn(7, 70_000)))
    np.testing.assert_array_equal(K, K.T)


def test_the_sum_is_kept_in_float64() -> None:
    # A float32 sum of these stops growing at 2^24.
    u = np.ones(20_000_000, dtype=np.float32)
    assert gram([u])[0, 0] == 20_000_000


def test_arrays_of_float64_keep_their_precision() -> None:
    U = np.random.default_rng(0).standard_normal((3, 40))
    np.testing.assert_allclose(gram(list(U)), U @ U.T, rtol=1e-14)
    mixed: list[Row] = [U[0], U[1].astype(np.float32), U[2]]
    assert gram(mixed)[0, 2] == pytest.approx(U[0] @ U[2], rel=1e-14)


def test_rows_without_weight_are_not_read(tmp_path: Path) -> None:
    rows = stored(tmp_path, drawn(3, 1000))
    (tmp_path / "1.safetensors").unlink()
    assert len(joined(np.array([1.0, 0.0, 2.0]), rows)) == 1000
    assert not joined(np.zeros(3), rows).any()


def test_a_step_is_base_minus_rate_times_direction(tmp_path: Path) -> None:
    U, base = drawn(4, 100_001), drawn(1, 100_001, seed=9)[0]
    c = np.array([0.5, -1.0, 2.0, 0.0])
    pieces: list[bytes] = []
    norm = apply_step(base, 0.25, combine(c, stored(tmp_path, U)), lambda piece: pieces.append(bytes(piece)))
    direction = c @ U.astype(np.float64)
    model = np.frombuffer(b"".join(pieces), dtype="<f4")
    np.testing.assert_array_equal(model, (base - 0.25 * direction).astype(np.float32))
    assert norm == pytest.approx(np.linalg.norm(direction), rel=1e-12)


def test_a_step_without_weight_writes_the_base() -> None:
    base = drawn(1, 70_000)[0]
    pieces: list[bytes] = []
    norm = apply_step(base, 1.0, combine(np.zeros(1), [base]), lambda piece: pieces.append(bytes(piece)))
    assert b"".join(pieces) == base.tobytes()
    assert norm == 0


def test_a_step_out_of_the_range_of_float32_is_an_error() -> None:
    huge = np.full(10, 3e38, dtype=np.float32)
    with pytest.raises(FloatingPointError, match="leaves the range of float32"):
        apply_step(np.zeros(10, np.float32), 10.0, combine(np.ones(1), [huge]), lambda _: None)


def test_rows_of_different_lengths_are_refused() -> None:
    rows: list[Row] = [np.zeros(3, np.float32), np.zeros(4, np.float32)]
    with pytest.raises(ValueError, match=r"one length.*\[3, 4\]"):
        gram(rows)
    for base in (np.zeros(2, np.float32), np.zeros(4, np.float32)):
        with pytest.raises(ValueError, match="one length"):
            apply_step(base, 1.0, combine(np.ones(1), rows[:1]), lambda _: None)


def test_another_number_of_coefficients_than_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2,\) for 1 rows"):
        joined(np.ones(2), [np.zeros(3, np.float32)])


def test_a_file_that_shrank_is_an_error_and_no_crash(tmp_path: Path) -> None:
    rows = stored(tmp_path, drawn(2, 500_000))
    os.truncate(tmp_path / "1.safetensors", 1_000_000)
    with pytest.raises(OSError, match=r"1\.safetensors ends at byte 1000000"):
        gram(rows)


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="'tpu'"):
        gram([np.zeros(3, np.float32)], device="tpu")


COMPUTATION = """
gram(rows)
apply_step(rows[0], 1.0, combine(np.ones(m), rows), len)
"""


@pytest.mark.parametrize("longest", [600_000, pytest.param(2_000_000, marks=pytest.mark.full)])
def test_memory_grows_neither_with_rows_nor_with_their_length(tmp_path: Path, longest: int) -> None:
    check_bounded(COMPUTATION, tmp_path, longest)


def test_the_gpu_agrees_with_the_cpu(tmp_path: Path) -> None:
    need_gpu()
    U = drawn(6, 100_001)
    rows = stored(tmp_path, U)
    c = np.arange(6.0)
    np.testing.assert_allclose(gram(rows, device="cuda"), gram(rows), rtol=1e-12, atol=1e-9)
    direction = np.concatenate(list(combine(c, rows, device="cuda")))
    np.testing.assert_allclose(direction, joined(c, rows), atol=1e-12)
