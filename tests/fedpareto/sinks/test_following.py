"""`admin follow`: a run of a real coordinator goes to a sink of an installed package, and to TensorBoard."""

import json
import os
from pathlib import Path

import pytest

from federation.v1 import admin_pb2 as admin
from federation.v1.admin_pb2_grpc import AdminStub
from tests.fedpareto.cli import scene
from tests.fedpareto.cli.scene import centre, stub
from tests.fedpareto.sinks.scene import installed, rounds_in
from tests.harness import Federation, Process, wait_for
from tests.paths import ROOT

__all__ = ["centre", "installed", "stub"]
pytestmark = pytest.mark.full


def test_each_round_goes_to_each_target_once_while_the_run_goes_on_and_after_a_kill(
    centre: Federation, stub: AdminStub, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{installed / 'packages'}")
    path, log = installed / "a.jsonl", installed / "follow.log"
    arguments = ["-m", "fedpareto", "admin", "--home", str(centre.home / "admin"), "follow", "followed"]
    with scene.attending(centre, stub, "followed-a", "followed-b", "followed-c") as streams:
        run_id = scene.submit(centre, "followed")
        following = Process([*arguments, "--to", f"own:{path}"], log, forks=False)
        following.wait_for_text(f"goes to own:{path}")
        scene.play(streams, 2)
        wait_for(lambda: path.exists() and rounds_in(path) == [0], "the first round at the target")
        following.kill()
        scene.play(streams, 2)
        centre.wait_completed(run_id)
    done = scene.command(centre, "follow", run_id, "--to", f"own:{path}", "--json")
    found = json.loads(done.stdout)
    assert (found["state"], found["targets"]) == (
        "COMPLETED",
        [{"target": f"own:{path}", "rounds": 2, "problem": ""}],
    )
    assert rounds_in(path) == [0, 1]
    assert path.with_suffix(".end").read_text() == "COMPLETED model.safetensors card.md report.html"
    summaries = stub.ListRounds(admin.ListRoundsRequest(run=run_id)).rounds
    for line, summary in zip(path.read_text().splitlines(), summaries, strict=True):
        values = json.loads(line)[1]
        assert values["replies/accepted"] == 3
        assert values["accuracy/mean"] == pytest.approx(summary.metrics["accuracy/mean"])
