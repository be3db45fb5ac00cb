"""Rotation: a member replaces its signing key; the old key signs the new one.

The new key is on the disk before the coordinator receives it. After a crash in between, the same request is repeated
before the worker goes on, since only the coordinator knows if the old key is still valid.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from federation.errors import Error
from federation.refusals import Refusal
from federation.text_files import FORMAT, FormatError, check_format
from federation.transport.proxies import RouteError
from federation.trust.certificates import load_certificate, make_csr
from federation.trust.envelope import envelope_digest
from federation.trust.identity import parse_peer
from federation.trust.key_chain import moment, parse_rotations, read_rotations, rotate, rotations_text
from federation.trust.keys import (
    FileDamaged,
    IdentityError,
    new_tls_key,
    private_key_pem,
    replace_private,
    replace_together,
)
from federation.trust.member_files import COORDINATOR_ROTATIONS, OWN_ROTATIONS, MemberFiles, renewed_files
from federation.trust.proofs import prove_renewal
from federation.v1.common_pb2 import KeyRotation, RotationReceiptManifest
from federation.v1.federation_pb2 import RotateKeyRequest, RotateKeyResponse
from federation.v1.federation_pb2_grpc import FederationStub
from worker.home import FileLocked, WorkerHome
from worker.site.roster import Card, Roster, pinned_roster
from worker.work.memory import WorkerMemory

ROTATE_SECONDS = 60.0
# The coordinator has not registered the new key, and never will.
_REFUSED = frozenset({"rotation", "signing-key", "key-unknown", "key-ended", "signature", "manifest", "run-state"})


class RotationError(Error):
    """The new key is not valid, or it is not known if it is; the message says which and what to do."""


@dataclass(frozen=True)
class Rotated:
    """A member with its new signing key. `until` is when the old one stops being valid for earlier assignments."""

    member: MemberFiles
    until: datetime


@dataclass(frozen=True)
class _Begun:
    key: Ed25519PrivateKey
    rotation: KeyRotation


def rotate_key(home: WorkerHome, member: MemberFiles, *, passphrase: bytes | None = None, now: datetime) -> Rotated:
    """Replaces the signing key of a member whose worker does not run; the caller has locked the home.

    A rotation that has begun before is completed instead. `now` is by this machine's clock.

    Raises:
        RotationError: the coordinator cannot be reached, or refuses; the directory cannot be written.
        FileLocked: another process has locked a file of the home.
        WorkerHomeError: the worker's memory is damaged.
        IdentityError, RosterError: a file of the home is damaged.
    """
    with _writing(home):
        begun = _begun(home, member, passphrase) or _begin(home, member, passphrase, now)
        return _end(home, member, begun, passphrase)


def end_rotation(home: WorkerHome, member: MemberFiles, *, passphrase: bytes | None = None) -> MemberFiles:
    """Completes a rotation that has begun, if there is one; arguments and errors are those of `rotate_key`."""
    with _writing(home):
        begun = _begun(home, member, passphrase)
        return member if begun is None else _end(home, member, begun, passphrase).member


@contextmanager
def _writing(home: WorkerHome) -> Iterator[None]:
    try:
        yield
    except FileLocked:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise RotationError(f"{home.directory} cannot be written ({reason}): make room there") from error


def _begin(home: WorkerHome, member: MemberFiles, passphrase: bytes | None, now: datetime) -> _Begun:
    key, number = Ed25519PrivateKey.generate(), len(read_rotations(home.own_rotations)) + 1
    rotation = rotate(
        member.signing_key, key, federation_id=member.federation_id, client_id=member.client_id, number=number, now=now
    )
    document = {
        "format": FORMAT,
        "key": private_key_pem(key, passphrase).decode(),
        "rotation": rotations_text([rotation]),
    }
    replace_private(home.rotating, json.dumps(document).encode())
    return _Begun(key, rotation)


def _begun(home: WorkerHome, member: MemberFiles, passphrase: bytes | None) -> _Begun | None:
    """The rotation that has begun; None if there is none, or if it is complete already."""
    if not home.rotating.exists():
        return None
    try:
        document = json.loads(home.rotating.read_text())
        check_format(document["format"])
        key = load_pem_private_key(document["key"].encode(), passphrase)
        [rotation] = parse_rotations(document["rotation"])
    except FormatError as error:
        raise FileDamaged(f"{home.rotating}: {error}: use the version that wrote it") from None
    except (ValueError, KeyError, TypeError) as error:
        raise FileDamaged(f"{home.rotating} is damaged: {error}; restore it from a backup") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise FileDamaged(f"{home.rotating} does not hold an Ed25519 key; restore it from a backup")
    if key.private_bytes_raw() == member.signing_key.private_bytes_raw():
        home.rotating.unlink()
        return None
    return _Begun(key, rotation)


def _end(home: WorkerHome, member: MemberFiles, begun: _Begun, passphrase: bytes | None) -> Rotated:
    tls_key = new_tls_key()
    csr = make_csr(tls_key)
    request = RotateKeyRequest(rotation=begun.rotation, csr=csr, proof=prove_renewal(begun.key, csr))
    answer = _ask(home, member, request)
    changed = replace(member, signing_key=begun.key, tls_key=tls_key, certificate=answer.certificate)
    receipt = _receipt(changed, begun.rotation, answer)
    kept = KeyRotation(statement=begun.rotation.statement, possession=begun.rotation.possession, receipt=answer.receipt)
    rotations = (*read_rotations(home.own_rotations), kept)
    files = {
        **renewed_files(tls_key, answer.certificate, passphrase),
        "signing.key": private_key_pem(begun.key, passphrase).decode(),
        OWN_ROTATIONS: rotations_text(rotations),
    }
    if member.coordinator.rotations:
        files[COORDINATOR_ROTATIONS] = rotations_text(member.coordinator.rotations)
    if (roster := pinned_roster(home.roster, member)) is not None:
        files[home.roster.name] = _with_new_card(roster, Card.of(changed, rotations)).text
    WorkerMemory.erase_kept(home.memory)  # the old key encrypts it
    replace_together(home.directory, files)
    home.rotating.unlink()
    return Rotated(changed, moment(receipt.until))


def _ask(home: WorkerHome, member: MemberFiles, request: RotateKeyRequest) -> RotateKeyResponse:
    goes_on = "`fedpareto worker rotate-key` goes on, and so does `fedpareto worker run`"
    try:
        address, channel = member.serving_channel()
    except RouteError as error:
        raise RotationError(f"{member.client_id} has registered no new signing key ({error}): {goes_on}") from None
    with channel:
        try:
            return FederationStub(channel).RotateKey(request, timeout=ROTATE_SECONDS)
        except grpc.RpcError as error:
            refusal = member.refusal(error, address)
            reason = ": ".join(part for part in (refusal.reason, refusal.message or refusal.status) if part)
            if refusal.reason in _REFUSED:
                home.rotating.unlink()
                raise RotationError(f"{address} refused the new signing key: {reason}") from error
            raise RotationError(
                f"{address} did not answer whether it has the new signing key of {member.client_id} ({reason}): "
                f"{goes_on}"
            ) from error


def _receipt(member: MemberFiles, rotation: KeyRotation, answer: RotateKeyResponse) -> RotationReceiptManifest:
    """The receipt, after checks that find a coordinator's mistakes early."""
    try:
        member.coordinator.learn(answer.rotations)
        receipt = member.coordinator.verify(answer.receipt, RotationReceiptManifest)
        holder = parse_peer(answer.certificate)
        fits = load_certificate(answer.certificate).public_key() == member.tls_key.public_key()
    except (Refusal, IdentityError) as error:
        raise RotationError(f"the coordinator's answer cannot be used: {error}") from error
    expected = (member.federation_id, member.client_id, envelope_digest(rotation.statement))
    expected_holder = (member.federation_id, member.client_id, member.signing_key.public_key().public_bytes_raw())
    fits = fits and (holder.federation_id, holder.name, holder.signing_key) == expected_holder
    if not fits or (receipt.federation_id, receipt.client_id, receipt.rotation) != expected:
        raise RotationError("the coordinator's receipt or certificate is for another key or member")
    return receipt


def _with_new_card(roster: Roster, card: Card) -> Roster:
    others = (other for other in roster.cards if other.client_id != card.client_id)
    return replace(roster, cards=tuple(sorted((*others, card), key=lambda member_card: member_card.client_id)))
