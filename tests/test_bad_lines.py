"""Real workers over lines that break and lines that are long, with TLS and a proxy that delays, limits and cuts."""

import json
from pathlib import Path

import numpy as np
from harness import Federation, federation
from slow_line import SlowLine, slow_line

from federation.channels import CHUNK_BYTES
from federation.vectors import Layout, Tensor, to_bytes
from storage.directory import DirectoryStore

LAYOUT = Layout((Tensor("weight", (600_000,)),))  # 2.4 MB
WORKER = Path(__file__).resolve().parent.parent / "benchmarks" / "resident_worker.py"  # it does not train
SPEC = """
task = "nothing"
rounds = 1
algorithm.name = "fedavg"
evaluate.every = 0
"""
CONNECTION_BYTES = 40_000  # a handshake, a hello, heartbeats and the envelope of a reply, at most


def begin(fed: Federation, line: SlowLine, home: Path, port: int) -> str:
    """Submits a run and starts a worker that reaches the coordinator over the line; returns the run's id."""
    description = (home / "member.toml").read_text()
    (home / "member.toml").write_text(description.replace(f":{port}", f":{line.port}"))
    model = fed.directory / "model.safetensors"
    model.write_bytes(to_bytes(LAYOUT, np.ones(LAYOUT.size, np.float32)))
    run = fed.submit(home.name, SPEC, "--model", str(model))
    fed._spawn([str(WORKER), str(home), str(LAYOUT.size)], home.name)
    return run


def test_transfers_go_on_after_each_break_and_after_the_death_of_the_coordinator(tmp_path: Path) -> None:
    with federation(tmp_path) as fed:
        coordinator = fed.serve()
        port = json.loads((fed.home / "ports.json").read_text())["federation"]
        home = fed.join("far")
        with slow_line(port, rate=2e6, cut_after=700_000) as line:
            run = begin(fed, line, home, port)
            worker = fed.processes[-1]
            worker.wait_for_text('"event": "resuming"')
            coordinator.kill()
            fed.serve()
            fed.wait_completed(run)
            worker.wait_for_text('"event": "receipt"')
            cuts, up, down = line.cuts, line.up.carried, line.down.carried
        lines = [text for text in worker.text.splitlines() if text.startswith('{"event"')]
        told = [json.JSONDecoder().raw_decode(text)[0] for text in lines]  # some of the log may follow on the line
        arrived = [event["arrived_bytes"] for event in told if event["event"] == "resuming"]
        assert arrived == sorted(arrived)
        assert cuts >= 6  # at least three on the way down and three on the way up
        # Down came the model, and the new one for the evaluation. Each break, and the death, costs at most the chunk
        # that was on its way, and another handshake.
        breaks = cuts + 1
        assert up - LAYOUT.file_bytes <= breaks * (CHUNK_BYTES + CONNECTION_BYTES)
        assert down - 2 * LAYOUT.file_bytes <= breaks * (CHUNK_BYTES + CONNECTION_BYTES)
        assert "incident" not in coordinator.text
        assert {event["accepted"] for event in told if event["event"] == "receipt"} == {True}
        assert DirectoryStore(fed.home / "blobs").partial_uploads() == []
