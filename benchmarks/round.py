"""The costs of a round besides training: CPU-seconds of all processes, wall time, and the coordinator's peak memory.

    python benchmarks/round.py [--quick] [--json]
    python benchmarks/round.py --private M D [--json]

Ten workers in processes of their own use TLS 1.3 and signatures over the loopback interface; only the training is left
out. For comparison, the same call measures bare gRPC over TLS that moves the same bytes in the same chunks between the
same number of processes. `--private` measures open and private rounds of M workers and D parameters, one after the
other, each with a new coordinator.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from harness import Federation, Process, federation

from federation.trust.member_files import MemberFiles
from federation.vectors import Layout, Tensor, to_bytes
from worker.home import WorkerHome
from worker.site.roster import Card, Roster

SPEC = """
task = "nothing"
rounds = {rounds}
[algorithm]
name = "fedmgda+"
epsilon = 0.5
[selection]
minimum = {clients}
quorum = 1.0
[evaluate]
every = 0
[privacy]
secure = "{mode}"
"""
WORKER = Path(__file__).with_name("resident_worker.py")
CHUNK = 1 << 18  # bytes, the chunk size of workers and coordinator
WARM_UP = 2  # rounds that are not measured: they open connections, fill the page cache and import modules


def cpu_seconds(pids: list[int]) -> float:
    total = 0.0
    for pid in pids:
        times = psutil.Process(pid).cpu_times()
        total += times.user + times.system
    return total


def peak_memory(pid: int) -> float:
    """The peak of the resident memory (VmHWM), in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM")


def wait_until(condition: Callable[[], bool], processes: Sequence[Process]) -> None:
    """Waits until a condition holds.

    Raises:
        RuntimeError: a process has ended, or the condition did not hold within 600 s; the message has the log.
    """
    end = time.monotonic() + 600
    while not condition():
        for process in processes:
            if process.popen.poll() is not None:
                raise RuntimeError(f"{process.log.stem} ended with {process.popen.returncode}:\n{process.text[-3000:]}")
        if time.monotonic() > end:
            logs = "\n".join(f"{process.log.stem}:\n{process.text[-1000:]}" for process in processes[:2])
            raise RuntimeError(f"the rounds do not end:\n{logs}")
        time.sleep(0.2)  # the database does not notify; looks more often would take CPU time from the processes


def pin_roster(homes: Sequence[Path]) -> None:
    """Pins a roster of all these members in each of their homes."""
    members = [MemberFiles.load(home) for home in homes]
    text = "\n".join(Card.of(member).text() for member in members)
    for home, member in zip(homes, members, strict=True):
        Roster.parse(text, member).pin(WorkerHome(home).roster)


def measure(
    fed: Federation,
    parameters: int,
    clients: int,
    rounds: int,
    mode: str = "off",
    *,
    fresh: bool = False,
    program: str = "",
) -> dict[str, Any]:
    """Measures one run without training; with `fresh`, all updates are different.

    `program` is that of the coordinator, in place of the command's.
    """
    fed.forks = False  # the memory of a coordinator that has imported nothing else
    coordinator = fed.serve(program=program)
    fed.forks = True
    idle = peak_memory(coordinator.popen.pid)
    homes = [fed.directory / f"worker-{i:02}" for i in range(clients)]
    for home in homes:
        if not home.exists():
            fed.join(home.name)
    if mode != "off":
        pin_roster(homes)
    more = ["fresh"] if fresh else []
    workers = [fed.spawn(home.name, [str(WORKER), str(home), str(parameters), *more]) for home in homes]
    model = fed.directory / "model.safetensors"
    model.write_bytes(to_bytes(Layout((Tensor("weight", (parameters,)),)), np.zeros(parameters, np.float32)))
    total = rounds + WARM_UP
    spec = SPEC.format(rounds=total, clients=clients, mode=mode)
    run = fed.submit(f"round-{parameters}-{clients}-{mode}", spec, "--model", str(model))
    pids = [coordinator.popen.pid, *(worker.popen.pid for worker in workers)]

    def completed() -> int:
        state, reason = fed.query("select state, reason from runs where run_id = :run", run=run)[0]
        if state in ("FAILED", "STOPPED", "PAUSED"):
            logs = "\n".join(process.text[-3000:] for process in (coordinator, workers[0]))
            raise RuntimeError(f"the run is {state}: {reason}\n{logs}")
        return int(
            fed.query("select count(*) from rounds where run_id = :run and result_model is not null", run=run)[0][0]
        )

    processes = [coordinator, *workers]
    wait_until(lambda: completed() >= WARM_UP, processes)
    cpu, coordinator_cpu = cpu_seconds(pids), cpu_seconds(pids[:1])
    first = completed()
    began = time.perf_counter()
    wait_until(lambda: completed() >= total - 1, processes)
    # In the smallest form all rounds may have ended before the first look.
    measured, wall = max(1, completed() - first), time.perf_counter() - began
    cpu, coordinator_cpu = cpu_seconds(pids) - cpu, cpu_seconds(pids[:1]) - coordinator_cpu
    fed.wait_completed(run)
    result = {
        "parameters": parameters,
        "clients": clients,
        "mode": mode,
        "rounds": measured,
        "cpu_seconds": cpu / measured,
        "coordinator_cpu_seconds": coordinator_cpu / measured,
        "wall_seconds": wall / measured,
        "coordinator_peak_bytes": peak_memory(coordinator.popen.pid),
        "coordinator_idle_bytes": idle,
    }
    for worker in workers:
        worker.kill()
    coordinator.stop()
    return result


