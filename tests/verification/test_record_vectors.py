"""The bundles in tests/vectors/record, edited in many ways: `fedpareto verify`, and a verifier of its own."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from federation.record.bundle import BundleError, BundleReader
from federation.v1.common_pb2 import SignedEnvelope
from federation.v1.record_pb2 import LogRecord, RoundRecord
from tests.few import every, few
from tests.stage import Stage
from tests.verification import record_vectors
from tests.verification.every_value import is_map, opened
from tests.verification.independent_verifier import Wrong as AlsoWrong
from tests.verification.independent_verifier import verify as verify_independently
from tests.verification.record_vectors import OUTCOMES, at, change, put, vector
from tests.verification.scene import Edited
from verification.errors import VerificationError
from verification.own_replies import reply_outcomes
from verification.run import OpenedRun

VECTORS = record_vectors.DIRECTORY
EDITS = json.loads((VECTORS / "edits.json").read_text())


@pytest.mark.parametrize("name", OUTCOMES)
def test_both_verifiers_find_what_is_written_beside_the_bundles(name: str) -> None:
    expected = OUTCOMES[name]
    assert record_vectors.outcome(vector(name)) == expected
    found = verify_independently(vector(name), expected["ca"])
    assert (found.rounds, found.models, found.record) == (
        len(expected["rounds"]),
        expected["models"],
        expected["record"],
    )
    assert bool(found.missing) == (name in ("multi-gradient", "objectives"))  # it knows one algorithm
    with pytest.raises(AlsoWrong, match="the fingerprint"):
        verify_independently(vector(name), "00" * 32)


def test_the_independent_verifier_imports_nothing_of_ours_but_the_stubs() -> None:
    tree = ast.parse((Path(__file__).parent / "independent_verifier.py").read_text())
    ours = {"federation", "coordinator", "storage", "verification", "fedpareto", "worker", "bundles"}
    for node in ast.walk(tree):
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            assert name == "federation.v1" or name.partition(".")[0] not in ours


# --- edits


def placed(bundle: Edited, name: str) -> str:
    """The name of an entry; `kind[n]` is the n-th of a kind, in the order of the file."""
    if not name.endswith("]"):
        return name
    kind, _, place = name[:-1].partition("[")
    return [one for one in bundle.entries if one.startswith(f"{kind}/") and not one.endswith("ca.der")][int(place)]


def edited(bundle: Edited, edit: dict[str, Any]) -> Edited:
    name = placed(bundle, edit["entry"])
    if "add" in edit:
        return bundle.having({name: edit["add"].encode()})
    data = bundle.entries[name]
    if "append" in edit:
        return bundle.having({name: data + bytes.fromhex(edit["append"])})
    if "delete" in edit:
        return bundle.having({name: None})
    if "swap" in edit:
        other = placed(bundle, edit["swap"])
        return bundle.having({name: bundle.entries[other], other: data})
    if "flip" in edit:
        return bundle.having({name: data[:-1] + bytes([data[-1] ^ 1])})
    if "text" in edit:
        old, new = edit["text"]
        assert old in data.decode()
        return bundle.having({name: data.decode().replace(old, new, 1).encode()})
    message: Message = LogRecord.FromString(data) if name == "log.pb" else RoundRecord.FromString(data)
    change(message, edit)
    return bundle.having({name: message.SerializeToString()})


@pytest.mark.parametrize("case", every(2, EDITS), ids=[f"{case['bundle']}: {case['name']}" for case in EDITS])
def test_both_verifiers_refuse_each_edit_and_ours_names_it(case: dict[str, Any], tmp_path: Path) -> None:
    bundle = Edited.of(vector(case["bundle"]))
    for edit in case["edit"]:
        bundle = edited(bundle, edit)
    path = bundle.write(tmp_path / "edited")
    with pytest.raises((VerificationError, BundleError)) as raised, BundleReader(path) as reader:
        list(OpenedRun.of(reader).verify())
    said = str(raised.value)
    assert case["says"] in said
    assert case["round"] is None or said.startswith(f"round {case['round']}: ")
    with pytest.raises(AlsoWrong):
        verify_independently(path)


@pytest.mark.parametrize("path", [["step"], ["phases", 0, "exchanges", 0, "assignment"]])
def test_a_member_that_looks_for_its_replies_is_told_of_a_message_that_cannot_be_read(
    tmp_path: Path, path: list[str | int]
) -> None:
    bundle = Edited.of(vector("open")).with_round(0, lambda record: put(at(record, path), {"manifest": "/w=="}))
    with (
        BundleReader(bundle.write(tmp_path / "edited")) as reader,
        pytest.raises(BundleError, match="round 0 has a message that cannot be read"),
    ):
        list(reply_outcomes(reader, "ann", []))


# --- whether the bundles are those that this version writes


def filled(message: Message) -> Iterator[tuple[str, str]]:
    """The fields that have values, with the types of their messages; also inside of envelopes."""
    for field, value in message.ListFields():
        yield message.DESCRIPTOR.name, field.name
        if field.message_type is None or is_map(field):
            continue
        for one in value if field.is_repeated else [value]:
            yield from filled(opened(one, message, field.name) if isinstance(one, SignedEnvelope) else one)


def shape(path: Path) -> set[tuple[str, str]]:
    """The kinds of entries of a bundle, and the fields in them that have values."""
    bundle = Edited.of(path)
    found = {("entry", name.partition("/")[0]) for name in bundle.entries}
    found |= {*filled(bundle.about), *filled(bundle.log)}
    for number in range(bundle.about.rounds):
        found |= {*filled(bundle.round(number))}
    return found


@few("open", "objectives")
@pytest.mark.parametrize("name", OUTCOMES)
def test_the_bundles_have_the_form_that_this_version_writes(stage: Stage, tmp_path: Path, name: str) -> None:
    written = record_vectors.write(stage, name, tmp_path)
    assert shape(written) == shape(vector(name)), "run `python tests/verification/record_vectors.py`"
    assert record_vectors.outcome(written)["rounds"] == OUTCOMES[name]["rounds"]
