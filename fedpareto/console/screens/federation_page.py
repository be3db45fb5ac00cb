"""The first page: is all well, what needs the operator, what runs, who is connected."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from federation.text import counted
from federation.v1 import admin_pb2 as v1
from federation.v1.common_pb2 import ClientState, RunState
from fedpareto import formatting
from fedpareto.admin_messages import name_of
from fedpareto.console.federation_reader import HeldRun, Lists, PageError, Reader
from fedpareto.console.render import moment
from fedpareto.console.run_history import Outcome
from fedpareto.console.screens import wording
from fedpareto.console.view import PageRequest, PageView, Screen
from fedpareto.formatting import natural
from fedpareto.officer_requests import OfficerRequest
from fedpareto.pages.alert_list import alert_list, lines_of
from fedpareto.pages.charts import Series
from fedpareto.pages.html import Html
from fedpareto.pages.scales import ACCURACY, Axis
from fedpareto.pages.small import sparkline, strip
from fedpareto.run_names import ENDED

_STRIP = 30  # rounds
_POINTS = 120  # of a sparkline
_RECENT = 12  # runs that have ended
_GRACE = timedelta(minutes=1)  # a worker that restarts is back before it counts as not connected


@dataclass(frozen=True)
class Need:
    """Something that waits, other than an alert: a sentence and the command."""

    sentence: str
    command: str


def _view(reader: Reader, asked: PageRequest) -> PageView:
    lists = reader.lists
    if lists is None:
        raise PageError(503, "The console has not read the federation yet.")
    open_runs = [_newest(reader, run) for run in lists.runs if run.state not in ENDED]
    alerts = [alert for alert in lists.alerts if alert.severity != v1.AlertSeverity.ALERT_SEVERITY_NOTICE]
    notices = [alert for alert in lists.alerts if alert.severity == v1.AlertSeverity.ALERT_SEVERITY_NOTICE]
    needs = list(_needs(reader, lists, open_runs, asked.administrator))
    count = len(alerts) + len(needs)
    members = [client for client in lists.clients if client.state != ClientState.CLIENT_STATE_REVOKED]
    connected = sum(client.attending for client in members)
    return PageView(
        "Federation",
        "federation.html",
        {
            "sentence": f"{counted(count, 'thing needs you', 'things need you')}." if count else "All well.",
            "counts": f"{connected} of {counted(len(members), 'member')} connected, "
            f"{counted(len(open_runs), 'open run')}",
            "alerts": alert_list(lines_of(alerts, reader.names.named)) if alerts else Html(""),
            "notices": alert_list(lines_of(notices[:5], reader.names.named)) if notices else Html(""),
            "needs": needs,
            "own_requests": list(_own_requests(lists, asked.administrator)),
            "open_runs": [_running(reader, run) for run in open_runs],
            "members": _members(reader, lists),
            "ended": [run for run in lists.runs if run.state in ENDED][:_RECENT],
            "runs": lists.runs,
            "state_look": wording.state_look,
        },
    )


def _newest(reader: Reader, run: v1.Run) -> v1.Run:
    """A run as the stream that follows it says, which is newer than the lists."""
    held = reader.held.get(run.run_id)
    return run if held is None else held.run


def _needs(reader: Reader, lists: Lists, open_runs: Sequence[v1.Run], administrator: str) -> Iterator[Need]:
    """What waits for the operator and is no alert yet; who is connected is only known while the coordinator runs."""
    waiting = {alert.client_id for alert in lists.alerts if alert.kind == v1.AlertKind.ALERT_KIND_MEMBER_PENDING}
    for client in lists.clients:
        if client.state == ClientState.CLIENT_STATE_PENDING and client.client_id not in waiting:
            yield Need(f"{client.client_id} waits for approval", f"approve {client.client_id}")
    for request in _open_requests(lists):
        if request.officer != administrator:
            sentence = (
                f"{request.officer} asks to {request.phrase}: request {request.name}, {_until(request)}, waits for"
            )
            yield Need(f"{sentence} another security officer", f"consent {request.name}")
    alerted = {alert.run_id for alert in lists.alerts if alert.kind == v1.AlertKind.ALERT_KIND_RUN_PAUSED}
    for run in open_runs:
        if run.state == RunState.RUN_STATE_PAUSED and run.run_id not in alerted:
            paused = _paused(reader.names.named(run.run_id, run.name), run.reason.rstrip("."))
            yield Need(paused, f"resume {wording.argument(reader, run)}")
    away = _away(lists) if reader.connection.live else []
    if away:
        verb = "is" if len(away) == 1 else "are"
        active = sum(client.state == ClientState.CLIENT_STATE_ACTIVE for client in lists.clients)
        of_all = f"{len(away)} of {counted(active, 'member')} {verb} not connected: " if active > 1 else ""
        sentence = f"{of_all}{wording.some(away)}" if of_all else f"{away[0]} is not connected"
        yield Need(sentence, f"client {away[0]}" if len(away) == 1 else "clients")


def _open_requests(lists: Lists) -> Iterator[OfficerRequest]:
    """What officers have asked for, and another one has not decided."""
    for request in lists.requests:
        if request.state == v1.RequestState.REQUEST_STATE_OPEN:
            yield OfficerRequest.of(request)


def _own_requests(lists: Lists, administrator: str) -> Iterator[Need]:
    """What the operator has asked for, and another officer has to decide."""
    for request in _open_requests(lists):
        if request.officer == administrator:
            sentence = f"You asked to {request.phrase}: another security officer has to consent to request"
            yield Need(f"{sentence} {request.name}, {_until(request)}", f"withdraw {request.name}")


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
            and client.client_id not in alerted
            and lists.at.timestamp() - client.last_seen.ToNanoseconds() / 1e9 > _GRACE.total_seconds()
        ),
        key=natural,
    )


@dataclass(frozen=True)
class _Running:
    run: v1.Run
    progress: str
    left: str
    waits: str
    verdict: str
    spark: Html


def _running(reader: Reader, run: v1.Run) -> _Running:
    held = reader.held.get(run.run_id)
    if held is None:
        return _Running(run, wording.rounds_done(run), "", run.reason, "", Html(""))
    return _Running(
        held.run,
        wording.rounds_done(held.run),
        wording.time_left(held),
        wording.waiting(held),
        wording.verdict_of(held) if held.run.rounds_done else "",
        _spark(held),
    )


def _spark(held: HeldRun) -> Html:
    lines = [held.history.lines[number] for number in sorted(held.history.lines)][-_POINTS:]
    if len(lines) < 2:
        return Html("")
    kind = wording.scored(held.run, held.history)
    series = [Series("mean", [line.mean for line in lines], 0), Series("worst", [line.worst for line in lines], 1)]
    newest = lines[-1]
    alt = f"Mean {kind.text(newest.mean)} and worst member {kind.text(newest.worst)} after round {newest.number}"
    return sparkline(series, ACCURACY if kind.share else Axis(kind.title, kind.text), alt=alt)


@dataclass(frozen=True)
class _Member:
    client: v1.Client
    state: str
    look: str
    since: str
    strip: Html


def _members(reader: Reader, lists: Lists) -> list[_Member]:
    """The members by name, those that need a look first."""
    members = [client for client in lists.clients if client.state != ClientState.CLIENT_STATE_REVOKED]
    members.sort(key=lambda client: natural(client.client_id))
    shown = []
    for client in members:
        state, look, since = _state(client)
        last = _outcomes(reader, lists, client.client_id)
        well = look != "warning" and (not last or last[-1] in _FINE)
        shown.append((well, _Member(client, state, look, since, _strip(client.client_id, last))))
    return [member for _, member in sorted(shown, key=lambda item: item[0])]


def _state(client: v1.Client) -> tuple[str, str, str]:
    """A member's state, the look of its badge, and since or until when."""
    if name_of(client, "state") == "PENDING":
        return "pending", "warning", "waits for approval"
    if client.HasField("closed_until"):
        return "closed", "notice", f"until {moment(client.closed_until)}"
    if client.attending:
        return "connected", "good", ""
    return "not connected", "warning", wording.since(client)


_FINE = (Outcome.REPLIED, Outcome.NOT_NEEDED)


def _strip(name: str, last: Sequence[Outcome]) -> Html:
    if not last:
        return Html("")
    failed = sum(outcome not in _FINE for outcome in last)
    return strip(last, alt=f"Of the last {counted(len(last), 'round')}, {name} failed in {failed}", most=_STRIP)


def _outcomes(reader: Reader, lists: Lists, client: str) -> list[Outcome]:
    """A member's last rounds over the runs that are held, the newest runs last, in order."""
    last: deque[Outcome] = deque(maxlen=_STRIP)
    for run in reversed(lists.runs):
        held = reader.held.get(run.run_id)
        if held is not None:
            last.extend(outcome for _, outcome in held.history.outcomes_of(client, _STRIP))
    return list(last)


def _version(reader: Reader, asked: PageRequest) -> object:
    return reader.version


SCREEN = Screen(_view, _version, "/")
