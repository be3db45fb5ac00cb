"""Who is who: keys, certificates, the join string, and the directories that hold them (SECURITY: "Keys").

TLS uses P-256 certificates from the federation's own CA; who a member is stands in URI names of its certificate:
`fedpareto://<federation>/client/<id>`, `fedpareto://<federation>/admin/<name>` with one
`fedpareto://<federation>/role/<role>` for each role, `fedpareto://<federation>/coordinator`. Ed25519 keys sign what
must be provable later. Private keys are PKCS#8 files of mode 0600, optionally under a passphrase.
"""

import base64
import hashlib
import json
import re
import secrets
import socket
import ssl
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from federation.certificates import (
    issue_certificate,
    issuer_in,
    load_certificate,
    load_certificate_file,
    make_ca,
    make_csr,
    pem,
    serial_of,
)
from federation.keys import (
    FileDamaged,
    IdentityError,
    load_signing_key,
    load_tls_key,
    make_private_directory,
    new_tls_key,
    private_key_pem,
    read_file,
    remedy,
    replace_private,
    write_private_key,
)

if TYPE_CHECKING:
    import grpc

__all__ = [
    "AdminFiles",
    "IdentityError",
    "Join",
    "MemberFiles",
    "PeerIdentity",
    "Role",
    "admin_uris",
    "check_name",
    "client_uri",
    "coordinator_uri",
    "fetch_ca",
    "issue_certificate",
    "load_signing_key",
    "load_tls_key",
    "make_ca",
    "make_csr",
    "move_address",
    "new_tls_key",
    "parse_peer",
    "prove_possession",
    "prove_renewal",
    "proves_possession",
    "proves_renewal",
    "save_renewal",
    "secret_hash",
    "signing_public_key",
    "write_private_key",
]

NAME_PATTERN = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
ENROLLMENT_CONTEXT = b"fedpareto/v1/enrollment\0"
RENEWAL_CONTEXT = b"fedpareto/v1/renewal\0"
SECRET_BYTES = 32
UNSIGNED = bytes(32)  # in place of the signing key of a simulated client, which has none; nobody can enroll with it
_JOIN_PREFIX = "fpjoin1_"
_RENEWED = "renewed.pem"  # key and certificate, until each is in its place

Kind = Literal["client", "admin", "coordinator"]


class Role(StrEnum):
    """What an administrator may do. Each role reads; see the Admin service for the rest."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    SECURITY_OFFICER = "security-officer"


@dataclass(frozen=True)
class PeerIdentity:
    """Who a certificate says that its holder is.

    Attributes:
        federation_id: the federation.
        kind: what the holder is.
        name: the client id or the administrator's name; "coordinator" for the coordinator.
        roles: an administrator's roles; empty for others.
        serial: the certificate's serial number, hexadecimal without leading zeros.
        not_after: when the certificate expires.
        uri: the URI that names the holder, for the record.
    """

    federation_id: str
    kind: Kind
    name: str
    roles: frozenset[str]
    serial: str
    not_after: datetime
    uri: str


def check_name(name: str, what: str = "name") -> str:
    """Returns `name` when it can name a federation, a client or an administrator.

    Raises:
        IdentityError: it cannot.
    """
    if NAME_PATTERN.fullmatch(name) is None:
        raise IdentityError(
            f"{what} {name[:80]!r} will not do: use 1 to 63 lower-case letters, digits and hyphens, "
            "no hyphen at either end"
        )
    return name


def client_uri(federation_id: str, client_id: str) -> str:
    """The URI name of a client."""
    return f"fedpareto://{federation_id}/client/{client_id}"


def admin_uris(federation_id: str, name: str, roles: Iterable[Role]) -> list[str]:
    """The URI names of an administrator: its own, then one for each role."""
    return [f"fedpareto://{federation_id}/admin/{name}", *(f"fedpareto://{federation_id}/role/{r}" for r in roles)]


def coordinator_uri(federation_id: str) -> str:
    """The URI name of the coordinator."""
    return f"fedpareto://{federation_id}/coordinator"


def parse_peer(certificate: bytes) -> PeerIdentity:
    """Reads who the holder of a certificate is. It does not verify the certificate: TLS has done that.

    Args:
        certificate: PEM or DER.

    Raises:
        IdentityError: it names nobody of a federation, or more than one.
    """
    parsed = load_certificate(certificate)
    try:
        names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except (x509.ExtensionNotFound, ValueError):
        uris = []
    holders: list[tuple[str, Kind, str, str]] = []
    roles: set[tuple[str, str]] = set()
    for uri in uris:
        match uri.removeprefix("fedpareto://").split("/") if uri.startswith("fedpareto://") else []:
            case [federation, "client", name]:
                holders.append((federation, "client", name, uri))
            case [federation, "admin", name]:
                holders.append((federation, "admin", name, uri))
            case [federation, "coordinator"]:
                holders.append((federation, "coordinator", "coordinator", uri))
            case [federation, "role", role]:
                roles.add((federation, role))
    if len(holders) != 1:
        raise IdentityError(f"the certificate names {len(holders)} members of a federation; it must name exactly one")
    federation_id, kind, name, uri = holders[0]
    for part in (federation_id, name):
        check_name(part)
    if roles and (kind != "admin" or {federation for federation, _ in roles} != {federation_id}):
        raise IdentityError(f"the certificate gives roles to {uri}, which cannot hold them")
    return PeerIdentity(
        federation_id=federation_id,
        kind=kind,
        name=name,
        roles=frozenset(role for _, role in roles),
        serial=serial_of(parsed),
        not_after=parsed.not_valid_after_utc,
        uri=uri,
    )


# Enrollment

# The encodings of Ed25519 points of small order, sign bit cleared (p - 1, p and p + 1 among them). Under such a "key"
# a signature can be valid for messages that nobody signed, so its holder could disown its own.
_SMALL_ORDER = frozenset(
    bytes.fromhex(point)
    for point in (
        "0000000000000000000000000000000000000000000000000000000000000000",
        "0100000000000000000000000000000000000000000000000000000000000000",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    )
)


def signing_public_key(raw: bytes) -> Ed25519PublicKey:
    """The Ed25519 key that a stranger wants to register.

    Raises:
        IdentityError: not 32 bytes, or a key that binds nobody.
    """
    if len(raw) != 32:
        raise IdentityError(f"an Ed25519 public key has 32 bytes, not {len(raw)}")
    if raw[:31] + bytes([raw[31] & 0x7F]) in _SMALL_ORDER:
        raise IdentityError("a point of small order is no Ed25519 key")
    return Ed25519PublicKey.from_public_bytes(raw)


def secret_hash(secret: bytes) -> str:
    """What the coordinator keeps of a token's secret: its SHA-256, hexadecimal."""
    return hashlib.sha256(secret).hexdigest()


