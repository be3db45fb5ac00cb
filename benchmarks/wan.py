"""Goodput of a worker's transfers over a long line, beside loopback; and a large update over a line that breaks.

    python benchmarks/wan.py [--quick] [--breaks] [--json]

A coordinator and a worker in processes of their own, with TLS 1.3 and signatures; only the training is left out. The
line is the proxy of `tests/slow_line.py`, which delays and limits the rate: no kernel emulation is needed. Goodput is
the size of the update by the time from its first byte to its receipt, which is signed when the update is stored; that
of the download is the size of the model by the time from the worker's attendance to the begin of its work. With
`--breaks` an update of 758 MB goes over a line that breaks after every 40 MB.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from harness import Federation, federation, wait_for
from slow_line import slow_line

from federation.vectors import Layout, Tensor, to_bytes

SPEC = """
task = "nothing"
rounds = 1
algorithm.name = "fedavg"
evaluate.every = 0
"""
WORKER = Path(__file__).with_name("resident_worker.py")


@dataclass(frozen=True)
class Line:
    """A line: seconds in each direction, bytes per second, bytes after which each connection breaks (0: never)."""

    name: str
    delay: float = 0.0
    rate: float = 1e12
    cut_after: int = 0


MEGABIT = 1e6 / 8
LONGEST_SECONDS = 1200.0
LINES = (
    Line("loopback, through the proxy"),
    Line("20 ms, 200 Mbit/s", 0.010, 200 * MEGABIT),
    Line("200 ms, 200 Mbit/s", 0.100, 200 * MEGABIT),
    Line("200 ms, 20 Mbit/s", 0.100, 20 * MEGABIT),
)


def events(log: Path) -> list[dict[str, Any]]:
    """What a worker has told, each with its time in seconds."""
    found = []
    for text in log.read_text(errors="replace").splitlines():
        if text.startswith('{"event"'):
            record, _ = json.JSONDecoder().raw_decode(text)  # a line of the log may follow on the same line
            found.append({**record, "time": datetime.fromisoformat(record["time"]).timestamp()})
    return found


def measure(fed: Federation, port: int, parameters: int, line: Line, number: int) -> dict[str, Any]:
    """One round of one worker, which is new, over a line to the coordinator's port; `number` is the measurement's."""
    client = f"site-{number}"
    home = fed.join(client)
    description = (home / "member.toml").read_text()
    model = fed.directory / "model.safetensors"
    layout = Layout((Tensor("weight", (parameters,)),))
    model.write_bytes(to_bytes(layout, np.full(parameters, float(number + 1), np.float32)))
    with slow_line(port, delay=line.delay, rate=line.rate, cut_after=line.cut_after) as proxy:
        (home / "member.toml").write_text(description.replace(f":{port}", f":{proxy.port}"))
        run = fed.submit(f"wan-{number}", SPEC, "--model", str(model))
        worker = fed.spawn(client, [str(WORKER), str(home), str(parameters)])
        # In its log, which costs less than looks into the database.
        wait_for(lambda: '"event": "receipt"' in worker.text, f"a receipt: {worker.log}", seconds=LONGEST_SECONDS)
        fed.wait_completed(run)
        worker.kill()
        told = events(worker.log)
        carried_up, carried_down = proxy.up.carried, proxy.down.carried

    def when(name: str) -> float:
        return float(next(event["time"] for event in told if event["event"] == name))

    size = layout.file_bytes
    upload, download = when("receipt") - when("submitting"), when("training") - when("attending")
    return {
        "line": line.name,
        "bytes": size,
        "upload_seconds": upload,
        "upload_mbit": 8 * size / upload / 1e6,
        "download_seconds": download,
        "download_mbit": 8 * size / download / 1e6,
        "rate_mbit": line.rate / MEGABIT if line.rate < 1e12 else None,
        "breaks": proxy.cuts,
        "carried_up": carried_up,
        "carried_down": carried_down,
    }


def show(result: dict[str, Any]) -> None:
    """Prints a measurement as a line of text."""
    share = f" ({100 * result['upload_mbit'] / result['rate_mbit']:.0f} %)" if result["rate_mbit"] else ""
    print(
        f"{result['line']:28} {result['bytes'] / 1e6:7.1f} MB   up {result['upload_seconds']:7.2f} s "
        f"{result['upload_mbit']:7.1f} Mbit/s{share}   down {result['download_seconds']:7.2f} s "
        f"{result['download_mbit']:7.1f} Mbit/s",
        flush=True,
    )
    if result["breaks"]:
        up = (result["carried_up"] - result["bytes"]) / 1e6
        down = (result["carried_down"] - 2 * result["bytes"]) / 1e6  # the model, and the new one for the evaluation
        print(f"  broke {result['breaks']} times; {up:.2f} MB more than needed went up, {down:.2f} MB down", flush=True)


def main() -> None:
    """Measures the lines, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the small update only")
    parser.add_argument("--smallest", action="store_true", help="an update of 400 kB over a short line that breaks")
    parser.add_argument("--breaks", action="store_true", help="758 MB over a line that breaks after every 40 MB")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    cases = [(size, line) for size in (11_200_000, 50_000_000) for line in LINES]
    if arguments.smallest:
        cases = [(100_000, Line("2 ms, breaks", 0.001, cut_after=340_000))]  # more than a chunk
    elif arguments.breaks:
        broken = Line("20 ms, 400 Mbit/s, breaks", 0.010, 400 * MEGABIT, 40_000_000)
        cases = [(189_500_000, broken)]
    elif arguments.quick:
        cases = cases[: len(LINES)]
    results = []
    with tempfile.TemporaryDirectory() as directory, federation(Path(directory)) as fed:
        fed.serve()
        port = int(json.loads((fed.home / "ports.json").read_text())["federation"])
        for number, (parameters, line) in enumerate(cases):
            results.append(measure(fed, port, parameters, line, number))
            if not arguments.json:
                show(results[-1])
    if arguments.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
