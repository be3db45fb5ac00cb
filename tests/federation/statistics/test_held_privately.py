"""Private statistics: both verifiers compute the document from the members' words; each value of a run is edited."""

import ast
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from federation.aggregation.phases import Asked
from federation.digests import digest
from federation.record.bundle import blob_entry
from federation.secure.thresholds import Mode
from federation.statistics.data_columns import Column, ColumnError
from federation.statistics.result import summed
from federation.statistics.sums import sums_of
from federation.statistics.words import to_words
from federation.work.registry import encode, encode_statement
from tests.federation.work.scene import Cast, cast, names, play
from tests.few import few_of
from tests.verification import every_value, independent_statistics, independent_sums
from tests.verification.every_value import edited, edits, signed_anew
from tests.verification.independent_statistics import NoData
from tests.verification.independent_sums import Answer, NoSum
from tests.verification.independent_verifier import Wrong
from tests.verification.independent_verifier import verify as verify_independently
from tests.verification.recorded import FREE, NAMED, SIGNED, Recorded, by, check_listed, held_privately
from tests.verification.scene import Edited, checked, refusal
from tests.worker.work.scene import STAGES

NAMES = ("ada", "ben", "cleo", "dan", "eve")


# --- the document, computed twice


def words_of(random: np.random.Generator, columns: Sequence[Column], bins: int) -> NDArray[np.uint64]:
    """The sum of the words of five members; sometimes, one of them is another one."""
    total = np.zeros(1 + sum(map(independent_statistics.width, asked(columns, bins))), np.uint64)
    for _ in NAMES:
        size = int(random.choice([12, 40, 300]))
        shape = (size, int(random.choice([2, 3]))) if random.random() < 0.2 else (size,)
        told = []
        for column in columns:
            values = random.integers(0, 3, shape).astype(float) if column.classes else random.uniform(-2, 9, shape)
            values[random.random(shape) < random.choice([0.0, 0.1])] = np.nan
            told.append(sums_of(values, column, bins))
        total += to_words(size, told, columns).view(np.uint64)
    if random.random() < 0.4:
        change = random.choice([-1, 1, -5000, 5000, -(2**45), 2**45, 2**63 - 1])
        place = random.integers(len(total))
        total.view(np.int64)[place : place + 1] += change
    return total


def asked(columns: Sequence[Column], bins: int) -> list[independent_statistics.Asked]:
    return independent_statistics.asked(specification(columns, bins))


def specification(columns: Sequence[Column], bins: int) -> dict[str, dict[str, object]]:
    ranges = {column.name: [column.low, column.high] for column in columns if column.low is not None}
    classes = {column.name: column.classes for column in columns if column.classes}
    names = [column.name for column in columns]
    return {"statistics": {"columns": names, "ranges": ranges, "classes": classes, "bins": bins}}


def compare(seeds: range) -> tuple[str, int]:
    """Compares documents of many sums. Returns those that there are, and how many there are not."""
    columns = [Column(name="ranged", low=0.0, high=7.5), Column(name="free"), Column(name="kind", classes=3)]
    documents, none = "", 0
    for seed in seeds:
        random = np.random.default_rng(seed)
        bins = int(random.integers(2, 9))
        words = words_of(random, columns, bins)
        try:
            ours = summed(words, NAMES, columns, bins, ["train"]).document
        except ColumnError:
            ours = None
        try:
            by_the_page = independent_statistics.private_document(specification(columns, bins), words.tolist(), NAMES)
        except NoData:
            by_the_page = None
        assert ours == by_the_page, seed
        documents += "" if ours is None else ours.decode()
        none += ours is None
    return documents, none


def test_the_page_gives_the_same_bytes_as_the_code_for_sums_of_many_kinds() -> None:
    documents, none = compare(range(30))
    assert all(word in documents for word in ('"mean":null', '"mean":3', "fewer than 10", "not shown"))
    assert none > 0


@pytest.mark.full
def test_the_page_gives_the_same_bytes_as_the_code_for_thousands_of_sums() -> None:
    compare(range(1000, 4000))


def test_nothing_of_ours_computes_the_second_sum() -> None:
    tree = ast.parse(Path(str(independent_sums.__file__)).read_text())
    names = {one.module.partition(".")[0] for one in ast.walk(tree) if isinstance(one, ast.ImportFrom) and one.module}
    ours = {one.module for one in ast.walk(tree) if isinstance(one, ast.ImportFrom) and one.module}
    assert {name for name in ours if name.startswith(("federation", "tests"))} == {"federation.v1"}
    assert names == {"blake3", "collections", "cryptography", "dataclasses", "federation", "typing"}


# --- the sum of a session, computed twice


def answers(scene: Cast) -> list[Answer]:
    """All accepted replies to the phases of a session."""
    found = []
    for phase in scene.phases:
        stage = phase.kind.name
        for reply in scene.sent[stage, 0]:
            member = scene.members[reply.client_id]
            read = [name in ("masked", "shares") for name in reply.names]
            rows = [np.asarray(row) for row, is_read in zip(reply.rows, read, strict=True) if is_read]
            found.append(
                Answer(
                    name=reply.client_id,
                    stage=stage.removeprefix("secure-"),
                    digest=reply.envelope,
                    work=encode(phase.work(Asked(member.name, member.objectives, scene.spec, 0))),
                    statement=encode_statement(stage, reply.statement),
                    payload=rows[0].view(np.uint8) if rows else None,
                    payload_digest=reply.signed_payload,
                )
            )
    return found