def prove_possession(key: Ed25519PrivateKey, secret: bytes, csr: bytes) -> bytes:
    """Signs an enrollment with the key that it registers."""
    return key.sign(ENROLLMENT_CONTEXT + secret + csr)


def proves_possession(key: Ed25519PublicKey, proof: bytes, secret: bytes, csr: bytes) -> bool:
    """Whether `proof` was made by `prove_possession` with this key, secret and request."""
    return _verifies(key, proof, ENROLLMENT_CONTEXT + secret + csr)


def prove_renewal(key: Ed25519PrivateKey, csr: bytes) -> bytes:
    """Signs the request for a member's next certificate with the member's signing key."""
    return key.sign(RENEWAL_CONTEXT + csr)


def proves_renewal(key: Ed25519PublicKey, proof: bytes, csr: bytes) -> bool:
    """Whether `proof` was made by `prove_renewal` with this key and request."""
    return _verifies(key, proof, RENEWAL_CONTEXT + csr)


def _verifies(key: Ed25519PublicKey, signature: bytes, data: bytes) -> bool:
    try:
        key.verify(signature, data)
    except InvalidSignature:
        return False
    return True


@dataclass(frozen=True)
class Join:
    """What an administrator hands to a client to be, as one word.

    Attributes:
        address: the enrollment port, "host:port".
        ca_fingerprint: the SHA-256 of the CA certificate's DER, hexadecimal.
        secret: the one-time secret, 32 bytes.
        client_id: the name that the client will have.
    """

    address: str
    ca_fingerprint: str
    secret: bytes = field(repr=False)
    client_id: str

    def encode(self) -> str:
        """One word of letters, digits, "-" and "_", with a checksum against copying errors."""
        body = bytes.fromhex(self.ca_fingerprint) + self.secret + f"{self.client_id}\n{self.address}".encode()
        word = base64.urlsafe_b64encode(hashlib.sha256(body).digest()[:4] + body).decode().rstrip("=")
        return _JOIN_PREFIX + word

    @classmethod
    def decode(cls, text: str) -> Self:
        """Reads what `encode` wrote.

        Raises:
            IdentityError: it is not a join string, or not a whole one. The message does not repeat it.
        """
        text = "".join(text.split())
        if not text.startswith(_JOIN_PREFIX):
            raise IdentityError(f"this is not a join string: it does not begin with {_JOIN_PREFIX}")
        word = text.removeprefix(_JOIN_PREFIX)
        try:
            data = base64.b64decode(word + "=" * (-len(word) % 4), altchars=b"-_", validate=True)
            checksum, body = data[:4], data[4:]
            if hashlib.sha256(body).digest()[:4] != checksum:
                raise IdentityError("the join string is damaged: copy the whole of it again")
            client_id, separator, address = body[32 + SECRET_BYTES :].decode().partition("\n")
        except ValueError as error:
            if isinstance(error, IdentityError):
                raise
            raise IdentityError("the join string is damaged: copy the whole of it again") from None
        if not separator or len(body) < 32 + SECRET_BYTES or ":" not in address:
            raise IdentityError("the join string is damaged: copy the whole of it again")
        return cls(
            address=address,
            ca_fingerprint=body[:32].hex(),
            secret=body[32 : 32 + SECRET_BYTES],
            client_id=check_name(client_id, "client"),
        )


