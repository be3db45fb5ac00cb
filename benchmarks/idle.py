"""The coordinator's CPU and memory for 100 idle workers that attend and send heartbeats.

    python benchmarks/idle.py [--workers 100] [--seconds 30] [--quick] [--json]

The streams use TLS 1.3 and one certificate each. This process holds the workers' side of all of them, so that only the
coordinator is measured.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from harness import Attending, federation

from federation.v1.federation_pb2 import AttendRequest, AttendResponse, Heartbeat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--quick", action="store_true", help="20 workers for 10 seconds")
    parser.add_argument("--smallest", action="store_true", help="1 worker, one heartbeat")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.workers, arguments.seconds = 20, 10.0
    if arguments.smallest:
        arguments.workers, arguments.seconds = 1, 0.01
    with tempfile.TemporaryDirectory() as directory, federation(Path(directory)) as fed:
        fed.forks = False  # the memory of a coordinator that has imported nothing else
        coordinator = psutil.Process(fed.serve().popen.pid)
        alone = coordinator.memory_info().rss
        streams: list[Attending] = []
        interval = 5.0
        for i in range(arguments.workers):
            streams.append(fed.enroll(f"worker-{i:03}").attend(digits=100))
            welcome = streams[-1].next()
            assert isinstance(welcome, AttendResponse)
            interval = welcome.welcome.heartbeat_seconds
        before, began = coordinator.cpu_times(), time.monotonic()
        beats = 0
        while (elapsed := time.monotonic() - began) < arguments.seconds:
            for stream in streams:
                stream.say(AttendRequest(heartbeat=Heartbeat()))
            beats += 1
            rest = min(beats * interval, arguments.seconds)
            time.sleep(max(0.0, began + rest - time.monotonic()))  # until the next heartbeat: idling is measured
        after = coordinator.cpu_times()
        cpu = (after.user + after.system - before.user - before.system) / elapsed
        memory = (coordinator.memory_info().rss - alone) / arguments.workers
        for stream in streams:
            stream.close()
    result = {"workers": arguments.workers, "heartbeat_seconds": interval, "cpu_share": cpu, "bytes_per_worker": memory}
    if arguments.json:
        print(json.dumps(result))
    else:
        print(f"{arguments.workers} idle workers, a heartbeat every {interval:g} s")
        print(f"  {100 * cpu:.2f} % of one core, {memory / 1e3:.0f} kB of memory for each worker")


if __name__ == "__main__":
    main()
