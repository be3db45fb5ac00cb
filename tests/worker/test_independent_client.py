"""A client that was written from docs/reference/protocol.md and proto/ alone works for a real coordinator."""

import json
import subprocess
import sys
from pathlib import Path

import grpc_tools
import numpy as np
import pytest
from grpc_tools import protoc

from federation.v1.admin_pb2 import CreateJoinStringRequest
from federation.vectors import Layout, Tensor, to_bytes
from storage.states import RunState
from tests.paths import PROGRAMS, ROOT
from tests.stage import Stage
from tests.stage import stage as make_stage
from tests.storage.scene import blob_file

ROUNDS = 4
SPEC = f"""
name = "line-1"
task = "line"
rounds = {ROUNDS}
algorithm.name = "fedavg"
train.steps = 20
train.epochs = 0
train.batch_size = 0
train.learning_rate = 0.1
evaluate.splits = ["train"]
"""
LAYOUT = Layout((Tensor("slopes", (2,)), Tensor("intercept", (1,))))


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stubs made from proto/ by protoc alone, in packages without anything of ours."""
    out = tmp_path_factory.mktemp("stubs")
    include = Path(grpc_tools.__file__).parent / "_proto"
    names = [f"federation/v1/{name}.proto" for name in ("common", "enrollment", "federation")]
    options = [f"-I{ROOT / 'proto'}", f"-I{include}", f"--python_out={out}", f"--grpc_python_out={out}"]
    assert protoc.main(["protoc", *options, *names]) == 0
    for package in ("federation", "federation/v1"):
        (out / package / "__init__.py").touch()
    return out


def _client(stage: Stage, stubs: Path, name: str, seed: int) -> "subprocess.Popen[str]":
    join = stage._admin.CreateJoinString(CreateJoinStringRequest(client_id=name)).join_string
    program = str(PROGRAMS / "independent_client.py")
    client = subprocess.Popen(
        [sys.executable, "-P", program, str(stubs), str(ROUNDS), str(seed)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert client.stdin is not None
    client.stdin.write(join + "\n")
    client.stdin.flush()
    return client


def test_clients_written_from_the_documents_join_attend_train_and_get_receipts(tmp_path: Path, stubs: Path) -> None:
    with make_stage(tmp_path / "coordinator", f"sqlite:///{tmp_path / 'test.db'}") as stage:
        run = stage.submit(SPEC.encode() + b"selection.minimum = 2\n", model=to_bytes(LAYOUT, np.zeros(3, np.float32)))
        clients = [_client(stage, stubs, f"site-{seed}", seed) for seed in (1, 2)]
        told = []
        for client in clients:
            output, errors = client.communicate(timeout=120)
            assert client.returncode == 0, errors
            told.append([json.loads(line) for line in output.splitlines()])
        stage.wait_state(run, RunState.COMPLETED)
        for number, events in enumerate(told, start=1):
            first, last = events[:4], events[-1]
            assert first == [
                {"event": "joined", "client_id": f"site-{number}", "federation_id": "test"},
                {"event": "renewed"},
                {"event": "refused", "status": "PERMISSION_DENIED", "reason": "blob-not-offered"},
                {"event": "attends", "federation_id": "test"},
            ]
            assert last["ours"] == []
            assert all(name.startswith("federation.v1.") for name in last["federation"])
            receipts = [event for event in events if event["event"] == "receipt"]
            assert [(receipt["round"], receipt["kind"], receipt["accepted"]) for receipt in receipts] == [
                (round_, kind, True) for round_ in range(ROUNDS) for kind in ("train", "evaluate")
            ]
            for round_ in range(ROUNDS):
                update = stage.replies(run, round_)[f"site-{number}"]
                assert receipts[2 * round_]["envelope"] == update.envelope_digest
            assert receipts[-1]["loss"] < 1e-3 < receipts[0]["loss"]
        path = blob_file(stage.blobs, stage.run(run).model)
        assert np.allclose(np.frombuffer(path.read_bytes()[-12:], "<f4"), [1.5, -2.0, 0.5], atol=0.05)
