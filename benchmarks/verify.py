"""The record of a run as one file: bytes, seconds and memory of `admin bundle` and `verify`.

    python benchmarks/verify.py [--quick] [--json]

A real coordinator and ten workers make the run, without training. The rate of the verification is compared with that of
`gram` on the same updates: bytes of updates by seconds. A bundle without payloads is measured, too.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import gram as gram_benchmark
from harness import Federation, federation
from round import measure as play
from round import peak_memory

from coordinator.aggregation.gram import gram
from federation.record.bundle import BundleReader
from federation.v1.common_pb2 import ReplyManifest, StepManifest
from federation.vectors import RowFile

COMMAND = [sys.executable, "-m", "fedpareto"]


def ran(arguments: list[str]) -> dict[str, float]:
    """Runs a command: its wall seconds, CPU-seconds and peak memory.

    Raises:
        RuntimeError: it failed.
    """
    began, peak = time.perf_counter(), 0.0
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen([*COMMAND, *arguments], stdout=output, stderr=subprocess.STDOUT)
        # ru_maxrss would count this process, of which the command is a fork at first.
        while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
            with suppress(OSError, RuntimeError):  # it has ended
                peak = max(peak, peak_memory(process.pid))
            time.sleep(0.01)  # the memory of a process can only be read again and again
        seconds = time.perf_counter() - began
        _, status, usage = ended
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in (0, 3):
            output.seek(0)
            raise RuntimeError(f"{arguments} ended with {process.returncode}: {output.read().decode()[-2000:]}")
    return {
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_bytes": peak,
        "code": process.returncode,
    }


def rows_of(path: Path) -> list[RowFile]:
    """The updates of the first round of a bundle."""
    with BundleReader(path) as bundle:
        record = next(bundle.rounds())
        step = StepManifest.FromString(record.step.manifest)
        said = [
            ReplyManifest.FromString(answer.reply.manifest)
            for exchange in record.phases[0].exchanges
            for answer in exchange.answers
        ]
        return [row for one in said[: len(step.replies)] for row in bundle.rows(one.payload).values()]


def measure(fed: Federation, parameters: int, clients: int, rounds: int) -> dict[str, Any]:
    """Measures the bundle of one run."""
    play(fed, parameters, clients, rounds - 2, fresh=True)  # it plays two rounds more
    (run,) = fed.query("select run_id from runs")
    coordinator = fed.serve()
    idle = peak_memory(coordinator.popen.pid)
    result: dict[str, Any] = {"parameters": parameters, "clients": clients, "rounds": rounds}
    for name, more in (("bare", []), ("payloads", ["--payloads", "--yes"])):
        path = fed.directory / f"{name}.fedpareto"
        arguments = ["admin", "--home", str(fed.home / "admin"), "bundle", str(run[0]), "--out", str(path), *more]
        bundle = ran(arguments)
        result[name] = {"bytes": path.stat().st_size, "bundle": bundle, "verify": ran(["verify", str(path)])}
        result[name]["coordinator_growth_bytes"] = peak_memory(coordinator.popen.pid) - idle
    rows, updates = rows_of(path), 4.0 * parameters * clients
    cpu = time.process_time()
    seconds = gram_benchmark.best(lambda: gram(rows), 3)
    gram_seconds = {"seconds": seconds, "cpu_seconds": (time.process_time() - cpu) / 3}
    for name, used in gram_seconds.items():
        result[f"gram_bytes_per_{name}"] = updates / used
        result[f"verify_bytes_per_{name}"] = updates * rounds / result["payloads"]["verify"][name]
        result[f"share_by_{name}"] = result[f"verify_bytes_per_{name}"] / result[f"gram_bytes_per_{name}"]
    coordinator.stop()
    path.unlink()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the small model only, ten rounds")
    parser.add_argument("--smallest", action="store_true", help="1,000 parameters, 1 worker, 3 rounds")
    parser.add_argument(
        "--large", action="store_true", help="11.2 million parameters instead; a round is 0.5 GB, twice"
    )
    parser.add_argument("--rounds", type=int, default=30, help="with --large")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    size = (11_200_000, 10, options.rounds) if options.large else (800_000, 10, 30)
    size = (800_000, 10, 10) if options.quick else (1000, 1, 3) if options.smallest else size
    with tempfile.TemporaryDirectory() as directory, federation(Path(directory)) as fed:
        result = measure(fed, *size)
    if options.json:
        print(json.dumps(result))
        return
    print(f"{result['rounds']} rounds, {result['clients']} clients, {result['parameters']:,} parameters")
    for name in ("bare", "payloads"):
        found = result[name]
        print(
            f"{name:9} {found['bytes'] / 1e6:10.2f} MB; bundle {found['bundle']['seconds']:.1f} s, "
            f"{found['bundle']['peak_bytes'] / 1e6:.0f} MB; verify {found['verify']['seconds']:.1f} s, "
            f"{found['verify']['cpu_seconds']:.1f} CPU-s, {found['verify']['peak_bytes'] / 1e6:.0f} MB; coordinator "
            f"grew by {found['coordinator_growth_bytes'] / 1e6:.0f} MB"
        )
    for name in ("seconds", "cpu_seconds"):
        rates = [result[f"{what}_bytes_per_{name}"] / 1e9 for what in ("verify", "gram")]
        share = result[f"share_by_{name}"]
        print(f"verify reads {rates[0]:.2f} GB of updates by {name}, {share:.0%} of gram's {rates[1]:.2f}")


if __name__ == "__main__":
    main()
