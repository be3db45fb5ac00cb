"""What a worker shows at /metrics."""

from pathlib import Path

import pytest

from federation.monitoring import scrape_server
from federation.monitoring.events import Events
from federation.monitoring.metrics_page import page
from federation.monitoring.metrics_section import MetricsSection
from tests.coordinator.monitoring.scene import scraped, value
from worker.doctor import check_metrics
from worker.event_counts import EventCounts, serving_counts

pytest.importorskip("prometheus_client", reason="the extra `metrics` is not installed")


def test_a_scrape_shows_what_a_worker_has_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape_server, "PAGE_SECONDS", 0.0)
    events = Events()
    with serving_counts(MetricsSection(listen="127.0.0.1:0"), events) as port:
        assert port is not None
        assert value(page := scraped(port), "fedpareto_worker_attending") == 0
        assert "process_" not in page, "processor time would tell how long a computation took"
        events.tell("attending", "")
        events.tell("paused", "")
        events.tell("done", "", kind="train", seconds=3.0)
        events.warn("declined", "", reason="limit:waiting")
        events.tell("receipt", "", accepted=True)
        events.warn("submit-failed", "", reason="database")
        events.disk("")
        shown = scraped(port)
        assert value(shown, "fedpareto_worker_attending") == 1
        assert value(shown, "fedpareto_worker_open") == 0
        assert value(shown, "fedpareto_worker_work_total", kind="train") == 1
        assert value(shown, "fedpareto_worker_declines_total", reason="limit") == 1
        assert value(shown, "fedpareto_worker_receipts_total", outcome="accepted") == 1
        assert value(shown, "fedpareto_worker_submit_failures_total") == 1
        assert value(shown, "fedpareto_worker_disk_errors_total") == 1
        events.warn("disconnected", "", reason="")
        events.tell("open", "")
        shown = scraped(port)
        assert (value(shown, "fedpareto_worker_attending"), value(shown, "fedpareto_worker_open")) == (0, 1)
    with serving_counts(MetricsSection(), events) as port:
        assert port is None, "off by default"


def test_a_computation_that_failed_in_a_private_round_does_not_show() -> None:
    """Its owner alone is told; the page is the same as after one that did not fail, however long it took."""
    pages = []
    for failed in (False, True):
        counts = EventCounts()
        if failed:
            counts.hear("alert", {"reason": "failure-not-told", "failures": 1, "task": "digits"})
        counts.hear("done", {"kind": "secure-vector", "seconds": 0.01 if failed else 60.0})
        pages.append([line for line in page(counts.tally.readings()).splitlines() if b"fedpareto" in line])
    assert pages[0] == pages[1]


def test_the_doctor_says_why_metrics_cannot_be_served(tmp_path: Path) -> None:
    good = MetricsSection(listen="127.0.0.1:9464")
    assert "any process of this machine" in check_metrics(good).line
    bad = MetricsSection(listen="127.0.0.1:9464", token_file=str(tmp_path / "none"))
    assert "cannot be read: No such file" in check_metrics(bad).line
