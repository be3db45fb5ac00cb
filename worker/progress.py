"""The coordinator's newest signed time, the newest round of each run, and the restores that the coordinator signed.

They are kept in the worker's home, so that a restarted worker does not accept old messages as new.
"""

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from federation.errors import Error
from federation.monitoring.events import Events
from federation.refusals import Refusal
from federation.text import escaped
from federation.trust.envelope import envelope_digest, from_text, to_text
from federation.trust.keys import replace_private
from federation.trust.member_files import MemberFiles
from federation.v1.common_pb2 import RestoreManifest, SignedEnvelope
from worker.state_file import StateFile, read_state

MAX_RUNS = 1000  # runs whose newest round is remembered
_ADVICE = "the worker then trusts the next time and rounds that its coordinator signs"
EARLIEST = datetime.fromtimestamp(0, UTC)


class StatementError(Error, ValueError):
    """A statement that this coordinator did not sign, or that contradicts an earlier one; the message says why."""


class Progress:
    """The coordinator's progress as the worker knows it, in a file that may be missing. Any thread may call.

    With `ask`, a restore waits until `accept_restore` has written the file `accepted`.

    Raises:
        WorkerHomeError: the file is damaged.
    """

    def __init__(self, path: Path, accepted: Path, *, member: MemberFiles, ask: bool, events: Events) -> None:
        self._file = StateFile(path, "what the coordinator signed last", events)
        self._accepted = accepted
        self._member = member
        self._ask = ask
        self._events = events
        self._lock = threading.RLock()
        self._asked = False  # the owner was warned of the restore that waits
        state = read_state(path, partial(_parsed, None if ask else member), _ADVICE) or _State(EARLIEST, {}, None, None)
        self._time, self._rounds, self._restored, self._pending = state
        if self._pending is not None and not ask:  # the owner has changed the policy since
            self._take(self._pending, open_restore(self._pending, member))

    @property
    def time(self) -> datetime:
        """The newest signed time; a time in the distant past if there was none."""
        return self._time

    def saw_time(self, now: datetime) -> None:
        """Remembers a signed time that was accepted."""
        with self._lock:
            self._time = now
            self._save()

    def newest_round(self, run_id: str) -> int | None:
        """The newest round of a run in which this worker accepted work; None if there was none."""
        return self._rounds.get(run_id)

    def saw_round(self, run_id: str, number: int) -> None:
        """Remembers that work of a round was accepted."""
        with self._lock:
            newest = self._rounds.pop(run_id, None)
            self._rounds[run_id] = max(number, newest or 0)
            while len(self._rounds) > MAX_RUNS:
                del self._rounds[next(iter(self._rounds))]
            if self._rounds[run_id] != newest:
                self._save()

    def restored(self, envelope: SignedEnvelope) -> None:
        """Applies the coordinator's statement that it was restored from a backup, and warns the owner.

        Raises:
            StatementError: it is not signed by the coordinator, or is of another federation.
        """
        with self._lock:
            if envelope in (self._restored, self._pending):
                if envelope == self._pending:
                    self._tell_pending(envelope)
                return
            manifest = open_restore(envelope, self._member)
            known_times = [
                _made(open_restore(other, self._member)) for other in (self._restored, self._pending) if other
            ]
            if any(_made(manifest) <= time for time in known_times):
                return  # no newer than a known statement
            text, fields = self._told(manifest)
            if fields["runs"] and self._ask:
                self._pending, self._asked = envelope, False
                self._save()
                self._tell_pending(envelope)
            else:
                self._take(envelope, manifest)
                self._events.warn("restored", text, **fields)

    def _tell_pending(self, envelope: SignedEnvelope) -> None:
        """Warns the owner of a restore that waits, once in the life of this process."""
        if self._asked:
            return
        self._asked = True
        text, fields = self._told(open_restore(envelope, self._member))
        advice = "Nothing of them is done until you accept it: run `fedpareto worker restored --accept`"
        self._events.warn("restore-pending", f"{text}. {advice}", **fields)

    def _told(self, manifest: RestoreManifest) -> tuple[str, dict[str, object]]:
        """What the owner is told of a restore: the text, and the fields of the event."""
        affected = _affected(manifest, self._rounds)
        runs = ", ".join(f"{escaped(run)} (from round {self._rounds[run]} to {kept})" for run, kept in affected)
        text = f"the coordinator was restored from a backup; its statement is of {_made(manifest):%Y-%m-%d %H:%M} UTC"
        text += f". These runs go back: {runs}" if runs else ". No run goes back behind what this worker has seen"
        return text, {"restored": _made(manifest).isoformat(), "runs": dict(affected)}

    def waits(self, run_id: str) -> bool:
        """True if work of this run waits until the owner has accepted a restore."""
        with self._lock:
            if self._pending is None:
                return False
            return any(run == run_id for run, _ in _affected(open_restore(self._pending, self._member), self._rounds))

    def accepted(self) -> bool:
        """Applies the pending restore if the owner has accepted it. True if it was applied."""
        if self._pending is None:
            return False
        try:
            digest = self._accepted.read_text(encoding="utf-8")
        except (OSError, ValueError):  # in nearly all cases, it is not accepted yet
            return False
        with self._lock:
            if self._pending is None or digest != envelope_digest(self._pending):
                return False
            envelope = self._pending
            self._take(envelope, open_restore(envelope, self._member))
        with suppress(OSError):  # the file has no effect any more
            self._accepted.unlink()
        self._events.tell("restored", "the owner has accepted that the coordinator was restored from a backup")
        return True

    def _take(self, envelope: SignedEnvelope, manifest: RestoreManifest) -> None:
        for run, kept in _affected(manifest, self._rounds):
            self._rounds[run] = kept
        self._time = min(self._time, _made(manifest))
        self._restored, self._pending = envelope, None
        self._save()

    def _save(self) -> None:
        self._file.write(
            {
                "time": self._time.isoformat(),
                "rounds": self._rounds,
                "restored": self._restored and to_text(self._restored),
                "pending": self._pending and to_text(self._pending),
            }
        )


