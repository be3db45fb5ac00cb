"""The costs of a round besides training, and of the audit log.

`rounds`: for each of `--sizes` (parameters x workers x rounds), CPU-seconds of all processes, wall time, and the
coordinator's peak memory. Workers in processes of their own use TLS 1.3 and signatures over the loopback interface;
only the training is left out, and the updates of all workers and rounds differ. For comparison, bare gRPC over TLS
moves the same bytes in the same chunks between the same number of processes. `--modes "off private verified"` measures
open and private rounds, each with a new coordinator. The coordinator's CPU includes that of its front listener.

`log`: `--entries` are recorded in transactions of 100 and chained in batches, durably, as a coordinator does, on each
database; the time is that of both, one after the other. 0 leaves it out.
"""

import multiprocessing
import tempfile
import time
from datetime import UTC, datetime, timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path

import grpc
from bare import bare_channel, bare_server, pieces
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from measuring import (
    Document,
    cases,
    cpu_seconds,
    idle_worker,
    lone_coordinator,
    peak_memory,
    progress,
    submitted,
    temporary_federation,
    timed,
)

from coordinator.audit.checkpoints import LogKey
from coordinator.audit.log_verifier import log_problems
from coordinator.audit.sequencer import Sequencer
from coordinator.fault_state import FaultState
from federation.record.log_entries import ACCEPTED
from storage import audit
from storage.database import Database
from tests.harness import Federation
from tests.postgresql import server_at
from tests.worker.work.scene import pin_each_other
from worker.home import WorkerHome

FORMS = {
    # The last size is for the coordinator's memory.
    "full": {"sizes": "800000x10x40 11200000x10x5 11200000x50x2", "modes": "off", "entries": 50_000},
    "quick": {"sizes": "800000x10x20", "entries": 10_000},
    "smallest": {"sizes": "1000x1x2", "entries": 300},
}
WARM_UP = 2  # rounds that are not measured: they open connections, fill the page cache and import modules
MOST_MOVERS = 10  # of bare gRPC
IN_A_TRANSACTION = 100


def measure(sizes: str, modes: str, entries: int) -> Document:
    result: Document = {"rounds": []}
    for parameters, clients, rounds in cases(sizes):
        for mode in modes.split():
            with temporary_federation() as fed:
                found = play(fed, parameters, clients, rounds, mode)
                if clients <= MOST_MOVERS and mode == "off":
                    bare = floor(fed.home, 4 * parameters, clients, min(rounds, 5))
                    peer = bare["bare_cpu_seconds"]  # 0 if it took less than the kernel counts
                    found |= bare | {"ratio": found["cpu_seconds"] / peer if peer else None}
            result["rounds"].append(found)
    if entries:
        with tempfile.TemporaryDirectory() as directory, server_at(Path(tempfile.mkdtemp())) as server:
            urls = {"sqlite": f"sqlite:///{directory}/log.db", "postgresql": server.get_uri()}
            result["log"] = [{"database": kind, **in_log(url, entries, Path(directory))} for kind, url in urls.items()]
    return result


def play(fed: Federation, parameters: int, clients: int, rounds: int, mode: str = "off") -> Document:
    """Measures one run without training."""
    progress(f"{rounds} rounds of {clients} workers and {parameters:,} parameters, privacy.secure = {mode!r}")
    coordinator = lone_coordinator(fed)
    idle = peak_memory(coordinator.popen.pid)
    homes = [fed.join(f"worker-{i:02}") for i in range(clients)]
    if mode != "off":
        pin_each_other([WorkerHome(home) for home in homes], policy="")
    workers = [idle_worker(fed, home, parameters) for home in homes]
    total = rounds + WARM_UP
    run, _ = submitted(fed, "round", parameters, rounds=total, clients=clients, mode=mode)
    pids = [coordinator.popen.pid, *(worker.popen.pid for worker in workers)]

    def completed() -> int:
        count = "(select count(*) from rounds where run_id = :run and result_model is not null)"
        (found,) = fed.query(f"select state, reason, {count} from runs where run_id = :run", run=run)
        if found[0] in ("FAILED", "STOPPED", "PAUSED"):
            logs = "\n".join(process.text[-3000:] for process in (coordinator, workers[0]))
            raise RuntimeError(f"the run is {found[0]}: {found[1]}\n{logs}")
        return int(found[2])

    def wait(rounds: int) -> None:  # the database does not notify; more looks would take CPU time from the processes
        fed.wait(lambda: completed() >= rounds, "the run", coordinator, *workers, pause=0.2)

    fed.seconds = 600.0
    wait(WARM_UP)
    cpu, coordinator_cpu = cpu_seconds(*pids), cpu_seconds(pids[0])
    first = completed()
    began = time.perf_counter()
    wait(total - 1)
    # In the smallest form all rounds may have ended before the first look.
    measured, wall = max(1, completed() - first), time.perf_counter() - began
    cpu, coordinator_cpu = cpu_seconds(*pids) - cpu, cpu_seconds(pids[0]) - coordinator_cpu
    fed.wait_completed(run)
    return {
        "parameters": parameters,
        "clients": clients,
        "mode": mode,
        "rounds": measured,
        "cpu_seconds": cpu / measured,
        "coordinator_cpu_seconds": coordinator_cpu / measured,
        "wall_seconds": wall / measured,
        "coordinator_peak_mb": peak_memory(coordinator.popen.pid) / 1e6,
        "coordinator_idle_mb": idle / 1e6,
    }


