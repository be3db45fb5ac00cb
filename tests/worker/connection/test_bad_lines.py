"""Real workers over lines that break and lines that are long, with TLS and a proxy that delays, limits and cuts."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.settings import SMALLEST_WINDOW
from federation.transport.channels import CHUNK_BYTES
from federation.vectors import Layout, Tensor, to_bytes
from storage.blob_directory import DirectoryStore
from tests.federation.transport.slow_line import SlowLine, slow_line
from tests.harness import Federation, Process, federation
from tests.paths import PROGRAMS

LAYOUT = Layout((Tensor("weight", (600_000,)),))  # 2.4 MB
WORKER = PROGRAMS / "resident_worker.py"  # it does not train
SPEC = """
task = "nothing"
rounds = 1
algorithm.name = "fedavg"
evaluate.every = 0
"""
CONNECTION_BYTES = 40_000  # a handshake, a hello, heartbeats and the envelope of a reply, at most


def work(fed: Federation, home: Path, layout: Layout = LAYOUT) -> Process:
    return fed.spawn(home.name, [str(WORKER), str(home), str(layout.size)])


def begin(fed: Federation, line: SlowLine, home: Path, port: int, layout: Layout = LAYOUT) -> str:
    """Submits a run and starts a worker that reaches the coordinator over the line; returns the run's id."""
    description = (home / "member.toml").read_text()
    (home / "member.toml").write_text(description.replace(f":{port}", f":{line.port}"))
    model = fed.directory / "model.safetensors"
    model.write_bytes(to_bytes(layout, np.ones(layout.size, np.float32)))
    run = fed.submit(home.name, SPEC, "--model", str(model))
    work(fed, home, layout)
    return run


def told(text: str) -> list[dict[str, Any]]:
    """The events in what a worker has written; some of the log may follow on the line of an event."""
    lines = [line for line in text.splitlines() if line.startswith('{"event"')]
    return [json.JSONDecoder().raw_decode(line)[0] for line in lines]


@pytest.mark.full
def test_transfers_go_on_after_each_break_and_after_the_death_of_both_sides(tmp_path: Path) -> None:
    with federation(tmp_path) as fed:
        coordinator = fed.serve()
        port = json.loads((fed.home / "ports.json").read_text())["federation"]
        home = fed.join("far")
        with slow_line(port, rate=2e6, cut_after=700_000) as line:
            run = begin(fed, line, home, port)
            worker = fed.processes[-1]
            assert isinstance(worker, Process)
            worker.wait_for_text('"event": "resuming"')
            coordinator.kill()
            worker.kill()
            before = len(worker.text)
            fed.serve()
            work(fed, home)
            fed.wait_completed(run)
            worker.wait_for_text('"event": "receipt"')
            cuts, up, down = line.cuts, line.up.carried, line.down.carried
        events, names = told(worker.text), [event["event"] for event in told(worker.text[before:])]
        assert names.index("resuming") < names.index("receipt")
        assert [event["event"] for event in events].count("training") == 1
        arrived = [event["arrived_bytes"] for event in events if event["event"] == "resuming"]
        assert arrived == sorted(arrived)
        assert cuts >= 6  # at least three on the way down and three on the way up
        # Down came the model, and the new one for the evaluation. Each break and each death cost at most the chunk
        # that was on its way, the second one of its connection, and another handshake.
        breaks = cuts + 2
        assert up - LAYOUT.file_bytes <= breaks * (2 * CHUNK_BYTES + CONNECTION_BYTES)
        assert down - 2 * LAYOUT.file_bytes <= breaks * (2 * CHUNK_BYTES + CONNECTION_BYTES)
        assert "incident" not in coordinator.text
        assert {event["accepted"] for event in events if event["event"] == "receipt"} == {True}
        assert DirectoryStore(fed.home / "blobs").partial_uploads() == []


LONG = Layout((Tensor("weight", (10_000_000,)),))  # 40 MB
RATE, DELAY = 5e6, 0.5  # as many bytes are on the way as at 200 Mbit/s and a round trip of 200 ms


@pytest.mark.full
@pytest.mark.parametrize("spare", [0, 8], ids=["no spare memory", "8 MiB of spare memory"])
def test_an_upload_fills_80_percent_of_a_long_line_if_its_window_may_grow(tmp_path: Path, spare: int) -> None:
    with federation(tmp_path) as fed:
        settings = fed.home / "coordinator.toml"
        budget = f"transfer_bytes = {(64 + spare) * SMALLEST_WINDOW}"  # for 64 uploads at a time
        settings.write_text(re.sub("transfer_bytes = .*", budget, settings.read_text()))
        fed.serve()
        port = json.loads((fed.home / "ports.json").read_text())["federation"]
        home = fed.join("far")
        with slow_line(port, rate=RATE, delay=DELAY) as line:
            line.down.rate = 1e12
            fed.wait_completed(begin(fed, line, home, port, LONG))
            filled, whole = line.up.filled, RATE * DELAY
        assert line.up.carried > LONG.file_bytes
        if spare:
            assert filled >= 0.8 * whole
        else:
            assert filled < SMALLEST_WINDOW < 0.8 * whole
