"""The demo as a user starts it: real processes, shortened."""

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from harness import wait_for

from fedpareto.processes.forked import completed

SECONDS = 240.0


def start(directory: Path, *options: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "fedpareto", "demo", "--dir", str(directory), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def processes_of(directory: Path) -> list[int]:
    """Every process that was told of this directory, as root of its own tree or not."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if "fedpareto.cli.child" in words and any(str(directory) in word for word in words):
            found.append(process.pid)
    return found


def fedpareto(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return completed(["-m", "fedpareto", *arguments])


def test_the_demo_learns_beside_an_attacker_and_leaves_its_record(tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    demo = start(directory, "--rounds", "3", "--workers", "3", "--json")
    out, progress = demo.communicate(timeout=SECONDS)
    assert demo.returncode == 0, progress
    document = json.loads(out)
    assert document == json.loads((directory / "results.json").read_text())
    assert document["attacker"] == "member-3"
    runs = {(run["algorithm"], run["attacked"]): run for run in document["runs"]}
    assert set(runs) == {("fedmgda+", True), ("fedavg", True), ("fedmgda+", False), ("fedavg", False)}
    for run in document["runs"]:
        assert (run["state"], run["rounds_done"]) == ("COMPLETED", 3), progress
        assert 0 <= run["accuracy"]["worst5"] <= run["accuracy"]["mean"] <= run["accuracy"]["best5"] <= 1
        assert 0 <= run["improved"] <= 1
        assert run["seconds"] > 0
    # What the two rules are about: FedMGDA+ is blind to the scale of an update, FedAvg follows the largest.
    bounded = runs["fedmgda+", True]
    assert bounded["weight"] == pytest.approx(runs["fedmgda+", False]["weight"], abs=0.02)
    assert bounded["pull"] <= 1 / 3 + 0.1 + 1e-9
    assert runs["fedavg", True]["pull"] > 0.8
    assert runs["fedavg", False]["pull"] < 0.5

    assert document["private"] == []  # it needs more members

    served = {run["algorithm"]: run for run in document["objectives"]}
    assert document["left_only"] == "member-1"
    assert all(run["state"] == "COMPLETED" for run in served.values()), progress
    assert served["fsmgda"]["bytes_up"] > 1.6 * served["scalarised"]["bytes_up"]
    assert served["fedcmoo"]["bytes_up"] < 1.2 * served["scalarised"]["bytes_up"]

    assert processes_of(directory) == []
    shown = fedpareto("admin", "--home", document["admin_home"], "rounds", "fedmgda-attacked", "--json")
    assert shown.returncode == 0, shown.stderr
    assert len(json.loads(shown.stdout)["rounds"]) == 3
    last = fedpareto("admin", "--home", document["admin_home"], "round", "fedavg-attacked", "-1", "--json")
    parts = {part["client_id"]: part for part in json.loads(last.stdout)["participations"]}
    assert parts["member-3"]["loss_before"] > 1000
    whole = fedpareto("admin", "--home", document["admin_home"], "run", "fedcmoo-objectives", "--json")
    serving = {row["client_id"]: row["objectives"] for row in json.loads(whole.stdout)["run"]["serving"]}
    assert serving == {"member-1": ["left"], **{f"member-{n}": ["left", "right"] for n in (2, 3)}}
    assert processes_of(directory) == []
    assert (directory / "logs" / "coordinator.log").stat().st_size > 0
    assert (directory / "members" / "member-1" / "data" / "digits.npz").is_file()


@pytest.mark.parametrize("stage", ["joining", pytest.param("training", marks=pytest.mark.full)])
def test_ctrl_c_leaves_no_process_behind(tmp_path: Path, stage: str) -> None:
    directory = tmp_path / "demo"
    demo = start(directory, "--rounds", "1000", "--workers", "2")
    sign = {
        "joining": directory / "members" / "member-1" / "home" / "tls.key",
        "training": directory / "members" / "member-1" / "home" / "receipts.jsonl",
    }[stage]
    wait_for(lambda: sign.exists() or demo.poll() is not None, f"the demo to come to {stage}", SECONDS)
    running = processes_of(directory)
    os.kill(demo.pid, signal.SIGINT)
    out, errors = demo.communicate(timeout=SECONDS)
    assert demo.returncode == 130, out + errors
    assert "Traceback" not in out + errors
    assert running
    assert processes_of(directory) == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's help")
def test_even_a_killed_demo_leaves_no_process_behind(tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    demo = start(directory, "--rounds", "1000", "--workers", "2")
    wait_for(
        lambda: len(processes_of(directory)) >= 2 or demo.poll() is not None, "the start of its processes", SECONDS
    )
    demo.kill()
    demo.communicate(timeout=SECONDS)
    wait_for(lambda: not processes_of(directory), "the kernel to end them", SECONDS)


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("four years")
    done = fedpareto("demo", "--dir", str(tmp_path))
    assert done.returncode == 2
    assert "not of a demo" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_private_rounds_need_ten_members(tmp_path: Path) -> None:
    done = fedpareto("demo", "--dir", str(tmp_path / "demo"), "--private", "--workers", "9")
    assert done.returncode == 2
    assert "--private needs at least 10 members: --workers 10" in done.stderr
    assert not (tmp_path / "demo").exists()


def test_an_earlier_demo_gives_way_unless_it_is_still_running(tmp_path: Path) -> None:
    from fedpareto.cli.failure import Failure
    from fedpareto.cli.rehearsal import fresh_directory

    with fresh_directory(tmp_path):
        (tmp_path / "coordinator").mkdir()
        (tmp_path / "results.json").write_text("{}")
        with pytest.raises(Failure, match="another demo is running"), fresh_directory(tmp_path):
            pass
    with fresh_directory(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == ["demo.json"]


def test_the_table_of_the_private_act_has_what_the_sum_tells_and_chance() -> None:
    from rich.console import Console

    from fedpareto.cli.private_act import Private, table

    one = Private(
        run_id="r", name="n", algorithm="fedmgda+", model="", private=False, state="COMPLETED", reason="",
        rounds_done=1, accuracy=0.5, guessed=10, guessed_from_sum=1, members=10, named={},
    )  # fmt: skip
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table([one, replace(one, private=True, guessed=0, members=9)], "member-10"))
    lines = [" ".join(line.replace("│", " ").split()) for line in console.export_text().splitlines()]
    assert "digits told by a member's stored vector of 10 of 10 of 0 of 9" in lines
    assert "digits told by the round's sum of 1 of 10 of 1 of 9" in lines
    assert "by chance of 0.2 of 10 of 0.2 of 9" in lines


@pytest.mark.full
def test_the_private_act_names_the_attacker_and_leaves_nothing_to_guess(tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    demo = start(directory, "--private", "--rounds", "12", "--json")
    out, progress = demo.communicate(timeout=SECONDS)
    assert demo.returncode == 0, progress
    opened, private = json.loads(out)["private"]
    assert (opened["guessed"], opened["members"]) == (10, 10)
    assert private["guessed"] <= 2  # by chance one of 45 pairs
    assert private["guessed_from_sum"] <= 2
    assert private["members"] == 9
    assert private["named"] == {"member-10": "share-norm"}
    assert opened["named"] == {}
    assert 0 < private["accuracy"] <= 1
