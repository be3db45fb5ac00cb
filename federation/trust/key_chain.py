"""The signing keys of one holder over time: the old key signs each new one (docs/operate/operations.md).

An envelope counts if its key belonged to the holder when the envelope was made. For the coordinator, the manifest has
that time. A client may use a former key for some time, for replies to assignments from before its replacement; the
coordinator's signed receipts have the times.
"""

import base64
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from google.protobuf.message import DecodeError, Message
from google.protobuf.timestamp_pb2 import Timestamp

from federation.refusals import Refusal
from federation.trust.envelope import ManifestT, envelope_digest, key_id, sign, verify
from federation.trust.keys import FileDamaged, IdentityError, read_file
from federation.trust.proofs import signing_public_key
from federation.v1.common_pb2 import (
    AssignmentManifest,
    BackupManifest,
    KeyRotation,
    ReceiptManifest,
    RestoreManifest,
    ResultManifest,
    RotationManifest,
    RotationReceiptManifest,
    SignedEnvelope,
    StepManifest,
)

MAX_ROTATIONS = 1000  # of one holder
_POSSESSION = b"fedpareto/v1/rotation-possession\0"
# The field of a manifest of the coordinator with the time of its making. Other manifests are made for one call, with
# the present key.
_TIME_FIELDS: dict[type[Message], str] = {
    AssignmentManifest: "created",
    ReceiptManifest: "created",
    StepManifest: "created",
    ResultManifest: "created",
    RotationReceiptManifest: "ended",
    RestoreManifest: "restored",
    BackupManifest: "made",
}


@dataclass(frozen=True)
class FormerKey:
    """A key that another one has replaced.

    Attributes:
        ended: the time of the replacement; later envelopes and assignments need the next key.
        until: the end of the time in which it may sign replies to earlier assignments; `ended` for the coordinator.
    """

    key: Ed25519PublicKey
    ended: datetime
    until: datetime

    def check_counts(self, asked: datetime, received: datetime) -> None:
        """Raises the Refusal `key-ended` unless it may sign a reply that was asked for and received at these times."""
        # Protocol, rotation: by the time of the assignment: a key that was replaced because it leaked must answer
        # nothing new.
        if asked > self.ended:
            raise _ended(self.key, f"was replaced at {_time_text(self.ended)}, before this was asked or made")
        # Protocol, rotation: replies to earlier assignments count for a limited time, or a leaked key could send them
        # for ever.
        if received > self.until:
            raise _ended(
                self.key, f"was replaced at {_time_text(self.ended)}, and counted until {_time_text(self.until)}"
            )


@dataclass(frozen=True)
class KeyChain:
    """The signing keys of one holder; the former ones are in their order."""

    present: Ed25519PublicKey
    former: tuple[FormerKey, ...] = ()

    @property
    def raw(self) -> tuple[bytes, ...]:
        """The raw keys, the oldest first."""
        return (*(former.key.public_bytes_raw() for former in self.former), self.present.public_bytes_raw())

    def former_of(self, envelope: SignedEnvelope) -> FormerKey | None:
        """The former key that an envelope names; None if it names the present key, or no key of the holder."""
        return next((former for former in self.former if key_id(former.key) == envelope.key_id), None)

    def signer(self, envelope: SignedEnvelope) -> Ed25519PublicKey:
        """The key of the holder that an envelope names; the present one if it names none."""
        former = self.former_of(envelope)
        # With the present key for an unknown id, `verify` compares both ids and refuses (`key-unknown`).
        return self.present if former is None else former.key

    def check_counts(self, envelope: SignedEnvelope, asked: datetime, received: datetime) -> None:
        """Raises the Refusal `key-ended` if a former key signed an envelope and did not count at these times."""
        former = self.former_of(envelope)
        if former is not None:
            former.check_counts(asked, received)

    def check_made(self, envelope: SignedEnvelope, manifest: Message) -> None:
        """As `check_counts`, for an envelope of the coordinator, whose manifest has the time of its making."""
        former = self.former_of(envelope)
        if former is None:
            return
        field = _TIME_FIELDS.get(type(manifest))
        # Protocol, rotation: a manifest without a time is made for one call. With a former key, nobody could tell an
        # old one from a forged one.
        if field is None:
            raise _ended(former.key, f"was replaced at {_time_text(former.ended)}, and this is signed anew each time")
        created = moment(getattr(manifest, field))
        former.check_counts(created, created)

    def verify(self, envelope: SignedEnvelope, kind: type[ManifestT]) -> ManifestT:
        """Verifies and parses an envelope of the coordinator.

        Raises:
            Refusal: `key-unknown`, `key-ended`, `signature` or `manifest`.
        """
        # Protocol, the envelope: the signature first: the time by which the key is judged stands in the manifest.
        manifest = verify(envelope, kind, self.signer(envelope))
        self.check_made(envelope, manifest)
        return manifest


