"""An edit by somebody who has the keys of all, and who signs again whatever follows: the digests and the audit log."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from federation.digests import digest
from federation.record.bundle import LOG, SPECIFICATION, BundleError, BundleReader, round_entry
from federation.trust.envelope import envelope_digest, key_id
from federation.v1.common_pb2 import (
    AssignmentManifest,
    ReceiptManifest,
    ReplyManifest,
    SignedEnvelope,
    StepManifest,
)
from federation.v1.record_pb2 import Exchange, RoundRecord
from tests.verification.scene import Edited, log_signed_again, other, signed_again
from tests.verification.test_record_vectors import KEYS, vector
from verification.errors import Wrong
from verification.run import verify

ROUNDS = 2  # of the run "open"
HOLDERS = {key_id(key.public_key()): key for key in KEYS.values()}

# What nobody can refute who was not there: times, words, and what a client says of itself that enters no step.
FREE: dict[type[Message], set[str]] = {
    AssignmentManifest: {"created", "deadline"},
    ReplyManifest: {"created", "seconds", "software", "unrepeatable", "losses", "metrics", "privacy"},
    ReceiptManifest: {"created", "message"},
    StepManifest: {"created", "code"},
}
OF_EVALUATIONS: dict[type[Message], set[str]] = {ReplyManifest: {"samples"}}


def envelopes(record: RoundRecord) -> Iterator[tuple[SignedEnvelope, type[Message]]]:
    """Those of a round, each after all whose digests it names."""
    phases = sorted(record.phases, key=lambda phase: not phase.decides)
    for phase in phases:
        if not phase.decides:
            yield record.step, StepManifest
        for exchange in phase.exchanges:
            yield from of_exchange(exchange)


def of_exchange(exchange: Exchange) -> Iterator[tuple[SignedEnvelope, type[Message]]]:
    yield exchange.assignment, AssignmentManifest
    for answer in exchange.answers:
        yield answer.reply, ReplyManifest
        yield answer.receipt, ReceiptManifest


def nothing(_: object) -> None:
    """Changes nothing."""


def signed_anew(
    bundle: Edited, wanted: type[Message], change: Callable[[Any], object] = nothing, *, evaluates: bool = False
) -> Edited:
    """The bundle with a change of the first envelope of a kind, after which all digests and signatures fit.

    With `evaluates`, of the first one about the evaluation of a model.
    """
    replaced = {
        digest(Edited.of(vector("open")).entries[SPECIFICATION]).encode(): digest(
            bundle.entries[SPECIFICATION]
        ).encode()
    }
    done = False
    records = [bundle.round(number) for number in range(ROUNDS)]
    for envelope, kind in (pair for record in records for pair in envelopes(record)):
        before = envelope_digest(envelope).encode()
        for old, new in replaced.items():
            envelope.manifest = envelope.manifest.replace(old, new)
        of_evaluation = getattr(kind.FromString(envelope.manifest), "phase", 0) == 1
        first = kind is wanted and not done and of_evaluation is evaluates
        done = done or first
        signed_again(envelope, kind, HOLDERS[envelope.key_id], change if first else nothing)
        if (after := envelope_digest(envelope).encode()) != before:
            replaced[before] = after
    log = bundle.log
    for entry in log.entries:
        entry.digest = replaced.get(entry.digest.encode(), entry.digest.encode()).decode()
    log_signed_again(log, KEYS["log"])
    rounds: dict[str, bytes | None] = {round_entry(one.number): one.SerializeToString() for one in records}
    return bundle.having({**rounds, LOG: log.SerializeToString()})


def refusal(bundle: Edited, path: Path) -> str:
    """Why a bundle is refused; empty if it is not."""
    with BundleReader(bundle.write(path / "edited")) as reader:
        try:
            list(verify(reader))
        except (Wrong, BundleError) as error:
            return str(error)
    return ""


@pytest.fixture(scope="module")
def record() -> Edited:
    return Edited.of(vector("open"))


def test_the_record_verifies_after_all_of_it_was_signed_again(record: Edited, tmp_path: Path) -> None:
    again = signed_anew(record, StepManifest, lambda step: step.created.GetCurrentTime())
    assert again.entries[LOG] != record.entries[LOG]
    assert refusal(again, tmp_path) == ""


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("kind", FREE)
def test_each_field_counts_that_others_can_judge(
    record: Edited, tmp_path: Path, kind: type[Message], evaluates: bool
) -> None:
    if kind is StepManifest and evaluates:
        return
    accepted = {
        field
        for field in kind.DESCRIPTOR.fields_by_name
        if not refusal(signed_anew(record, kind, partial(other, field=field), evaluates=evaluates), tmp_path)
    }
    assert accepted == FREE[kind] | (OF_EVALUATIONS.get(kind, set()) if evaluates else set())


@pytest.mark.parametrize("kind", FREE)
def test_a_field_that_nobody_knows_is_refused_although_it_was_signed(
    record: Edited, tmp_path: Path, kind: type[Message]
) -> None:
    changed = signed_anew(record, kind, lambda said: said.MergeFromString(b"\xf8\x07\x01"))
    assert "a field that this release does not know" in refusal(changed, tmp_path)


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
def test_a_run_that_breaks_its_specification_is_refused(
    record: Edited, tmp_path: Path, old: str, new: str, says: str
) -> None:
    text = record.entries[SPECIFICATION].decode()
    assert old in text
    changed = record.having({SPECIFICATION: text.replace(old, new, 1).encode()})
    assert says in refusal(signed_anew(changed, StepManifest), tmp_path)
