"""The directory of a client: its keys and certificates."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import tomli_w
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from federation.line.proxies import Proxy
from federation.refusals import Refusal
from federation.trust.certificates import load_certificate, load_certificate_file, pem
from federation.trust.key_chain import CoordinatorKeys, read_rotations
from federation.trust.keys import (
    FileDamaged,
    IdentityError,
    finish_replacing,
    load_signing_key,
    load_tls_key,
    make_private_directory,
    private_key_pem,
    read_file,
    remedy,
    replace_private,
    replace_together,
    write_private,
)

if TYPE_CHECKING:
    import grpc

    from federation.line.channels import RpcRefusal

OWN_ROTATIONS = "signing.rotations"  # the replacements of the holder's signing keys
COORDINATOR_ROTATIONS = (
    "coordinator.rotations"  # the replacements of the coordinator's keys that this member has followed
)
_HOLDERS = {"client_id": "a worker", "admin": "an administrator"}


@dataclass(frozen=True, kw_only=True)
class Files:
    """The keys and certificates of a client or an administrator.

    The certificates are PEM, `tls_key` is the key of `certificate`, and the address is the federation port,
    "host:port". The proxy is not stored.
    """

    federation_id: str
    address: str
    ca: bytes
    certificate: bytes
    tls_key: EllipticCurvePrivateKey = field(repr=False)
    proxy: Proxy | None = None

    @property
    def not_after(self) -> datetime:
        """The time at which the certificate expires, aware."""
        return load_certificate(self.certificate).not_valid_after_utc

    def channel(self, options: Sequence[tuple[str, int | str]] = ()) -> "grpc.Channel":
        """A mutual-TLS channel to the federation port."""
        from federation.line.channels import mutual_channel  # noqa: PLC0415 - gRPC loads slowly

        key = private_key_pem(self.tls_key)
        return mutual_channel(
            self.address, ca=self.ca, key=key, certificate=self.certificate, options=options, proxy=self.proxy
        )

    def refusal(self, error: "grpc.RpcError") -> "RpcRefusal":
        """The reason why a call of the holder failed."""
        from federation.line.channels import refusal_from_rpc_error  # noqa: PLC0415 - gRPC loads slowly

        return refusal_from_rpc_error(error, not_after=self.not_after, proxy=self.proxy)


@dataclass(frozen=True, kw_only=True)
class MemberFiles(Files):
    """A client's keys, certificates and name, as stored in its directory.

    `signing_key` signs its updates; `coordinator` verifies the coordinator's assignments and receipts. All copies of a
    member share `coordinator`, since it learns new keys.
    """

    name_key: ClassVar[str] = "client_id"

    client_id: str
    signing_key: Ed25519PrivateKey = field(repr=False)
    coordinator: CoordinatorKeys

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
            "coordinator.pub": self.coordinator.first.public_bytes_raw().hex().encode() + b"\n",
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
        finish_replacing(directory)
        with remedy("restore it from a backup, or join again: `fedpareto worker join --help`"):
            return cls(
                **_load_common(directory, values, passphrase),
                client_id=values["client_id"],
                signing_key=load_signing_key(directory / "signing.key", passphrase),
                coordinator=_load_coordinator(directory, values["federation_id"]),
            )


def save_renewal(
    directory: Path, key: EllipticCurvePrivateKey, certificate: bytes, passphrase: bytes | None = None
) -> None:
    """Replaces a client's TLS key and certificate (PEM), both or neither.

    Without a passphrase, the key is protected by the file mode alone.
    """
    replace_together(directory, renewed_files(key, certificate, passphrase))


def renewed_files(key: EllipticCurvePrivateKey, certificate: bytes, passphrase: bytes | None) -> dict[str, str]:
    """The files of a TLS key and its certificate, by name."""
    return {"tls.key": private_key_pem(key, passphrase).decode(), "certificate.pem": certificate.decode()}


def move_address(directory: Path, holder: str, **addresses: str) -> None:
    """Records the coordinator's new addresses in the directory of a `holder`; see `read_description`."""
    values = read_description(directory, holder, *addresses)
    if (moved := {**values, **addresses}) != values:
        write_description(directory, moved)


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


def _load_coordinator(directory: Path, federation_id: str) -> CoordinatorKeys:
    path = directory / "coordinator.pub"
    data = read_file(path)
    try:
        first = Ed25519PublicKey.from_public_bytes(bytes.fromhex(data.decode().strip()))
    except ValueError as error:
        raise FileDamaged(f"{path} does not hold an Ed25519 key: {error}") from None
    path = directory / COORDINATOR_ROTATIONS
    try:
        return CoordinatorKeys(federation_id, first, read_rotations(path))
    except Refusal as refusal:
        raise FileDamaged(f"{path} is damaged: {refusal.message}") from None


def write_description(directory: Path, values: Mapping[str, str]) -> None:
    """Writes `member.toml`: the holder of a directory and the address of its coordinator."""
    replace_private(directory / "member.toml", tomli_w.dumps(values).encode())


def read_description(directory: Path, holder: str, *more: str) -> dict[str, str]:
    """Reads `member.toml`: federation_id, address, the holder's name under the key `holder`, and the keys in `more`.

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
