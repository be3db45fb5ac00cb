"""Results that describe data, computed a second time from the page, and each value of such a bundle edited."""

import ast
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from federation.digests import digest
from federation.statistics import result as of_result
from federation.statistics import shown
from federation.statistics.data_columns import Column, ColumnError
from federation.statistics.result import result
from federation.statistics.sums import ColumnSums, encoded, sums_of
from federation.vectors import payload_bytes
from federation.work.base import payload_layout
from federation.work.statistics.work import ROW, Statistics
from storage.states import RunState
from tests.described import begin, drawn, tell
from tests.stage import Stage
from tests.verification import every_value, independent_statistics
from tests.verification.every_value import Edit, edited, edits
from tests.verification.independent_statistics import NoData
from tests.verification.independent_verifier import Wrong
from tests.verification.independent_verifier import verify as verify_independently
from tests.verification.recorded import FREE, NAMED, SIGNED, Recorded, by, check_listed
from tests.verification.scene import Edited, checked, exported, refusal

NAMES = ("ada", "ben", "cleo")


# --- one result, computed twice


def columns_of(random: np.random.Generator) -> list[Column]:
    low = float(random.normal() * 10.0 ** random.integers(-3, 4))
    return [
        Column(name="ranged", low=low, high=low + float(random.uniform(0.1, 50))),
        Column(name="größe (cm)", low=0.0, high=1.0),
        Column(name="open"),
        Column(name="kind", classes=int(random.integers(2, 7))),
    ]


def values_of(random: np.random.Generator, column: Column, count: int) -> np.ndarray:
    """Values of a column: few, many, equal, huge, missing, outside; or of a channel of images."""
    shape = (count, int(random.integers(2, 5))) if random.random() < 0.2 else (count,)
    if column.classes:
        found = random.integers(0, column.classes, shape).astype(float)
    elif random.random() < 0.2:
        found = np.full(shape, 0.25)
    elif column.low is None:
        found = random.normal(size=shape) * 10.0 ** random.integers(-9, 30)
    else:
        found = random.uniform(*column.range, shape) ** random.integers(1, 3)
    found[random.random(shape) < random.choice([0.0, 0.05, 1.0], p=[0.6, 0.35, 0.05])] = np.nan
    found[random.random(shape) < random.choice([0.0, 0.02])] = 1e6
    return found


def told(random: np.random.Generator, columns: list[Column], bins: int, count: int) -> bytes:
    numbers = encoded(count, [sums_of(values_of(random, column, count), column, bins) for column in columns], columns)
    if random.random() < 0.15:  # a lie, which no data have or some could have
        with np.errstate(over="ignore"):
            numbers[random.integers(len(numbers))] *= random.choice([-1.0, 0.5, 2.0, 1e300, np.nan])
    return numbers.astype("<f8").tobytes()


def specification(columns: list[Column], bins: int) -> Mapping[str, Any]:
    section: dict[str, Any] = {"columns": [column.name for column in columns], "bins": bins}
    section["ranges"] = {column.name: [column.low, column.high] for column in columns if column.low is not None}
    section["classes"] = {column.name: column.classes for column in columns if column.classes}
    return {"statistics": section}


def payload_of(columns: list[Column], bins: int, numbers: bytes) -> bytes:
    work = Statistics(columns=tuple(columns), bins=bins, splits=("train",))
    return b"".join(payload_bytes(payload_layout(work.payload), {ROW: np.frombuffer(numbers, np.uint8)}))


def cases(first: int, count: int) -> Iterator[tuple[list[Column], int, dict[str, bytes]]]:
    for seed in range(first, first + count):
        random = np.random.default_rng(seed)
        columns, bins = columns_of(random), int(random.integers(2, 65))
        members = random.permutation(["ben", "Zoë", "ada", "b-10"])[: random.integers(1, 5)]
        sizes = random.choice([2, 12, 40, 300], size=len(members))
        yield (
            columns,
            bins,
            {str(name): told(random, columns, bins, int(size)) for name, size in zip(members, sizes, strict=True)},
        )


def both(columns: list[Column], bins: int, numbers: Mapping[str, bytes]) -> tuple[object, object]:
    """What the code and the page make of the numbers of members; None is no result."""
    try:
        made = result(numbers, columns, bins, ("train",))
        ours: object = (made.document, [*made.used], [*made.left_out])
    except ColumnError:
        ours = None
    payloads = {name: payload_of(columns, bins, data) for name, data in numbers.items()}
    try:
        return ours, independent_statistics.document(specification(columns, bins), payloads)
    except NoData:
        return ours, None


