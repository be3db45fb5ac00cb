"""Alerts on a terminal: lines about a run, and the list of all."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.text import Text

from federation.v1.admin_pb2 import Alert, AlertSeverity, ListAlertsResponse
from fedpareto.admin_messages import name_of
from fedpareto.formatting import UNKNOWN, span, when
from fedpareto.run_names import RunNames

_STYLES = {
    AlertSeverity.ALERT_SEVERITY_CRITICAL: "red",
    AlertSeverity.ALERT_SEVERITY_WARNING: "yellow",
    AlertSeverity.ALERT_SEVERITY_NOTICE: "default",
}


def line(alert: Alert) -> Text:
    """An alert about a run in one line, with what to do."""
    text = f"{name_of(alert, 'severity').lower()}: {alert.message}; {alert.remedy}"
    return Text(text, style=_STYLES.get(alert.severity, "default"))


def lines(alerts: Iterable[Alert]) -> Iterator[Text]:
    """Alerts about a run, in lines; notices, such as that the run has ended, are left out."""
    return (line(alert) for alert in alerts if alert.severity != AlertSeverity.ALERT_SEVERITY_NOTICE)


def listed(answer: ListAlertsResponse, now: datetime, names: RunNames, *, every: bool) -> RenderableType:
    """What `admin alerts` shows; arguments as of `alerts`."""
    parts = [alerts(answer.alerts, now, names, every=every)]
    if answer.next_page_token:
        count = len(answer.alerts)
        parts.append(Text(f"These are the newest {count}; more: --last {5 * count}", style="dim"))
    return Group(*parts)


def alerts(items: Sequence[Alert], now: datetime, names: RunNames, *, every: bool) -> RenderableType:
    """The list of alerts; `every` says that those that have ended are among them, and `now` is aware."""
    if not items:
        return Text("no alerts" if every else "all well: no alert lasts")
    parts: list[RenderableType] = []
    for item in items:
        end = item.ended.ToDatetime(UTC) if item.HasField("ended") else now
        lasted = span(max(0.0, (end - item.began.ToDatetime(UTC)).total_seconds()))
        style = _STYLES.get(item.severity, "default") if not item.HasField("ended") else "dim"
        state = name_of(item, "severity").lower() + (" (ended)" if item.HasField("ended") else "")
        run = item.run_id and names.named(item.run_id, item.run_name or item.run_id)
        about = " ".join(filter(None, (run, item.client_id))) or UNKNOWN
        parts.append(Text(f"{state}  {when(item, 'began')[:16]}  {lasted}  {about}", style=style))
        parts.append(Text(f"    {item.message}", style="default" if not item.HasField("ended") else "dim"))
        if not item.HasField("ended"):
            parts.append(Text(f"    {item.remedy}", style="dim"))
    return Group(*parts)