def fetch_ca(address: str, expected: str, timeout: float) -> bytes:
    """Fetches the federation's CA certificate from the enrollment port, knowing only its fingerprint.

    The first connection verifies nothing and sends nothing; it takes the CA certificate out of the server's own. The
    fingerprint decides whether that is the federation's; the connection that carries the secret is then verified
    in full against it.

    Args:
        address: "host:port".
        expected: the fingerprint from the join string.
        timeout: seconds to connect and shake hands.

    Returns:
        The CA certificate, PEM.

    Raises:
        IdentityError: somebody else answers there.
        OSError: nobody answers there.
    """
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host = host.strip("[]")
    with (
        socket.create_connection((host, int(port)), timeout=timeout) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        leaf = connection.getpeercert(binary_form=True)
    for issuer in issuer_in(leaf or b""):
        if secrets.compare_digest(hashlib.sha256(issuer).hexdigest(), expected):
            return pem(load_certificate(issuer))
    raise IdentityError(
        f"who answers at {address} is not the coordinator of this federation: the CA's fingerprint is not "
        f"{expected[:16]}...; do not go on before the administrator has confirmed address and join string"
    )


# Directories


@dataclass(frozen=True)
class MemberFiles:
    """What a client keeps in its directory.

    Attributes:
        federation_id: the federation.
        client_id: its own name.
        address: the federation port, "host:port".
        ca: the CA certificate, PEM.
        certificate: its own certificate, PEM.
        tls_key: the key of that certificate.
        signing_key: the key that signs its updates.
        coordinator_key: the only key whose assignments and receipts it obeys.
    """

    federation_id: str
    client_id: str
    address: str
    ca: bytes
    certificate: bytes
    tls_key: EllipticCurvePrivateKey = field(repr=False)
    signing_key: Ed25519PrivateKey = field(repr=False)
    coordinator_key: Ed25519PublicKey

    @property
    def not_after(self) -> datetime:
        """When the certificate expires."""
        return load_certificate(self.certificate).not_valid_after_utc

    def save(self, directory: Path, passphrase: bytes | None = None) -> None:
        """Writes a new directory; `member.toml` comes last, so that its presence says that all is there.

        Raises:
            FileExistsError: the directory holds keys already.
        """
        _save(directory, self.ca, self.certificate, self.tls_key, passphrase)
        write_private_key(directory / "signing.key", self.signing_key, passphrase)
        replace_private(directory / "coordinator.pub", self.coordinator_key.public_bytes_raw().hex().encode() + b"\n")
        _write_description(directory, federation_id=self.federation_id, client_id=self.client_id, address=self.address)

    @classmethod
    def load(cls, directory: Path, passphrase: bytes | None = None) -> Self:
        """Reads what `save` wrote.

        Raises:
            IdentityError: something is missing or wrong, or the passphrase is.
        """
        description = _read_description(directory, "client_id")
        _finish_renewal(directory)
        with remedy("restore it from a backup, or join again, under a new name and with another directory"):
            tls_key = load_tls_key(directory / "tls.key", passphrase)
            return cls(
                federation_id=description["federation_id"],
                client_id=description["client_id"],
                address=description["address"],
                ca=pem(load_certificate_file(directory / "ca.pem")),
                certificate=pem(load_certificate_file(directory / "certificate.pem", tls_key)),
                tls_key=tls_key,
                signing_key=load_signing_key(directory / "signing.key", passphrase),
                coordinator_key=_load_coordinator_key(directory / "coordinator.pub"),
            )

    def channel(self, options: Sequence[tuple[str, int | str]] = ()) -> "grpc.Channel":
        """A mutual-TLS channel to the federation port."""
        return _channel(self, options)


def save_renewal(
    directory: Path, key: EllipticCurvePrivateKey, certificate: bytes, passphrase: bytes | None = None
) -> None:
    """Puts a new key and its certificate in the place of a member's present ones.

    Both at once, as far as `MemberFiles.load` can see, wherever the process or the machine dies.

    Args:
        directory: the member's.
        key: the new key.
        certificate: of that key, PEM.
        passphrase: encrypts the key; None leaves it to the file mode.
    """
    replace_private(directory / _RENEWED, private_key_pem(key, passphrase) + certificate)
    _finish_renewal(directory)


def _finish_renewal(directory: Path) -> None:
    renewed = directory / _RENEWED
    if renewed.exists():
        key, begin, certificate = read_file(renewed).partition(b"-----BEGIN CERTIFICATE-----")
        replace_private(directory / "tls.key", key)
        replace_private(directory / "certificate.pem", begin + certificate)
        renewed.unlink()


@dataclass(frozen=True)
class AdminFiles:
    """What an administrator keeps in a directory.

    Attributes:
        federation_id: the federation.
        name: the administrator's name.
        address: the federation port, "host:port".
        ca: the CA certificate, PEM.
        certificate: the administrator's certificate, PEM.
        tls_key: the key of that certificate.
    """

    federation_id: str
    name: str
    address: str
    ca: bytes
    certificate: bytes
    tls_key: EllipticCurvePrivateKey = field(repr=False)

    @property
    def not_after(self) -> datetime:
        """When the certificate expires."""
        return load_certificate(self.certificate).not_valid_after_utc

    def save(self, directory: Path, passphrase: bytes | None = None) -> None:
        """Writes a new directory; `member.toml` comes last, so that its presence says that all is there.

        Raises:
            FileExistsError: the directory holds keys already.
        """
        _save(directory, self.ca, self.certificate, self.tls_key, passphrase)
        _write_description(directory, federation_id=self.federation_id, admin=self.name, address=self.address)

    @classmethod
    def load(cls, directory: Path, passphrase: bytes | None = None) -> Self:
        """Reads what `save` wrote.

        Raises:
            IdentityError: something is missing or wrong, or the passphrase is.
        """
        description = _read_description(directory, "admin")
        with remedy(
            "restore it from a backup, or have another administrator's directory issued, see `fedpareto "
            "coordinator admin --help`"
        ):
            tls_key = load_tls_key(directory / "tls.key", passphrase)
            return cls(
                federation_id=description["federation_id"],
                name=description["admin"],
                address=description["address"],
                ca=pem(load_certificate_file(directory / "ca.pem")),
                certificate=pem(load_certificate_file(directory / "certificate.pem", tls_key)),
                tls_key=tls_key,
            )

    def channel(self, options: Sequence[tuple[str, int | str]] = ()) -> "grpc.Channel":
        """A mutual-TLS channel to the federation port."""
        return _channel(self, options)


def _load_coordinator_key(path: Path) -> Ed25519PublicKey:
    data = read_file(path)
    try:
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(data.decode().strip()))
    except ValueError as error:
        raise FileDamaged(f"{path} does not hold an Ed25519 key: {error}") from None


