"""Checkpoints: the coordinator's signed statements about the audit log, in the database and in its directory.

The copy in the directory reveals a database that is older than the last signed checkpoint, even if the checkpoints in
the database are just as old.
"""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from google.protobuf.message import DecodeError
from sqlalchemy import select
from sqlalchemy.orm import Session

from federation.errors import Error
from federation.refusals import Refusal
from federation.trust.envelope import sign, verify
from federation.trust.keys import replace_private
from federation.v1.common_pb2 import CheckpointManifest, LogKeyManifest, SignedEnvelope
from storage.models import Checkpoint

NEWEST_FILE = "log-checkpoint.envelope"


class LogError(Error):
    """The audit log differs from what was signed; the message says how."""


@dataclass(frozen=True, kw_only=True)
class LogKey:
    """The key that signs the log of a federation."""

    federation_id: str
    key: Ed25519PrivateKey

    @property
    def public(self) -> Ed25519PublicKey:
        """The public part."""
        return self.key.public_key()

    @property
    def entry_key(self) -> bytes:
        """The key of the MACs of entries without a place in the log, 32 bytes."""
        return blake3(self.key.private_bytes_raw(), derive_key_context="fedpareto/v1/entry-tag").digest()

    def certified(self, signing_key: Ed25519PrivateKey) -> SignedEnvelope:
        """The coordinator's signed statement that this key signs its log."""
        raw = self.public.public_bytes_raw()
        return sign(LogKeyManifest(federation_id=self.federation_id, key=raw), signing_key)

    def sign(self, size: int, root: bytes, now: datetime) -> SignedEnvelope:
        """A checkpoint of the log with this many entries, whose tree has this root."""
        manifest = CheckpointManifest(federation_id=self.federation_id, size=size, root=root)
        manifest.created.FromDatetime(now)
        return sign(manifest, self.key)

    def open(self, envelope: bytes) -> CheckpointManifest:
        """The checkpoint in a serialized envelope that this key has signed.

        Raises:
            LogError: it is none.
        """
        try:
            manifest = verify(SignedEnvelope.FromString(envelope), CheckpointManifest, self.public)
        except (DecodeError, Refusal) as error:
            why = error.message if isinstance(error, Refusal) else "it is no signed envelope"
            raise LogError(f"a checkpoint is not signed by the log's key: {why}") from None
        if manifest.federation_id != self.federation_id:
            raise LogError(f"a checkpoint is of the federation {manifest.federation_id!r}")
        return manifest


def newest_signed(session: Session) -> bytes | None:
    """The newest checkpoint in the database, a serialized envelope; None before the first."""
    return session.scalar(select(Checkpoint.envelope).order_by(Checkpoint.size.desc()).limit(1))


def noted(directory: Path) -> bytes | None:
    """The newest checkpoint that is noted in the coordinator's directory; None where there is none."""
    try:
        return (directory / NEWEST_FILE).read_bytes()
    except FileNotFoundError:
        return None


def note(directory: Path, envelope: bytes | None) -> None:
    """Notes the newest checkpoint in the coordinator's directory; None forgets it."""
    if envelope is None:
        (directory / NEWEST_FILE).unlink(missing_ok=True)
    else:
        replace_private(directory / NEWEST_FILE, envelope)