def test_the_page_gives_the_same_bytes_as_the_code_for_data_of_many_kinds() -> None:
    text, left_out, none = "", 0, 0
    for columns, bins, numbers in cases(0, 60):
        ours, by_the_page = both(columns, bins, numbers)
        assert ours == by_the_page
        if isinstance(ours, tuple):
            text += ours[0].decode()
            left_out += len(ours[2])
        none += ours is None
    assert all(words in text for words in ("fewer than 10", "not shown", '"mean":null', '"quantiles":{}'))
    assert left_out > 0
    assert none > 0


@pytest.mark.full
def test_the_page_gives_the_same_bytes_as_the_code_for_thousands_of_data_sets() -> None:
    for columns, bins, numbers in cases(1000, 2000):
        ours, by_the_page = both(columns, bins, numbers)
        assert ours == by_the_page


def test_the_sums_of_squares_that_a_few_values_could_have_are_those_of_the_page() -> None:
    """At the bound of Cauchy and Schwarz: the last value that is possible, and the first that is not."""
    column = Column(name="x", low=0.0, high=4.0)
    for second, possible in ((Fraction(64), True), (Fraction(64) - Fraction(1, 2**40), False)):
        sums = ColumnSums(
            values=16, unit=1, missing=0, outside=0, first=Fraction(32), second=second, cells=(0, 16, 0, 0)
        )
        numbers = {"ada": encoded(16, [sums], [column]).astype("<f8").tobytes()}
        ours, by_the_page = both([column], 4, numbers)
        assert ours == by_the_page
        assert (ours is not None) == possible


def test_nothing_of_ours_computes_the_second_result() -> None:
    tree = ast.parse(Path(str(independent_statistics.__file__)).read_text())
    names = {one.module for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)}
    names |= {alias.name for one in ast.walk(tree) if isinstance(one, ast.Import) for alias in one.names}
    assert names == {"json", "math", "struct", "collections.abc", "dataclasses", "fractions", "typing"}


# --- a run


def described(stage: Stage, path: Path, *, liar: bool = False) -> Recorded:
    """A run in which three members describe their data; the last one, with numbers of no data."""
    run, players = begin(stage, *NAMES)
    for number, player in enumerate(players):
        wrong = liar and player is players[-1]
        assert tell(player, drawn(number), np.full(3, np.nan).tobytes() if wrong else b"").accepted
    stage.wait_state(run, RunState.COMPLETED)
    keys = {player.name: player.member.files.signing_key for player in players}
    keys |= {"coordinator": stage.served.home.signing_key, "log": stage.served.home.log_key.key}
    return Recorded(Edited.of(exported(stage, run, path / "run.fedpareto")), keys)


def test_both_verifiers_compute_the_result_of_a_run(stage: Stage, tmp_path: Path) -> None:
    recorded = described(stage, tmp_path, liar=True)
    assert len(checked(recorded.bundle, tmp_path)) == 1
    found = verify_independently(tmp_path / "run.fedpareto")
    assert (found.rounds, found.missing) == (1, [])
    assert found.record.startswith("sha256:")
    payloads = [name for name in recorded.bundle.blobs if b'"statistics"' in recorded.bundle.entries[name][:200]]
    assert len(payloads) == 3
    bare = recorded.bundle.having({payloads[0]: None}).write(tmp_path / "bare")
    assert verify_independently(bare).missing == ["round 0: the result: a blob is missing"]


def nearer(patch: pytest.MonkeyPatch) -> None:
    """Another rounding of mean and deviation, where a count is hidden."""
    step = shown._step
    patch.setattr(shown, "_step", lambda least: step(least / 2))


def shows_what_gives_a_hidden_count_away(patch: pytest.MonkeyPatch) -> None:
    """The counts below 10 are hidden, and no other."""

    def planted(counts: list[int], values: int, fewest: int) -> list[int | str]:
        return [shown.FEWER if count < fewest else count for count in counts]

    patch.setattr(shown, "_hidden", planted)


