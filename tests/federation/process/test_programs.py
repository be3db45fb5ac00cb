"""A program with a time: what it says, what it leaves behind, and what it cannot do to the process that runs it."""

import os
from pathlib import Path

from federation.process.programs import MAX_SAID, run_program
from tests.harness import wait_for
from tests.process_state import is_running

ENVIRONMENT = {"PATH": os.defpath}


def run(
    script: str, *arguments: str, seconds: float = 100.0, text: bytes = b"", said: list[bytes] | None = None
) -> str:
    command = ["/bin/sh", "-c", script, "sh", *arguments]
    return run_program(
        command, text, environment=ENVIRONMENT, seconds=seconds, said=None if said is None else said.append
    )


def test_a_program_gets_the_text_and_says_how_it_ended(tmp_path: Path) -> None:
    text = b"x" * 1_000_000  # more than a pipe holds
    assert run('cat > "$1"', str(tmp_path / "got"), text=text) == ""
    assert (tmp_path / "got").read_bytes() == text
    assert run("exit 3", text=text) == "ended with exit status 3", "it need not read the text"
    assert run("kill -9 $$") == "ended with signal 9"
    missing = run_program([str(tmp_path / "none")], b"", environment=ENVIRONMENT, seconds=1.0)
    assert missing == "cannot be started (No such file or directory)"


def test_what_a_program_leaves_running_has_the_rest_of_its_time_and_is_ended(tmp_path: Path) -> None:
    quick = '(sleep 0.2; echo done > "$1") > /dev/null 2>&1 & exit 0'
    assert run(quick, str(tmp_path / "mail")) == ""
    assert (tmp_path / "mail").exists(), "it was waited for"
    assert run('sleep 1000 > /dev/null 2>&1 & echo $! > "$1"; exit 0', str(tmp_path / "left"), seconds=0.5) == ""
    left = (tmp_path / "left").read_text().strip()
    wait_for(lambda: not is_running(int(left)), "the end of what it left")


def test_of_a_flood_of_errors_only_the_beginning_is_passed_on() -> None:
    said = list[bytes]()
    assert run("head -c 3000000 /dev/zero >&2; echo last >&2; exit 4", said=said) == "ended with exit status 4"
    assert len(b"".join(said)) == MAX_SAID
    said.clear()
    assert run("yes >&2", seconds=0.3, said=said) == "was ended after 0.3 s"
    assert len(b"".join(said)) == MAX_SAID
    said.clear()
    assert run("echo wrong >&2", said=said) == ""
    assert b"".join(said) == b"wrong\n"
