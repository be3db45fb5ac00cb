"""The directory of an administrator: a signing key, which is its identity, and the certificate of its last login."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from federation.trust.certificates import load_certificate, load_certificate_file, pem
from federation.trust.keys import (
    FileDamaged,
    load_signing_key,
    make_private_directory,
    private_key_pem,
    read_file,
    remedy,
    replace_private,
    write_private,
    write_private_key,
)
from federation.trust.member_files import Files, read_description, write_description

SIGNING_KEY = "signing.key"
LOGIN = "login.pem"  # the key and the certificate of the last login, in one file, which is replaced as a whole
_BEGIN = b"-----BEGIN CERTIFICATE-----"
_REMEDY = (
    "restore it from a backup, or have the administrator's directory issued again, see `fedpareto coordinator admin "
    "--help`"
)


@dataclass(frozen=True, kw_only=True)
class Account:
    """An administrator and its federation.

    `addresses` are the federation ports and `enrollment_addresses` the ports for logins of coordinators, "host:port":
    at least one of each, and first the one that worked last. `ca` is PEM.
    """

    federation_id: str
    name: str
    addresses: tuple[str, ...]
    enrollment_addresses: tuple[str, ...]
    ca: bytes

    def save(self, directory: Path, key: Ed25519PrivateKey, passphrase: bytes | None = None) -> None:
        """Writes a new directory with the administrator's signing key; `member.toml` is written last.

        Raises:
            FileExistsError: the directory holds keys already.
        """
        make_private_directory(directory)
        write_private_key(directory / SIGNING_KEY, key, passphrase)
        write_private(directory / "ca.pem", self.ca)
        values = {"federation_id": self.federation_id, AdminFiles.name_key: self.name}
        addresses = {"addresses": self.addresses, "enrollment_addresses": self.enrollment_addresses}
        write_description(directory, {**values, **addresses})

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Reads a directory that `save` wrote, without its keys.

        Raises:
            IdentityError: a file is missing or damaged.
        """
        values = read_description(directory, AdminFiles.name_key, "enrollment_addresses")
        with remedy(_REMEDY):
            ca = pem(load_certificate_file(directory / "ca.pem"))
        return cls(
            federation_id=values["federation_id"],
            name=values[AdminFiles.name_key],
            addresses=values["addresses"],
            enrollment_addresses=values["enrollment_addresses"],
            ca=ca,
        )

    def files(self, key: EllipticCurvePrivateKey, certificate: x509.Certificate) -> "AdminFiles":
        """The files that a channel needs, after a login."""
        return AdminFiles(
            federation_id=self.federation_id,
            name=self.name,
            addresses=self.addresses,
            ca=self.ca,
            certificate=pem(certificate),
            tls_key=key,
        )


@dataclass(frozen=True, kw_only=True)
class AdminFiles(Files):
    """The key and certificate of an administrator's last login."""

    name_key: ClassVar[str] = "admin"
    service: ClassVar[str] = "federation.v1.Admin"

    name: str

    def save(self, directory: Path) -> None:
        """Writes the key and certificate into the administrator's directory, atomically.

        The key is not encrypted, since the certificate expires soon; only the signing key has a passphrase.
        """
        replace_private(directory / LOGIN, private_key_pem(self.tls_key) + self.certificate)

    @classmethod
    def load(cls, directory: Path) -> "AdminFiles":
        """Reads the file of `save`.

        Raises:
            IdentityError: there was no login, or a file is missing or damaged.
        """
        account, path = Account.load(directory), directory / LOGIN
        key_pem, begin, rest = read_file(path).partition(_BEGIN)
        try:
            key, certificate = load_pem_private_key(key_pem, None), load_certificate(begin + rest)
        except (ValueError, TypeError):
            raise FileDamaged(f"{path} is damaged: it does not hold a key and a certificate") from None
        if not isinstance(key, EllipticCurvePrivateKey) or certificate.public_key() != key.public_key():
            raise FileDamaged(f"{path} is damaged: its certificate is not for its key")
        return account.files(key, certificate)


def load_admin_key(directory: Path, passphrase: bytes | None = None) -> Ed25519PrivateKey:
    """Reads an administrator's signing key.

    Raises:
        IdentityError: it is missing or damaged, or the passphrase is wrong.
    """
    with remedy(_REMEDY):
        return load_signing_key(directory / SIGNING_KEY, passphrase)
