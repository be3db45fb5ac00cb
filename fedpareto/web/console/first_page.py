"""What the first page says of a federation, as data: is all well, what needs the operator, what runs, who is connected.

The console draws it, and `fedpareto admin status` prints it.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from federation.text import counted
from federation.trust.identity import Action
from federation.v1 import admin_pb2 as v1
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.common_pb2 import ClientState, RunState
from fedpareto import formatting
from fedpareto.admin_messages import name_of
from fedpareto.formatting import moment, natural, some
from fedpareto.officer_requests import OfficerRequest
from fedpareto.run_names import ENDED, RunNames
from fedpareto.run_table import RunTable
from fedpareto.web.console.federation_reader import FOLLOWED, HeldRun, Lists, read_lists
from fedpareto.web.console.screens import wording
from fedpareto.web.sections.run_words import NAMED
from fedpareto.web.sections.shown_run import stop_metric

_RECENT = 12  # runs that have ended
_NOTICES = 5
_ROUNDS = 10  # the newest ones of an open run, from which its length is foretold
_GRACE = timedelta(minutes=1)  # a worker that restarts is back before it counts as not connected
_NOTICE = v1.AlertSeverity.ALERT_SEVERITY_NOTICE


@dataclass(frozen=True)
class Need:
    """Something that waits, other than an alert: a sentence, and a command after `fedpareto admin`."""

    sentence: str
    command: str


@dataclass(frozen=True)
class OpenRun:
    """A run that has not ended: how far it is, for whom it waits, how its members fare; texts may be empty."""

    run: v1.Run
    progress: str
    left: str
    waits: str
    verdict: str


@dataclass(frozen=True)
class MemberState:
    """A member's state in words, the look of its badge, and since or until when."""

    client: v1.Client
    state: str
    look: str
    since: str


@dataclass(frozen=True)
class FederationState:
    """What is known of a federation. `held` are the runs of which more is known; `live` says that a coordinator serves.

    `administrator` is the name of who asks.
    """

    lists: Lists
    held: Mapping[str, HeldRun]
    names: RunNames
    live: bool
    administrator: str

    @classmethod
    def read(cls, stub: AdminStub, *, live: bool, administrator: str) -> "FederationState":
        """Reads it once, of each open run the newest rounds."""
        lists = read_lists(stub)
        opened = [run for run in lists.runs if run.state not in ENDED][:FOLLOWED]
        held = {run.run_id: _held(stub, run.run_id, live=live) for run in opened}
        return cls(lists, held, RunNames(lists.runs), live, administrator)

    @property
    def open_runs(self) -> list[v1.Run]:
        """The runs that have not ended, as the newest message says."""
        newest = (self.held[run.run_id].run if run.run_id in self.held else run for run in self.lists.runs)
        return [run for run in newest if run.state not in ENDED]

    @property
    def ended(self) -> list[v1.Run]:
        """The newest runs that have ended."""
        return [run for run in self.lists.runs if run.state in ENDED][:_RECENT]

    @property
    def alerts(self) -> list[v1.Alert]:
        """The alerts that need somebody."""
        return [alert for alert in self.lists.alerts if alert.severity != _NOTICE]

    @property
    def notices(self) -> list[v1.Alert]:
        """The newest notices."""
        return [alert for alert in self.lists.alerts if alert.severity == _NOTICE][:_NOTICES]

    @property
    def sentence(self) -> str:
        """Whether all is well."""
        count = len(self.alerts) + len(self.needs)
        if self.lists.more_alerts:
            return f"More than {count:,} things need you; `fedpareto admin alerts --last {2 * count}` lists more."
        return f"{counted(count, 'thing needs you', 'things need you')}." if count else "All well."

    @property
    def counts(self) -> str:
        """How many members are connected, and how many runs are open."""
        connected = sum(member.client.attending for member in self.members)
        of_all = f"{connected} of {counted(len(self.members), 'member')} connected"
        return f"{of_all}, {counted(len(self.open_runs), 'open run')}"

    @property
    def members(self) -> list[MemberState]:
        """The members by name, without those that were revoked or have left."""
        gone = (ClientState.CLIENT_STATE_REVOKED, ClientState.CLIENT_STATE_LEFT)
        members = [client for client in self.lists.clients if client.state not in gone]
        return [_state(client) for client in sorted(members, key=lambda client: natural(client.client_id))]

    @property
    def running(self) -> list[OpenRun]:
        """The runs that have not ended."""
        return [_running(run, self.held.get(run.run_id)) for run in self.open_runs]

    @property
    def needs(self) -> list[Need]:
        """What waits for the operator and is no alert."""
        return list(self._needs())

    def _needs(self) -> Iterator[Need]:
        """Who is connected is only known while the coordinator runs."""
        lists = self.lists
        yield from self._pending()
        asked = [request for request in self._open_requests() if request.officer != self.administrator]
        if len(asked) > NAMED:
            told = some([f"{request.officer} asks to {request.phrase}" for request in asked], NAMED)
            yield Need(f"{len(asked)} requests wait for another security officer: {told}", "consent --all")
        else:
            for request in asked:
                told = f"{request.officer} asks to {request.phrase}: request {request.name}, {_until(request)}"
                yield Need(f"{told}, waits for another security officer", f"consent {request.name}")
        alerted = {alert.run_id for alert in lists.alerts if alert.kind == v1.AlertKind.ALERT_KIND_RUN_PAUSED}
        for run in self.open_runs:
            if run.state == RunState.RUN_STATE_PAUSED and run.run_id not in alerted:
                paused = _paused(self.names.named(run.run_id, run.name), run.reason.rstrip("."))
                yield Need(paused, f"resume {self.names.argument(run)}")
        away = _away(lists) if self.live else []
        if away:
            verb = "is" if len(away) == 1 else "are"
            active = sum(client.state == ClientState.CLIENT_STATE_ACTIVE for client in lists.clients)
            of_all = f"{len(away)} of {counted(active, 'member')} {verb} not connected: " if active > 1 else ""
            sentence = f"{of_all}{some(away, NAMED)}" if of_all else f"{away[0]} is not connected"
            yield Need(sentence, f"client {away[0]}" if len(away) == 1 else "clients")

    def _pending(self) -> Iterator[Need]:
        """The members that wait for approval, if no alert says so and no officer has asked for it."""
        known = {alert.client_id for alert in self.lists.alerts if alert.kind == v1.AlertKind.ALERT_KIND_MEMBER_PENDING}
        known |= {request.subject for request in self._open_requests() if request.action == Action.APPROVE}
        waiting = (item for item in self.lists.clients if item.state == ClientState.CLIENT_STATE_PENDING)
        names = sorted((item.client_id for item in waiting if item.client_id not in known), key=natural)
        if len(names) > NAMED:
            yield Need(f"{len(names)} members wait for approval: {some(names, NAMED)}", "approve --all-pending")
        else:
            yield from (Need(f"{name} waits for approval", f"approve {name}") for name in names)

    def _open_requests(self) -> Iterator[OfficerRequest]:
        """What officers have asked for, and another one has not decided."""
        for request in self.lists.requests:
            if request.state == v1.RequestState.REQUEST_STATE_OPEN:
                yield OfficerRequest.of(request)

    @property
    def own_requests(self) -> list[Need]:
        """What the operator has asked for, and another officer has to decide."""
        own = [request for request in self._open_requests() if request.officer == self.administrator]
        if len(own) > NAMED:
            told = some([request.phrase for request in own], NAMED)
            return [
                Need(f"You made {len(own)} requests, to {told}: another security officer has to consent", "requests")
            ]
        return [
            Need(
                f"You asked to {request.phrase}: another security officer has to consent to request {request.name}, "
                f"{_until(request)}",
                f"withdraw {request.name}",
            )
            for request in own
        ]