@dataclass(frozen=True)
class PendingRestore:
    """A restore that waits for the owner.

    Attributes:
        digest: of its envelope.
        made: the time at which the coordinator signed it, aware.
        runs: for each run that goes back, the newest round seen here, and the first round that may come again.
    """

    digest: str
    made: datetime
    runs: dict[str, tuple[int, int]]


def pending_restore(path: Path, member: MemberFiles) -> PendingRestore | None:
    """The restore that waits for the owner, from a worker's progress file; None when there is none.

    Raises:
        WorkerHomeError: the file is damaged.
    """
    state = read_state(path, partial(_parsed, member), _ADVICE)
    if state is None or state.pending is None:
        return None
    manifest = open_restore(state.pending, member)
    runs = {run: (state.rounds[run], kept) for run, kept in _affected(manifest, state.rounds)}
    return PendingRestore(envelope_digest(state.pending), _made(manifest), runs)


def last_restore(path: Path, member: MemberFiles) -> RestoreManifest | None:
    """The coordinator's newest statement of a restore that this worker has followed; None if there is none.

    Raises:
        WorkerHomeError: the file is damaged.
        StatementError: the coordinator has not signed the statement.
    """
    state = read_state(path, partial(_parsed, None), _ADVICE)
    return None if state is None or state.restored is None else open_restore(state.restored, member)


def accept_restore(accepted: Path, digest: str) -> None:
    """Records that the owner accepts a restore, for the running worker or the next one."""
    replace_private(accepted, digest.encode())


class _State(NamedTuple):
    time: datetime
    rounds: dict[str, int]  # the runs that were asked for last are last
    restored: SignedEnvelope | None
    pending: SignedEnvelope | None


def _parsed(member: MemberFiles | None, document: dict[str, Any]) -> _State:
    """The content of a file; for a `member`, a restore that waits for the owner is verified."""
    restored, pending = (_envelope(document[name]) for name in ("restored", "pending"))
    if member is not None and pending is not None:
        open_restore(pending, member)
    rounds = {str(run): int(number) for run, number in document["rounds"].items()}
    return _State(datetime.fromisoformat(document["time"]), rounds, restored, pending)


def open_restore(envelope: SignedEnvelope, member: MemberFiles) -> RestoreManifest:
    """A statement of a restore, verified.

    Raises:
        StatementError: it is not signed by the coordinator, or is of another federation.
    """
    try:
        manifest = member.coordinator.verify(envelope, RestoreManifest)
    except Refusal as refusal:
        raise StatementError(f"a restore that this federation's coordinator did not sign ({refusal.message})") from None
    if manifest.federation_id != member.federation_id:
        raise StatementError(f"a restore of federation {escaped(manifest.federation_id, 80)!r}")
    try:
        _made(manifest)
    except (ValueError, OverflowError) as error:
        raise StatementError(f"a restore at a time that does not exist ({error})") from None
    return manifest


def _affected(manifest: RestoreManifest, rounds: Mapping[str, int]) -> list[tuple[str, int]]:
    """The runs that go back behind the rounds seen here, each with the first round that may come again."""
    return [(run.run_id, run.next_round) for run in manifest.runs if rounds.get(run.run_id, 0) > run.next_round]


def _made(manifest: RestoreManifest) -> datetime:
    return manifest.restored.ToDatetime(tzinfo=UTC)


def _envelope(text: object) -> SignedEnvelope | None:
    return None if text is None else from_text(str(text))
