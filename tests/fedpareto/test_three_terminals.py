"""The first tutorial, docs/start/three-terminals.md: its commands, run from its text by real processes."""

import re
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from federation.tasks.digits import bundled
from fedpareto.processes.forked import completed
from fedpareto.processes.process_federation import Process
from tests.harness import SECONDS, wait_for
from tests.paths import DOCS

PAGE = (DOCS / "start/three-terminals.md").read_text()
BLOCK = re.compile(r"^```(?:console|python|toml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# (\S+\.(?:py|toml))\n")
# What is installed and made before; tests/fedpareto/test_demo.py plays the demo.
SKIPPED = ("make ", ". ", "mkdir ", "cd ", "fedpareto demo ")
# Commands that go on, each with the text after which a reader types the next one.
LASTING = {"fedpareto coordinator serve ": "members at", "fedpareto worker run ": "attending federation"}
AFTER_CTRL_C = "fedpareto admin runs"
FINGERPRINT = re.compile(r"[0-9a-f]{64}")


def commands(block: str) -> Iterator[tuple[str, list[str]]]:
    """The commands of a block, each with the lines of output that the page shows."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, *output = part.splitlines()
        yield command, [line for line in output if line.strip() not in ("", "...")]


def pattern(line: str) -> str:
    """A line without its numbers and digests, and without what the page cuts off."""
    text = re.sub(r"-?\b[0-9a-f]*\d[0-9a-f]*\b", "#", line.removesuffix(" ..."))
    return " ".join(text.split())


class Reader:
    """Types what the page shows, every terminal in the same directory."""

    def __init__(self, directory: Path, environment: Callable[[str, str], None]) -> None:
        self.directory, self.environment = directory, environment
        self.terminals: list[Process] = []
        self.fingerprint = ""

    def enter(self, line: str) -> str:
        """Runs a command line; returns what it printed, a lasting one until the next may follow."""
        if line == AFTER_CTRL_C:
            self.leave()
        if line.startswith("export "):
            self.environment(*line.removeprefix("export ").split("="))
            return ""
        lasting = next((text for start, text in LASTING.items() if line.startswith(start)), None)
        if lasting is not None:
            return self.keep(line, lasting)
        output = ""
        for command in FINGERPRINT.sub(self.fingerprint, line).split(" | "):
            done = completed(python(command), cwd=self.directory, text=output, timeout=SECONDS)
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
            output = done.stdout
        return output

    def keep(self, line: str, text: str) -> str:
        name = f"terminal-{len(self.terminals) + 1}"
        terminal = Process(name, python(line), self.directory / f"{name}.log", cwd=self.directory)
        self.terminals.append(terminal)
        wait_for(lambda: text in terminal.text or terminal.popen.poll() is not None, f"{text!r} of {line}")
        assert terminal.popen.poll() is None, terminal.text
        return terminal.text

    def leave(self) -> None:
        """Ctrl-C in each terminal, the workers first."""
        for terminal in reversed(self.terminals):
            terminal.send(signal.SIGINT)
            assert terminal.popen.wait(SECONDS) == 0, terminal.text


def deal(directory: Path) -> None:
    """Writes what data.py writes, without importing scikit-learn, which takes 4 CPU seconds."""
    x, y = bundled()
    for name, digits in (("hospital-a", y < 5), ("hospital-b", y >= 5)):
        (directory / "data" / name).mkdir(parents=True)
        np.savez(directory / "data" / name / "digits.npz", x=x[digits], y=y[digits])


def python(command: str) -> list[str]:
    """What follows `python` for a command of the page."""
    program, *arguments = shlex.split(command)
    assert program in ("fedpareto", "python"), command
    return ["-m", "fedpareto", *arguments] if program == "fedpareto" else arguments


@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.full)])
def test_a_reader_of_the_first_tutorial_sees_what_the_page_shows(
    rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    reader = Reader(tmp_path, monkeypatch.setenv)
    entered = 0
    try:
        for block in BLOCK.findall(PAGE):
            file_name = FILE_NAME.match(block)
            if file_name:
                (tmp_path / file_name[1]).write_text(block.replace("rounds = 20", f"rounds = {rounds}"))
            for command, shown in commands(block):
                if command.startswith(SKIPPED):
                    continue
                if command == "python data.py" and rounds < 20:
                    deal(tmp_path)
                    continue
                printed = reader.enter(command)
                reader.fingerprint = reader.fingerprint or FINGERPRINT.findall(printed)[0]
                lines = "\n".join(pattern(line) for line in printed.splitlines())
                assert not [line for line in shown if pattern(line) not in lines], f"{command}\n{printed}"
                entered += 1
    finally:
        for terminal in reader.terminals:
            terminal.kill()
    assert entered > 10
