"""A reader of a tutorial, who types the commands of a page, in real processes, and compares what they print with it."""

import re
import shlex
import signal
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from fedpareto.processes.forked import completed
from fedpareto.processes.process_federation import Process
from tests.harness import SECONDS, wait_for

BLOCK = re.compile(r"^ *```(?:console|python|toml)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# (\S+\.(?:py|toml))\n")
# Commands that go on, each with the text after which a reader types the next one.
LASTING = {"fedpareto coordinator serve ": "members at", "fedpareto worker run ": "attending federation"}
INSTALLING = ("make ", ". ", "mkdir ", "cd ")  # what is installed and made before
LATER = "fedpareto admin audit"  # an entry is in the log a moment after what it tells of
NOTHING: Mapping[str, str] = MappingProxyType({})
FINGERPRINT = re.compile(r"[0-9a-f]{64}")


def blocks(page: str) -> list[str]:
    """The files and the commands of a page, in their order."""
    return [textwrap.dedent(block) for block in BLOCK.findall(page)]


def commands(block: str) -> Iterator[tuple[str, list[str]]]:
    """The commands of a block, each with the lines of output that the page shows."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, *output = part.splitlines()
        yield command, [line for line in output if line.strip() not in ("", "...")]


def pattern(line: str) -> str:
    """A line without its numbers and digests, and without what the page cuts off."""
    text = re.sub(r"-?\b[0-9a-f]*\d[0-9a-f]*\b", "#", line.removesuffix(" ..."))
    return " ".join(text.split())


def missing(shown: list[str], printed: str) -> list[str]:
    """The lines of a page that a command has not printed."""
    lines = "\n".join(pattern(line) for line in printed.splitlines())
    return [line for line in shown if pattern(line) not in lines]


def python(command: str) -> list[str]:
    """What follows `python` for a command of the page."""
    program, *arguments = shlex.split(command)
    assert program in ("fedpareto", "python"), command
    return ["-m", "fedpareto", *arguments] if program == "fedpareto" else arguments


@dataclass
class Reader:
    """Types what the page shows, every terminal in the same directory.

    `own` are commands that the test runs in another way; at the command `after_ctrl_c`, the terminals are left first.
    """

    directory: Path
    environment: Callable[[str, str], None]
    own: Mapping[str, Callable[[], None]] = field(default_factory=dict)
    after_ctrl_c: str = "fedpareto admin runs"
    skipped: tuple[str, ...] = ()
    terminals: list[Process] = field(default_factory=list)
    fingerprint: str = ""

    def read(self, page: str, replaced: Mapping[str, str] = NOTHING) -> int:
        """Types a page, with other words in place of some of its own; returns how many commands it has entered."""
        entered = 0
        for old, new in replaced.items():
            page = page.replace(old, new)
        for block in blocks(page):
            file_name = FILE_NAME.match(block)
            if file_name:
                (self.directory / file_name[1]).write_text(block)
            for command, shown in commands(block):
                if command.startswith((*INSTALLING, *self.skipped)):
                    continue
                if command in self.own:
                    self.own[command]()
                    continue
                self.compare(command, shown)
                entered += 1
        return entered

    def compare(self, command: str, shown: list[str]) -> None:
        """Enters a command, which prints what the page shows: at once, or a little later if it is of the log."""
        printed = self.enter(command)
        if missing(shown, printed) and command.startswith(LATER):
            wait_for(lambda: not missing(shown, self.enter(command)), f"{shown} of {command}:\n{printed}")
        else:
            assert not missing(shown, printed), f"{command}\n{printed}"

    def enter(self, line: str, text: str = "") -> str:
        """Runs a command line; returns what it printed, a lasting one until the next may follow."""
        if line == self.after_ctrl_c:
            self.leave()
        if line.startswith("export "):
            self.environment(*line.removeprefix("export ").split("="))
            return ""
        lasting = next((told for start, told in LASTING.items() if line.startswith(start)), None)
        if lasting is not None:
            return self.keep(line, lasting)
        output = text
        for command in FINGERPRINT.sub(self.fingerprint, line).split(" | "):
            done = completed(python(command), cwd=self.directory, text=output, timeout=SECONDS)
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
            output = done.stdout
        self.fingerprint = self.fingerprint or next(iter(FINGERPRINT.findall(output)), "")
        return output

    def keep(self, line: str, text: str) -> str:
        name = f"terminal-{len(self.terminals) + 1}"
        terminal = Process(name, python(line), self.directory / f"{name}.log", cwd=self.directory)
        self.terminals.append(terminal)
        wait_for(lambda: text in terminal.text or terminal.popen.poll() is not None, f"{text!r} of {line}")
        assert terminal.popen.poll() is None, terminal.text
        return terminal.text

    def leave(self) -> None:
        """Ctrl-C in each terminal that has not ended, the workers first."""
        for terminal in reversed(self.terminals):
            if terminal.popen.poll() is None:
                terminal.send(signal.SIGINT)
                assert terminal.popen.wait(SECONDS) == 0, terminal.text

    def close(self) -> None:
        for terminal in self.terminals:
            terminal.kill()
