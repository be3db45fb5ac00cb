"""Tab completes the runs and members of a federation, if its coordinator answers at once; otherwise it says nothing."""

import re
import socket
from pathlib import Path
from shutil import copytree

import pytest

from tests.command_lines import completed
from tests.running import running
from tests.stage import Stage


@pytest.fixture
def home(stage: Stage) -> Path:
    return stage.served.home.admin_dir


def test_a_run_is_offered_by_name_and_one_of_two_equal_names_by_id(stage: Stage, home: Path) -> None:
    run, (ann,) = stage.begin("ann", name="twice")
    stage.play(run, ann)
    second, _ = stage.begin("ann", name="twice")
    third, _ = stage.begin("ann", name="two")
    assert sorted(completed(home, "admin run tw")) == ["two"]
    assert sorted(completed(home, "admin run ")) == sorted([run, second, "two"])
    assert completed(home, f"admin rounds {third[:5]}") == [third]
    assert sorted(completed(home, "admin stop ")) == sorted([second, "two"])
    assert completed(home, "admin compare two tw") == []
    assert completed(home, "console tw") == ["two"]
    stage.stop_run(second)
    stage.stop_run(third)


def test_members_are_offered_where_a_command_takes_one(stage: Stage, home: Path) -> None:
    for name in ("hospital-a", "hospital-b", "clinic"):
        stage.player(name)
    assert completed(home, "admin client hosp") == ["hospital-a", "hospital-b"]
    assert completed(home, "admin alerts --client cli") == ["clinic"]
    assert completed(Path("nowhere"), f"admin --home {home} revoke cli") == ["clinic"]
    assert completed(Path("nowhere"), f"admin tag --home {home} cli") == ["clinic"]


def test_without_an_answer_or_a_login_nothing_is_offered_and_nothing_said(
    stage: Stage, home: Path, tmp_path: Path
) -> None:
    silent = tmp_path / "silent"
    copytree(home, silent)
    with socket.create_server(("127.0.0.1", 0)) as listening:  # takes connections, and never says a word
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        member = silent / "member.toml"
        member.write_text(re.sub(r'"localhost:\d+"', f'"{address}"', member.read_text()))
        assert completed(silent, "admin client ", wait=0.1) == []
    (silent / "login.pem").unlink()
    for place in (silent, tmp_path / "nowhere"):
        assert completed(place, "admin run ") == []


def test_of_a_stopped_coordinator_nothing_is_offered_and_status_says_what_the_record_says(tmp_path: Path) -> None:
    with running(tmp_path / "home") as served:
        served.enroll("ann")
    assert completed(served.home.admin_dir, "admin client ") == []
    status = served.document("status")
    assert (status["live"], status["sentence"]) == (False, "All well.")
    assert [item["client_id"] for item in status["members"]] == ["ann"]
    assert "No coordinator serves" in served.command("status")
