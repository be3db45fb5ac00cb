"""The record of a run as one file: bytes, CPU-seconds and memory of `admin bundle` and `verify`.

A real coordinator and workers make the run, without training: `--size` is parameters x workers x rounds. The rate of
the verification is compared with that of `gram` on the same updates: bytes of updates by CPU-seconds. A bundle without
payloads is measured, too. With 11200000x10x30, a round is 0.5 GB, twice.
"""

import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from measuring import Document, cases, peak_memory, progress, temporary_federation, timed
from round import play

from federation.aggregation.gram import gram
from federation.record.bundle import BundleReader
from federation.v1.common_pb2 import ReplyManifest
from federation.vectors import RowFile
from tests.harness import Federation

FORMS = {"full": {"size": "800000x10x30"}, "quick": {"size": "800000x10x10"}, "smallest": {"size": "1000x1x3"}}


def measure(size: str) -> Document:
    with temporary_federation() as fed:
        return bundled(fed, *cases(size)[0])


def ran(*arguments: str) -> dict[str, float]:
    """Runs a command: its CPU-seconds and peak memory.

    Raises:
        RuntimeError: it failed.
    """
    before, peak = cpu_of_commands(), 0.0
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen([sys.executable, "-m", "fedpareto", *arguments], stdout=output, stderr=output)
        # ru_maxrss would count this process, of which the command is a fork at first.
        while process.poll() is None:
            with suppress(OSError, IndexError):  # it has ended
                peak = max(peak, peak_memory(process.pid))
            time.sleep(0.01)  # the memory of a process can only be read again and again
        if process.returncode not in (0, 3):
            output.seek(0)
            raise RuntimeError(f"{arguments} ended with {process.returncode}: {output.read().decode()[-2000:]}")
    return {"cpu_seconds": cpu_of_commands() - before, "peak_bytes": peak, "code": process.returncode}


def cpu_of_commands() -> float:
    """The CPU-seconds of all that have ended."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def rows_of(path: Path) -> list[RowFile]:
    """The updates of the first round of a bundle."""
    with BundleReader(path) as bundle:
        record = next(bundle.rounds())
        replies = [answer.reply.manifest for exchange in record.phases[0].exchanges for answer in exchange.answers]
        payloads = [ReplyManifest.FromString(reply).payload for reply in replies]
        return [row for payload in payloads for row in bundle.rows(payload).values()]


def bundled(fed: Federation, parameters: int, clients: int, rounds: int) -> Document:
    """Measures the bundle of one run."""
    play(fed, parameters, clients, rounds - 2)  # it plays two rounds more
    fed.stop(*fed.processes)
    (run,) = fed.query("select run_id from runs")
    fed.serve()
    result: Document = {"parameters": parameters, "clients": clients, "rounds": rounds}
    for name, more in (("bare", []), ("payloads", ["--payloads", "--yes"])):
        progress(f"the bundle, {name}")
        path = fed.directory / f"{name}.fedpareto"
        bundle = ran("admin", "--home", str(fed.home / "admin"), "bundle", run[0], "--out", str(path), *more)
        result[name] = {"bytes": path.stat().st_size, "bundle": bundle, "verify": ran("verify", str(path))}
    rows, updates = rows_of(path), 4.0 * parameters * clients
    by_gram = 3 * updates / timed(lambda: [gram(rows) for _ in range(3)], time.process_time)
    verified = updates * rounds / result["payloads"]["verify"]["cpu_seconds"]
    rates = {"gram_bytes_per_cpu_second": by_gram, "verify_bytes_per_cpu_second": verified}
    return result | rates | {"share": verified / by_gram}
