"""Tells a worker's owner what needs attention, with a command of the owner's own: `[notify]` of `worker.toml`.

The command gets the facts as one JSON object on its standard input. They have no text of the log, which may hold paths
and values of the data: the sentences are those below, the rest are names and numbers that the coordinator knows.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self

from federation.monitoring.events import Events
from federation.process.programs import run_program
from federation.text import counted, escaped
from federation.text_files import FORMAT
from worker.config import Notify

PAUSE_SECONDS = 60.0  # between two commands; facts that come meanwhile are told together
STOP_SECONDS = 5.0  # for a command that runs when the worker stops
MAX_WAITING = 100  # facts that wait for the command
MAX_STANDING = 1000  # facts of which an end, or a repetition, is known
MAX_DAYS = 14  # a certificate that ends later may still be renewed
ENVIRONMENT = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR")
"""What the command gets of the worker's environment, which may hold secrets."""
PRIVACY = frozenset({
    "policy:mode", "policy:disclose", "policy:required", "policy:approved", "policy:blur", "policy:evaluation-noise",
    "dp-budget", "dp-work", "roster", "cohort", "cover", "coefficients", "initial-model", "evaluates-only",
    "sessions", "model-sessions", "model-sums",
})  # fmt: skip
"""The reasons of declines by the owner's rules about privacy."""
_DISK = frozenset({"disk", "limit:disk"})  # reasons of declines
_CHARACTERS = 200  # of a name


@dataclass(frozen=True)
class FactKind:
    """A kind of fact: the fields of its event that the command gets, and what it says at its begin and at its end."""

    fields: tuple[str, ...]
    begins: str
    over: str = ""


KINDS = {
    "run-waits": FactKind(
        ("run_id", "name", "task", "submitted_by"),
        "run {run_id} ({name}, task {task}, submitted by {submitted_by}) waits for your approval: "
        "`fedpareto worker runs` shows it",
        "run {run_id} ({name}) has its answer",
    ),
    "restore-waits": FactKind(
        ("restored",),
        "the coordinator was restored from a backup, and work of runs that go back waits until you accept it: "
        "`fedpareto worker restored` shows it",
        "the restore of the coordinator is accepted",
    ),
    "certificate-ends": FactKind(
        ("not_after", "days_left"),
        "the certificate of this worker ends at {not_after}, and could not be renewed: its log says why; "
        "`fedpareto worker renew` tries again",
        "the certificate of this worker is renewed",
    ),
    "disk": FactKind(
        (),
        "the disk of this worker is full, or its files take more room than its policy allows: make room; its log names "
        "the file",
        "the disk of this worker takes its files again",
    ),
    "privacy-refused": FactKind(
        ("run_id", "reason"),
        "work of run {run_id} was declined by your rules about privacy: `fedpareto explain {reason}` says more",
    ),
}


@dataclass(frozen=True)
class _Change:
    """That a fact begins or is over; `subject` tells facts of one kind apart."""

    kind: str
    subject: str = ""
    begins: bool = True


