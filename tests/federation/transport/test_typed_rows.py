"""Payloads whose rows are not float32: what is read of them, what is refused, and what aggregation makes of them."""

from pathlib import Path

import numpy as np
import pytest

from federation.aggregation.gram import gram
from federation.digests import digest
from federation.refusals import Refusal
from federation.transport.payload_check import PayloadCheck
from federation.vectors import DTYPES, Layout, parse_header, payload_bytes, update_layout, update_rows

MIXED = update_layout([("mask", 5, "U32"), ("small", 7, "BF16"), ("key", 3, "U8"), ("loss", 4)])


def bfloat16(values: np.ndarray) -> np.ndarray:
    """The upper halves of float32 numbers: bfloat16 rounded towards zero."""
    return (values.astype("<f4").view("<u4") >> np.uint32(16)).astype("<u2")


def rows(seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        "mask": draw.integers(0, 2**32, 5, dtype=np.uint32),
        "small": bfloat16(draw.standard_normal(7)),
        "key": draw.integers(0, 256, 3, dtype=np.uint8),
        "loss": draw.standard_normal(4).astype(np.float32),
    }


def write(path: Path, layout: Layout, values: dict[str, np.ndarray]) -> bytes:
    data = b"".join(payload_bytes(layout, values))
    path.write_bytes(data)
    return data


def checked(data: bytes, layout: Layout, chunk: int) -> PayloadCheck:
    check = PayloadCheck(layout)
    for start in range(0, len(data), chunk):
        check.feed(data[start : start + chunk])
    assert check.finish() == digest(data)
    return check


def test_every_row_comes_back_with_its_type(tmp_path: Path) -> None:
    values = rows()
    write(tmp_path / "payload", MIXED, values)
    found = update_rows(tmp_path / "payload")
    assert [(name, row.dtype) for name, row in found.items()] == [(t.name, t.dtype) for t in MIXED.tensors]
    for name in ("mask", "key", "loss"):
        np.testing.assert_array_equal(found[name].read(), values[name])
    widened = (values["small"].astype("<u4") << np.uint32(16)).view("<f4")
    np.testing.assert_array_equal(found["small"].read(), widened)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8, 1000])
def test_the_check_finds_the_norms_of_floats_whatever_the_pieces(chunk: int) -> None:
    values = rows()
    check = checked(b"".join(payload_bytes(MIXED, values)), MIXED, chunk)
    assert check.problem is None
    assert list(check.norms) == ["small", "loss"]
    assert check.norms["loss"] == pytest.approx(np.linalg.norm(values["loss"].astype(float)))


def test_only_floats_must_be_finite() -> None:
    values = rows()
    values["mask"][:] = 0x7FC00000  # the bits of NaN, as an integer
    assert checked(b"".join(payload_bytes(MIXED, values)), MIXED, 7).problem is None
    values["small"][2] = 0x7F80  # infinity
    problem = checked(b"".join(payload_bytes(MIXED, values)), MIXED, 7).problem
    assert problem is not None
    assert problem.reason == "non-finite"
    assert "small" in problem.message


@pytest.mark.parametrize("change", ["U8", "F32"])
def test_another_type_than_asked_for_is_refused(change: str) -> None:
    asked = update_layout([("row", 8, "U32")])
    sent = update_layout([("row", 8, change)])
    data = b"".join(payload_bytes(sent, {"row": np.zeros(8, dtype=DTYPES[change])}))
    problem = checked(data, asked, 1000).problem
    assert problem is not None
    assert problem.reason in ("dtype", "layout")


def test_a_payload_that_goes_on_or_ends_early_is_refused() -> None:
    data = b"".join(payload_bytes(MIXED, rows()))
    longer = checked(data + b"\0", MIXED, 9).problem
    shorter = checked(data[:-1], MIXED, 9).problem
    assert longer is not None
    assert "goes on" in longer.message
    assert shorter is not None
    assert "ends before" in shorter.message


def test_a_model_holds_float32_alone() -> None:
    header = update_layout([("weight", 8, "BF16")]).header
    with pytest.raises(Refusal, match="only F32", check=lambda error: error.reason == "dtype"):
        parse_header(header)


def test_the_gram_matrix_reads_bfloat16_as_the_numbers_that_it_holds(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    layout = update_layout([("loss", 10_000, "BF16")])
    files = []
    for index in range(3):
        path = tmp_path / str(index)
        write(path, layout, {"loss": bfloat16(draw.standard_normal(10_000))})
        files.append(update_rows(path)["loss"])
    same = np.stack([row.read() for row in files])
    np.testing.assert_array_equal(gram(files), gram(list(same)))
    mixed = [files[0], same[1], same[2].astype(np.float64)]
    np.testing.assert_allclose(gram(mixed), gram(list(same.astype(np.float64))), rtol=1e-15)


def test_integers_are_not_aggregated(tmp_path: Path) -> None:
    layout = update_layout([("mask", 8, "U32")])
    write(tmp_path / "masked", layout, {"mask": np.ones(8, dtype=np.uint32)})
    with pytest.raises(ValueError, match="U32"):
        gram([update_rows(tmp_path / "masked")["mask"]])


def test_a_row_of_another_length_or_type_is_not_written() -> None:
    layout = update_layout([("mask", 8, "U32")])
    for row in (np.ones(7, dtype=np.uint32), np.ones(8, dtype=np.float32)):
        with pytest.raises(ValueError, match="mask"):
            payload_bytes(layout, {"mask": row})
