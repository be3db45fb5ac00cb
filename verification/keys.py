"""Whose key is whose: the CA's certificate is the root of trust, and its certificates name the signing keys."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from federation.bundle import BundleReader
from federation.certificates import load_certificate
from federation.identity import PeerIdentity, parse_peer
from federation.keys import IdentityError
from federation.proofs import signing_public_key
from verification.errors import Wrong


@dataclass(frozen=True)
class Keys:
    """The signing keys of a federation.

    Attributes:
        ca_fingerprint: the SHA-256 of the CA's certificate, hexadecimal.
        coordinator: signs assignments, receipts and steps.
        clients: raw, 32 bytes each, by client id.
    """

    ca_fingerprint: str
    coordinator: Ed25519PublicKey
    clients: Mapping[str, bytes]

    def client(self, client_id: str) -> Ed25519PublicKey:
        """The key of a client. Raises Wrong if no certificate names one."""
        raw = self.clients.get(client_id)
        if raw is None:
            raise Wrong(f"no certificate names a signing key of {client_id}")
        return Ed25519PublicKey.from_public_bytes(raw)


def read_keys(bundle: BundleReader, fingerprint: str = "") -> Keys:
    """The keys that the certificates in a bundle name. Their dates do not count: they say when TLS accepted them.

    Args:
        bundle: has the certificates.
        fingerprint: the SHA-256 of the CA's certificate that the caller trusts, hexadecimal; empty trusts the bundle's.

    Raises:
        Wrong: a certificate is not of this CA and federation, or two name different keys for one holder.
    """
    found = hashlib.sha256(bundle.ca).hexdigest()
    wanted = fingerprint.replace(":", "").strip().lower()
    if wanted and wanted != found:
        raise Wrong(f"the bundle's CA has the fingerprint {found}, not {wanted}: it is of another federation")
    try:
        ca = load_certificate(bundle.ca)
        ca.verify_directly_issued_by(ca)
    except (IdentityError, ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature) as error:
        raise Wrong(f"the CA's certificate: {error or 'it is not signed by its own key'}") from error
    keys: dict[tuple[str, str], bytes] = {}
    for name, data in bundle.certificates.items():
        holder = _holder(name, data, ca)
        if holder.federation_id != bundle.about.federation_id or holder.kind == "admin" or not holder.signing_key:
            raise Wrong(f"{name} names no signing key of a member of {bundle.about.federation_id}: {holder.uri}")
        if keys.setdefault((holder.kind, holder.name), holder.signing_key) != holder.signing_key:
            raise Wrong(f"{name} names another signing key of {holder.uri} than an earlier certificate")
    try:
        coordinator = Ed25519PublicKey.from_public_bytes(keys.pop(("coordinator", "coordinator")))
    except KeyError:
        raise Wrong("the bundle has no certificate of the coordinator") from None
    return Keys(found, coordinator, {name: key for (_, name), key in keys.items()})


def _holder(name: str, data: bytes, ca: x509.Certificate) -> PeerIdentity:
    try:
        certificate = load_certificate(data)
        certificate.verify_directly_issued_by(ca)
        holder = parse_peer(data)
        if holder.signing_key:
            signing_public_key(holder.signing_key)
    except InvalidSignature:
        raise Wrong(f"{name} was not issued by the federation's CA") from None
    except (IdentityError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise Wrong(f"{name}: {error}") from error
    return holder
