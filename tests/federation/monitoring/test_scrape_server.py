"""The server of /metrics: who gets the page, and what a scraper cannot take."""

import http.client
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from federation.monitoring.metrics_page import page
from federation.monitoring.metrics_section import MetricsEndpoint, MetricsError, MetricsSection
from federation.monitoring.scrape_server import MOST_BYTES, MOST_CONNECTIONS, ScrapeServer
from federation.monitoring.tally import MOST_SETS, MonitoredKind, MonitoredNumber, Tally

pytest.importorskip("prometheus_client", reason="the extra `metrics` is not installed")

REPLIES = MonitoredNumber("fedpareto_replies", "Replies.", MonitoredKind.COUNTER, ("outcome",))
TOKEN = b"0123456789abcdef"


@contextmanager
def serving(make: Callable[[], bytes], token: bytes | None = None) -> Iterator[int]:
    listener = MetricsEndpoint("127.0.0.1", 0, token).bind()
    with ScrapeServer(listener, token, make):
        yield listener.getsockname()[1]


def asked(port: int, path: str = "/metrics", method: str = "GET", **fields: str) -> tuple[int, bytes]:
    """The status and the body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, headers=fields)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_a_scrape_gets_the_numbers_that_were_counted() -> None:
    tally = Tally()
    tally.add(REPLIES, "accepted", amount=2)
    with serving(lambda: page(tally.readings())) as port:
        status, body = asked(port)
        assert (status, b'fedpareto_replies_total{outcome="accepted"} 2.0' in body) == (200, True)
        assert asked(port, method="HEAD") == (200, b"")
        assert asked(port, "/")[0] == 404
        assert asked(port, method="POST")[0] == 405
        assert asked(port, Host="elsewhere.example:80")[0] == 421, "a name of another site that leads to loopback"


def test_with_a_token_only_its_holder_gets_the_page() -> None:
    with serving(lambda: b"the page", TOKEN) as port:
        assert asked(port)[0] == asked(port, Authorization="Bearer 0123456789abcdeX")[0] == 401
        assert asked(port, Authorization=f"Bearer {TOKEN.decode()}") == (200, b"the page")


def test_scrapers_that_hang_or_send_too_much_keep_nobody_out() -> None:
    with serving(lambda: b"the page") as port:
        hanging = [socket.create_connection(("127.0.0.1", port)) for _ in range(2 * MOST_CONNECTIONS)]
        with socket.create_connection(("127.0.0.1", port), timeout=30) as large:
            large.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * (2 * MOST_BYTES) + b"\r\n\r\n")
        assert asked(port) == (200, b"the page")
        for end in hanging:
            end.close()


def test_labels_of_others_are_bounded() -> None:
    tally = Tally()
    for number in range(MOST_SETS + 7):
        tally.add(REPLIES, str(number))
    ((_, values),) = tally.readings()
    assert (len(values), values["other",]) == (MOST_SETS + 1, 7)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"listen": "0.0.0.0:9464"}, "which other machines reach"),
        ({"listen": "localhost"}, "is not HOST:PORT"),
        ({"token_file": "token"}, "nothing is served"),
    ],
)
def test_a_section_that_cannot_be_used_is_refused(values: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        MetricsSection.from_values(values)


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(TOKEN + b"\n")
    section = MetricsSection(listen="127.0.0.1:0", token_file="token")
    file.chmod(0o644)
    with pytest.raises(MetricsError, match="0644, so others can read"):
        section.endpoint(tmp_path)
    file.chmod(0o600)
    endpoint = section.endpoint(tmp_path)
    assert endpoint is not None
    assert endpoint.token == TOKEN
    assert TOKEN.decode() not in repr(endpoint)
