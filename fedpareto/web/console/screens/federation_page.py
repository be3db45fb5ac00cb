"""The first page: is all well, what needs the operator, what runs, who is connected."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from federation.text import counted
from fedpareto.run_table import Outcome
from fedpareto.web.console.federation_reader import HeldRun, PageError, Reader
from fedpareto.web.console.first_page import FederationState, MemberState, OpenRun
from fedpareto.web.console.view import PageRequest, PageView, Screen
from fedpareto.web.pages.alert_list import alert_list, lines_of
from fedpareto.web.pages.charts import Series
from fedpareto.web.pages.html import Html
from fedpareto.web.pages.small import sparkline, strip
from fedpareto.web.sections import run_words

_STRIP = 30  # rounds
_POINTS = 120  # of a sparkline


def _view(reader: Reader, asked: PageRequest) -> PageView:
    lists = reader.lists
    if lists is None:
        raise PageError(503, "The console has not read the federation yet.")
    seen = FederationState(lists, reader.held, reader.names, reader.connection.live, asked.administrator)
    alerts, notices = seen.alerts, seen.notices
    return PageView(
        "Federation",
        "federation.html",
        {
            "sentence": seen.sentence,
            "counts": seen.counts,
            "alerts": alert_list(lines_of(alerts, reader.names.named)) if alerts else Html(""),
            "notices": alert_list(lines_of(notices, reader.names.named)) if notices else Html(""),
            "needs": seen.needs,
            "own_requests": seen.own_requests,
            "open_runs": [_Running(each, _spark(seen.held.get(each.run.run_id))) for each in seen.running],
            "members": _members(seen),
            "ended": seen.ended,
            "runs": lists.runs,
            "state_look": run_words.state_look,
        },
    )


@dataclass(frozen=True)
class _Running:
    line: OpenRun
    spark: Html


def _spark(held: HeldRun | None) -> Html:
    if held is None:
        return Html("")
    lines = [held.table.lines[number] for number in sorted(held.table.lines)][-_POINTS:]
    if len(lines) < 2:
        return Html("")
    kind = held.shown().scored
    series = [Series("mean", [line.mean for line in lines], 0), Series("worst", [line.worst for line in lines], 1)]
    newest = lines[-1]
    alt = f"Mean {kind.text(newest.mean)} and worst member {kind.text(newest.worst)} after round {newest.number}"
    return sparkline(series, kind.axis, alt=alt)


@dataclass(frozen=True)
class _Member:
    line: MemberState
    strip: Html


def _members(seen: FederationState) -> list[_Member]:
    """The members by name, those that need a look first."""
    shown = []
    for line in seen.members:
        last = _outcomes(seen, line.client.client_id)
        well = line.look != "warning" and (not last or last[-1] in _FINE)
        shown.append((well, _Member(line, _strip(line.client.client_id, last))))
    return [member for _, member in sorted(shown, key=lambda item: item[0])]


_FINE = (Outcome.REPLIED, Outcome.NOT_NEEDED)


def _strip(name: str, last: Sequence[Outcome]) -> Html:
    if not last:
        return Html("")
    failed = sum(outcome not in _FINE for outcome in last)
    return strip(last, alt=f"Of the last {counted(len(last), 'round')}, {name} failed in {failed}", most=_STRIP)


def _outcomes(seen: FederationState, client: str) -> list[Outcome]:
    """A member's last rounds over the runs that are held, the newest runs last, in order."""
    last: deque[Outcome] = deque(maxlen=_STRIP)
    for run in reversed(seen.lists.runs):
        held = seen.held.get(run.run_id)
        if held is not None:
            last.extend(outcome for _, outcome in held.table.outcomes_of(client, _STRIP))
    return list(last)


def _version(reader: Reader, asked: PageRequest) -> object:
    return reader.version


SCREEN = Screen(_view, _version, "/")