def _held(stub: AdminStub, run_id: str, *, live: bool) -> HeldRun:
    """An open run with its newest rounds, down to the last evaluated one, and with its open phase."""
    run = stub.GetRun(v1.GetRunRequest(run=run_id)).run
    held = HeldRun(run, RunTable(stop_metric(run.spec)), details=run)
    newest = max(0, run.rounds_done - _ROUNDS)
    first = min(newest, run.latest.round) if run.HasField("latest") else newest
    if run.rounds_done:
        for item in stub.ExportRounds(v1.ExportRoundsRequest(run=run_id, first=first)):
            held.table.add(item)
    if live:
        watched = stub.WatchRun(v1.WatchRunRequest(run=run_id))
        with suppress(StopIteration):
            message = next(watched)
            held.ahead = message.now.ToNanoseconds() / 1e9 - datetime.now(UTC).timestamp()
            held.phase = message.phase if message.HasField("phase") else None
        watched.cancel()
    return held


def _running(run: v1.Run, held: HeldRun | None) -> OpenRun:
    if held is None:
        return OpenRun(run, wording.rounds_done(run), "", run.reason, "")
    verdict = held.shown().verdict if held.run.rounds_done else ""
    return OpenRun(held.run, wording.rounds_done(held.run), wording.time_left(held), wording.waiting(held), verdict)


def _until(request: OfficerRequest) -> str:
    return f"open until {formatting.UNKNOWN if request.expires is None else moment(request.expires)}"


def _paused(name: str, reason: str) -> str:
    if reason.startswith("paused"):
        return f"Run {name} is {reason}"
    return f"Run {name} is paused{f': {reason}' if reason else ''}"


def _away(lists: Lists) -> list[str]:
    """The active members that should be connected and are not, without those that an alert names."""
    alerted = {alert.client_id for alert in lists.alerts if alert.kind == v1.AlertKind.ALERT_KIND_MEMBER_SILENT}
    return sorted(
        (
            client.client_id
            for client in lists.clients
            if client.state == ClientState.CLIENT_STATE_ACTIVE
            and not client.attending
            and not client.HasField("closed_until")
            and not client.paused
            and client.client_id not in alerted
            # Also of a time to come, which a wrong clock noted.
            and abs(lists.at.timestamp() - client.last_seen.ToNanoseconds() / 1e9) > _GRACE.total_seconds()
        ),
        key=natural,
    )


def _state(client: v1.Client) -> MemberState:
    if name_of(client, "state") == "PENDING":
        return MemberState(client, "pending", "warning", "waits for approval")
    if client.paused or client.HasField("closed_until"):
        until = f"until {moment(client.closed_until)}" if client.HasField("closed_until") else "by its owner"
        return MemberState(client, "paused" if client.paused else "closed", "notice", until)
    if client.attending:
        return MemberState(client, "connected", "good", "")
    return MemberState(client, "not connected", "warning", wording.since(client))