def move_bare(home: Path, port: int, size: int, barrier: Barrier) -> None:
    """A client that downloads and uploads `size` bytes in each round, which all clients begin and end together."""
    with bare_channel(home, port) as channel:
        give: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/Bare/Give")
        take: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary("/Bare/Take")
        while True:
            barrier.wait()
            if sum(map(len, give(str(size).encode()))) != size or int(take(pieces(size))) != size:
                raise RuntimeError("bytes were lost")
            barrier.wait()


def floor(home: Path, size: int, clients: int, rounds: int) -> dict[str, float]:
    """CPU-seconds and wall seconds of moving `size` bytes down and up for each client, with a process for each."""
    context = multiprocessing.get_context("forkserver")
    barrier = context.Barrier(clients + 1, timeout=600)  # if one process ends early, the others end after this time

    def move(times: int) -> None:
        for _ in range(times):
            barrier.wait()
            barrier.wait()

    with bare_server(home, ["127.0.0.1:0"]) as (server, port):
        given = (home, port, size, barrier)
        movers = [context.Process(target=move_bare, args=given, daemon=True) for _ in range(clients)]
        for mover in movers:
            mover.start()
        move(1)  # opens the connections
        pids = [server, *(mover.pid or 0 for mover in movers)]
        cpu = cpu_seconds(*pids)
        wall = timed(lambda: move(rounds))
        cpu = cpu_seconds(*pids) - cpu
        for mover in movers:
            mover.terminate()
    return {"bare_cpu_seconds": cpu / rounds, "bare_wall_seconds": wall / rounds}


def in_log(url: str, entries: int, parent: Path) -> Document:
    """Records, chains, proves, reads again and verifies this many entries."""
    directory = Path(tempfile.mkdtemp(dir=parent))
    key = LogKey(federation_id="bench", key=Ed25519PrivateKey.generate())
    database, now = Database.open(url), datetime(2026, 5, 4, tzinfo=UTC)
    database.migrate()
    database.entry_key = key.entry_key

    def record() -> None:
        for start in range(0, entries, IN_A_TRANSACTION):
            with database.begin() as session:
                for number in range(start, min(start + IN_A_TRANSACTION, entries)):
                    at, actor = now + timedelta(microseconds=number), f"fedpareto://bench/client/hospital-{number % 50}"
                    subject, digest = f"{number:032x}", f"blake3:{number:064x}"
                    audit.record(session, at=at, actor=actor, action=ACCEPTED, subject=subject, digest=digest)

    def sequencer() -> Sequencer:
        return Sequencer(database, key, directory, faults=FaultState(), clock=lambda: now)

    cpu = time.process_time()
    first = sequencer()
    seconds = timed(record) + timed(lambda: first.sequence(show=True))
    cpu = time.process_time() - cpu
    sizes = [1 + number * entries // 50 for number in range(50)]  # each proof is made once, and remembered
    proved = timed(lambda: [first.head(size) for size in sizes]) / len(sizes)
    again = sequencer()
    started = timed(again.sequence)
    with database.read() as session:
        verified = timed(lambda: list(log_problems(session, key, again.newest)))
    database.close()
    return {
        "entries": entries,
        "entries_per_second": entries / seconds,
        "entries_per_cpu_second": entries / cpu,  # of the coordinator's process; a database server has its own
        "proof_seconds": proved,
        "proof_hashes": len(first.head(sizes[25]).consistency),
        "start_seconds": started,
        "verified_per_second": entries / verified,
    }
