"""Alerts as a list on a page."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from federation.v1.admin_pb2 import Alert
from fedpareto.admin_messages import name_of
from fedpareto.formatting import when
from fedpareto.web.pages.html import Html, join, tag

_SEVERITIES = ("critical", "warning", "notice")


@dataclass(frozen=True, kw_only=True)
class AlertLine:
    """An alert as it is shown.

    Attributes:
        severity: "critical", "warning" or "notice".
        about: the run and the member; empty where the page is about these.
        message: the case.
        remedy: what to do.
        time: since when, and until when.
        over: True if it has ended.
    """

    severity: str
    about: str
    message: str
    remedy: str
    time: str
    over: bool


def line_of(alert: Alert, *, about: str = "") -> AlertLine:
    """An alert as it is shown, in the local zone."""
    rounds = ""
    if alert.HasField("first_round") and alert.HasField("last_round"):
        first, last = alert.first_round, alert.last_round
        rounds = f"round {first}" if first == last else f"rounds {first} to {last}"
    ended = f" to {when(alert, 'ended')[:16]}" if alert.HasField("ended") else ""
    return AlertLine(
        severity=severity if (severity := name_of(alert, "severity").lower()) in _SEVERITIES else "notice",
        about=about,
        message=_sentence(alert.message, alert.client_id),
        remedy=_sentence(alert.remedy, alert.client_id),
        time=rounds or f"since {when(alert, 'began')[:16]}{ended}",
        over=alert.HasField("ended"),
    )


def alert_list(alerts: Sequence[AlertLine]) -> Html:
    """A list with the severest first, otherwise in the given order."""
    return tag("ul", *(_item(alert) for severity in _SEVERITIES for alert in alerts if alert.severity == severity),
               class_="alerts")  # fmt: skip


def _item(alert: AlertLine) -> Html:
    about = [tag("span", alert.severity, class_=f"state {alert.severity}")]
    about += [tag("span", text) for text in (alert.about, alert.time) if text]
    look = f"alert {alert.severity}"
    parts = [tag("div", *about, class_="about"), tag("p", with_code(alert.message), class_="case")]
    if alert.remedy:
        parts.append(tag("p", with_code(alert.remedy), class_="soft"))
    return tag("li", *parts, class_=look)


def with_code(text: str) -> Html:
    """Text whose parts between backticks are commands or names."""
    return join(tag("code", part) if at % 2 else part for at, part in enumerate(text.split("`")))


def _sentence(text: str, name: str) -> str:
    """A sentence with a capital and a full stop; a member's name stays as it is."""
    begin = text[:1] if name and text.startswith(name) else text[:1].upper()
    end = "" if text.endswith((".", "?", "!")) else "."
    return f"{begin}{text[1:]}{end}" if text else ""


def lines_of(alerts: Iterable[Alert], named: Callable[[str, str], str]) -> list[AlertLine]:
    """Alerts about several runs and members as they are shown; `named` makes the text of a run's id and name."""
    return [
        line_of(
            alert,
            about=" · ".join(filter(None, (alert.run_id and named(alert.run_id, alert.run_name), alert.client_id))),
        )
        for alert in alerts
    ]
