"""Models and updates as flat vectors in safetensors files."""

import contextlib
import itertools
import json
import struct
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import numpy as safetensors

from federation import vectors
from federation.digests import digest
from federation.record.provenance import Provenance, read_exported, with_provenance
from federation.refusals import Refusal
from federation.task_layout import TaskLayout
from federation.tensor_names import first_difference
from federation.transport.payload_check import PayloadCheck

MODEL = vectors.Layout((vectors.Tensor("weight", (2, 3)), vectors.Tensor("bias", (3,)), vectors.Tensor("scale", ())))
ROWS = vectors.update_layout([("loss", 7), ("fairness", 5)])


def numbers(layout: vectors.Layout) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.arange(1, layout.size + 1).astype(np.float32) / np.float32(7)


def raw(document: Any, data: bytes = b"") -> bytes:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(begin: int, end: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def check(
    payload: bytes, layout: vectors.Layout = ROWS, cuts: tuple[int, ...] = (), algorithm: str = "blake3"
) -> PayloadCheck:
    found = PayloadCheck(layout, algorithm)
    edges = [0, *sorted(cut % (len(payload) + 1) for cut in cuts), len(payload)]
    for start, stop in pairwise(edges):
        found.feed(payload[start:stop])
    assert found.finish() == digest(payload, algorithm)
    return found


def refusal_of(found: PayloadCheck) -> str:
    """Why a payload is refused; empty if it is not."""
    return "" if found.problem is None else found.problem.reason


def test_a_vector_survives_its_file(tmp_path: Path) -> None:
    vectors.write_vectors(tmp_path / "m", MODEL, numbers(MODEL))
    layout, vector = vectors.read_vector(tmp_path / "m")
    assert layout == MODEL == vectors.model_layout(tmp_path / "m")
    np.testing.assert_array_equal(vector, numbers(MODEL))
    assert not vector.flags.writeable
    assert (tmp_path / "m").read_bytes() == vectors.to_bytes(MODEL, numbers(MODEL))
    assert (tmp_path / "m").stat().st_size == MODEL.file_bytes
    np.testing.assert_array_equal(vectors.model_row(tmp_path / "m").read(), numbers(MODEL))


def test_the_safetensors_library_reads_our_files() -> None:
    tensors = safetensors.load(vectors.to_bytes(MODEL, numbers(MODEL)))
    assert {name: t.shape for name, t in tensors.items()} == {"weight": (2, 3), "bias": (3,), "scale": ()}
    np.testing.assert_array_equal(tensors["bias"], numbers(MODEL)[6:9])


def test_we_read_files_of_the_safetensors_library(tmp_path: Path) -> None:
    tensors = {"b": np.ones((2, 2), np.float32), "a": np.zeros(3, np.float32)}
    (tmp_path / "m").write_bytes(safetensors.save(tensors, metadata={"format": "pt"}))
    layout, vector = vectors.read_vector(tmp_path / "m")
    assert {t.name: t.shape for t in layout.tensors} == {"b": (2, 2), "a": (3,)}
    assert vector.sum() == 4


def test_the_header_is_aligned_and_depends_on_the_layout_alone() -> None:
    assert len(MODEL.header) % 8 == 0
    assert MODEL.header == vectors.Layout(tuple(MODEL.tensors)).header
    assert vectors.parse_header(MODEL.header) == (MODEL, len(MODEL.header))


def test_the_header_of_a_mixture_of_experts_with_9216_adapters_is_taken_everywhere(tmp_path: Path) -> None:
    module = "adapted.base_model.model.model.layers.{}.mlp.experts.{}.{}_proj.lora_{}.default.weight"
    parts = itertools.product(range(24), range(64), ("gate", "up", "down"), "AB")
    layout = vectors.Layout(tuple(vectors.Tensor(module.format(*part), (1,)) for part in parts))
    assert (len(layout.tensors), len(layout.header) > 1_200_000) == (9216, True)
    data, found = vectors.to_bytes(layout, np.zeros(9216, np.float32)), PayloadCheck(None)
    found.feed(data)
    found.finish()
    assert (found.problem, found.layout) == (None, layout)
    origin = Provenance(federation="f", run="r", round="0", record="", entries="")
    (tmp_path / "m").write_bytes(with_provenance(layout.header, origin) + data[len(layout.header) :])
    assert vectors.model_layout(tmp_path / "m") == layout
    assert read_exported(tmp_path / "m", "blake3") == (digest(data), origin)


NESTED = b",".join([b"[" * 900 + b"]" * 900] * 100)
COSTLY = {  # headers, and the bytes of memory that a byte of each takes at most
    "lists": (b'{"a":[%s]}' % NESTED, 1),
    "objects": (b'{"a":[%s]}' % b",".join([b"{}"] * 60_000), 1),
    "metadata": (b'{"__metadata__":{"a":[%s]}}' % NESTED, 60),  # which has at most 1,000,000 bytes
    "tensors": (
        b"{%s}" % b",".join(b'"%d":%s' % (i, json.dumps(entry(4 * i, 4 * i + 4, [])).encode()) for i in range(2500)),
        11,
    ),
}


@pytest.mark.parametrize(("text", "most"), COSTLY.values(), ids=COSTLY)
def test_a_header_takes_little_memory_while_it_is_read(text: bytes, most: int) -> None:
    data = raw(text)
    tracemalloc.start()
    try:
        with contextlib.suppress(Refusal):
            vectors.parse_header(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak / len(data) < most + 3  # itself, and its text


def test_rows_of_an_update_are_found_by_objective(tmp_path: Path) -> None:
    vectors.write_vectors(tmp_path / "u", ROWS, numbers(ROWS))
    rows = vectors.update_rows(tmp_path / "u")
    assert list(rows) == ["loss", "fairness"]
    np.testing.assert_array_equal(rows["loss"].read(), numbers(ROWS)[:7])
    np.testing.assert_array_equal(rows["fairness"].read(), numbers(ROWS)[7:])


def test_a_row_must_be_a_vector(tmp_path: Path) -> None:
    vectors.write_vectors(tmp_path / "u", MODEL, numbers(MODEL))
    with pytest.raises(Refusal, match="layout"):
        vectors.update_rows(tmp_path / "u")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((), "at least one"),
        ((vectors.Tensor("a", (1,)), vectors.Tensor("a", (2,))), "twice"),
        ((vectors.Tensor("", (1,)),), "cannot name"),
        ((vectors.Tensor("__metadata__", (1,)),), "cannot name"),
        ((vectors.Tensor("a", (2, 0)),), "no elements"),
    ],
)
def test_an_impossible_layout_cannot_be_made(tensors: tuple[vectors.Tensor, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vectors.Layout(tensors)


def test_a_vector_of_another_size_or_type_is_not_written(tmp_path: Path) -> None:
    for wrong in (np.zeros(9, np.float32), np.zeros(10, np.float64), np.zeros((1, 10), np.float32)):
        with pytest.raises(ValueError, match="not the float32"):
            vectors.write_vectors(tmp_path / "m", MODEL, wrong)  # type: ignore[arg-type]
    assert not (tmp_path / "m").exists()


BAD_HEADERS = {
    "empty": (b"", "layout"),
    "short": (b"\x01\x02", "layout"),
    "truncated": (raw({"a": entry(0, 4, [1])})[:-3], "layout"),
    "absurd length": (struct.pack("<Q", 2**63) + b"{}", "limit:header"),
    "one byte too long": (struct.pack("<Q", vectors.MAX_HEADER_BYTES + 1) + b"{}", "limit:header"),
    "not utf-8": (raw(b"{\xff\xfe}"), "layout"),
    "not json": (raw(b"{'a': 1}"), "layout"),
    "pickle": (raw(b"\x80\x04\x95"), "layout"),
    "not an object": (raw([1, 2]), "layout"),
    "deep": (raw(b"[" * 100_000), "layout"),
    "more after its end": (raw(b'{"a":%s}}' % json.dumps(entry(0, 4, [1])).encode()), "layout"),
    "a number for a name": (raw(b"{1:%s}" % json.dumps(entry(0, 4, [1])).encode()), "layout"),
    "a long value": (raw(b'{"a":%s}' % json.dumps({**entry(0, 4, [1]), "x": "x" * 1000}).encode()), "layout"),
    "huge number": (raw(b'{"a":{"dtype":"F32","shape":[' + b"9" * 10_000 + b'],"data_offsets":[0,4]}}'), "layout"),
    "no tensors": (raw({}), "layout"),
    "metadata alone": (raw({"__metadata__": {"a": "b"}}), "layout"),
    "twice": (raw(b'{"a":%s,"a":%s}' % ((json.dumps(entry(0, 4, [1])).encode(),) * 2)), "layout"),
    "float16": (raw({"a": entry(0, 2, [1], "F16")}), "dtype"),
    "dtype is a list": (raw({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}), "dtype"),
    "extra key": (raw({"a": entry(0, 4, [1]) | {"x": 1}}), "layout"),
    "missing key": (raw({"a": {"dtype": "F32", "shape": [1]}}), "layout"),
    "no entry": (raw({"a": None}), "layout"),
    "hole": (raw({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}), "layout"),
    "hole in front": (raw({"a": entry(4, 8, [1])}), "layout"),
    "overlap": (raw({"a": entry(0, 8, [2]), "b": entry(4, 8, [1])}), "layout"),
    "backwards": (raw({"a": entry(8, 4, [1])}), "layout"),
    "wrong size": (raw({"a": entry(0, 8, [1])}), "layout"),
    "negative shape": (raw({"a": entry(0, 4, [-1, -1])}), "layout"),
    "boolean shape": (raw({"a": entry(0, 4, [True])}), "layout"),
    "fractional shape": (raw({"a": entry(0, 4, [1.0])}), "layout"),
    "empty tensor": (raw({"a": entry(0, 0, [0])}), "layout"),
    "overflow": (raw({"a": entry(0, 0, [2**32, 2**32])}), "layout"),
    "too many dimensions": (raw({"a": entry(0, 4, [1] * 33)}), "layout"),
    "three offsets": (raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}}), "layout"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_a_bad_header_is_refused_with_its_reason(case: str) -> None:
    payload, reason = BAD_HEADERS[case]
    with pytest.raises(Refusal, check=lambda error: error.reason == reason):
        vectors.parse_header(payload)
    assert refusal_of(check(payload, cuts=(1, 9))) == reason


@given(st.integers(0, len(MODEL.header) - 1), st.integers(0, 255))
def test_a_damaged_header_is_read_or_refused_and_nothing_else(position: int, value: int) -> None:
    damaged = bytearray(MODEL.header)
    damaged[position] = value
    try:
        layout, offset = vectors.parse_header(bytes(damaged))
    except Refusal:
        return
    assert not damaged[offset:].strip()  # a shorter length may cut off padding
    assert layout.size == MODEL.size


def test_a_file_that_is_longer_or_shorter_than_its_header_says_is_refused(tmp_path: Path) -> None:
    payload = vectors.to_bytes(MODEL, numbers(MODEL))
    for wrong in (payload + b"\0", payload[:-1]):
        (tmp_path / "m").write_bytes(wrong)
        with pytest.raises(Refusal, match="header describes"):
            vectors.read_vector(tmp_path / "m")


@given(st.lists(st.integers(0, 10_000), max_size=12), st.sampled_from(["blake3", "sha256"]))
def test_a_good_payload_passes_however_it_is_cut(cuts: list[int], algorithm: str) -> None:
    found = check(vectors.to_bytes(ROWS, numbers(ROWS)), cuts=tuple(cuts), algorithm=algorithm)
    assert found.problem is None
    vector = numbers(ROWS).astype(np.float64)
    assert found.norms == pytest.approx({"loss": np.linalg.norm(vector[:7]), "fairness": np.linalg.norm(vector[7:])})


@given(
    st.integers(0, ROWS.size - 1),
    st.sampled_from([np.nan, -np.nan, np.inf, -np.inf]),
    st.lists(st.integers(0, 10_000), max_size=12),
)
def test_one_value_that_is_not_finite_is_found_wherever_it_is(where: int, value: float, cuts: list[int]) -> None:
    vector = numbers(ROWS)
    vector[where] = value
    found = check(vectors.to_bytes(ROWS, vector), cuts=tuple(cuts))
    assert found.problem is not None
    assert found.problem.reason == "non-finite"
    assert ("loss" if where < 7 else "fairness") in found.problem.message


@given(st.lists(st.integers(0, 10_000), max_size=12))
def test_the_norm_of_a_row_is_zero_only_where_every_element_is(cuts: list[int]) -> None:
    vector = np.zeros(ROWS.size, np.float32)
    vector[0] = -0.0
    assert check(vectors.to_bytes(ROWS, vector), cuts=tuple(cuts)).norms == {"loss": 0.0, "fairness": 0.0}
    vector[3] = np.finfo(np.float32).smallest_subnormal
    found = check(vectors.to_bytes(ROWS, vector), cuts=tuple(cuts))
    assert found.norms == {"loss": pytest.approx(float(vector[3]), abs=0), "fairness": 0.0}
    assert found.problem is None


@given(st.lists(st.integers(0, 10_000), max_size=12))
def test_the_norm_of_the_largest_values_does_not_overflow(cuts: list[int]) -> None:
    largest = np.finfo(np.float32).max
    found = check(vectors.to_bytes(ROWS, np.full(ROWS.size, -largest)), cuts=tuple(cuts))
    assert found.problem is None
    assert found.norms == pytest.approx({"loss": float(largest) * 7**0.5, "fairness": float(largest) * 5**0.5})


@given(st.integers(0, ROWS.file_bytes - 1), st.lists(st.integers(0, 10_000), max_size=6))
def test_a_payload_that_ends_too_early_is_a_layout_problem(length: int, cuts: list[int]) -> None:
    assert refusal_of(check(vectors.to_bytes(ROWS, numbers(ROWS))[:length], cuts=tuple(cuts))) == "layout"


@pytest.mark.parametrize("tail", [b"\0", b"\0\0\0\0", b"\0" * 1000])
def test_a_payload_that_goes_on_is_a_layout_problem(tail: bytes) -> None:
    assert refusal_of(check(vectors.to_bytes(ROWS, numbers(ROWS)) + tail, cuts=(ROWS.file_bytes,))) == "layout"


@pytest.mark.parametrize(
    "other",
    [
        vectors.update_layout([("loss", 7)]),
        vectors.update_layout([("loss", 5), ("fairness", 7)]),
        vectors.update_layout([("fairness", 5), ("loss", 7)]),
        vectors.Layout((vectors.Tensor("loss", (7, 1)), vectors.Tensor("fairness", (5,)))),
    ],
)
def test_another_layout_than_the_assignments_is_refused(other: vectors.Layout) -> None:
    assert refusal_of(check(vectors.to_bytes(other, numbers(other)))) == "layout"


def test_an_absurd_header_is_refused_before_it_is_kept() -> None:
    found = PayloadCheck(ROWS)
    found.feed(struct.pack("<Q", 1_000_001))  # a model may have ten times as much
    assert found.problem is not None
    assert found.problem.reason == "limit:header"


def test_large_chunks_are_seen_whole() -> None:
    layout = vectors.update_layout([("loss", 300_001)])
    vector = np.ones(300_001, np.float32)
    vector[-1] = np.inf
    assert check(vectors.to_bytes(layout, vector), layout, cuts=(200_003,)).problem is not None
    assert check(vectors.to_bytes(layout, np.ones_like(vector)), layout, cuts=(200_003,)).problem is None


def test_versions_of_a_task_are_compared_by_the_names_shapes_places_and_buffers_of_their_tensors() -> None:
    weight, mean = vectors.Tensor("layer.weight", (8, 5)), vectors.Tensor("layer.mean", (5,))
    layout = vectors.Layout((weight, mean))
    found = TaskLayout.of(layout, {"layer.mean"})
    assert found.digest == "blake3:b941c1e0a2e3cdd6cab7fa2f33c48f7cf46fe292747b5bba09a9c065992b4dd0"  # as the protocol
    assert (found.tensors, found.elements) == (2, 45)
    others = [(mean, weight), (weight,), (weight, vectors.Tensor("layer.mean", (5, 1)))]
    digests = {found.digest, TaskLayout.of(layout).digest}
    assert len(digests | {TaskLayout.of(vectors.Layout(other), {"layer.mean"}).digest for other in others}) == 5
    for other, words in zip(others, ("tensor 1 is 'layer.mean' [5]", "tensor 2 is missing", "[5, 1]"), strict=True):
        assert words in first_difference(vectors.Layout(other).shapes, layout.shapes)
    assert first_difference(layout.shapes, layout.shapes) == ""
