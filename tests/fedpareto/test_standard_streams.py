"""Standard output of commands: full disks, readers that end, terminals without UTF-8, and prints of owners' code."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedpareto.processes.forked import Forked, completed
from fedpareto.standard_streams import READER_GONE, print_document
from tests.few import few
from tests.harness import federation
from tests.paths import OWNERS_CODE

# Text of Click, lines, tables and documents are written in four ways.
COMMANDS = (["--help"], ["worker", "attacks"], ["aggregate", "--list"], ["aggregate", "--list", "--json"])
commands = pytest.mark.parametrize("arguments", COMMANDS, ids=[" ".join(words) for words in COMMANDS])
START = "from fedpareto.cli.main import main; import os, sys; sys.argv[0] = 'fedpareto'; "
CLOSED_PIPE = START + "reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1); main()"
ENCODED = START + "sys.stdout = open(1, 'w', encoding=sys.argv.pop(1), closefd=False); main()"
TALKATIVE = "talkative_task:Talkative"
CODE = ["--code", str(OWNERS_CODE)]


@few("aggregate --list", "aggregate --list --json")
@commands
def test_a_full_disk_behind_standard_output_is_an_error_in_words(arguments: list[str], tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    command = ["-m", "fedpareto", *arguments]
    process = Forked(command, Path("/dev/full"), errors, cwd=tmp_path, env=os.environ)
    assert process.wait(60) == 1
    assert errors.read_text() == "fedpareto: standard output cannot be written: No space left on device\n"


@few("worker attacks", "aggregate --list --json")
@commands
def test_a_reader_that_has_ended_ends_the_command_without_a_word(arguments: list[str]) -> None:
    done = completed(["-c", CLOSED_PIPE, *arguments])
    assert (done.returncode, done.stderr) == (READER_GONE, "")


def encoded(encoding: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return completed(["-c", ENCODED, encoding, *arguments])


def test_letters_that_a_terminal_cannot_show_are_replaced() -> None:
    table = encoded("ascii", "aggregate", "--list")
    assert (table.returncode, table.stderr) == (0, "")
    assert table.stdout.isascii()
    assert "server.learning_rate is ?_w/?_l" in " ".join(table.stdout.split())
    assert encoded("ascii", "admin", "submit", "--explain").stdout.isascii()


@pytest.mark.parametrize("encoding", ["ascii", "iso8859-1", "utf-8"])
def test_a_document_is_valid_json_in_every_encoding(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"Ängström": "γ ≥ 1 \N{ZOMBIE}"}
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding))
    print_document(json.dumps(value, ensure_ascii=False))
    assert json.loads(written.getvalue().decode(encoding)) == value


SPEC = f"name = 'talkative'\ntask = '{TALKATIVE}'\nrounds = 1\nsimulation.clients = 2\n"


@few("data")
@pytest.mark.parametrize(
    "command",
    [
        ["data", "show", TALKATIVE],
        ["worker", "run", "--rehearse", "--task", TALKATIVE, "--set", "part=1/8"],
        ["simulate", "talkative.toml", "--home", "home"],
        ["worker", "doctor", "--task", TALKATIVE],
    ],
    ids=["data", "rehearse", "simulate", "doctor"],
)
def test_with_json_each_line_of_standard_output_is_json_whatever_own_code_prints(
    command: list[str], tmp_path: Path
) -> None:
    (tmp_path / "talkative.toml").write_text(SPEC)
    done = completed(["-m", "fedpareto", *command, *CODE, "--json"], cwd=tmp_path)
    assert [json.loads(line) for line in done.stdout.splitlines()], done.stderr
    assert {"talkative: import", "talkative: losses", "talkative: losses, from C"} <= set(done.stderr.splitlines())


@pytest.mark.full
def test_a_worker_whose_task_prints_has_events_alone_on_standard_output(tmp_path: Path) -> None:
    with federation(tmp_path) as fed:
        fed.serve()
        fed.join("ann")
        arguments = ["worker", "run", "--home", str(tmp_path / "ann"), "--task", TALKATIVE, *CODE, "--json"]
        output, log = tmp_path / "output", tmp_path / "log"
        worker = Forked(["-m", "fedpareto", *arguments], output, log, cwd=tmp_path, env=os.environ)
        try:
            fed.attending("ann")
            fed.completed("talkative", f"task = '{TALKATIVE}'\nrounds = 1\n", *CODE)
        finally:
            worker.send(signal.SIGTERM)
            worker.wait(60)
    assert "training" in [json.loads(line)["event"] for line in output.read_text().splitlines()]
    assert "talkative: losses, from C" in log.read_text()
