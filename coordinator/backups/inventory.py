"""The content of a directory with a backup.

backup.json              its inventory, a `Content`; replaced last, so that an older backup is valid until then
database-TIME.db         the rows, as a SQLite database, whichever kind the coordinator's is
database-TIME.envelope   the coordinator's signature of backup.json, a `BackupManifest`
blobs/                   the blobs that the rows refer to, as `storage.blob_directory` keeps them
lock                     held while a backup is made or restored

The signature covers backup.json, backup.json has the digest of the database, and the rows have those of the blobs.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Literal, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from federation.digests import digest
from federation.refusals import Refusal
from federation.trust.certificates import fingerprint, load_certificate
from federation.trust.envelope import sign
from federation.trust.identity import parse_peer
from federation.trust.key_chain import KeyChain
from federation.trust.keys import IdentityError, replace_private
from federation.v1.common_pb2 import BackupManifest, SignedEnvelope

CONTENT_FILE = "backup.json"
LOCK_FILE = "lock"
BLOBS = "blobs"


class BackupError(Exception):
    """A backup cannot be made or restored; the message says why and what to do."""


class Content(BaseModel):
    """The inventory of a backup."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    federation_id: str
    ca: str  # the CA's certificate, PEM
    server: str  # the coordinator's certificate, PEM; it names the signing key, and the CA has signed it
    made: datetime
    database: str = Field(pattern=r"^database-[0-9TZ]+\.db$")  # the name of the file
    digest: str  # of that file
    log_entries: int  # entries of the audit log that have a place in it
    runs: int
    blobs: int
    bytes: int  # of the blobs
    keep_rounds: int  # the coordinator's setting: of the other rounds, blobs may be missing
    missing: tuple[str, ...]  # digests of blobs that were removed meanwhile, or that the coordinator could not read
    restored: str  # the newest statement that a backup was restored, an envelope in base64; empty if there is none

    @property
    def ca_fingerprint(self) -> str:
        """The SHA-256 of the CA's certificate, hexadecimal."""
        return fingerprint(load_certificate(self.ca.encode()))

    @property
    def signature(self) -> str:
        """The name of the file with the signature."""
        return Path(self.database).with_suffix(".envelope").name

    @field_validator("ca", "server")
    @classmethod
    def _must_be_certificate(cls, text: str) -> str:
        try:
            load_certificate(text.encode())
        except IdentityError as error:
            raise ValueError(str(error)) from None
        return text

    def save(self, directory: Path, key: Ed25519PrivateKey) -> None:
        """Signs and writes the inventory."""
        raw = self.model_dump_json(indent=2).encode() + b"\n"
        manifest = BackupManifest(federation_id=self.federation_id, inventory=digest(raw))
        manifest.made.FromDatetime(self.made)
        replace_private(directory / self.signature, sign(manifest, key).SerializeToString(deterministic=True))
        replace_private(directory / CONTENT_FILE, raw)

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Reads the content of a backup, without its signature.

        Raises:
            BackupError: the directory holds no backup, or its inventory is damaged.
        """
        return cls._read(directory)[0]

    @classmethod
    def open(cls, directory: Path, chain: KeyChain | None = None) -> Self:
        """Reads the content of a backup, and verifies that the coordinator has signed all of it.

        `chain` has the coordinator's signing keys; by default it is the key that the CA in the backup has certified.

        Raises:
            BackupError: the directory holds no backup, another key than the coordinator's has signed its inventory, or
                the inventory was changed since.
        """
        content, inventory = cls._read(directory)
        path = directory / content.signature
        try:
            envelope = SignedEnvelope.FromString(path.read_bytes())
            manifest = (chain or KeyChain(_certified_key(content))).verify(envelope, BackupManifest)
        except FileNotFoundError:
            raise BackupError(f"the backup in {directory} is not signed: {content.signature} is missing") from None
        except DecodeError:
            raise BackupError(f"{path} is damaged: it is no signature") from None
        except Refusal as refusal:
            raise BackupError(f"{path} is not a signature of the coordinator: {refusal.message}") from None
        if (manifest.federation_id, manifest.inventory) != (content.federation_id, inventory):
            raise BackupError(f"{directory / CONTENT_FILE} was changed: {path.name} is the signature of another one")
        return content

    @classmethod
    def _read(cls, directory: Path) -> tuple[Self, str]:
        """The content and the digest of its bytes."""
        path = directory / CONTENT_FILE
        try:
            raw = path.read_bytes()
            return cls.model_validate_json(raw), digest(raw)
        except FileNotFoundError:
            raise BackupError(f"{directory} holds no backup: there is no {CONTENT_FILE}") from None
        except ValidationError as error:
            problem = error.errors()[0]
            raise BackupError(f"{path}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None


def _certified_key(content: Content) -> Ed25519PublicKey:
    """The signing key that the coordinator's certificate names. Raises the Refusal `certificate-unknown`."""
    ca, server = load_certificate(content.ca.encode()), load_certificate(content.server.encode())
    try:
        server.verify_directly_issued_by(ca)
        identity = parse_peer(content.server.encode())
    except (InvalidSignature, IdentityError, TypeError, ValueError):
        raise Refusal("certificate-unknown", "the CA in the inventory has not issued its `server`") from None
    if (identity.kind, identity.federation_id) != ("coordinator", content.federation_id) or not identity.signing_key:
        raise Refusal("certificate-unknown", f"`server` is not the coordinator of {content.federation_id}")
    return Ed25519PublicKey.from_public_bytes(identity.signing_key)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Locks a backup: no other process makes, prunes or restores it meanwhile.

    Raises:
        BackupError: another process does so now.
    """
    descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise BackupError(f"another process uses the backup in {directory}: wait until it has ended") from None
    finally:
        os.close(descriptor)
