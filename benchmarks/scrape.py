"""The costs of `/metrics`: a page of many members, the looks behind it, and a round while it is scraped.

`page`: a coordinator with `--members` on record, each with a certificate and replies. The share of a core is that of a
scrape every 15 s, as Prometheus makes them, and of the looks that the coordinator makes meanwhile.

`rounds`: pairs of the same run, once without `/metrics` and once scraped every second, in turn first and second; the
sizes are parameters x workers x rounds. Counting, which goes on in both, is measured by itself: the time of a count,
and how many a round makes.
"""

import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median

from measuring import Document, cases, progress, temporary_federation, timed
from prometheus_client.parser import text_string_to_metric_families
from round import WARM_UP, play

from coordinator.monitoring.number_keeper import LOOK_SECONDS, MEMBERS_SECONDS, NumberKeeper
from coordinator.rounds.replies.intake import count_reply
from federation.monitoring.metrics_page import page
from federation.monitoring.tally import MonitoredKind, MonitoredNumber, Tally
from storage.models import Certificate, Client
from storage.states import ClientState
from tests.harness import Federation
from tests.running import Running, running

SCRAPE_SECONDS = 15.0  # between two scrapes of Prometheus, by its usual settings
REPEATS = 20
COUNTS = 100_000
FORMS = {
    "full": {"members": 1000, "sizes": "800000x10x20", "pairs": 5},
    "quick": {"members": 1000, "sizes": "800000x10x10", "pairs": 2},
    "smallest": {"members": 5, "sizes": "1000x1x2", "pairs": 1},
}


def measure(members: int, sizes: str, pairs: int) -> Document:
    progress(f"the page of {members} members")
    with tempfile.TemporaryDirectory() as directory, running(Path(directory) / "home") as served:
        result: Document = {"page": of_page(served, members)}
    result["count_microseconds"] = of_count()
    result["rounds"] = [
        of_rounds(parameters, clients, rounds, pairs, result["count_microseconds"])
        for parameters, clients, rounds in cases(sizes)
    ]
    return result


def of_page(served: Running, members: int) -> Document:
    """The size of the page, and the CPU time of a scrape and of a look."""
    now = datetime.now(UTC)
    names = [f"hospital-{number:04}" for number in range(members)]
    with served.database.begin() as session:
        for number, name in enumerate(names):
            of_key = {"signing_key": number.to_bytes(32, "big"), "key_id": f"{number:064x}"}
            session.add(Client(client_id=name, state=ClientState.ACTIVE, enrolled=now, **of_key))
        session.flush()
        for number, name in enumerate(names):
            given = {"subject": name, "not_before": now, "not_after": now + timedelta(days=90 + number)}
            session.add(Certificate(serial=f"{number:x}", client_id=name, certificate=b"", **given))
    record, presence = served.coordinator.record, served.coordinator.rounds.presence
    for name in names:
        for outcome in ("accepted", "declined", "refused", "missing"):
            count_reply(record.database.tally, name, outcome)

    def looked(*, names_members: bool = True) -> NumberKeeper:
        """A first look, which is one at each member, too, if it names them."""
        keeper = NumberKeeper(record, presence, names_members=names_members)
        keeper.look(gives=True)
        return keeper

    keeper = looked()
    made = page(keeper.readings(), process=True)
    scrape, look = cpu_of(lambda: page(keeper.readings(), process=True)), cpu_of(lambda: looked(names_members=False))
    look_at_members = max(0.0, cpu_of(looked) - look)
    families = text_string_to_metric_families(made.decode())
    return {
        "members": members,
        "series": sum(len(family.samples) for family in families),
        "bytes": len(made),
        "scrape_cpu_seconds": scrape,
        "look_cpu_seconds": look,
        "look_at_members_cpu_seconds": look_at_members,
        "scrape_core_percent": 100 * scrape / SCRAPE_SECONDS,
        "looks_core_percent": 100 * (look / LOOK_SECONDS + look_at_members / MEMBERS_SECONDS),
    }


def cpu_of(work: Callable[[], object]) -> float:
    """The CPU-seconds of a call, of the calling thread."""
    return timed(lambda: [work() for _ in range(REPEATS)], time.thread_time) / REPEATS


def of_count() -> float:
    """The microseconds of a count."""
    tally, metric = Tally(), MonitoredNumber("counted", "Counts.", MonitoredKind.COUNTER, ("outcome",))

    def count() -> None:
        for _ in range(COUNTS):
            tally.add(metric, "accepted")

    return 1e6 * timed(count, time.thread_time) / COUNTS


def of_rounds(parameters: int, clients: int, rounds: int, pairs: int, microseconds: float) -> Document:
    """The CPU time of the coordinator in a round, with and without scrapes, and what counting takes of it."""
    ratios, counted, plain = list[float](), 0.0, list[float]()
    for number in range(pairs):
        costs = dict[bool, float]()
        for scraped in (number % 2 == 0, number % 2 == 1):
            with temporary_federation() as fed, scrapes(fed) if scraped else nullcontext(list[str]()) as pages:
                costs[scraped] = play(fed, parameters, clients, rounds)["coordinator_cpu_seconds"]
            counted = max(counted, counts(pages[-1]) / (rounds + WARM_UP) if pages else 0.0)
        plain.append(costs[False])
        ratios.append(costs[True] / costs[False] if costs[False] else 1.0)
    return {
        "parameters": parameters,
        "clients": clients,
        "pairs": pairs,
        "coordinator_cpu_seconds": median(plain),
        "scraped_ratio": median(ratios),
        "least_ratio": min(ratios),
        "most_ratio": max(ratios),
        "counts": counted,
        "counting_percent": 100 * counted * microseconds / 1e6 / median(plain) if median(plain) else 0.0,
    }


@contextmanager
def scrapes(fed: Federation) -> Iterator[list[str]]:
    """Has the coordinator serve `/metrics`, and scrapes it every second; the pages are the value."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = fed.home / "coordinator.toml"
    settings.write_text(settings.read_text().replace('listen = ""', f'listen = "127.0.0.1:{port}"'))
    pages, ended = list[str](), threading.Event()

    def scrape() -> None:
        while not ended.wait(1.0):
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                pages.append(answer.read().decode())

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield pages
    finally:
        ended.set()
        thread.join()


def counts(text: str) -> float:
    """How often a process has counted, by its page."""
    families = [family for family in text_string_to_metric_families(text) if family.name.startswith("fedpareto")]
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name.endswith("_count") or (sample.name.endswith("_total") and "bytes" not in sample.name)
    )
