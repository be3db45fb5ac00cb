"""Follows a run: its rounds as they end, and the open phase with the members that it waits for."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime

import grpc
from rich.console import Console
from rich.live import Live
from rich.text import Text

from federation.text import escaped
from federation.transport.channels import refusal_from_rpc_error
from federation.v1.admin_pb2 import (
    Alert,
    GetRunRequest,
    ListRoundsRequest,
    MemberSummary,
    Outstanding,
    PhaseProgress,
    RoundSummary,
    Run,
    WatchRunRequest,
    WatchRunResponse,
)
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.common_pb2 import RoundState, RunState
from fedpareto import formatting
from fedpareto.admin_messages import name_of, whole
from fedpareto.cli.show import alert_lines, participation_table, round_lines, tables
from fedpareto.run_names import ENDED, RunNames

_METRICS = ("accuracy/mean", "accuracy/worst5", "improved")

QUIET_SECONDS = 5.0  # without a terminal: between a line about an open phase and the line before it
NAMED = 6  # members that are waited for by name
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 10.0  # seconds between two attempts to reach the coordinator again

_ENDED_ROUNDS = (RoundState.ROUND_STATE_COMPLETED, RoundState.ROUND_STATE_SKIPPED)
_RESTARTING = ("UNAVAILABLE", "CANCELLED")  # the status of a call whose coordinator stops or does not answer


def header(stop: str = "") -> str:
    """The titles of `row`; `stop` is that of the value by which the run is stopped, empty if by none."""
    return round_lines.heading(_METRICS, "replies", "time", stop=stop)


def row(summary: RoundSummary, stop: str = "") -> Text:
    """A round in one line, under `header`."""
    replies = f"{summary.accepted}/{summary.asked}"
    took = formatting.seconds(summary.seconds)
    numbers = (summary.metrics, summary.undisclosed)
    line = Text(round_lines.line(summary.round, *numbers, _METRICS, replies, took, stop=stop))
    if summary.reason:
        line.append(f"  {name_of(summary, 'state')}: {summary.reason}", style="yellow")
    return line


def status(message: WatchRunResponse, late: float = 0.0, name: str = "") -> Text:
    """The state of a run and its open phase in one line, `late` seconds after the message arrived.

    `name` is what the line calls the run; empty for its name.
    """
    run = message.run
    line = Text().append(f"{name or run.name}  ", style="bold")
    line.append_text(tables.state(name_of(run, "state")))
    line.append(f"  {run.rounds_done}/{run.rounds_total} rounds")
    if message.HasField("phase"):
        left = (
            message.phase.deadline.ToNanoseconds() - message.now.ToNanoseconds()
        ) / 1e9  # by the coordinator's clock
        line.append(f"  {_phase(message.phase, left - late)}")
    elif run.reason:
        line.append(f"  {run.reason}")
    return line


def _phase(phase: PhaseProgress, left: float) -> str:
    text = f"round {phase.round}: {phase.kind}, {phase.replied} of {phase.asked} replied, {formatting.span(left)} left"
    if not phase.outstanding:
        return text
    names = ", ".join(_waited_for(member) for member in phase.outstanding[:NAMED])
    more = f" and {len(phase.outstanding) - NAMED} more" if len(phase.outstanding) > NAMED else ""
    since = min(member.asked.ToNanoseconds() for member in phase.outstanding)
    return f"{text}; waiting since {_clock(since)} for {names}{more}"


def _waited_for(member: Outstanding) -> str:
    if member.attending:
        return member.client_id
    since = f" since {_clock(member.last_seen.ToNanoseconds())}" if member.HasField("last_seen") else ""
    return f"{member.client_id} (away{since})"


def _clock(nanoseconds: int) -> str:
    """A time of day in the local zone."""
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC).astimezone().strftime("%H:%M:%S")


def messages(stub: AdminStub, run: str, tell: Callable[[str], None]) -> Iterator[WatchRunResponse]:
    """The messages of a run until it ends, also across restarts of the coordinator; `tell` reports these.

    Raises:
        grpc.RpcError: the coordinator refuses, or it did not answer the first call.
    """
    begun, lost, pause, over = False, False, _FIRST_PAUSE, False
    while True:
        reason = "the coordinator ended the call"
        call = stub.WatchRun(WatchRunRequest(run=run))
        try:
            for message in call:
                if lost:
                    tell("the coordinator answers again")
                begun, lost, pause = True, False, _FIRST_PAUSE
                run = message.run.run_id
                over = message.run.state in ENDED  # a further message may bring its last alerts
                yield message
        except grpc.RpcError as error:
            refusal = refusal_from_rpc_error(error)
            expired = refusal.reason == "certificate-expired"  # the next call begins with a login
            if not begun or not (expired or refusal.status in _RESTARTING):
                raise
            reason = refusal.message
        finally:
            call.cancel()
        if over:
            return
        if not lost:
            tell(f"lost the coordinator, trying again until it answers (Ctrl-C ends this): {escaped(reason)}")
            lost = True
        time.sleep(pause)  # the coordinator may be restarting; longer each time, so as not to load it
        pause = min(2 * pause, _LONGEST_PAUSE)


def not_completed(run: Run) -> str:
    """How a run ended that was not completed, in words; empty if it was."""
    if run.state == RunState.RUN_STATE_COMPLETED:
        return ""
    return f"run {run.run_id} did not complete: {name_of(run, 'state')} {run.reason}".rstrip()


def changes(messages: Iterable[WatchRunResponse]) -> Iterator[WatchRunResponse]:
    """The messages in which more than the time has changed."""
    before = None
    for message in messages:
        compared = WatchRunResponse()
        compared.CopyFrom(message)
        compared.ClearField("now")
        for member in compared.phase.outstanding if compared.HasField("phase") else ():
            if member.attending:
                member.ClearField("last_seen")  # changes with every message of the member
        del compared.run.members[:]  # they come with the end of a round only
        if compared != before:
            before = compared
            yield message


class _Screen:
    """Prints lines about a run, and none of them twice."""

    def __init__(self, stub: AdminStub, console: Console, stop: str, name: str) -> None:
        self.name = name  # of the run
        self._stub = stub
        self._console = console
        self._stop = stop
        self._shown = -1  # the last round that has a line
        self._alerted: set[int] = set()
        self._last_failures: dict[str, str] = {}  # the last failure of each member
        self._complete = False  # True once all rounds that ended before the next message were listed

    def print(self, line: Text) -> None:
        """Prints a line."""
        self._console.print(line, soft_wrap=not self._console.is_terminal)

    def gap(self) -> None:
        """Notes that rounds may have ended without a message."""
        self._complete = False

    def show(self, message: WatchRunResponse) -> bool:
        """Prints the rounds that have ended, with failures, and new alerts. True if it printed a round."""
        run, before = message.run, self._shown
        rounds = [message.ended] if message.HasField("ended") else []
        if not self._complete:  # listed once the stream has begun, so that no round is missed
            missed = _ended_rounds(self._stub, run.run_id)
            if missed is None:
                return False  # the coordinator has stopped again; listed at the next message
            rounds, self._complete = [*missed, *rounds], True
        for summary in rounds:
            if summary.round > self._shown:
                self.print(row(summary, self._stop))
                self._shown = summary.round
        self._failures(run.members)
        self._alerts(run.alerts)
        return self._shown > before

    def _failures(self, summaries: Iterable[MemberSummary]) -> None:
        for member in summaries:
            failed = member.last_reason and member.last_reason_round == member.last_round == self._shown
            text = participation_table.said(member) if failed else ""
            if text and text != self._last_failures.get(member.client_id):
                self.print(Text(f"{'':>6}  {text}", style="yellow"))
            if member.last_round == self._shown:
                self._last_failures[member.client_id] = text

    def _alerts(self, alerts: Sequence[Alert]) -> None:
        fresh = [alert for alert in alerts if alert.alert_id not in self._alerted]
        for line in alert_lines.lines(fresh):
            self.print(line)
        self._alerted |= {alert.alert_id for alert in fresh}


def show(stub: AdminStub, run_id: str, console: Console, *, quiet_seconds: float = QUIET_SECONDS) -> Run:
    """Shows a run until it ends, and returns it: a line for each round, and the open phase.

    On a terminal the open phase is one line at the bottom. Elsewhere it is a further line when it has changed and
    `quiet_seconds` have passed since the last line.
    """
    watched = stub.GetRun(GetRunRequest(run=run_id, brief=True)).run
    stop, name = round_lines.stop_title(watched), RunNames.read(stub).named(watched.run_id, watched.name)
    console.print(Text(header(stop), style="bold"))
    screen = _Screen(stub, console, stop, name)

    def tell(text: str) -> None:
        screen.gap()
        screen.print(Text(text, style="yellow"))

    follow = _follow_live if console.is_terminal else _follow_in_lines
    run = follow(messages(stub, run_id, tell), screen, console, quiet_seconds)
    if any(map(participation_table.failures, run.members)):
        console.print(Text(), tables.members(run.members))
    console.print(status(WatchRunResponse(run=run), name=name))
    return run


def _follow_live(messages: Iterable[WatchRunResponse], screen: _Screen, console: Console, _: float) -> Run:
    message, arrived = WatchRunResponse(), time.monotonic()

    def now() -> Text:
        return status(message, time.monotonic() - arrived, screen.name) if message.run.run_id else Text()

    with Live(console=console, transient=True, refresh_per_second=4, get_renderable=now):
        for newer in messages:
            screen.show(newer)
            message, arrived = newer, time.monotonic()
    return message.run


def _follow_in_lines(messages: Iterable[WatchRunResponse], screen: _Screen, console: Console, quiet: float) -> Run:
    message, printed, last = WatchRunResponse(), time.monotonic(), ""
    for message in messages:
        if screen.show(message):
            printed = time.monotonic()
        now = _subject(message)
        if now and now != last and time.monotonic() - printed >= quiet:
            screen.print(status(message, name=screen.name))
            printed, last = time.monotonic(), now
    return message.run


def _subject(message: WatchRunResponse) -> str:
    """The content of a line about the present, without the time."""
    return _phase(message.phase, 0.0) if message.HasField("phase") else message.run.reason


def _ended_rounds(stub: AdminStub, run_id: str) -> list[RoundSummary] | None:
    """The rounds that have ended; None when the coordinator does not answer."""
    try:
        rounds = whole(stub.ListRounds, ListRoundsRequest(run=run_id)).rounds
    except grpc.RpcError as error:
        if refusal_from_rpc_error(error).status not in _RESTARTING:
            raise
        return None
    return [summary for summary in rounds if summary.state in _ENDED_ROUNDS]
