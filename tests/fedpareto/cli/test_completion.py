"""Tab completes in each shell; also runs and members, if the coordinator answers at once. Otherwise it says nothing."""

import os
import pty
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from shutil import copytree

import pytest
from typer.testing import CliRunner

from fedpareto.cli import completion
from fedpareto.cli.main import app
from tests.command_lines import completed
from tests.paths import ROOT
from tests.running import running
from tests.stage import Stage


@pytest.fixture
def home(stage: Stage) -> Path:
    return stage.served.home.admin_dir


@pytest.mark.full
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


@pytest.fixture
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, str]]:
    """A shell that is installed here, and its environment, with the program; its script is in the home."""
    name: str = request.param
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed here")
    program = tmp_path / "fedpareto"
    call = "import sys; sys.argv[0] = 'fedpareto'; from fedpareto.cli.entry import main; main()"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{call}" "$@"\n')
    program.chmod(0o755)
    script = CliRunner().invoke(app, ["completion", name])
    assert script.exit_code == 0, script.output
    (tmp_path / "script").write_text(script.stdout)
    path = f"{tmp_path}:{os.environ['PATH']}"
    return found, {"PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "TERM": "xterm", "COLUMNS": "80"}


def typed(command: list[str], environment: dict[str, str], setup: str, line: str, awaited: str) -> str:
    """What a terminal shows from a line and Tab until the awaited words, or for a minute."""
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        command, stdin=end, stdout=end, stderr=end, env=environment, cwd=environment["HOME"], start_new_session=True
    )
    os.close(end)
    timer = threading.Timer(60, process.kill)
    timer.start()
    shown = ""

    def until(words: str) -> None:
        nonlocal shown
        while words not in shown:
            try:
                shown += re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", os.read(terminal, 1000).decode(errors="replace"))
            except OSError:  # the shell has ended
                return

    os.write(terminal, f"{setup}; echo rea''dy\n".encode())
    until("ready\r\n")
    shown = ""
    os.write(terminal, f"{line}\t".encode())
    until(awaited)
    timer.cancel()
    process.kill()
    process.wait()
    os.close(terminal)
    return shown


@pytest.mark.parametrize("shell", ["bash", "zsh"], indirect=True)
def test_tab_completes_a_word_after_its_equals_sign_at_a_terminal(shell: tuple[str, dict[str, str]]) -> None:
    found, environment = shell
    options, setup = ["--norc", "--noprofile", "-i"], "source ./script"
    if found.endswith("zsh"):
        options, setup = ["-f", "-i"], "autoload -Uz compinit; compinit -u; source ./script"
    line = "fedpareto worker run --set attack=backd"
    assert f"{line}oor" in typed([found, *options], environment, setup, line, f"{line}oor")


@pytest.mark.parametrize("shell", ["fish"], indirect=True)
def test_fish_completes_a_word_after_its_equals_sign(shell: tuple[str, dict[str, str]]) -> None:
    found, environment = shell
    call = "source ./script; complete -C 'fedpareto worker run --set attack=backd'"
    done = subprocess.run(
        [found, "-N", "-c", call], env=environment, cwd=environment["HOME"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["attack=backdoor"]


@pytest.mark.parametrize("shell", ["bash"], indirect=True)
def test_bash_is_offered_a_line_for_each_name_and_none_of_what_it_means(shell: tuple[str, dict[str, str]]) -> None:
    found, environment = shell
    line = "fedpareto worker run --set pa"
    call = f'source ./script; compopt() {{ :; }}; COMP_LINE="{line}" COMP_POINT={len(line)}\n'
    call += '_fedpareto_completion fedpareto; echo "${COMPREPLY[@]}"'
    done = subprocess.run(
        [found, "--norc", "-c", call],
        env=environment,
        cwd=environment["HOME"],
        capture_output=True,
        text=True,
        check=True,
    )
    offers = completion.worker_keys("pa")
    assert max(len(means) for _, means in offers) > int(environment["COLUMNS"]), "one that could be wrapped"
    assert (done.stdout.split(), done.stderr) == ([name for name, _ in offers], "")