def of_words(count: int) -> int:
    return 2**32 // count


@pytest.mark.parametrize("stage", few_of([None, *STAGES], STAGES[3]))
def test_the_page_gives_the_same_sum_as_the_code_whichever_member_is_lost(stage: str | None) -> None:
    scene = cast(8, assumed=1, lost={} if stage is None else {(stage, 0): names([2, 6])})
    total = play(scene, Mode.SUM)
    said = answers(scene)
    found = independent_sums.unmasked(said, "<u4", of_words)
    assert (found.members, found.agreed) == ([*total.record.survivors], [*total.record.members])
    assert np.array_equal(found.total, total.words)
    assert len(found.members) == (8 if stage in (None, *STAGES[4:]) else 6)
    first = {one.stage: place for place, one in reversed([*enumerate(said)])}  # the first reply to each phase
    for stage_, place in first.items():
        one = said[place]
        if stage_ == "unmask":
            assert one.payload is not None
            changed = replace(one, payload=one.payload ^ np.uint8(1))
        elif stage_ != "ready":  # its statement is agreed on by its keys, which are in each view
            changed = replace(one, statement=one.statement[:-1] + bytes([one.statement[-1] ^ 1]))
        else:
            changed = replace(one, name="another")
        with pytest.raises((NoSum, DecodeError, KeyError)):
            independent_sums.unmasked([*said[:place], changed, *said[place + 1 :]], "<u4", of_words)


# --- runs of real workers


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return held_privately(tmp_path_factory.mktemp("held"))


def accepted_independently(bundle: Edited, path: Path) -> bool:
    """True if the independent verifier accepts all of a bundle."""
    try:
        return not verify_independently(bundle.write(path)).missing
    except (Wrong, ValueError, KeyError, TypeError, OverflowError):  # a parser of Python's refuses, too
        return False


@pytest.mark.full
def test_both_verifiers_compute_the_document_from_the_words_of_the_members(held: Recorded, tmp_path: Path) -> None:
    assert len(checked(held.bundle, tmp_path)) == 1
    found = verify_independently(held.bundle.write(tmp_path / "run"))
    assert (found.rounds, found.missing) == (1, [])
    (payload, *_) = payloads(held, "masked")
    bare = held.bundle.having({payload: None}).write(tmp_path / "bare")
    assert verify_independently(bare).missing == ["round 0: the result: a blob is missing"]


def payloads(recorded: Recorded, row: str) -> list[str]:
    """The entries of payloads with this row."""
    return [name for name in recorded.bundle.blobs if f'"{row}"'.encode() in recorded.bundle.entries[name][:200]]


@pytest.mark.full
@pytest.mark.parametrize("row", ["masked", "shares"])
def test_each_word_and_each_share_of_a_member_is_bound_by_the_result(held: Recorded, tmp_path: Path, row: str) -> None:
    """Somebody who has all keys changes one word, and signs again whatever follows from it."""
    name, *_ = payloads(held, row)
    data = held.bundle.entries[name]
    begin = 8 + int.from_bytes(data[:8], "little")
    for place in range(begin, len(data), 8):
        other = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        follows = {digest(data).encode(): digest(other).encode()}
        bundle = held.bundle.having({name: None, blob_entry(digest(other)): other})
        bundle = signed_anew(bundle, every_value.messages(bundle), held.holders, held.keys["log"], follows)
        assert refusal(bundle, tmp_path), place
        assert not accepted_independently(bundle, tmp_path / "edited"), place


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_each_edit_of_private_statistics_is_refused_by_both_verifiers_or_listed(held: Recorded, tmp_path: Path) -> None:
    chosen = {name: edit for name, edit in edits(held.bundle).items() if "LoggedEntry" not in name}
    assert {edit.value.rpartition(" ")[2] for edit in chosen.values()} >= {
        f"ResultManifest.{name}" for name in ("replies", "left_out", "document", "document_bytes", "spec", "round")
    }
    _, count = check_listed(held, chosen, tmp_path / "edited")
    assert count > len(chosen)
    assert accepted_independently(held.again(), tmp_path / "edited")
    kinds = ("ResultManifest", "ReplyManifest", "AssignmentManifest", "ReceiptManifest", "RoundRecord")
    bound = [
        edit
        for edit in chosen.values()
        if not by(edit).startswith((FREE, SIGNED, NAMED)) and edit.value.rpartition(" ")[2].startswith(kinds)
    ]
    missed = [
        edit.name
        for edit in bound
        if not edit.value.endswith((".inputs", ".max_payload_bytes"))  # of private orders: not read there
        if accepted_independently(edited(held.bundle, edit, held.holders, held.keys["log"]), tmp_path / "edited")
    ]
    assert missed == []
