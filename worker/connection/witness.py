"""The witness: keeps the newest checkpoints of the coordinator's log, and refuses a log that does not continue them.

They are kept in the worker's home. A coordinator whose record was restored from a backup has forgotten the end of its
log: it says so in a signed statement. Its log must then continue the newest checkpoint of this file that it still has.
"""

import json
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from federation.monitoring.events import Events
from federation.record.merkle import HASH_BYTES, continues
from federation.refusals import Refusal
from federation.trust.envelope import from_text, to_text, verify
from federation.trust.keys import replace_private
from federation.trust.member_files import MemberFiles
from federation.v1.common_pb2 import CheckpointManifest, LogHead, LogKeyManifest, RestoreManifest, SignedEnvelope
from worker.progress import EARLIEST, StatementError
from worker.state_file import StateFile, read_state

_ADVICE = "the worker then trusts the next audit log that its coordinator shows"
MAX_KEPT = 64  # checkpoints
MAX_CHECKPOINT_BYTES = 8 << 10


class LogForked(StatementError):
    """The coordinator's log does not continue what this worker has seen; the message says what to do."""


@dataclass(frozen=True)
class Kept:
    """A checkpoint, with its envelope."""

    size: int
    root: bytes
    envelope: SignedEnvelope


class Witness:
    """The checkpoints of the coordinator's log, in a file that may be missing. Any thread may call.

    Args:
        path: of the file.
        fork: of the file where the evidence of a log that does not continue is written.
        member: the membership.
        events: tells the owner.

    Raises:
        WorkerHomeError: the file is damaged.
    """

    def __init__(self, path: Path, fork: Path, *, member: MemberFiles, events: Events) -> None:
        self._file = StateFile(path, "what the coordinator's log was", events)
        self._fork = fork
        self._member = member
        self._events = events
        self._lock = threading.RLock()
        self._key: Ed25519PublicKey | None = None  # of the log, from the last welcome
        # The checkpoints by size, and the time of the newest restore that was applied.
        self._kept, self._restored = read_state(path, _parsed, _ADVICE) or ([], EARLIEST)

    @property
    def size(self) -> int:
        """The number of entries in the newest checkpoint that is kept; 0 without one."""
        with self._lock:
            return self._kept[-1].size if self._kept else 0

    def welcome(self, log_key: SignedEnvelope, head: LogHead, restored: RestoreManifest | None) -> None:
        """Checks the log that the coordinator shows in its welcome. The Hello before it named `size`.

        `restored` is the coordinator's newest statement of a restore, verified.

        Raises:
            StatementError: the key is not certified by the coordinator, or the checkpoint is not signed by it.
            LogForked: the log does not continue the kept checkpoint.
        """
        with self._lock:
            try:
                certified = self._member.coordinator.verify(log_key, LogKeyManifest)
                key = Ed25519PublicKey.from_public_bytes(certified.key)
            except (Refusal, ValueError) as error:
                raise StatementError(f"a key of the audit log that the coordinator did not sign ({error})") from None
            if certified.federation_id != self._member.federation_id:
                raise StatementError("a key of the audit log of another federation")
            self._key = key
            if restored is not None and self._goes_back(restored) and self._kept:
                raise StatementError(
                    "the coordinator was restored from a backup; this worker asks again for the proof that its log "
                    f"continues the {self.size} entries from before"
                )
            self._take(head, newest=True)

    def saw(self, head: LogHead) -> None:
        """Checks and keeps a checkpoint that came with an assignment or a receipt.

        Raises:
            StatementError: it is not signed by the log's key.
            LogForked: the log does not continue the kept checkpoint.
        """
        with self._lock:
            if self._key is not None:
                self._take(head, newest=False)

    def _take(self, head: LogHead, *, newest: bool) -> None:
        """Keeps a checkpoint that continues the last one, or, unless `newest`, one that was the last a moment ago."""
        new = self._open(head.checkpoint)
        last = self._kept[-1] if self._kept else None
        if last is not None:
            candidates = [last] if newest else reversed(self._kept)
            base = next((candidate for candidate in candidates if candidate.size == head.since), None)
            if base is None:
                raise self._forked(head, last, new, f"there is no proof that it continues the {last.size} entries")
            if not continues(base.size, base.root, new.size, new.root, head.consistency):
                raise self._forked(
                    head, base, new, f"the proof does not hold that it continues the {base.size} entries"
                )
            if base is not last or new.size == last.size:
                return  # another checkpoint came in between
        self._kept.append(new)
        if len(self._kept) > MAX_KEPT:  # the older half becomes thinner
            half = MAX_KEPT // 2
            self._kept = [*self._kept[:half:2], *self._kept[half:]]
        self._save()

    def _goes_back(self, manifest: RestoreManifest) -> bool:
        """Drops the checkpoints that the coordinator lost by restores since the last one. True if any were dropped."""
        try:
            restores = [(log.restored.ToDatetime(tzinfo=UTC), log.size) for log in manifest.logs]
        except (ValueError, OverflowError) as error:
            raise StatementError(f"a restore at a time that does not exist ({error})") from None
        since = [(at, size) for at, size in restores if at > self._restored]
        if not since:
            return False
        size = min(size for _, size in since)
        lost = [checkpoint for checkpoint in self._kept if checkpoint.size > size]
        self._restored = max(at for at, _ in since)
        if lost:
            self._kept = self._kept[: -len(lost)]
            self._events.warn(
                "log-restored",
                f"the coordinator was restored from a backup: its audit log goes on after {size} entries; this worker "
                f"has seen {lost[-1].size}. From here on it must continue the checkpoint of {self.size} entries",
                size=size,
                seen=lost[-1].size,
            )
        self._save()
        return bool(lost)

    def _open(self, envelope: SignedEnvelope) -> Kept:
        if (size := envelope.ByteSize()) > MAX_CHECKPOINT_BYTES:
            raise StatementError(f"a checkpoint of {size} bytes; at most {MAX_CHECKPOINT_BYTES}")
        try:
            manifest = verify(envelope, CheckpointManifest, self._key)
        except Refusal as refusal:
            raise StatementError(f"a checkpoint that the log's key did not sign ({refusal.message})") from None
        if manifest.federation_id != self._member.federation_id:
            raise StatementError("a checkpoint of another federation")
        if manifest.size == 0 or len(manifest.root) != HASH_BYTES:
            raise StatementError("a checkpoint without entries or with a root of another length")
        return Kept(manifest.size, manifest.root, envelope)

    def _forked(self, head: LogHead, kept: Kept, shown: Kept, why: str) -> LogForked:
        evidence = {
            "kept": to_text(kept.envelope),
            "shown": to_text(shown.envelope),
            "since": head.since,
            "consistency": [node.hex() for node in head.consistency],
        }
        try:
            replace_private(self._fork, json.dumps(evidence).encode() + b"\n")
            location = f"both signed checkpoints are in {self._fork}"
        except OSError as error:
            location = f"{self._fork} could not be written ({error.strerror or error})"
        return LogForked(
            f"the coordinator's audit log was changed or cut: {why} that this worker has seen; it shows {shown.size}. "
            "Nothing is done for it. If a backup was restored, its operator has to run `fedpareto coordinator "
            f"restored`. If not, tell the federation's security officer: {location}"
        )

    def _save(self) -> None:
        checkpoints = [to_text(kept.envelope) for kept in self._kept]
        self._file.write({"checkpoints": checkpoints, "restored": self._restored.isoformat()})


def _parsed(document: dict[str, Any]) -> tuple[list[Kept], datetime]:
    return [_kept(text) for text in document["checkpoints"]], datetime.fromisoformat(document["restored"])


def _kept(text: str) -> Kept:
    envelope = from_text(text)
    manifest = CheckpointManifest.FromString(envelope.manifest)
    return Kept(manifest.size, manifest.root, envelope)
