"""Compares the withdrawals of members on record with what the audit log tells of them.

Each entry `client.left` has the signed withdrawal of its member, from the joining in which the member was, and each
withdrawal has its entry. While a member has left, no reply of it is accepted.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from federation.digests import digest
from federation.record.exchange import Opened, Signers, mismatch, opened
from federation.record.joinings import (
    ENROLLED,
    JOINED_AGAIN,
    LEFT,
    ROTATED,
    WITH_CERTIFICATES,
    is_of_newest_joining,
)
from federation.record.log_entries import ACCEPTED
from federation.trust.envelope import envelope_digest
from federation.trust.identity import client_uri
from federation.v1.common_pb2 import SignedEnvelope, WithdrawalManifest

TELLING = (*WITH_CERTIFICATES, LEFT, ACCEPTED)  # the actions of the entries that are compared


class Told(Protocol):
    """An entry of the audit log; see `federation.record.log_entries.LogEntry`."""

    @property
    def actor(self) -> str:
        """The actor."""

    @property
    def action(self) -> str:
        """The action."""

    @property
    def subject(self) -> str:
        """The subject."""

    @property
    def outcome(self) -> str:
        """The outcome."""

    @property
    def detail(self) -> str:
        """The detail."""

    @property
    def digest(self) -> str:
        """The digest."""


def open_withdrawal(
    envelope: SignedEnvelope, client_id: str, signers: Signers, federation_id: str
) -> Opened[WithdrawalManifest]:
    """Opens the withdrawal of a client; its joining is not looked at."""

    def verify(envelope: SignedEnvelope, kind: type[WithdrawalManifest]) -> WithdrawalManifest:
        return signers.of_client(client_id, envelope, kind)

    found = opened("withdrawal", f"the withdrawal of {client_id!r}", envelope, WithdrawalManifest, verify)
    expected = {"federation_id": federation_id, "client_id": client_id}
    return found.but(mismatch(found.manifest, expected), action=LEFT, subject=client_id)


def withdrawal_problems(
    told: Iterable[Told], withdrawals: Sequence[SignedEnvelope], signers: Signers, federation_id: str
) -> Iterator[str]:
    """Describes what differs between the log and the withdrawals on record, one sentence each.

    Args:
        told: the entries with an action of `TELLING`, in the order of the log; others are ignored.
        withdrawals: those on record.
        signers: the keys that may sign them.
        federation_id: of the record.
    """
    kept = {envelope_digest(envelope): envelope for envelope in withdrawals}
    if len(kept) != len(withdrawals):
        yield "the record has a withdrawal twice"
    before: dict[str, list[Told]] = {}
    gone: set[str] = set()
    for entry in told:
        if entry.outcome or entry.action not in TELLING:
            continue
        name = entry.subject
        if entry.action == ACCEPTED:
            sender = entry.actor.rpartition("/")[2]
            # Verify, 16: a member that has left does no work: a reply that is accepted afterwards is not its own wish.
            if sender in gone:
                yield f"the log tells that a reply of {sender} to assignment {name} was accepted after it had left"
            continue
        if entry.action == LEFT:
            # Verify, 16: the member's own signature: the coordinator alone can make nobody leave.
            if (envelope := kept.pop(entry.digest, None)) is None:
                yield f"the log tells that {name} has left, and its withdrawal {entry.digest} is not in the record"
            else:
                yield from _differences(entry, envelope, before.get(name, []), signers, federation_id)
            gone.add(name)
        elif entry.action == JOINED_AGAIN:
            gone.discard(name)
        before.setdefault(name, []).append(entry)
    # Verify, 16: a withdrawal that the log hides would have had no effect.
    yield from (f"no entry of the log tells of the withdrawal {name}, which is in the record" for name in kept)


def _differences(
    entry: Told, envelope: SignedEnvelope, before: Sequence[Told], signers: Signers, federation_id: str
) -> Iterator[str]:
    client_id = entry.subject
    found = open_withdrawal(envelope, client_id, signers, federation_id)
    if found.problem is not None:
        yield found.words
        return
    if entry.actor != client_uri(federation_id, client_id):
        yield f"{found.name}: the log tells that {entry.actor} has sent it"
    # Verify, 16: from no later joining: it must not be used again once the member has come back.
    told = ((one.action, one.detail) for one in before)
    if not is_of_newest_joining(found.manifest.certificate, told):
        yield f"{found.name}: it is from an earlier joining than the one that the log tells of before it"
    key = next((one.digest for one in reversed(before) if one.action in (ENROLLED, ROTATED)), "")
    signer = signers.client(client_id, envelope).signer(envelope)
    # Verify, 16: by the key of that time: one that was replaced, since it leaked, must not make its member leave.
    if digest(signer.public_bytes_raw()) != key:
        yield f"{found.name}: it is signed with another key than its member had, by the log, when it left"
