"""The directory in which a client keeps its keys and certificates."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import tomli_w
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from federation.certificates import load_certificate, load_certificate_file, pem
from federation.keys import (
    FileDamaged,
    IdentityError,
    load_signing_key,
    load_tls_key,
    make_private_directory,
    private_key_pem,
    read_file,
    remedy,
    replace_private,
    write_private,
)
from federation.proxies import Proxy

if TYPE_CHECKING:
    import grpc

    from federation.channels import RpcRefusal

_RENEWED = "renewed.pem"  # holds a new key and certificate until both files have been replaced
_HOLDERS = {"client_id": "a worker", "admin": "an administrator"}


@dataclass(frozen=True, kw_only=True)
class Files:
    """The keys and certificates that clients and administrators both have.

    The certificates are PEM, `tls_key` is the key of `certificate`, and the address is the federation port,
    "host:port". The proxy on the way there is not stored.
    """

    federation_id: str
    address: str
    ca: bytes
    certificate: bytes
    tls_key: EllipticCurvePrivateKey = field(repr=False)
    proxy: Proxy | None = None

    @property
    def not_after(self) -> datetime:
        """When the certificate expires."""
        return load_certificate(self.certificate).not_valid_after_utc

    def channel(self, options: Sequence[tuple[str, int | str]] = ()) -> "grpc.Channel":
        """A mutual-TLS channel to the federation port."""
        from federation.channels import mutual_channel  # noqa: PLC0415 - gRPC loads slowly

        key = private_key_pem(self.tls_key)
        return mutual_channel(
            self.address, ca=self.ca, key=key, certificate=self.certificate, options=options, proxy=self.proxy
        )

    def refusal(self, error: "grpc.RpcError") -> "RpcRefusal":
        """Why a call of the holder failed."""
        from federation.channels import refusal_from_rpc_error  # noqa: PLC0415 - gRPC loads slowly

        return refusal_from_rpc_error(error, not_after=self.not_after, proxy=self.proxy)


@dataclass(frozen=True, kw_only=True)
class MemberFiles(Files):
    """A client's keys, certificates and name, as stored in its directory.

    `signing_key` signs its updates; `coordinator_key` verifies the coordinator's assignments and receipts.
    """

    name_key: ClassVar[str] = "client_id"

    client_id: str
    signing_key: Ed25519PrivateKey = field(repr=False)
    coordinator_key: Ed25519PublicKey

    def save(self, directory: Path, passphrase: bytes | None = None) -> None:
        """Writes a new directory; `member.toml` is written last, so a directory that has it is complete.

        Raises:
            FileExistsError: the directory holds keys already.
        """
        make_private_directory(directory)
        for name, content in {
            "tls.key": private_key_pem(self.tls_key, passphrase),
            "ca.pem": self.ca,
            "certificate.pem": self.certificate,
            "signing.key": private_key_pem(self.signing_key, passphrase),
            "coordinator.pub": self.coordinator_key.public_bytes_raw().hex().encode() + b"\n",
        }.items():
            write_private(directory / name, content)
        values = {"federation_id": self.federation_id, "client_id": self.client_id, "address": self.address}
        write_description(directory, values)

    @classmethod
    def load(cls, directory: Path, passphrase: bytes | None = None) -> Self:
        """Reads a directory that `save` wrote.

        Raises:
            IdentityError: a file is missing or damaged, or the passphrase is wrong.
        """
        values = read_description(directory, cls.name_key)
        _finish_renewal(directory)
        with remedy("restore it from a backup, or join again: `fedpareto worker join --help`"):
            return cls(
                **_load_common(directory, values, passphrase),
                client_id=values["client_id"],
                signing_key=load_signing_key(directory / "signing.key", passphrase),
                coordinator_key=_load_coordinator_key(directory / "coordinator.pub"),
            )


def save_renewal(
    directory: Path, key: EllipticCurvePrivateKey, certificate: bytes, passphrase: bytes | None = None
) -> None:
    """Replaces a client's TLS key and certificate (PEM).

    The change is atomic for `MemberFiles.load`, even if the process or the machine dies in between. Without a
    passphrase, the key is protected by the file mode alone.
    """
    replace_private(directory / _RENEWED, private_key_pem(key, passphrase) + certificate)
    _finish_renewal(directory)


def move_address(directory: Path, holder: str, **addresses: str) -> None:
    """Records the coordinator's new addresses in the directory of a `holder`; see `read_description`."""
    values = read_description(directory, holder, *addresses)
    if (moved := {**values, **addresses}) != values:
        write_description(directory, moved)


def _finish_renewal(directory: Path) -> None:
    renewed = directory / _RENEWED
    if renewed.exists():
        key, begin, certificate = read_file(renewed).partition(b"-----BEGIN CERTIFICATE-----")
        replace_private(directory / "tls.key", key)
        replace_private(directory / "certificate.pem", begin + certificate)
        renewed.unlink()


def _load_common(directory: Path, values: Mapping[str, str], passphrase: bytes | None) -> dict[str, Any]:
    """The fields of `Files`."""
    tls_key = load_tls_key(directory / "tls.key", passphrase)
    return {
        "federation_id": values["federation_id"],
        "address": values["address"],
        "ca": pem(load_certificate_file(directory / "ca.pem")),
        "certificate": pem(load_certificate_file(directory / "certificate.pem", tls_key)),
        "tls_key": tls_key,
    }


def _load_coordinator_key(path: Path) -> Ed25519PublicKey:
    data = read_file(path)
    try:
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(data.decode().strip()))
    except ValueError as error:
        raise FileDamaged(f"{path} does not hold an Ed25519 key: {error}") from None


def write_description(directory: Path, values: Mapping[str, str]) -> None:
    """Writes who the holder of a directory is, and where its coordinator is."""
    replace_private(directory / "member.toml", tomli_w.dumps(values).encode())


def read_description(directory: Path, holder: str, *more: str) -> dict[str, str]:
    """What `member.toml` says: federation_id, address, the holder's name, whose key is `holder`, and what `more` names.

    Raises:
        IdentityError: there is no membership, or it is of another kind of holder.
    """
    path = directory / "member.toml"
    if not path.exists():
        raise IdentityError(f"{directory} holds no membership: there is no {path.name} in it")
    try:
        values = tomllib.loads(read_file(path).decode())
    except ValueError as error:
        raise IdentityError(f"{path} is not TOML: {error}") from None
    for key in ("federation_id", holder, "address", *more):
        if not isinstance(values.get(key), str):
            raise IdentityError(f"{path} has no {key}: it is not the directory of {_HOLDERS[holder]}")
    return values
