"""An edit by somebody who has the keys of all, and who signs again whatever follows: the digests and the audit log."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bundles import Edited, log_signed_again, other, signed_again
from google.protobuf.message import Message
from test_record_vectors import KEYS, vector

from federation.record.bundle import LOG, BundleError, BundleReader, round_entry
from federation.trust.envelope import envelope_digest, key_id
from federation.v1.common_pb2 import (
    AssignmentManifest,
    ReceiptManifest,
    ReplyManifest,
    SignedEnvelope,
    StepManifest,
)
from federation.v1.record_pb2 import Exchange, RoundRecord
from verification.errors import Wrong
from verification.run import verify

ROUNDS = 2  # of the run "open"
HOLDERS = {key_id(key.public_key()): key for key in KEYS.values()}

# What nobody can refute who was not there: times, words, and what a client says of itself that enters no step.
ACCEPTED: dict[type[Message], set[str]] = {
    AssignmentManifest: {"created", "deadline", "max_payload_bytes"},
    ReplyManifest: {"created", "seconds", "software", "unrepeatable", "losses", "metrics", "privacy"},
    ReceiptManifest: {"created", "message"},
    StepManifest: {"created", "code"},
}


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


def signed_anew(bundle: Edited, wanted: type[Message], change: Callable[[Any], object]) -> Edited:
    """The bundle with a change of the first envelope of a kind, after which all digests and signatures fit."""
    replaced: dict[bytes, bytes] = {}
    records = [bundle.round(number) for number in range(ROUNDS)]
    for envelope, kind in (pair for record in records for pair in envelopes(record)):
        before = envelope_digest(envelope).encode()
        for old, new in replaced.items():
            envelope.manifest = envelope.manifest.replace(old, new)
        first = kind is wanted and not replaced
        signed_again(envelope, kind, HOLDERS[envelope.key_id], change if first else lambda _: None)
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


@pytest.mark.parametrize("kind", ACCEPTED)
def test_each_field_counts_that_others_can_judge(record: Edited, tmp_path: Path, kind: type[Message]) -> None:
    accepted = {
        field
        for field in kind.DESCRIPTOR.fields_by_name
        if not refusal(signed_anew(record, kind, lambda said, field=field: other(said, field)), tmp_path)
    }
    assert accepted == ACCEPTED[kind]