def serve_bare(home: Path, size: int, ports: Any, stop: Any) -> None:
    """A gRPC server that sends and receives `size` bytes."""
    data = bytes(CHUNK)

    def download(request: bytes, context: Any) -> Iterator[bytes]:
        for start in range(0, size, CHUNK):
            yield data[: min(CHUNK, size - start)]

    def upload(requests: Iterator[bytes], context: Any) -> bytes:
        return str(sum(len(chunk) for chunk in requests)).encode()

    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Download": grpc.unary_stream_rpc_method_handler(download),
        "Upload": grpc.stream_unary_rpc_method_handler(upload),
    }
    server = grpc.server(ThreadPoolExecutor(32))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Bare", handlers),))
    pair = ((home / "server.key").read_bytes(), (home / "server.pem").read_bytes())
    ports.put(server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair])))
    server.start()
    stop.wait()
    server.stop(None)


def move_bare(ca: bytes, port: int, size: int, rounds: int, barrier: Any) -> None:
    """A client that downloads and uploads `size` bytes in each round, like a worker."""
    data = bytes(CHUNK)
    with grpc.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(ca)) as channel:
        download: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/Bare/Download")
        upload: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary("/Bare/Upload")
        for turn in range(rounds + 1):
            barrier.wait()
            if turn == rounds:
                return
            received = sum(len(chunk) for chunk in download(b""))
            sent = upload(data[: min(CHUNK, size - start)] for start in range(0, size, CHUNK))
            if received != size or int(sent) != size:
                raise RuntimeError("bytes were lost")


def floor(home: Path, size: int, clients: int, rounds: int) -> dict[str, float]:
    """CPU-seconds and wall seconds of moving `size` bytes down and up for each client."""
    context = multiprocessing.get_context("forkserver")
    ports, stop = context.Queue(), context.Event()
    barrier = context.Barrier(clients + 1, timeout=600)  # if one process ends early, the others end after this time
    server = context.Process(target=serve_bare, args=(home, size, ports, stop))
    server.start()
    port = ports.get(timeout=60)
    arguments = ((home / "ca.pem").read_bytes(), port, size, rounds + 1, barrier)
    movers = [context.Process(target=move_bare, args=arguments) for _ in range(clients)]
    for mover in movers:
        mover.start()
    barrier.wait()  # the warm-up begins
    barrier.wait()  # the measured rounds begin
    pids = [process.pid or 0 for process in (server, *movers)]
    cpu, began = cpu_seconds(pids), time.perf_counter()
    for _ in range(rounds - 1):
        barrier.wait()
    # After its last round each client waits at the barrier. Waiting there too would release the clients, which then end
    # and take their CPU times with them.
    while barrier.n_waiting < clients and not barrier.broken:
        time.sleep(0.001)  # a barrier does not notify of its waiters
    cpu, wall = cpu_seconds(pids) - cpu, time.perf_counter() - began
    barrier.wait()
    for mover in movers:
        mover.join()
    stop.set()
    server.join()
    return {"cpu_seconds": cpu / rounds, "wall_seconds": wall / rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the small model only, few rounds")
    parser.add_argument("--smallest", action="store_true", help="1,000 parameters, 1 worker, 2 rounds")
    parser.add_argument("--private", type=int, nargs=2, metavar=("M", "D"), help="open and private rounds")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.private:
        private(*arguments.private, as_json=arguments.json)
        return
    cases = [(800_000, 10, 20 if arguments.quick else 40)]
    if arguments.smallest:
        cases = [(1_000, 1, 2)]
    elif not arguments.quick:
        cases += [(11_200_000, 10, 5), (11_200_000, 50, 2)]  # the last one measures the coordinator's memory
    results = []
    for parameters, clients, rounds in cases:
        with tempfile.TemporaryDirectory() as directory, federation(Path(directory)) as fed:
            measured = measure(fed, parameters, clients, rounds)
            bare = floor(fed.home, 4 * parameters, clients, min(rounds, 5)) if clients <= 10 else {}
        results.append({**measured, **{f"bare_{name}": value for name, value in bare.items()}})
        if not arguments.json:
            show(results[-1])
    if arguments.json:
        print(json.dumps(results, indent=2))


def private(clients: int, parameters: int, *, as_json: bool) -> None:
    """Measures and prints open and private rounds."""
    results = []
    for mode in ("off", "private", "verified"):
        with tempfile.TemporaryDirectory() as directory, federation(Path(directory)) as fed:
            results.append(measure(fed, parameters, clients, rounds=2, mode=mode))
        if not as_json:
            print(f"\nprivacy.secure = {mode!r}", end="")
            show(results[-1])
    if as_json:
        print(json.dumps(results, indent=2))


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['parameters'] / 1e6:.1f} M parameters, {result['clients']} workers, {result['rounds']} rounds")
    print(f"  a round             {result['cpu_seconds']:7.2f} CPU-s  {result['wall_seconds']:7.3f} s")
    print(f"    of it the coordinator {result['coordinator_cpu_seconds']:5.2f} CPU-s")
    if "bare_cpu_seconds" in result:
        ratio = result["cpu_seconds"] / result["bare_cpu_seconds"]
        print(f"  bare gRPC over TLS  {result['bare_cpu_seconds']:7.2f} CPU-s  {result['bare_wall_seconds']:7.3f} s")
        print(f"  ratio               {ratio:7.2f}")
    peak, idle = result["coordinator_peak_bytes"] / 1e6, result["coordinator_idle_bytes"] / 1e6
    bound = 2 * 4 * result["parameters"] / 1e6 + 400
    print(f"  coordinator's peak  {peak:7.0f} MB  (idle {idle:.0f} MB; two models and 0.4 GB: {bound:.0f} MB)")


if __name__ == "__main__":
    main()