class Notifier:
    """Hears a worker's events, and has a command tell the facts among them while it is entered as a context.

    A thread of its own starts one command at a time. So neither a slow command nor one that fails holds up any work; a
    fact that it does not take is dropped, and counted. A fact is told once, until it is over or the worker starts
    again. Without a command, this does nothing.

    `federation_id` and `client_id` say whose facts they are; `environment` is that of the worker; `pause` is the
    number of seconds between two commands.
    """

    def __init__(
        self,
        notify: Notify,
        events: Events,
        *,
        federation_id: str,
        client_id: str,
        environment: Mapping[str, str],
        pause: float = PAUSE_SECONDS,
    ) -> None:
        self._notify = notify
        self._events = events
        self._whose = {"federation_id": federation_id, "client_id": client_id}
        self._environment = {name: environment[name] for name in ENVIRONMENT if name in environment}
        self._pause = pause
        self._changed = threading.Condition()
        self._standing: dict[tuple[str, str], dict[str, object]] = {}  # the fields of each, the oldest first
        self._waiting: list[tuple[tuple[str, str], dict[str, object]]] = []
        self._dropped = 0  # facts since the last command that took some
        self._disk_failed = False  # since work was last done
        self._failed = False  # the last command
        self._stop_by: float | None = None
        self._thread = threading.Thread(target=self._run, name="worker-notify", daemon=True)
        if notify.command:
            events.listen(self._hear)

    def __enter__(self) -> Self:
        if self._notify.command:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Tells what still waits, and ends a command that takes longer than `STOP_SECONDS`."""
        with self._changed:
            self._stop_by = time.monotonic() + STOP_SECONDS
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(2 * STOP_SECONDS)

    # Called by any thread of the worker

    def _hear(self, event: str, fields: Mapping[str, object]) -> None:
        with self._changed:
            if (change := self._change(event, fields)) is None:
                return
            kind, key = KINDS[change.kind], (change.kind, change.subject)
            if change.begins == (key in self._standing):
                return
            if change.begins:
                known = {name: _plain(fields.get(name, "")) for name in kind.fields}
                if len(self._standing) >= MAX_STANDING:
                    del self._standing[next(iter(self._standing))]
                self._standing[key] = known
            else:
                known = self._standing.pop(key)
            text = (kind.begins if change.begins else kind.over).format_map(known)
            fact = {"kind": change.kind, "state": "begins" if change.begins else "over"}
            fact |= {"time": datetime.now(UTC).isoformat(timespec="seconds"), "text": text}
            if len(self._waiting) < MAX_WAITING:
                self._waiting.append((key, {**fact, **known}))
                self._changed.notify_all()
            else:
                self._drop(key)

    def _change(self, event: str, fields: Mapping[str, object]) -> _Change | None:
        """What an event says of a fact; None for the many others."""
        run, reason = str(fields.get("run_id")), str(fields.get("reason"))
        match event:
            case "run-waits" | "run-answered":
                return _Change("run-waits", f"{run} {fields.get('spec')}", fields.get("answer") == "waiting")
            case "restore-pending" | "restored":
                return _Change("restore-waits", begins=event == "restore-pending")
            case "certificate-ends":
                days = fields.get("days_left")
                return _Change(event) if isinstance(days, int) and days <= MAX_DAYS else None
            case "renewed":
                return _Change("certificate-ends", begins=False)
            case "disk":
                self._disk_failed = True
                return _Change("disk")
            case "declined" if reason in _DISK:
                self._disk_failed = True
                return _Change("disk")
            case "declined" if reason in PRIVACY:
                return _Change("privacy-refused", f"{reason} {run}")
            case "done":  # its reply is written afterwards, so that the next work that is done says whether it was
                failed, self._disk_failed = self._disk_failed, False
                return None if failed else _Change("disk", begins=False)
        return None

    def _drop(self, key: tuple[str, str]) -> None:
        """Counts a fact that is not told. If its event comes again, it is told then."""
        self._dropped += 1
        self._standing.pop(key, None)

    # The thread of its own

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stop_by is not None)
                if not self._waiting:
                    return
                facts, self._waiting = self._waiting, []
                dropped, self._dropped = self._dropped, 0
            document = {"format": FORMAT, **self._whose, "dropped": dropped, "facts": [fact for _, fact in facts]}
            problem = run_program(
                self._notify.command,
                json.dumps(document).encode() + b"\n",
                environment=self._environment,
                seconds=self._notify.seconds,
                stop_by=lambda: self._stop_by,
                said=_pass_on,
            )
            with self._changed:
                if problem:
                    self._dropped += dropped
                    for key, _ in facts:
                        self._drop(key)
                known, self._failed = self._failed, bool(problem)
            if problem and not known:
                lost = counted(len(facts), "fact was", "facts were")
                self._events.warn(
                    "notify-failed",
                    f"the command of [notify] in worker.toml {problem}: {lost} not told. Further failures are not "
                    "reported until it succeeds; `fedpareto worker doctor` checks that it exists",
                    dropped=dropped + len(facts),
                )
            with self._changed:
                self._changed.wait_for(lambda: self._stop_by is not None, timeout=self._pause)


def _pass_on(text: bytes) -> None:
    """Writes what the command has said on standard error to that of the worker."""
    with suppress(OSError):
        os.write(sys.stderr.fileno(), text)


def _plain(value: object) -> object:
    return value if isinstance(value, int) else escaped(str(value), _CHARACTERS)
