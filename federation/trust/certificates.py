"""The federation's certificates: P-256, issued by its own CA, with the holder in a URI (docs/operate/operations.md)."""

import base64
import hashlib
from collections.abc import Sequence
from datetime import datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import AuthorityInformationAccessOID, ExtendedKeyUsageOID, NameOID

from federation.trust.keys import FileDamaged, IdentityError, read_file

CA_LIFETIME = timedelta(days=3650)
SERVER_LIFETIME = timedelta(days=398)
CLIENT_LIFETIME = timedelta(days=90)
MAX_CSR_BYTES = 4096
ExtensionT = TypeVar("ExtensionT", bound=x509.ExtensionType)
# A certificate is valid from two hours before its making, for slow clocks: a wrong time zone makes one hour. This is
# safe: nobody has the certificate before it is made, and no check of signed messages uses its first date.
_CLOCK_SKEW = timedelta(hours=2)
_CA_IN_LEAF = "data:application/pkix-cert;base64,"


def load_certificate(certificate: bytes) -> x509.Certificate:
    """Parses a certificate, PEM or DER. Raises IdentityError if it is not one."""
    try:
        if certificate.startswith(b"-----BEGIN"):
            return x509.load_pem_x509_certificate(certificate)
        return x509.load_der_x509_certificate(certificate)
    except (ValueError, x509.InvalidVersion) as error:
        raise IdentityError(f"not a certificate: {error}") from None


def renewal_due(certificate: x509.Certificate) -> datetime:
    """The time at which the last third of a certificate's life begins, aware: its holder then asks for the next one."""
    end = certificate.not_valid_after_utc
    return end - (end - certificate.not_valid_before_utc - _CLOCK_SKEW) / 3


def load_certificate_file(path: Path, key: EllipticCurvePrivateKey | None = None) -> x509.Certificate:
    """Reads a certificate, PEM or DER, and checks that it is for `key` if there is one.

    Raises:
        IdentityError: it cannot be read, is not a certificate, or is not for this key.
    """
    try:
        certificate = load_certificate(read_file(path))
    except FileDamaged:
        raise
    except IdentityError as error:
        raise FileDamaged(f"{path} is damaged: {error}") from None
    if key is not None and certificate.public_key() != key.public_key():
        raise FileDamaged(f"{path} is the certificate of another key than the one beside it")
    return certificate


def extension(certificate: x509.Certificate, kind: type[ExtensionT]) -> ExtensionT | None:
    """An extension of a certificate; None if it has none, or if its extensions cannot be read."""
    try:
        return certificate.extensions.get_extension_for_class(kind).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError):
        return None


def serial_of(certificate: x509.Certificate) -> str:
    """The serial number as the database spells it: hexadecimal, no leading zeros."""
    return f"{certificate.serial_number:x}"


def pem(certificate: x509.Certificate) -> bytes:
    """The certificate as PEM."""
    return certificate.public_bytes(Encoding.PEM)


def der(certificate: x509.Certificate) -> bytes:
    """The certificate as DER."""
    return certificate.public_bytes(Encoding.DER)


def fingerprint(certificate: x509.Certificate) -> str:
    """The SHA-256 of the certificate's DER, hexadecimal."""
    return hashlib.sha256(der(certificate)).hexdigest()


def _name(federation_id: str, common_name: str) -> x509.Name:
    parts = {NameOID.ORGANIZATION_NAME: federation_id, NameOID.COMMON_NAME: common_name}
    return x509.Name([x509.NameAttribute(oid, value) for oid, value in parts.items()])


