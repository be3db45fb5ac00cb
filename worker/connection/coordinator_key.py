"""The coordinator's signing key: a worker follows it from one key to the next, and keeps the rotations."""

from collections.abc import Sequence
from pathlib import Path

from federation.monitoring.events import Events
from federation.refusals import Refusal
from federation.trust.envelope import key_id
from federation.trust.key_chain import rotations_text
from federation.trust.keys import replace_private
from federation.trust.member_files import MemberFiles
from federation.v1.common_pb2 import KeyRotation
from worker.progress import StatementError


def follow_coordinator(member: MemberFiles, shown: Sequence[KeyRotation], path: Path, events: Events) -> None:
    """Follows the rotations that the coordinator sends, and writes them to a file of the worker's home.

    Raises:
        StatementError: they do not lead on from the key that this member knows.
    """
    keys = member.coordinator
    try:
        if not keys.learn(shown):
            return
    except Refusal as refusal:
        raise StatementError(f"{refusal.reason}: {refusal.message}") from None
    name = key_id(keys.chain.present).hex()[:16]
    events.tell("coordinator-key", f"the coordinator signs with the key {name} now; the old key signed it")
    try:
        replace_private(path, rotations_text(keys.rotations).encode())
    except OSError as error:
        events.disk(
            f"{path} cannot be written ({error.strerror or error}): the next worker with this directory follows the "
            "coordinator to its new key again; make room on the disk",
        )