class CoordinatorKeys:
    """The coordinator's signing keys as a member knows them. Any thread may call.

    Args:
        federation_id: the federation.
        first: the key that the member got when it joined.
        rotations: the rotations that the member has followed since, in their order.

    Raises:
        Refusal: the rotations do not follow from the first key.
    """

    def __init__(self, federation_id: str, first: Ed25519PublicKey, rotations: Sequence[KeyRotation] = ()) -> None:
        self._federation_id = federation_id
        self._lock = threading.Lock()
        self.first = first
        self.rotations: tuple[KeyRotation, ...] = ()
        self.chain = KeyChain(first)
        self.learn(rotations)

    def learn(self, shown: Sequence[KeyRotation]) -> bool:
        """Follows the rotations that a coordinator shows, the earlier ones included. True if there is a new key.

        Raises:
            Refusal: they do not continue from the known key: `rotation`, or the reasons of `follow`.
        """
        with self._lock:
            # Protocol, rotation: followed completely, then taken over: a list that breaks in the middle must change
            # nothing.
            chain, new = follow(self.chain, shown, federation_id=self._federation_id)
            self.chain, self.rotations = chain, (*self.rotations, *new)
        return bool(new)

    def verify(self, envelope: SignedEnvelope, kind: type[ManifestT]) -> ManifestT:
        """As `KeyChain.verify`."""
        return self.chain.verify(envelope, kind)


def rotations_text(rotations: Sequence[KeyRotation]) -> str:
    """Rotations as the lines of a file."""
    return "".join(
        base64.b64encode(rotation.SerializeToString(deterministic=True)).decode() + "\n" for rotation in rotations
    )


def read_rotations(path: Path) -> tuple[KeyRotation, ...]:
    """Reads the rotations in a file; none if the file does not exist. Raises FileDamaged."""
    if not path.exists():
        return ()
    try:
        return parse_rotations(read_file(path).decode())
    except ValueError as error:  # UnicodeDecodeError is one
        raise FileDamaged(f"{path} is damaged: {error}") from None


def parse_rotations(text: str) -> tuple[KeyRotation, ...]:
    """Parses the text of `rotations_text`. Raises ValueError."""
    try:
        return tuple(KeyRotation.FromString(base64.b64decode(line, validate=True)) for line in text.split())
    except DecodeError as error:
        raise ValueError(f"no rotation: {error}") from None


def rotate(
    old: Ed25519PrivateKey,
    new: Ed25519PrivateKey,
    *,
    federation_id: str,
    client_id: str = "",
    number: int,
    now: datetime,
) -> KeyRotation:
    """States that one key replaces another, signed by both; without a `client_id`, for keys of the coordinator.

    `number` counts the rotations of this holder, this one included.
    """
    manifest = RotationManifest(
        federation_id=federation_id,
        client_id=client_id,
        number=number,
        old_key=old.public_key().public_bytes_raw(),
        new_key=new.public_key().public_bytes_raw(),
    )
    manifest.created.FromDatetime(now)
    statement = sign(manifest, old)
    # Protocol, rotation: the new key signs, too, or anybody could have the key of somebody else registered as theirs.
    return KeyRotation(statement=statement, possession=new.sign(_POSSESSION + statement.manifest))


