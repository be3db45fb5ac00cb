"""The join string, which an administrator gives to a new client, and the CA certificate whose fingerprint it holds."""

import base64
import hashlib
import secrets
import ssl
from dataclasses import dataclass, field
from typing import Self

from federation.transport.addresses import MAX_ADDRESSES, is_address
from federation.transport.proxies import Proxy, RouteError, dial
from federation.trust.certificates import issuer_in, load_certificate, pem
from federation.trust.identity import check_name
from federation.trust.keys import IdentityError

SECRET_BYTES = 32
PREFIX = "fpjoin1_"


@dataclass(frozen=True)
class JoinStringFields:
    """The facts that a new client needs to enroll: the enrollment ports of coordinators, and its future name.

    The addresses ("host:port") are tried in turn. `ca_fingerprint` is the SHA-256 of the CA certificate's DER,
    hexadecimal; `secret` is used once, 32 bytes.
    """

    addresses: tuple[str, ...]
    ca_fingerprint: str
    secret: bytes = field(repr=False)
    client_id: str

    @property
    def address(self) -> str:
        """The address that is tried first."""
        return self.addresses[0]

    def encode(self) -> str:
        """The join string: letters, digits, "-" and "_", with a checksum that detects copying errors."""
        body = bytes.fromhex(self.ca_fingerprint) + self.secret + "\n".join((self.client_id, *self.addresses)).encode()
        encoded = base64.urlsafe_b64encode(hashlib.sha256(body).digest()[:4] + body).decode().rstrip("=")
        return PREFIX + encoded

    @classmethod
    def decode(cls, text: str) -> Self:
        """Parses a join string; white space and invisible characters in it are ignored: mail programs fold long lines.

        Raises:
            IdentityError: it is not a join string, or it is damaged. The message does not repeat it.
        """
        text = "".join(letter for letter in text if letter.isprintable() and letter != " ")
        if not text.startswith(PREFIX):
            raise IdentityError(f"this is not a join string: it does not begin with {PREFIX}")
        encoded = text.removeprefix(PREFIX)
        try:
            data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
            checksum, body = data[:4], data[4:]
            client_id, *addresses = body[32 + SECRET_BYTES :].decode().split("\n")
            intact = hashlib.sha256(body).digest()[:4] == checksum
            intact = intact and 0 < len(addresses) <= MAX_ADDRESSES and all(map(is_address, addresses))
        except ValueError:
            intact = False
        if not intact:
            raise IdentityError("the join string is damaged: copy the whole of it again")
        return cls(
            addresses=tuple(addresses),
            ca_fingerprint=body[:32].hex(),
            secret=body[32 : 32 + SECRET_BYTES],
            client_id=check_name(client_id, "client"),
        )


def secret_hash(secret: bytes) -> str:
    """The SHA-256 of a join string's secret, hexadecimal. The coordinator stores this in place of the secret."""
    return hashlib.sha256(secret).hexdigest()


def fetch_ca(address: str, expected: str, timeout: float, proxy: Proxy | None = None) -> bytes:
    """Fetches the federation's CA certificate, PEM, from the enrollment port at "host:port".

    This connection verifies no certificate and sends no data. The server's certificate contains the CA certificate,
    which is accepted if it has the expected fingerprint. The connection that carries the secret is then verified
    against it.

    Raises:
        IdentityError: the server there has no CA certificate with this fingerprint.
        RouteError: no TLS server answers there within `timeout` seconds; the message says which hop failed.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with dial(address, proxy, timeout) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=address.rpartition(":")[0].strip("[]")) as connection:
                leaf = connection.getpeercert(binary_form=True)
        except OSError as error:  # an SSLError is one
            detour = "" if proxy is None else f", or a device behind the proxy {proxy},"
            raise RouteError(
                f"the server at {address}{detour} does not speak TLS 1.3 as a coordinator does ({error}): check the "
                "address; where a device on the way inspects TLS, ask the network department for an exception"
            ) from error
    for issuer in issuer_in(leaf or b""):
        if secrets.compare_digest(hashlib.sha256(issuer).hexdigest(), expected):
            return pem(load_certificate(issuer))
    raise IdentityError(
        f"the server at {address} is not the coordinator of this federation: its CA's fingerprint is not "
        f"{expected[:16]}...; do not go on before the administrator has confirmed address and join string. A device "
        "on the way that inspects TLS looks the same: ask the network department for an exception"
    )
