"""`admin follow`: a run of a real coordinator goes to a sink of an installed package, and to TensorBoard."""

import json
import os
from pathlib import Path

import pytest

from federation.v1 import admin_pb2 as admin
from federation.v1.admin_pb2_grpc import AdminStub
from tests.fedpareto.cli import scene
from tests.fedpareto.sinks.test_deliveries import installed, rounds_in
from tests.harness import Federation, Process, wait_for
from tests.paths import ROOT

__all__ = ["installed"]


@pytest.mark.full
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
    assert path.with_suffix(".end").read_text() == "COMPLETED"
    summaries = stub.ListRounds(admin.ListRoundsRequest(run=run_id)).rounds
    for line, summary in zip(path.read_text().splitlines(), summaries, strict=True):
        values = json.loads(line)[1]
        assert values["replies/accepted"] == 3
        assert values["accuracy/mean"] == pytest.approx(summary.metrics["accuracy/mean"])


def test_a_target_that_lacks_something_is_a_failure_and_the_same_command_goes_on(
    centre: Federation, finished: scene.Finished, installed: Path
) -> None:
    away, there = f"own:{installed / 'none' / 'a.jsonl'}", f"own:{installed / 'b.jsonl'}"
    failed = scene.command(centre, "follow", finished[0], "--to", away, "--to", there, code=1)
    assert "1 of 2 targets lack something; the same command goes on where each target is" in failed.stderr
    assert failed.stderr.count("cannot be reached") == 1
    assert f"{there} has 2 rounds of finished" in failed.stdout
    assert rounds_in(installed / "b.jsonl") == [0, 1]
    (installed / "none").mkdir()
    done = scene.command(centre, "follow", finished[0], "--to", away, "--to", there, "--json")
    found = json.loads(done.stdout)
    assert (found["state"], found["targets"]) == (
        "COMPLETED",
        [{"target": target, "rounds": 2, "problem": ""} for target in (away, there)],
    )
    assert rounds_in(installed / "none" / "a.jsonl") == rounds_in(installed / "b.jsonl") == [0, 1]
    assert "name a target" in scene.command(centre, "follow", finished[0], code=2).stderr
    assert "no sink 'x'" in scene.command(centre, "follow", finished[0], "--to", "x:y", code=2).stderr
