"""What a worker shows at `/metrics`: counts of its events. They say nothing that its coordinator does not know.

Only the events below count. A computation that failed in a private round is told to the owner alone (event `alert`), so
it is not here: any user of the machine may read the page. For the same reason the page has no times of computations,
and neither processor time nor memory of the process.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from federation.monitoring.events import Events
from federation.monitoring.metrics_page import page
from federation.monitoring.metrics_section import MetricsSection
from federation.monitoring.scrape_server import ScrapeServer
from federation.monitoring.tally import MonitoredKind, MonitoredNumber, Tally
from federation.work.registry import BUILT_IN, STAGES

MOST = 100  # reasons and kinds of work
ATTENDS = MonitoredNumber("fedpareto_worker_attending", "1 while the worker attends, else 0.", MonitoredKind.GAUGE)
OPEN = MonitoredNumber("fedpareto_worker_open", "0 while the site is closed or paused, else 1.", MonitoredKind.GAUGE)
DISCONNECTED = MonitoredNumber(
    "fedpareto_worker_disconnections",
    "Times that the worker could not attend, by reason.",
    MonitoredKind.COUNTER,
    ("reason",),
    most=MOST,
)
DONE = MonitoredNumber(
    "fedpareto_worker_work", "Assignments whose work is done, by its kind.", MonitoredKind.COUNTER, ("kind",), most=MOST
)
DECLINED = MonitoredNumber(
    "fedpareto_worker_declines",
    "Assignments that were declined, by reason.",
    MonitoredKind.COUNTER,
    ("reason",),
    most=MOST,
)
CANCELLED = MonitoredNumber(
    "fedpareto_worker_cancelled", "Assignments that were no longer wanted.", MonitoredKind.COUNTER
)
RECEIPTS = MonitoredNumber(
    "fedpareto_worker_receipts", "Receipts of replies, by outcome.", MonitoredKind.COUNTER, ("outcome",)
)
SUBMIT_FAILED = MonitoredNumber(
    "fedpareto_worker_submit_failures", "Attempts to hand in a reply that will be repeated.", MonitoredKind.COUNTER
)
DISK = MonitoredNumber("fedpareto_worker_disk_errors", "Files that could not be written.", MonitoredKind.COUNTER)
CERTIFICATE = MonitoredNumber(
    "fedpareto_worker_certificate_renewal_failing",
    "1 while the worker's certificate ends soon and could not be renewed, else 0.",
    MonitoredKind.GAUGE,
)


class EventCounts:
    """Counts a worker's events in a tally. `hear` is their listener."""

    def __init__(self) -> None:
        self.tally = Tally()
        for gauge, value in ((ATTENDS, 0), (OPEN, 1), (CERTIFICATE, 0)):
            self.tally.put(gauge, value)
        self.tally.begin(DONE, *((kind,) for kind in (*BUILT_IN, *STAGES)))
        self.tally.begin(RECEIPTS, ("accepted",), ("refused",))
        for count in (CANCELLED, SUBMIT_FAILED, DISK):
            self.tally.begin(count, ())

    def hear(self, event: str, fields: Mapping[str, object]) -> None:
        """Counts an event."""
        tally, reason = self.tally, str(fields.get("reason", "")).partition(":")[0]
        match event:
            case "attending":
                tally.put(ATTENDS, 1)
            case "disconnected" | "refused":
                tally.put(ATTENDS, 0)
                tally.add(DISCONNECTED, reason)
            case "open":
                tally.put(OPEN, 1)
            case "closed" | "paused":  # the reasons of `SiteClosing`
                tally.put(OPEN, 0)
            case "done":
                tally.add(DONE, str(fields.get("kind", "")))
            case "declined":
                tally.add(DECLINED, reason)
            case "cancelled":
                tally.add(CANCELLED)
            case "receipt":
                tally.add(RECEIPTS, "accepted" if fields.get("accepted") else "refused")
            case "submit-failed":
                tally.add(SUBMIT_FAILED)
            case "disk":
                tally.add(DISK)
            case "certificate-ends" | "renewed":
                tally.put(CERTIFICATE, event == "certificate-ends")


@contextmanager
def serving_counts(section: MetricsSection, events: Events) -> Iterator[int | None]:
    """Serves `/metrics` during the block, where `[metrics]` says so. The value is the port; None if it is not served.

    Raises:
        MetricsError: it cannot be served.
    """
    endpoint = section.endpoint(Path())
    if endpoint is None:
        yield None
        return
    counts, listener = EventCounts(), endpoint.bind()
    with ScrapeServer(listener, endpoint.token, lambda: page(counts.tally.readings())):
        events.listen(counts.hear)
        yield listener.getsockname()[1]
