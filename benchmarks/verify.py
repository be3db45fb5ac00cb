"""The record of a run as one file: bytes, seconds and memory of `admin bundle` and `verify`.

A real coordinator and workers make the run, without training: `--size` is parameters x workers x rounds. The rate of
the verification is compared with that of `gram` on the same updates: bytes of updates by CPU-seconds. A bundle without
payloads is measured, too. With 11200000x10x30, a round is 0.5 GB, twice.
"""

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from measuring import Document, cases, peak_memory, progress, temporary_federation
from round import play

from coordinator.aggregation.gram import gram
from federation.record.bundle import BundleReader
from federation.v1.common_pb2 import ReplyManifest, StepManifest
from federation.vectors import RowFile
from tests.harness import Federation

FORMS = {"full": {"size": "800000x10x30"}, "quick": {"size": "800000x10x10"}, "smallest": {"size": "1000x1x3"}}
COMMAND = [sys.executable, "-m", "fedpareto"]


def measure(size: str) -> Document:
    with temporary_federation() as fed:
        return bundled(fed, *cases(size)[0])


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


def bundled(fed: Federation, parameters: int, clients: int, rounds: int) -> Document:
    """Measures the bundle of one run."""
    play(fed, parameters, clients, rounds - 2, fresh=True)  # it plays two rounds more
    (run,) = fed.query("select run_id from runs")
    coordinator = fed.serve()
    result: Document = {"parameters": parameters, "clients": clients, "rounds": rounds}
    for name, more in (("bare", []), ("payloads", ["--payloads", "--yes"])):
        progress(f"the bundle, {name}")
        path = fed.directory / f"{name}.fedpareto"
        arguments = ["admin", "--home", str(fed.home / "admin"), "bundle", str(run[0]), "--out", str(path), *more]
        bundle = ran(arguments)
        result[name] = {"bytes": path.stat().st_size, "bundle": bundle, "verify": ran(["verify", str(path)])}
    rows, updates = rows_of(path), 4.0 * parameters * clients
    cpu = time.process_time()
    for _ in range(3):
        gram(rows)
    result["gram_bytes_per_cpu_second"] = 3 * updates / (time.process_time() - cpu)
    result["verify_bytes_per_cpu_second"] = updates * rounds / result["payloads"]["verify"]["cpu_seconds"]
    result["share"] = result["verify_bytes_per_cpu_second"] / result["gram_bytes_per_cpu_second"]
    coordinator.stop()
    path.unlink()
    return result