def move_address(directory: Path, address: str) -> None:
    """Notes in an administrator's directory where the coordinator is to be found now.

    Raises:
        IdentityError: it is no such directory.
    """
    values = _read_description(directory, "admin")
    if values["address"] != address:
        _write_description(directory, **{**values, "address": address})


def _channel(files: MemberFiles | AdminFiles, options: Sequence[tuple[str, int | str]]) -> "grpc.Channel":
    from federation.channels import mutual_channel  # noqa: PLC0415 - gRPC loads slowly

    return mutual_channel(
        files.address,
        ca=files.ca,
        key=private_key_pem(files.tls_key),
        certificate=files.certificate,
        options=options,
    )


def _save(
    directory: Path, ca: bytes, certificate: bytes, tls_key: EllipticCurvePrivateKey, passphrase: bytes | None
) -> None:
    make_private_directory(directory)
    write_private_key(directory / "tls.key", tls_key, passphrase)
    replace_private(directory / "ca.pem", ca)
    replace_private(directory / "certificate.pem", certificate)


def _write_description(directory: Path, **values: str) -> None:
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in values.items()]
    replace_private(directory / "member.toml", "".join(lines).encode())


def _read_description(directory: Path, holder: str) -> dict[str, str]:
    path = directory / "member.toml"
    if not path.exists():
        raise IdentityError(f"{directory} holds no membership: there is no {path.name} in it")
    try:
        values = tomllib.loads(read_file(path).decode())
    except ValueError as error:
        raise IdentityError(f"{path} is not TOML: {error}") from None
    for key in ("federation_id", holder, "address"):
        if not isinstance(values.get(key), str):
            raise IdentityError(f"{path} has no {key}: it is not the directory of {_HOLDERS[holder]}")
    return values


_HOLDERS = {"client_id": "a worker", "admin": "an administrator"}
