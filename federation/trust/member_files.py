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

from federation.refusals import Refusal
from federation.text_files import FORMAT, FormatError, check_format, decoded
from federation.transport.addresses import is_address
from federation.transport.proxies import ProxyChoice, no_proxy
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
    write_private_key,
)

if TYPE_CHECKING:
    import grpc

    from federation.transport.channels import RpcRefusal

OWN_ROTATIONS = "signing.rotations"  # the replacements of the holder's signing keys
COORDINATOR_ROTATIONS = (
    "coordinator.rotations"  # the replacements of the coordinator's keys that this member has followed
)
_HOLDERS = {"client_id": "a worker", "admin": "an administrator"}


@dataclass(frozen=True, kw_only=True)
class Files:
    """The keys and certificates of a client or an administrator.

    The certificates are PEM, and `tls_key` is the key of `certificate`. The addresses are the federation ports of
    coordinators, "host:port": at least one, and first the one that worked last. The choice of proxies is not stored.
    """

    service: ClassVar[str]  # that the holder calls

    federation_id: str
    addresses: tuple[str, ...]
    ca: bytes
    certificate: bytes
    tls_key: EllipticCurvePrivateKey = field(repr=False)
    proxy: ProxyChoice = no_proxy

    @property
    def not_after(self) -> datetime:
        """The time at which the certificate expires, aware."""
        return load_certificate(self.certificate).not_valid_after_utc

    @property
    def address(self) -> str:
        """The address that is tried first."""
        return self.addresses[0]

    def channel(self, options: Sequence[tuple[str, int | str]] = (), *, address: str = "") -> "grpc.Channel":
        """A mutual-TLS channel to the federation port of the coordinator at `address`, or at the first address."""
        from federation.transport.channels import mutual_channel  # noqa: PLC0415 - gRPC loads slowly

        key, address = private_key_pem(self.tls_key), address or self.address
        return mutual_channel(
            address, ca=self.ca, key=key, certificate=self.certificate, options=options, proxy=self.proxy(address)
        )

    def serving_channel(self, options: Sequence[tuple[str, int | str]] = ()) -> "tuple[str, grpc.Channel]":
        """The address of the first coordinator that serves the holder, and a channel to it; see `first_serving`.

        Raises:
            RouteError: no coordinator answers.
        """
        from federation.transport.first_serving import first_serving  # noqa: PLC0415 - gRPC loads slowly

        return first_serving(
            self.addresses, self.service, self.proxy, lambda address: self.channel(options, address=address)
        )

    def refusal(self, error: "grpc.RpcError", address: str = "") -> "RpcRefusal":
        """The reason why a call of the holder failed, to the coordinator at `address`, or at the first address."""
        from federation.transport.channels import refusal_from_rpc_error  # noqa: PLC0415 - gRPC loads slowly

        proxy = self.proxy(address or self.address)
        return refusal_from_rpc_error(error, not_after=self.not_after, proxy=proxy)


@dataclass(frozen=True, kw_only=True)
class MemberFiles(Files):
    """A client's keys, certificates and name, as stored in its directory.

    `signing_key` signs its updates; `coordinator` verifies the coordinator's assignments and receipts. All copies of a
    member share `coordinator`, since it learns new keys.
    """

    name_key: ClassVar[str] = "client_id"
    service: ClassVar[str] = "federation.v1.Federation"

    client_id: str
    signing_key: Ed25519PrivateKey = field(repr=False)
    coordinator: CoordinatorKeys

    def save(self, directory: Path, passphrase: bytes | None = None) -> None:
        """Writes a new directory; `member.toml` is written last, so a directory that has it is complete.

        Raises:
            FileExistsError: the directory holds keys already.
        """
        save_keys(directory, self.tls_key, self.signing_key, passphrase)
        self.complete(directory)

    def complete(self, directory: Path) -> None:
        """Writes the rest of a directory that has the keys."""
        for name, content in {
            "ca.pem": self.ca,
            "certificate.pem": self.certificate,
            "coordinator.pub": self.coordinator.first.public_bytes_raw().hex().encode() + b"\n",
        }.items():
            replace_private(directory / name, content)
        holder = {"federation_id": self.federation_id, self.name_key: self.client_id}
        write_description(directory, {**holder, "addresses": self.addresses})

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


def note_addresses(directory: Path, holder: str, **addresses: tuple[str, ...]) -> None:
    """Notes the coordinators' addresses in the directory of a `holder`, if they differ; see `read_description`."""
    values = read_description(directory, holder, *addresses)
    if (changed := {**values, **addresses}) != values:
        write_description(directory, changed)


def _load_common(directory: Path, values: Mapping[str, Any], passphrase: bytes | None) -> dict[str, Any]:
    """The fields of `Files`."""
    tls_key = load_tls_key(directory / "tls.key", passphrase)
    return {
        "federation_id": values["federation_id"],
        "addresses": values["addresses"],
        "ca": pem(load_certificate_file(directory / "ca.pem")),
        "certificate": pem(load_certificate_file(directory / "certificate.pem", tls_key)),
        "tls_key": tls_key,
    }


def save_keys(
    directory: Path,
    tls_key: EllipticCurvePrivateKey,
    signing_key: Ed25519PrivateKey,
    passphrase: bytes | None = None,
) -> None:
    """Writes a member's keys to a new directory. Raises FileExistsError if it holds keys already."""
    make_private_directory(directory)
    write_private_key(directory / "tls.key", tls_key, passphrase)
    write_private_key(directory / "signing.key", signing_key, passphrase)


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


def write_description(directory: Path, values: Mapping[str, str | tuple[str, ...]]) -> None:
    """Writes `member.toml`: the holder of a directory and the addresses of the coordinators."""
    replace_private(directory / "member.toml", tomli_w.dumps({"format": FORMAT, **values}).encode())


def read_description(directory: Path, holder: str, *more: str) -> dict[str, Any]:
    """Reads `member.toml`: federation_id, the holder's name under the key `holder`, addresses, and the keys in `more`.

    Those in `more` are lists of addresses, too.

    Raises:
        IdentityError: there is no membership, or it is of another kind of holder.
    """
    path = directory / "member.toml"
    if not path.exists():
        raise IdentityError(f"{directory} holds no membership: there is no {path.name} in it")
    try:
        values = tomllib.loads(decoded(read_file(path)))
    except ValueError as error:
        raise IdentityError(f"{path} is not TOML: {error}") from None
    try:
        check_format(values.pop("format", FORMAT))
    except FormatError as error:
        raise IdentityError(f"{path}: format: {error}") from None
    for key in ("federation_id", holder):
        if not isinstance(values.get(key), str):
            raise IdentityError(f"{path} has no {key}: it is not the directory of {_HOLDERS[holder]}")
    for key in dict.fromkeys(("addresses", *more)):
        addresses = values.get(key)
        if not isinstance(addresses, list) or not addresses or not all(map(is_address, addresses)):
            raise IdentityError(
                f"{path} has no {key}, a list of HOST:PORT: it is not the directory of {_HOLDERS[holder]}"
            )
        values[key] = tuple(addresses)
    return values
