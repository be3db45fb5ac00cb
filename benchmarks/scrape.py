"""The costs of `/metrics`: a page of many members, the looks behind it, and a round while it is scraped.

`page`: a coordinator with `--members` on record, each with a certificate and replies. The share of a core is that of a
scrape every 15 s, as Prometheus makes them, and of the looks that the coordinator makes meanwhile.

`rounds`: pairs of the same run in two federations, of which one serves `/metrics` at the coordinator and at each worker
and is scraped every second. They take turns to be first, and after half of the pairs they swap. The sizes are
parameters x workers x rounds. `ratio` is the median over the pairs of the CPU time of all processes, served to not,
between the ends of an interval that holds the true median at 95 %. `computed_percent` follows from the CPU time of the
parts, which hardly depends on what else the machine does: looks, scrapes every 15 s, and the counting, which goes on in
both federations. `computed_as_scraped` is the same with a scrape every second, as in the pairs.
"""

import re
import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median

import psutil
from measuring import Document, cases, idle_worker, lone_coordinator, progress, submitted, temporary_federation, timed
from prometheus_client.parser import text_string_to_metric_families
from round import WARM_UP
from scipy.stats import binom

from coordinator.monitoring.number_keeper import LOOK_SECONDS, MEMBERS_SECONDS, NumberKeeper
from coordinator.rounds.replies.reply_counts import count_reply
from federation.monitoring.metrics_page import page
from federation.monitoring.scrape_server import ScrapeServer
from federation.monitoring.tally import MonitoredKind, MonitoredNumber, Tally
from storage.models import Certificate, Client
from storage.states import ClientState
from tests.harness import Federation
from tests.running import Running, running
from worker.event_counts import EventCounts

SCRAPE_SECONDS = 15.0  # between two scrapes of Prometheus, by its usual settings
SCRAPED_SECONDS = 1.0  # between two scrapes of a federation whose rounds are measured
REPEATS = 20
COUNTS = 100_000
FORMS = {
    "full": {"members": 1000, "sizes": "100000x5x20", "pairs": 40},  # five minutes on a quiet machine
    "quick": {"members": 1000, "sizes": "100000x5x10", "pairs": 8},
    "smallest": {"members": 5, "sizes": "1000x1x2", "pairs": 2},
}


def measure(members: int, sizes: str, pairs: int) -> Document:
    result: Document = {"page": of_page(members), "count_microseconds": of_count()}
    result["rounds"] = [
        of_rounds(parameters, clients, rounds, pairs, result["count_microseconds"])
        for parameters, clients, rounds in cases(sizes)
    ]
    return result


def of_page(members: int) -> Document:
    """The size of the page, and the CPU time of a scrape and of the looks."""
    progress(f"the page of {members} members")
    with tempfile.TemporaryDirectory() as directory, running(Path(directory) / "home") as served:
        add_members(served, members)
        record, presence = served.coordinator.record, served.coordinator.rounds.presence

        def looked(*, names_members: bool = True) -> NumberKeeper:
            """A first look, which is one at each member, too, if it names them."""
            keeper = NumberKeeper(record, presence, names_members=names_members)
            keeper.look(gives=True)
            return keeper

        keeper = looked()
        made = page(keeper.readings(), process=True)
        scrape = cpu_of(lambda: page(keeper.readings(), process=True)) + of_answer(made)
        look = cpu_of(lambda: looked(names_members=False))
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


def add_members(served: Running, members: int) -> None:
    """Members on record, each with a certificate and replies."""
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
    for name in names:
        for outcome in ("accepted", "declined", "refused", "missing"):
            count_reply(served.coordinator.record.database.tally, name, outcome)


def cpu_of(work: Callable[[], object]) -> float:
    """The CPU-seconds of a call, of the calling thread."""
    return timed(lambda: [work() for _ in range(REPEATS)], time.thread_time) / REPEATS