def counts_a_member_twice(patch: pytest.MonkeyPatch) -> None:
    total = of_result.total  # type: ignore[attr-defined]

    def planted(of: Any) -> ColumnSums:
        first, *others = of
        return total([first, first, *others])

    patch.setattr(of_result, "total", planted)


def accepts_numbers_of_no_data(patch: pytest.MonkeyPatch) -> None:
    decoded = of_result.decoded  # type: ignore[attr-defined]

    def planted(numbers: Any, columns: Any, bins: int) -> Any:
        return decoded(np.nan_to_num(numbers, nan=1.0), columns, bins)

    patch.setattr(of_result, "decoded", planted)


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a finer rounding": nearer,
    "counts that give a hidden one away": shows_what_gives_a_hidden_count_away,
    "a member that counts twice": counts_a_member_twice,
    "numbers of no data": accepts_numbers_of_no_data,
}


@pytest.mark.parametrize("error", PLANTED)
def test_an_error_in_the_functions_that_the_coordinator_shares_with_verifiers_is_found(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    PLANTED[error](monkeypatch)
    recorded = described(stage, tmp_path, liar=error == "numbers of no data")
    assert len(checked(recorded.bundle, tmp_path)) == 1, "one function agrees with itself"
    with pytest.raises(Wrong, match="the document that follows"):
        verify_independently(tmp_path / "run.fedpareto")
    monkeypatch.undo()
    assert "not what follows from the replies" in refusal(recorded.bundle, tmp_path)


# --- edits

EDITED = ("ResultManifest", "ReplyManifest", "AssignmentManifest", "ReceiptManifest", "RoundRecord", "Row")


def accepted_independently(bundle: Edited, path: Path) -> bool:
    """True if the independent verifier accepts all of a bundle."""
    try:
        return not verify_independently(bundle.write(path)).missing
    except (Wrong, ValueError, KeyError, TypeError, OverflowError):  # a parser of Python's refuses, too
        return False


@pytest.mark.full
def test_an_edit_of_each_value_of_the_result_and_of_each_reply_is_refused_by_both_verifiers_or_listed(
    stage: Stage, tmp_path: Path
) -> None:
    recorded = described(stage, tmp_path, liar=True)
    chosen = {
        edit.name: edit
        for edit in edits(recorded.bundle).values()
        if edit.value.rpartition(" ")[2].partition(".")[0] in EDITED
    }
    assert {edit.value.rpartition(" ")[2] for edit in chosen.values()} >= {
        f"ResultManifest.{name}" for name in ("replies", "left_out", "document", "document_bytes", "spec", "round")
    }
    _, count = check_listed(recorded, chosen, tmp_path / "edited")
    assert count > len(chosen)
    again = recorded.again()
    assert accepted_independently(again, tmp_path / "edited")

    def bound(edit: Edit) -> bool:
        return not by(edit).startswith((FREE, SIGNED, NAMED))

    keys, log = recorded.holders, recorded.keys["log"]
    missed = [
        name
        for name, edit in chosen.items()
        if bound(edit) and accepted_independently(edited(recorded.bundle, edit, keys, log), tmp_path / "edited")
    ]
    assert missed == []


@pytest.mark.full
def test_each_number_that_a_member_has_told_is_bound_by_the_result(stage: Stage, tmp_path: Path) -> None:
    """Somebody who has all keys changes one number of a payload, and signs again whatever follows from it."""
    recorded = described(stage, tmp_path)
    run = tmp_path / "run.fedpareto"
    verify_independently(run)
    (name, *_) = [name for name in recorded.bundle.blobs if b'"statistics"' in recorded.bundle.entries[name][:200]]
    data = recorded.bundle.entries[name]
    begin_at = 8 + int.from_bytes(data[:8], "little")
    numbers = np.frombuffer(data[begin_at:], "<f8")
    for place, number in enumerate(numbers):
        changed = numbers.copy()
        changed[place] = 2 * number + 1e6  # more than a rounded mean hides
        other = data[:begin_at] + changed.tobytes()
        new = f"blobs/{digest(other).replace(':', '-')}"
        follows = {digest(data).encode(): digest(other).encode()}
        bundle = recorded.bundle.having({name: None, new: other})
        found = every_value.messages(bundle)
        bundle = every_value.signed_anew(bundle, found, recorded.holders, recorded.keys["log"], follows)
        assert "result" in refusal(bundle, tmp_path), place
        assert not accepted_independently(bundle, tmp_path / "edited"), place
