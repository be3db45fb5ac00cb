"""A search for an edit of a bundle that `verify` accepts although nothing lists it, or that harms its reader.

Each edited bundle is given to the command `fedpareto verify`. It must refuse it in one line, or the page must list each
value that was changed. It never ends with a traceback, never needs much memory, and prints what is printable alone.
"""

import io
import random
import re
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from federation.record.bundle import LOG, ROTATIONS
from federation.text import escaped_lines
from fedpareto.cli.failure import CommandFailure
from fedpareto.cli.verify import verify_command
from tests.fuzzing import bounded_memory
from tests.verification.every_value import Edit
from tests.verification.random_edits import FORGED, Editor
from tests.verification.record_vectors import OUTCOMES, vector
from tests.verification.recorded import FREE, NAMED, SIGNED, Recorded, by, eventful, frozen, private
from tests.verification.scene import MOST, forget_peak, peak

LINE = 1100  # characters: 1000 of a text of others, and its length


@dataclass(frozen=True)
class Read:
    """What the command did with a bundle: its exit code, its lines, and the memory that it needed, in bytes."""

    code: int
    output: str
    memory: int


def read(path: Path) -> Read:
    """Runs the command; each exception but that of a failure, or of an exit, is an error of this test."""
    printed, code, before = io.StringIO(), 0, forget_peak()
    with redirect_stdout(printed), redirect_stderr(printed):
        try:
            verify_command(path)
        except CommandFailure as failure:
            code = failure.code
            printed.write(f"fedpareto: {escaped_lines(failure.message)}\n")  # as `main` prints it
        except typer.Exit as end:
            code = end.exit_code
    return Read(code, printed.getvalue(), peak() - before)


def check_printable(output: str) -> None:
    assert output.replace("\n", "").isprintable()
    assert not any(line.startswith(FORGED) for line in output.splitlines())
    assert max(map(len, output.splitlines())) <= LINE + 100


def listed(edit: Edit, *, signed: bool, bare: bool) -> bool:
    """True if the page says that this value may have this difference in an accepted bundle."""
    if not edit.field:  # an entry
        return False
    return by(edit, bare=bare).startswith((FREE, SIGNED) if signed else (FREE,))


def _is_signed_again(edit: Edit, recorded: Recorded) -> bool:
    """True if an edit is undone, or harmless, when all is signed again.

    The log is signed by its key. A holder whose key was replaced may sign with the newer key, too.
    """
    value = edit.value.rpartition(" ")[2]
    any_key = edit.entry == LOG or ROTATIONS in recorded.bundle.entries
    return value == "SignedEnvelope.signature" or (value == "SignedEnvelope.key_id" and any_key)


def check_refused_or_listed(recorded: Recorded, changed: set[Edit], result: Read, honest: int, *, signed: bool) -> str:
    """The outcome of the edits of some values, in a word. Raises AssertionError."""
    if result.code == 1:
        return "refused"
    assert result.code in (honest, 3)
    if signed:  # what was signed again has a valid signature; the log, by its key
        changed = {edit for edit in changed if not _is_signed_again(edit, recorded)}
    if signed and not all(edit.field for edit in changed):
        return "another record"  # a specification or a blob, signed by all
    absent = {edit for edit in changed if edit.value.startswith("blobs/")}
    if result.code == 3:
        absent |= {edit for edit in changed if edit.field and by(edit).startswith(NAMED)}
    free = {edit.name for edit in changed if edit not in absent and not listed(edit, signed=signed, bare=recorded.bare)}
    assert free == set()
    return "listed" if changed else "the same"


def search(recorded: Recorded, path: Path, seeds: range) -> Counter[str]:
    """Edits a bundle once for each seed. Returns how often each outcome was."""
    editor = Editor(recorded.bundle, recorded.holders, recorded.keys["log"])
    honest = read(recorded.bundle.write(path)).code
    assert honest in (0, 3)
    outcomes: Counter[str] = Counter()
    with bounded_memory(1 << 30):
        for seed in seeds:
            for signed in (False, True):
                draft = editor.draw(random.Random(seed))
                changed = draft.differences()
                result = read((draft.by_all() if signed else draft.alone()).write(path))
                try:
                    assert result.memory < MOST
                    check_printable(result.output)
                    outcome = check_refused_or_listed(recorded, changed, result, honest, signed=signed)
                except AssertionError as error:
                    error.add_note(f"seed {seed}, {'signed by all' if signed else 'without keys'}: {draft.words}")
                    raise
                outcomes[outcome] += 1
    return outcomes


def damaged(data: bytes, chance: random.Random) -> bytes:
    """The bytes of a file after one to four changes, in one of two near the headers of the archive."""
    changed = bytearray(data)
    headers = [match.start() for match in re.finditer(rb"PK[\1\3\5]", data)]
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = min(
            chance.choice((chance.randrange(len(changed)), chance.choice(headers) + chance.randrange(60))),
            len(changed) - 1,
        )
        act = chance.randrange(5)
        if act == 0:
            changed[at] = chance.randrange(256)
        elif act == 1:
            changed[at : at + 4] = chance.choice((b"\xff" * 4, bytes(4), b"\xff\xff\xff\x7f"))
        elif act == 2:
            del changed[at : at + chance.choice((1, 4, 100, 2000))]
        elif act == 3:
            changed[at:at] = chance.randbytes(chance.choice((1, 4, 100)))
        else:
            changed[at:at] = data[chance.randrange(len(data)) :][: chance.choice((30, 46, 500))]
    return bytes(changed)


def damage(name: str, path: Path, seeds: range) -> Counter[int]:
    """Damages the bytes of a bundle once for each seed. Returns how often each exit code was."""
    data = vector(name).read_bytes()
    codes: Counter[int] = Counter()
    with bounded_memory(1 << 30):
        for seed in seeds:
            path.write_bytes(damaged(data, random.Random(seed)))
            result = read(path)
            check_printable(result.output)
            assert result.memory < MOST, f"seed {seed}"
            codes[result.code] += 1
    return codes


def test_a_random_edit_is_refused_or_listed_and_harms_no_reader(tmp_path: Path) -> None:
    outcomes = search(frozen("open"), tmp_path / "edited", range(40))
    assert outcomes["refused"] > 50
    assert outcomes["listed"] > 0


def test_a_bundle_with_damaged_bytes_is_refused_in_one_line(tmp_path: Path) -> None:
    codes = damage("open", tmp_path / "damaged", range(50))
    assert codes[1] > 25
    assert codes.keys() <= {0, 1}  # bytes that no reader reads, such as the times of the archive


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", OUTCOMES)
def test_thousands_of_random_edits_are_refused_or_listed(tmp_path: Path, name: str) -> None:
    print(search(frozen(name), tmp_path / "edited", range(1000)))
    print(damage(name, tmp_path / "damaged", range(1000)))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("made", "count"), [(eventful, 500), (private, 200)])
def test_random_edits_of_an_eventful_and_of_a_private_run_are_refused_or_listed(
    tmp_path: Path, made: Callable[[Path], Recorded], count: int
) -> None:
    print(search(made(tmp_path), tmp_path / "edited", range(count)))
