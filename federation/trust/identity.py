"""The names of a federation's members, and their form in certificates (docs/operate/operations.md).

TLS uses P-256 certificates from the federation's own CA. URI names of a certificate identify its holder:
`fedpareto://<federation>/client/<id>`; `fedpareto://<federation>/admin/<name>`, with one
`fedpareto://<federation>/role/<role>` for each role; or `fedpareto://<federation>/coordinator`. The certificates of
clients and of the coordinator also name their holder's Ed25519 signing key, so that the CA vouches for it:
`fedpareto://<federation>/signing-key/<64 hexadecimal digits>`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Literal

from cryptography import x509

from federation.trust.certificates import extension, load_certificate, serial_of
from federation.trust.keys import IdentityError

NAME_PATTERN = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")

_SIGNING_KEY = re.compile(r"[0-9a-f]{64}")

Kind = Literal["client", "admin", "coordinator"]


class Role(StrEnum):
    """The roles of administrators. Every role may read; the Admin service defines the other permissions of each."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    SECURITY_OFFICER = "security-officer"


class Action(StrEnum):
    """The actions for which a federation can require two security officers."""

    APPROVE = "approve"
    REVOKE = "revoke"
    FORGET = "forget"
    REVOKE_ADMIN = "revoke-admin"


@dataclass(frozen=True)
class PeerIdentity:
    """The holder of a certificate, as the certificate names it.

    `name` is the client id or the administrator's name, or "coordinator"; only an administrator has roles; `serial` is
    hexadecimal without leading zeros; `uri` names the holder in records. `signing_key` is the raw Ed25519 key that the
    certificate names; empty for an administrator.
    """

    federation_id: str
    kind: Kind
    name: str
    roles: frozenset[str]
    serial: str
    not_after: datetime
    uri: str
    signing_key: bytes = b""


def check_name(name: str, what: str = "name") -> str:
    """Returns `name` if it can name a federation, a client or an administrator; else raises IdentityError."""
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


def signing_key_uri(federation_id: str, key: bytes) -> str:
    """The URI name of a signing key: a raw Ed25519 public key, 32 bytes."""
    return f"fedpareto://{federation_id}/signing-key/{key.hex()}"


def parse_peer(certificate: bytes) -> PeerIdentity:
    """Reads the holder of a certificate, PEM or DER. It does not verify the certificate: TLS has done that.

    Raises:
        IdentityError: it names no member of a federation, or more than one.
    """
    parsed = load_certificate(certificate)
    names = extension(parsed, x509.SubjectAlternativeName)
    uris = names.get_values_for_type(x509.UniformResourceIdentifier) if names is not None else []
    holders: list[tuple[str, Kind, str, str]] = []
    roles: set[tuple[str, str]] = set()
    keys: list[tuple[str, bytes]] = []
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
            case [federation, "signing-key", key] if _SIGNING_KEY.fullmatch(key):
                keys.append((federation, bytes.fromhex(key)))
    if len(holders) != 1:
        raise IdentityError(f"the certificate names {len(holders)} members of a federation; it must name exactly one")
    [(federation_id, kind, name, uri)] = holders
    for part in (federation_id, name):
        check_name(part)
    if roles and (kind != "admin" or {federation for federation, _ in roles} != {federation_id}):
        raise IdentityError(f"the certificate gives roles to {uri}, which cannot hold them")
    if len(keys) > 1 or any(federation != federation_id or kind == "admin" for federation, _ in keys):
        raise IdentityError(f"the certificate names {len(keys)} signing keys for {uri}; it may name one of its own")
    return PeerIdentity(
        federation_id=federation_id,
        kind=kind,
        name=name,
        roles=frozenset(role for _, role in roles),
        serial=serial_of(parsed),
        not_after=parsed.not_valid_after_utc,
        uri=uri,
        signing_key=keys[0][1] if keys else b"",
    )