def _certificate(
    holder: x509.Name,
    issuer: x509.Name,
    key: EllipticCurvePublicKey,
    begin: datetime,
    end: datetime,
    constraints: x509.BasicConstraints,
) -> x509.CertificateBuilder:
    """The common part of the certificates of the CA and of its members."""
    usage = x509.KeyUsage(
        digital_signature=not constraints.ca,
        key_cert_sign=constraints.ca,
        crl_sign=constraints.ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(holder)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin - _CLOCK_SKEW)
        .not_valid_after(end)
        .add_extension(constraints, critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def make_ca(key: EllipticCurvePrivateKey, federation_id: str, now: datetime) -> x509.Certificate:
    """The federation's own CA certificate: self-signed, ten years, for end entities only."""
    name, constraints = _name(federation_id, "fedpareto CA"), x509.BasicConstraints(ca=True, path_length=0)
    builder = _certificate(name, name, key.public_key(), now, now + CA_LIFETIME, constraints)
    return builder.sign(key, hashes.SHA256())


def issue_certificate(
    *,
    ca: x509.Certificate,
    ca_key: EllipticCurvePrivateKey,
    public_key: EllipticCurvePublicKey,
    federation_id: str,
    common_name: str,
    uris: Sequence[str],
    now: datetime,
    lifetime: timedelta,
    hosts: Sequence[str] = (),
) -> x509.Certificate:
    """Issues the certificate of a member, or of the coordinator when there are hosts (DNS names and IP addresses).

    The caller has verified that the holder has the private part of `public_key`, P-256. `uris` name the holder; nothing
    reads `common_name`. The certificate does not last longer than the CA's own. A server's certificate carries the CA's
    certificate as its issuer's address (RFC 5280, 4.2.2.1), so that a newcomer with the CA's fingerprint can fetch it.
    """
    names: list[x509.GeneralName] = []
    for host in hosts:
        try:
            names.append(x509.IPAddress(ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    names.extend(x509.UniformResourceIdentifier(uri) for uri in uris)
    usage = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
    ca_identifier = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    end = min(now + lifetime, ca.not_valid_after_utc)
    holder, constraints = _name(federation_id, common_name), x509.BasicConstraints(ca=False, path_length=None)
    builder = (
        _certificate(holder, ca.subject, public_key, now, end, constraints)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(ca_identifier), critical=False)
    )
    if hosts:
        location = x509.UniformResourceIdentifier(_CA_IN_LEAF + base64.b64encode(der(ca)).decode())
        description = x509.AccessDescription(AuthorityInformationAccessOID.CA_ISSUERS, location)
        builder = builder.add_extension(x509.AuthorityInformationAccess([description]), critical=False)
    return builder.sign(ca_key, hashes.SHA256())


def make_csr(key: EllipticCurvePrivateKey) -> bytes:
    """A certificate request for `key`, DER. Its subject is empty: the coordinator decides on the name."""
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return request.public_bytes(Encoding.DER)


def csr_public_key(csr: bytes) -> EllipticCurvePublicKey:
    """The P-256 key of a certificate request whose signature proves possession. Raises IdentityError."""
    if len(csr) > MAX_CSR_BYTES:
        raise IdentityError(f"the certificate request has {len(csr)} bytes; at most {MAX_CSR_BYTES} are read")
    try:
        request = x509.load_der_x509_csr(csr)
        key = request.public_key()
        valid = request.is_signature_valid
    except Exception:  # a hostile request can make the parser raise nearly anything
        raise IdentityError("the certificate request is not PKCS#10 in DER") from None
    if not isinstance(key, EllipticCurvePublicKey) or not isinstance(key.curve, SECP256R1):
        raise IdentityError("the certificate request is not for a P-256 key")
    if not valid:
        raise IdentityError("the certificate request is not signed by the key that it is for")
    return key


def issuer_in(leaf: bytes) -> list[bytes]:
    """The CA certificates (DER) that a server's certificate carries. They are not verified."""
    try:
        access = extension(load_certificate(leaf), x509.AuthorityInformationAccess)
        locations = [str(description.access_location.value) for description in access or ()]
        return [
            base64.b64decode(location.removeprefix(_CA_IN_LEAF), validate=True)
            for location in locations
            if location.startswith(_CA_IN_LEAF)
        ]
    except ValueError:
        return []
