"""Each value in a bundle is edited: `verify` refuses it, or docs/reference/verify.md says that the value is not bound.

An edit is made by somebody who has no key, and by somebody who has all keys and signs again whatever follows.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from federation.digests import digest
from federation.record.bundle import SPECIFICATION
from tests.few import few_of
from tests.verification import every_value
from tests.verification.every_value import Edit, edits, signed_anew, values
from tests.verification.record_vectors import OUTCOMES
from tests.verification.recorded import (
    FREE,
    SIGNED,
    bound,
    by,
    check_listed,
    eventful,
    first_of,
    frozen,
    outcome,
    private,
)
from tests.verification.scene import Edited, refusal


def test_the_page_has_a_row_for_each_value() -> None:
    assert {name.partition(" ")[0] for name in bound()} == values()


MANIFESTS = ("AssignmentManifest", "ReplyManifest", "ReceiptManifest", "StepManifest")


@pytest.mark.parametrize("kind", few_of(MANIFESTS, "ReplyManifest"))
@pytest.mark.full
def test_an_edit_of_each_field_of_a_signed_message_is_refused_or_listed(tmp_path: Path, kind: str) -> None:
    chosen = first_of(frozen("open"), kind)
    free, _ = check_listed(frozen("open"), chosen, tmp_path / "edited")
    listed = {edit.value for edit in chosen.values() if by(edit).startswith((FREE, SIGNED))}
    # By the samples, the rule of this run weighs.
    assert listed - free == ({"ReplyManifest.samples"} if kind == "ReplyManifest" else set())


def test_a_sample_of_the_edits_is_refused_or_listed(tmp_path: Path) -> None:
    for name in ("open", "objectives", "multi-gradient"):
        chosen = dict(list(edits(frozen(name).bundle).items())[3::96])
        _, count = check_listed(frozen(name), chosen, tmp_path / "edited")
        assert count > len(chosen)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_each_edit_of_an_open_run_is_refused_or_listed(tmp_path: Path) -> None:
    done: dict[str, Edit] = {}
    free, count = set[str](), 0
    for recorded in (eventful(tmp_path), *map(frozen, OUTCOMES)):
        chosen = edits(recorded.bundle)
        found, refusals = check_listed(recorded, chosen, tmp_path / "edited")
        free, count, done = free | found, count + refusals, done | chosen
    print(f"{len(done)} edits of {len({edit.value for edit in done.values()})} values; {count} refusals")
    assert len(done) >= 300
    listed = {edit.value for edit in done.values() if by(edit).startswith((FREE, SIGNED))}
    never = {value.rpartition(" ")[2] for value in listed} - {value.rpartition(" ")[2] for value in free}
    assert never == set(), "the page lists values whose edits are refused"


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_each_edit_of_a_private_run_is_refused_or_listed(tmp_path: Path) -> None:
    recorded = private(tmp_path)
    chosen = {name: edit for name, edit in edits(recorded.bundle).items() if "LoggedEntry" not in name}
    assert len(chosen) >= 150
    _, count = check_listed(recorded, chosen, tmp_path / "edited")
    print(f"{len(chosen)} edits; {count} refusals")


def of_entries(bundle: Edited) -> Iterator[tuple[str, Edited]]:
    """Edits of whole entries of a bundle."""
    seen = set[str]()
    for name, data in bundle.entries.items():
        kind = name.partition("/")[0] + (" of the CA" if name.endswith("/ca.der") else "")
        if kind in seen:
            continue
        seen.add(kind)
        yield f"{kind} removed", bundle.having({name: None})
        yield f"{kind} flipped", bundle.having({name: data[:-1] + bytes([data[-1] ^ 1])})
        yield f"{kind} longer", bundle.having({name: data + b"\0"})
        yield f"{kind} emptied", bundle.having({name: b""})
    yield "an entry added", bundle.having({"more": b"x"})
    yield "a blob added", bundle.having({f"blobs/blake3-{64 * '0'}": b"x"})
    yield "a round added", bundle.having({"rounds/000009.pb": b""})
    about = json.loads(bundle.entries["bundle.json"])
    yield "a key added", bundle.having({"bundle.json": json.dumps({**about, "more": 1}).encode()})


def test_each_entry_of_a_bundle_counts(tmp_path: Path) -> None:
    recorded = frozen("open")
    found = {name: outcome(bundle, tmp_path / "edited") for name, bundle in of_entries(recorded.bundle)}
    named = {name for name, (said, missing) in found.items() if said == "accepted" and missing}
    assert {name for name, (said, missing) in found.items() if said == "accepted" and not missing} == set()
    assert named == {"blobs removed"}


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "selection.minimum = 3",
            "selection.minimum = 4",
            "3 clients were asked; by selection.minimum = 4, at least 4",
        ),
        ("selection.minimum = 3", 'selection.required = ["dan"]', "dan was not asked, and selection.required names it"),
        ("selection.minimum = 3", 'selection.exclude = ["ben"]', "ben was asked; selection.exclude says no"),
        ("selection.minimum = 3", 'selection.members = ["ann", "ben"]', "cleo was asked; selection.members says no"),
        ("rounds = 2", "rounds = 1", "the specification ends after 1 rounds"),
        ("rounds = 2", "rounds = 3", "the run is COMPLETED after 2 of 3 rounds"),
        ('name = "open"', 'name = "another"', "the bundle says that the run is called 'open'"),
    ],
)
def test_a_run_that_breaks_its_specification_is_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    recorded = frozen("open")
    text = recorded.bundle.entries[SPECIFICATION]
    broken = text.replace(old.encode(), new.encode(), 1)
    assert broken != text
    bundle, follows = recorded.bundle.having({SPECIFICATION: broken}), {digest(text).encode(): digest(broken).encode()}
    found = every_value.messages(bundle)
    assert says in refusal(signed_anew(bundle, found, recorded.holders, recorded.keys["log"], follows), tmp_path)
