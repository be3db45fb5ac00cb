"""Lets several coordinators run while processes die, freeze and lose their lines: python -m tests.soak --minutes 60."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from random import Random

from federation.transport.tls import require_tls13
from fedpareto.processes.forked import start_server
from tests.postgresql import postgresql

HEADING = "## The record"
LEASE_SECONDS = 2.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program. Returns 1 if something was wrong, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    os.nice(options.nice)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # which a shell ignores in what it starts in the background
    require_tls13()
    start_server()
    # After the settings of gRPC.
    from tests.soak.cluster import CLIENTS, NAMES, Cluster
    from tests.soak.faults import Inflictor, Kind, drawn, small_disk
    from tests.soak.figures import growths
    from tests.soak.record import record
    from tests.soak.soak import Soak, Stuck

    memory = Path("/dev/shm")
    with ExitStack() as stack:
        parent = memory if os.access(memory, os.W_OK) else None
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=parent, ignore_cleanup_errors=True)))
        disks = [
            stack.enter_context(small_disk(directory / name, size))
            for name, size in (*((name, "64m") for name in NAMES), ("blobs", "512m"))
        ]
        kinds = [kind for kind in Kind if all(disks) or kind not in (Kind.DIRECTORY, Kind.BLOBS)]
        server = stack.enter_context(postgresql())
        url = server.create("soak")
        cluster = Cluster(directory, url, NAMES, lease_seconds=LEASE_SECONDS, heartbeat_seconds=1.0)
        stack.callback(cluster.close)
        soak, ended = None, "complete"
        code = 0
        random, pause = Random(options.seed), options.pause
        try:
            _show("three coordinators and eight workers start")
            cluster.start(CLIENTS, forks=False)
            faults = drawn(random, cluster, kinds, pause=pause, lease=LEASE_SECONDS)
            soak = Soak(cluster, Inflictor(cluster, server, url), faults, lease=LEASE_SECONDS, show=_show)
            soak.prepare()
            _show("the calm runs have ended; faults begin")
            soak.play(60 * options.minutes)
        except KeyboardInterrupt:
            ended, code = f"interrupted, of {options.minutes:g}", 130
        except Stuck as error:
            ended, code = f"given up, of {options.minutes:g}", 1
            _show(str(error))
            if soak is not None:
                soak.findings.problems.append(str(error))
        except BaseException:
            _keep_logs(directory, options.logs)
            raise
        _keep_logs(directory, options.logs)
        if soak is None:
            return code
        found = soak.findings
        (options.logs / "samples.jsonl").write_text("".join(json.dumps(asdict(one)) + "\n" for one in found.samples))
        facts = {"command": f"make soak MINUTES={options.minutes:g}", "commit": _commit(), "seed": options.seed}
        facts["command"] += f' ARGS="--pause {pause:g}"' if pause != _parser().get_default("pause") else ""
        left_out = [kind for kind in Kind if kind not in kinds]
        text = record(found, **facts, lease=LEASE_SECONDS, lasting=NAMES[0], ended=ended, left_out=left_out)
        print(text)
        if options.record is not None:
            page = options.record.read_text() if options.record.exists() else "# Soak\n\n"
            options.record.write_text(page.partition(HEADING)[0] + f"{HEADING}\n\n{text}")
            _show(f"the record is in {options.record}")
        grown = [one for one in growths(found.samples, NAMES[0], found.seconds) if one.grows]
        return code or (1 if found.problems or grown else 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long; the runs before the faults come on top")
    parser.add_argument("--seed", type=int, default=1, help="of the faults")
    parser.add_argument("--pause", type=float, default=3.0, help="the mean of the seconds between two faults of a run")
    parser.add_argument("--record", type=Path, help=f"writes the summary to this page, below {HEADING!r}")
    parser.add_argument("--logs", type=Path, default=Path("build/soak"), help="where the logs of the processes go")
    parser.add_argument("--nice", type=int, default=0, help="lowers the priority of the processes")
    return parser


def _show(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def _keep_logs(directory: Path, logs: Path) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    for path in directory.glob("*/*.log"):
        (logs / f"{path.parent.name}-{path.name}").write_bytes(path.read_bytes())


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
