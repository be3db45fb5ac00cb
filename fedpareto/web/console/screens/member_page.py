"""A member: its keys, tags and contact, its part in each run, its last failures, and its entries in the log."""

import math
from dataclasses import dataclass

import numpy as np

from federation.v1 import admin_pb2 as v1
from fedpareto import formatting
from fedpareto.admin_messages import name_of
from fedpareto.run_table import MemberNumber, Outcome
from fedpareto.series import equals
from fedpareto.web.console.federation_reader import HeldRun, PageError, Reader
from fedpareto.web.console.screens import wording
from fedpareto.web.console.view import PageRequest, PageView, Screen
from fedpareto.web.pages.alert_list import alert_list, lines_of
from fedpareto.web.pages.charts import Series
from fedpareto.web.pages.html import Html
from fedpareto.web.pages.scales import Axis
from fedpareto.web.pages.small import sparkline, strip
from fedpareto.web.sections import run_words
from fedpareto.web.sections.shown_run import Scored

_RUNS = 8  # the newest, that the page reads
_ENTRIES = 20  # of the log
_FAILURES = 10
_POINTS = 120  # of a sparkline
_SECONDS = 1.5  # that the page waits for each run's rounds


@dataclass(frozen=True)
class _Part:
    """A member's part in a run."""

    run: v1.Run
    kind: Scored
    first: str
    last: str
    scores: Html
    norms: Html
    norm: str
    strip: Html
    failed: str


@dataclass(frozen=True)
class _Failure:
    """A failure, or several equal ones of a run; `number` is the last round."""

    run: v1.Run
    number: int
    rounds: str
    told: str


def _view(reader: Reader, asked: PageRequest) -> PageView:
    name = asked.parameters["client"]
    lists = reader.lists
    client = next((item for item in lists.clients if item.client_id == name), None) if lists else None
    if client is None:
        raise PageError(404, f"There is no member {name[:80]}.")
    runs = [reader.run(run.run_id, seconds=_SECONDS) for run in (lists.runs if lists else ())[:_RUNS]]
    parts = [part for held in runs if (part := _part(held, name)) is not None]
    request = v1.ListAuditRequest(newest=_ENTRIES, text=name)
    entries = [entry for page in reader.call(lambda stub: list(stub.ListAudit(request))) for entry in page.entries]
    alerts = [alert for alert in (lists.alerts if lists else ()) if alert.client_id == name]
    return PageView(
        name,
        "member.html",
        {
            "client": client,
            "state": name_of(client, "state").lower(),
            "since": wording.since(client),
            "alerts": alert_list(lines_of(alerts, reader.names.named)) if alerts else Html(""),
            "undecided": [reader.names.of_open(run) for run in client.undecided],
            "parts_by_run": parts,
            "failures": _failures(runs, name),
            "entries": entries,
            "more_runs": bool(lists and len(lists.runs) > _RUNS),
        },
    )


def _part(held: HeldRun, name: str) -> _Part | None:
    table = held.table.snapshot()
    if name not in table.members:
        return None
    kind = held.shown().scored
    scores, norms = table.row(MemberNumber.SCORE, name), table.row(MemberNumber.NORM, name)
    known = scores[np.isfinite(scores)]
    outcomes = table.outcomes_of(name, 10**9)
    failures = sum(outcome in (Outcome.DECLINED, Outcome.REFUSED, Outcome.MISSING) for _, outcome in outcomes)
    last = [str(outcome) for _, outcome in outcomes[-30:]]
    return _Part(
        held.run,
        kind,
        kind.text(float(known[0])) if known.size else formatting.UNKNOWN,
        kind.text(float(known[-1])) if known.size else formatting.UNKNOWN,
        _line(scores.tolist(), kind.axis, f"{kind.title} of {name} in {held.run.name}", 0),
        _line(norms.tolist(), Axis("norm", formatting.number, low=0.0), f"Norms of {name} in {held.run.name}", 4),
        formatting.number(table.newest(MemberNumber.NORM, name)),
        strip(last, alt=f"The last {len(last)} rounds of {name} in {held.run.name}; {failures} failed"),
        f"{failures} of {len(outcomes)}",
    )


def _line(values: list[float], axis: Axis, alt: str, colour: int) -> Html:
    known = [value for value in values if math.isfinite(value)][-_POINTS:]
    return sparkline([Series(axis.name, known, colour)], axis, alt=alt) if len(known) > 1 else Html("")


def _failures(runs: list[HeldRun], name: str) -> list[_Failure]:
    """The last failures, the newest first; equal ones of a run that follow one another are one."""
    failures = []
    for held in sorted(runs, key=lambda held: held.run.created.ToNanoseconds(), reverse=True):
        failed = [line for _, line in sorted(held.table.lines.items(), reverse=True) if name in line.failed]
        for group in equals(failed, lambda line: line.number, lambda line: line.failed[name]):
            outcome, why = group.said
            told = f"{run_words.VERBS[outcome]}{f': {why}' if why else ''}"
            failures.append(_Failure(held.run, group.last, group.rounds, told))
    return failures[:_FAILURES]


def _version(reader: Reader, asked: PageRequest) -> object:
    """The page reads the log, so it is made again only when the member comes, goes or fails."""
    name, lists = asked.parameters["client"], reader.lists
    if lists is None:
        return None
    client = next((item for item in lists.clients if item.client_id == name), None)
    state = None if client is None else (client.attending, client.state, tuple(client.tags), client.contact)
    return state, tuple(alert.alert_id for alert in lists.alerts if alert.client_id == name)


SCREEN = Screen(_view, _version, "/")