def of_answer(made: bytes) -> float:
    """The CPU-seconds in which the server answers with a page that is made."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with ScrapeServer(listener, None, lambda: made):
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "metrics"]
        clock = time.pthread_getcpuclockid(thread.ident or 0)
        before = time.clock_gettime(clock)
        for _ in range(REPEATS):
            scraped(port)
        return (time.clock_gettime(clock) - before) / REPEATS


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


def of_count() -> float:
    """The microseconds of a count."""
    tally, metric = Tally(), MonitoredNumber("counted", "Counts.", MonitoredKind.COUNTER, ("outcome",))

    def count() -> None:
        for _ in range(COUNTS):
            tally.add(metric, "accepted")

    return 1e6 * timed(count, time.thread_time) / COUNTS


class Side:
    """A federation of processes whose runs are measured, with `/metrics` or without."""

    def __init__(self, fed: Federation, parameters: int, clients: int) -> None:
        self._fed, self._parameters, self._clients = fed, parameters, clients
        self._homes: list[Path] = []
        self._pids: list[int] = []
        self._runs = 0
        self.ports: list[int] = []  # of `/metrics`

    def start(self, *, served: bool) -> None:
        """Starts the coordinator and the workers."""
        self._pids.clear()
        self.ports = free_ports(1 + self._clients) if served else []
        listens = [f"127.0.0.1:{port}" for port in self.ports] or [""] * (1 + self._clients)
        settings = self._fed.home / "coordinator.toml"
        text = re.sub(r'(?m)^listen = ".*"$', f'listen = "{listens[0]}"', settings.read_text())
        settings.write_text(text)
        processes = [lone_coordinator(self._fed)]
        self._homes = self._homes or [self._fed.join(f"worker-{number}") for number in range(self._clients)]
        for home, listen in zip(self._homes, listens[1:], strict=True):
            (home / "worker.toml").write_text(f'format = 1\n[metrics]\nlisten = "{listen}"\n')
            processes.append(idle_worker(self._fed, home, self._parameters))
        self.run(WARM_UP)
        ids = [process.popen.pid for process in processes]
        self._pids = [*ids, *(child.pid for pid in ids for child in psutil.Process(pid).children(recursive=True))]

    def run(self, rounds: int) -> tuple[float, float]:
        """The CPU-seconds of all processes in a run, and its seconds."""
        self._runs += 1
        before, began = self._cpu(), time.perf_counter()
        run, _ = submitted(self._fed, f"run-{self._runs}", self._parameters, rounds=rounds, clients=self._clients)
        self._fed.wait_completed(run)
        return self._cpu() - before, time.perf_counter() - began

    def _cpu(self) -> float:
        """The CPU-seconds of the processes so far, by their own clocks, which count nanoseconds."""
        return sum(time.clock_gettime(~pid << 3 | 2) for pid in self._pids)

    def stop(self) -> None:
        self._fed.stop(*self._fed.processes)


def free_ports(count: int) -> list[int]:
    with ExitStack() as kept:
        listeners = [kept.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


def of_rounds(parameters: int, clients: int, rounds: int, pairs: int, microseconds: float) -> Document:
    """What `/metrics` adds to the CPU time of a round, of all processes."""
    costs: list[tuple[float, float]] = []  # of each pair: with `/metrics`, and without
    walls, counted = list[float](), 0.0
    with temporary_federation() as one, temporary_federation() as other:
        sides = Side(one, parameters, clients), Side(other, parameters, clients)
        for half in (0, 1):
            served, plain = sides[half], sides[1 - half]
            served.start(served=True)
            plain.start(served=False)
            with scraping(served.ports):
                for number in range(pairs // 2):
                    progress(f"{rounds} rounds of {clients} workers: pair {len(costs) + 1} of {pairs}")
                    before = counts(scraped(served.ports[0]))
                    found = {side: side.run(rounds) for side in ((served, plain) if number % 2 else (plain, served))}
                    counted = max(counted, (counts(scraped(served.ports[0])) - before) / rounds)
                    costs.append((found[served][0], found[plain][0]))
                    walls.append(found[plain][1])
            served.stop()
            plain.stop()
    ratios = sorted(with_metrics / without for with_metrics, without in costs)
    low, high = interval(ratios)
    cpu, wall = median(without for _, without in costs) / rounds, median(walls) / rounds
    looks, scrapes = idle_costs(clients)

    def percent(between: float) -> float:
        """Of a round, with this time between two scrapes."""
        return 100 * (wall * (looks + scrapes / between) + counted * microseconds / 1e6) / cpu

    return {
        "parameters": parameters,
        "clients": clients,
        "pairs": len(costs),
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "ratio": median(ratios),
        "ratio_from": low,
        "ratio_to": high,
        "counts": counted,
        "computed_percent": percent(SCRAPE_SECONDS),
        "computed_as_scraped": percent(SCRAPED_SECONDS),
    }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The ends of an interval that holds the true median at 95 %, of sorted values; all of them if they are few."""
    outside = max(0, int(binom.ppf(0.025, len(values), 0.5)) - 1)
    return values[outside], values[-1 - outside]


def idle_costs(clients: int) -> tuple[float, float]:
    """The CPU-seconds of a coordinator's looks in a second, and of a scrape of it and of each worker."""
    coordinator, worker = of_page(clients), EventCounts().tally
    of_worker = cpu_of(lambda: page(worker.readings())) + of_answer(page(worker.readings()))
    return coordinator["looks_core_percent"] / 100, coordinator["scrape_cpu_seconds"] + clients * of_worker


@contextmanager
def scraping(ports: Sequence[int]) -> Iterator[None]:
    """Scrapes these ports meanwhile."""
    ended = threading.Event()

    def scrape() -> None:
        while not ended.wait(SCRAPED_SECONDS):
            for port in ports:
                with suppress(OSError):
                    scraped(port)

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
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
