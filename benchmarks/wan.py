"""Goodput of a worker's transfers over a long line, beside loopback; and a large update over a line that breaks.

A coordinator and a worker in processes of their own, with TLS 1.3 and signatures; only the training is left out. The
line is the proxy of `tests/federation/transport/slow_line.py`, which delays and limits the rate: no kernel emulation is
needed. Goodput is the size of the update by the time from its first byte to its receipt, which is signed when the
update is stored; that of the download is the size of the model by the time from the worker's attendance to the begin of
its work.

`--lines` is "long", "breaks" (breaks after every 40 MB; use --parameters 189500000) or "short" (breaks, too).
`--parameters` are the sizes of updates, one or more.
"""

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from measuring import Document, cases, idle_worker, progress, submitted, temporary_federation

from tests.federation.transport.slow_line import slow_line
from tests.harness import Federation, wait_for

FORMS = {
    "full": {"lines": "long", "parameters": "11200000 50000000"},
    "quick": {"parameters": "11200000"},
    "smallest": {"lines": "short", "parameters": "100000"},
}


@dataclass(frozen=True)
class Line:
    """A line: seconds in each direction, bytes per second, bytes after which each connection breaks (0: never)."""

    name: str
    delay: float = 0.0
    rate: float = 1e12
    cut_after: int = 0


MEGABIT = 1e6 / 8
LONGEST_SECONDS = 1200.0
LINES = {
    "long": [
        Line("loopback, through the proxy"),
        Line("20 ms, 200 Mbit/s", 0.010, 200 * MEGABIT),
        Line("200 ms, 200 Mbit/s", 0.100, 200 * MEGABIT),
        Line("200 ms, 20 Mbit/s", 0.100, 20 * MEGABIT),
    ],
    "breaks": [Line("20 ms, 400 Mbit/s, breaks", 0.010, 400 * MEGABIT, 40_000_000)],
    "short": [Line("2 ms, breaks", 0.001, cut_after=340_000)],  # more than a chunk
}


def measure(lines: str, parameters: str) -> Document:
    results: list[Document] = []
    with temporary_federation() as fed:
        fed.serve()
        port = int(json.loads((fed.home / "ports.json").read_text())["federation"])
        for (size,) in cases(parameters):
            for line in LINES[lines]:
                progress(f"{size:,} parameters: {line.name}")
                results.append(one_round(fed, port, size, line, len(results)))
    return {"lines": results}


def moments(log: Path) -> dict[str, float]:
    """When a worker told each kind of event first, in seconds."""
    lines = [text for text in log.read_text(errors="replace").splitlines() if text.startswith('{"event"')]
    told = [json.JSONDecoder().raw_decode(text)[0] for text in lines]  # a line of the log may follow on the same line
    return {event["event"]: datetime.fromisoformat(event["time"]).timestamp() for event in reversed(told)}


def one_round(fed: Federation, port: int, parameters: int, line: Line, number: int) -> Document:
    """One round of one worker, which is new, over a line to the coordinator's port; `number` is the measurement's."""
    client = f"site-{number}"
    home = fed.join(client)
    description = (home / "member.toml").read_text()
    with slow_line(port, delay=line.delay, rate=line.rate, cut_after=line.cut_after) as proxy:
        (home / "member.toml").write_text(description.replace(f":{port}", f":{proxy.port}"))
        run, size = submitted(fed, f"wan-{number}", parameters)
        worker = idle_worker(fed, home, parameters)
        # In its log, which costs less than looks into the database.
        wait_for(lambda: '"event": "receipt"' in worker.text, f"a receipt: {worker.log}", seconds=LONGEST_SECONDS)
        fed.wait_completed(run)
        worker.kill()
        told = moments(worker.log)
        carried = proxy.up.carried

    upload, download = told["receipt"] - told["submitting"], told["training"] - told["attending"]
    return {
        "line": line.name,
        "bytes": size,
        "upload_seconds": upload,
        "upload_mbit": 8 * size / upload / 1e6,
        "download_mbit": 8 * size / download / 1e6,
        "upload_of_rate": size / upload / line.rate if line.rate < 1e12 else None,
        "breaks": proxy.cuts,
        "bytes_up_beyond": carried - size,
    }