def open_rotation(
    rotation: KeyRotation, old: Ed25519PublicKey, *, federation_id: str, client_id: str = "", number: int | None = None
) -> tuple[RotationManifest, Ed25519PublicKey]:
    """Verifies a rotation that replaces a key. Returns its manifest and the new key.

    `number` is the expected number of the rotation; None accepts any.

    Raises:
        Refusal: `key-unknown`, `signature`, `manifest`; `rotation`: it is of another holder, or not the next one;
            `signing-key`: the new key is not a key; `proof`: the new key has not signed.
    """
    # Protocol, rotation: by the key that is replaced, whatever the statement says: only its holder may name a
    # successor.
    manifest = verify(rotation.statement, RotationManifest, old)
    expected: dict[str, object] = {"federation_id": federation_id, "client_id": client_id}
    # Protocol, rotation: also in the statement, which verifiers read as a link of the chain without this key at hand.
    expected["old_key"] = old.public_bytes_raw()
    if number is not None:
        expected["number"] = number
    for field, value in expected.items():
        if getattr(manifest, field) != value:
            shown = manifest.old_key.hex() if field == "old_key" else getattr(manifest, field)
            raise Refusal("rotation", f"the rotation is for another {field}, {str(shown)[:80]!r}")
    try:
        new = signing_public_key(manifest.new_key)
        moment(manifest.created)
    except IdentityError as error:
        raise Refusal("signing-key", str(error)) from None
    try:
        # Protocol, rotation: over the bytes of this statement: a proof for another rotation is of no use here.
        new.verify(rotation.possession, _POSSESSION + rotation.statement.manifest)
    except InvalidSignature:
        raise Refusal("proof", "the new key has not signed the rotation: nobody may take the key of another") from None
    return manifest, new


def follow(
    known: KeyChain,
    rotations: Sequence[KeyRotation],
    *,
    federation_id: str,
    client_id: str = "",
    coordinator: KeyChain | None = None,
) -> tuple[KeyChain, list[KeyRotation]]:
    """Continues a chain from its present key. Returns the longer chain, and the rotations that are new to it.

    Args:
        known: the known keys of the holder; a key without history begins a chain.
        rotations: of the holder, in their order; the rotations that lead to the present key come first.
        federation_id: the federation of all rotations.
        client_id: the client that holds the keys; empty for the coordinator.
        coordinator: the keys that signed the receipts of a client's rotations.

    Raises:
        Refusal: a rotation is not signed by the key before and by its new key, or has no receipt; `rotation`: one is
            missing, or they lead to another key.
    """
    # Before the first signature is verified: the list is a stranger's, and each entry costs time.
    if len(rotations) > MAX_ROTATIONS:
        raise Refusal("rotation", f"{len(rotations)} rotations; at most {MAX_ROTATIONS} are read")
    present, number, new = known.present, None, list[KeyRotation]()
    former, claimed = list(known.former), RotationManifest()
    for rotation in rotations:
        before, claimed = claimed, _claimed(rotation)
        # Protocol, rotation: each continues the one before: in a gap, a key of anybody's could have been put.
        if claimed.old_key != (before.new_key or claimed.old_key):
            raise _missing(client_id, present)
        if claimed.old_key != present.public_bytes_raw():
            continue  # it comes before the known key
        manifest, following = open_rotation(
            rotation, present, federation_id=federation_id, client_id=client_id, number=number
        )
        # Protocol, rotation: of a client, the times of the coordinator's receipt: with its own, a thief could keep the
        # old key valid.
        ended = until = moment(manifest.created)
        if client_id:
            ended, until = _receipt_times(rotation, coordinator, federation_id, client_id)
        former.append(FormerKey(present, ended, until))
        present, number = following, manifest.number + 1
        new.append(rotation)
    # Protocol, rotation: the last one has to lead to the present key, also where all were skipped: else rotations of
    # somebody else would pass.
    if rotations and claimed.new_key != present.public_bytes_raw():
        raise _missing(client_id, present)
    return KeyChain(present, tuple(former)), new


