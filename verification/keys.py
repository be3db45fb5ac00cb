"""The holders of keys: the CA's certificate is the root of trust, and its certificates name the signing keys."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from google.protobuf.message import DecodeError

from federation.record.bundle import BundleReader, certificate_entry, has_unknown_fields
from federation.record.exchange import Signers
from federation.refusals import Refusal
from federation.trust.certificates import load_certificate
from federation.trust.envelope import ManifestT, verify
from federation.trust.identity import PeerIdentity, parse_peer
from federation.trust.key_chain import KeyChain, whole_chain
from federation.trust.keys import IdentityError
from federation.trust.proofs import signing_public_key
from federation.v1.common_pb2 import KeyRotation, RotationManifest, RotationReceiptManifest, SignedEnvelope
from verification.errors import VerificationError


@dataclass(frozen=True)
class Keys:
    """The signing keys of a federation.

    Attributes:
        ca_fingerprint: the SHA-256 of the CA's certificate, hexadecimal.
        coordinator: its keys, which sign assignments, receipts and steps.
        clients: their keys, by client id.
    """

    ca_fingerprint: str
    coordinator: KeyChain
    clients: Mapping[str, KeyChain]

    @property
    def signers(self) -> Signers:
        """The signers of the record's messages."""
        return Signers(coordinator=self.coordinator, client=self._client, verify=verify_known)

    def _client(self, client_id: str, envelope: SignedEnvelope) -> KeyChain:
        keys = self.clients.get(client_id)
        if keys is None:
            raise Refusal("key-unknown", f"no certificate names a signing key of {client_id}")
        return keys


def verify_known(envelope: SignedEnvelope, kind: type[ManifestT], key: Ed25519PublicKey) -> ManifestT:
    """The manifest in an envelope that a key has signed, all of whose fields are known here.

    Raises:
        Refusal: as of `federation.trust.envelope.verify`; or `manifest` for a field that this release does not know.
    """
    manifest = verify(envelope, kind, key)
    # Verify, 12: an unknown field may change what the others mean, so nothing of the message counts as verified.
    if has_unknown_fields(manifest):
        raise Refusal("manifest", "it has a field that this release does not know: use the release that wrote it")
    return manifest


def read_keys(bundle: BundleReader, fingerprint: str = "") -> Keys:
    """Reads the keys that the certificates of a bundle name, and the former keys, each of which signed its successor.

    The validity dates of certificates are ignored, since they concern TLS alone.

    Args:
        bundle: contains the certificates.
        fingerprint: the SHA-256 of the CA's certificate that the caller trusts, hexadecimal; empty trusts the bundle's.

    Raises:
        VerificationError: a certificate is not of this CA and federation, two name different keys for one holder, or a
            rotation does not lead to the key that the certificate names.
    """
    present = hashlib.sha256(bundle.ca).hexdigest()
    trusted = fingerprint.replace(":", "").strip().lower()
    # Verify, 1: first of all: every key below is believed because this CA has certified it.
    if trusted and trusted != present:
        raise VerificationError(
            f"the bundle's CA has the fingerprint {present}, not {trusted}: it is of another federation"
        )
    try:
        ca = load_certificate(bundle.ca)
        # Verify, 1: a certificate that is not signed by its own key is no root: somebody else could have issued it.
        ca.verify_directly_issued_by(ca)
    except (IdentityError, ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature) as error:
        raise VerificationError(f"the CA's certificate: {error or 'it is not signed by its own key'}") from error
    keys: dict[tuple[str, str], bytes] = {}
    for name, data in bundle.certificates.items():
        holder = _holder(name, data, ca)
        # Verify, 1: a certificate of an administrator is genuine, too, and must not sign as a member.
        if holder.federation_id != bundle.about.federation_id or holder.kind == "admin" or not holder.signing_key:
            raise VerificationError(
                f"{name} names no signing key of a member of {bundle.about.federation_id}: {holder.uri}"
            )
        # Verify, 1: one present key for each holder; former ones come from rotations, where the old key has agreed.
        if keys.setdefault((holder.kind, holder.name), holder.signing_key) != holder.signing_key:
            raise VerificationError(f"{name} names another signing key of {holder.uri} than an earlier certificate")
    replaced: dict[str, list[KeyRotation]] = {}
    for rotation in bundle.rotations:
        replaced.setdefault(_claimed(rotation), []).append(rotation)
    try:
        coordinator_key = keys.pop(("coordinator", "coordinator"))
    except KeyError:
        raise VerificationError("the bundle has no certificate of the coordinator") from None
    federation_id = bundle.about.federation_id
    coordinator = _chain(replaced.pop("", []), coordinator_key, federation_id, "", None)
    clients = {
        name: _chain(replaced.pop(name, []), key, federation_id, name, coordinator) for (_, name), key in keys.items()
    }
    # Verify, 12: rotations that belong to nobody are verified by nobody.
    if replaced:
        raise VerificationError(f"the bundle has rotations of {min(replaced)}, and no certificate of it")
    return Keys(present, coordinator, clients)


def _claimed(rotation: KeyRotation) -> str:
    try:
        statement = RotationManifest.FromString(rotation.statement.manifest)
        receipt = RotationReceiptManifest.FromString(rotation.receipt.manifest)
    except DecodeError as error:
        raise VerificationError(f"a rotation: {error}") from error
    if has_unknown_fields(statement) or has_unknown_fields(receipt):
        raise VerificationError("a rotation has a field that this release does not know: use the release that wrote it")
    return statement.client_id


def _chain(
    rotations: list[KeyRotation], present: bytes, federation_id: str, client_id: str, coordinator: KeyChain | None
) -> KeyChain:
    # Verify, each value: nobody could have signed a receipt for the coordinator, so a field there is not verified.
    if coordinator is None and any(rotation.HasField("receipt") for rotation in rotations):
        raise VerificationError("a rotation of the coordinator has a receipt")
    try:
        key = Ed25519PublicKey.from_public_bytes(present)
        return whole_chain(rotations, key, federation_id=federation_id, client_id=client_id, coordinator=coordinator)
    except Refusal as error:
        raise VerificationError(f"the rotations of {client_id or 'the coordinator'}: {error.message}") from error


def _holder(name: str, data: bytes, ca: x509.Certificate) -> PeerIdentity:
    try:
        certificate = load_certificate(data)
        # Verify, 1: before its names are read: what it says of its holder is the CA's word or nothing.
        certificate.verify_directly_issued_by(ca)
        holder = parse_peer(data)
        if holder.signing_key:
            signing_public_key(holder.signing_key)
        # Verify, a verifier of your own, 1: under its serial number and as DER: else one certificate could stand there
        # twice.
        if name != certificate_entry(holder.serial) or data != certificate.public_bytes(Encoding.DER):
            raise VerificationError(f"{name} is not the DER of the certificate with this serial number")
    except InvalidSignature:
        raise VerificationError(f"{name} was not issued by the federation's CA") from None
    except (IdentityError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise VerificationError(f"{name}: {error}") from error
    return holder