def whole_chain(
    rotations: Sequence[KeyRotation],
    present: Ed25519PublicKey,
    *,
    federation_id: str,
    client_id: str = "",
    coordinator: KeyChain | None = None,
) -> KeyChain:
    """The chain of all keys of a holder: its rotations lead from the first key to the present one.

    The other arguments are those of `follow`.

    Raises:
        Refusal: as of `follow`; `rotation`: the first one is missing, or they lead to another key.
    """
    if not rotations:
        return KeyChain(present)
    first = _claimed(rotations[0])
    try:
        oldest = signing_public_key(first.old_key)
    except IdentityError as error:
        raise Refusal("signing-key", str(error)) from None
    chain, _ = follow(
        KeyChain(oldest), rotations, federation_id=federation_id, client_id=client_id, coordinator=coordinator
    )
    # Verify, 1: from the first key to the certified one. A chain that begins later hides a key that may have signed.
    if first.number != 1 or chain.present != present:
        raise _missing(client_id, present)
    return chain


def receipt(
    rotation: KeyRotation,
    key: Ed25519PrivateKey,
    *,
    federation_id: str,
    client_id: str,
    ended: datetime,
    until: datetime,
) -> SignedEnvelope:
    """The coordinator's receipt for a client's rotation."""
    name = envelope_digest(rotation.statement)
    manifest = RotationReceiptManifest(federation_id=federation_id, client_id=client_id, rotation=name)
    manifest.ended.FromDatetime(ended)
    manifest.until.FromDatetime(until)
    return sign(manifest, key)


def _receipt_times(
    rotation: KeyRotation, coordinator: KeyChain | None, federation_id: str, client_id: str
) -> tuple[datetime, datetime]:
    # Protocol, rotation: without the receipt, nobody knows when the old key ended, and it would count or not as one
    # likes.
    if coordinator is None or not rotation.HasField("receipt"):
        raise Refusal("rotation", f"a rotation of {client_id} has no receipt of the coordinator")
    manifest = coordinator.verify(rotation.receipt, RotationReceiptManifest)
    # Protocol, rotation: by the digest of the statement: the receipt of another rotation has other times.
    expected = (federation_id, client_id, envelope_digest(rotation.statement))
    if (manifest.federation_id, manifest.client_id, manifest.rotation) != expected:
        raise Refusal("rotation", f"the receipt of a rotation of {client_id} is for another one")
    return moment(manifest.ended), moment(manifest.until)


def _claimed(rotation: KeyRotation) -> RotationManifest:
    try:
        return RotationManifest.FromString(rotation.statement.manifest)
    except DecodeError:
        raise Refusal("manifest", "the manifest is not a RotationManifest") from None


def _missing(client_id: str, known: Ed25519PublicKey) -> Refusal:
    holder = f"of {client_id}" if client_id else "of the coordinator"
    return Refusal(
        "rotation",
        f"the signing keys {holder} do not lead on from the key {key_id(known).hex()[:16]} that is known: a rotation "
        "is missing, or they are of another federation",
    )


def moment(stamp: Timestamp) -> datetime:
    """The time in a message, aware. Raises the Refusal `manifest` if the time does not exist."""
    try:
        return stamp.ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError) as error:
        raise Refusal("manifest", f"a time that does not exist: {error}") from None


def _ended(key: Ed25519PublicKey, reason: str) -> Refusal:
    return Refusal("key-ended", f"the key {key_id(key).hex()[:16]} {reason}")


def _time_text(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S} UTC"
