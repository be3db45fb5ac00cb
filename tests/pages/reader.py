"""A reader of a page, who types its commands, in real processes, and compares what they print with it."""

import os
import re
import shlex
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from fedpareto.processes.forked import completed
from fedpareto.processes.process_federation import Process
from tests.harness import SECONDS, wait_for

BLOCK = re.compile(r"^(<!-- generated [^\n]*\n\n)? *```(console|python|toml)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# (\S+\.(?:py|toml))\n")
SCRIPT = re.compile(r"(import|from) ")  # other Python is a part of something
# Commands that go on, each with the text after which a reader types the next one.
LASTING = {
    re.compile("fedpareto coordinator serve "): "members at",
    re.compile("fedpareto worker run (?!.*--rehearse)"): "attending federation",
    re.compile("fedpareto (worker )?console "): "/enter?key=",
    re.compile("fedpareto admin .*notify $"): "are delivered to",
    re.compile("fedpareto admin audit --follow "): "hospital-a",
}
# Commands that ask at a terminal, which these processes do not have.
ASKING = re.compile(r"fedpareto (worker roster pin|admin .*(approve|bundle|consent|forget|revoke|revoke-admin|stop)) ")
INSTALLING = ("make ", ". ", "mkdir ", "cd ", "chmod ")  # what is installed and made before
LATER = "fedpareto admin audit"  # an entry is in the log a moment after what it tells of
NOTHING: Mapping[str, str] = MappingProxyType({})
FINGERPRINT = re.compile(r"[0-9a-f]{64}")
QUESTION = "[y/N]"
JOIN_STRING = re.compile(r"fpjoin1_\S+")


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """The files, programs and commands of a page, in their order, each after its kind; not the files of examples."""
    for generated, kind, text in BLOCK.findall(page):
        if not generated:
            yield kind, textwrap.dedent(text)


def commands(block: str) -> Iterator[tuple[str, list[str]]]:
    """The commands of a block, each with the lines of output that the page shows."""
    for part in re.split(r"^\$ ", re.sub(r" \\\n\s*", " ", block), flags=re.MULTILINE)[1:]:
        command, *output = part.splitlines()
        yield command, [line for line in output if line.strip() not in ("", "...") and QUESTION not in line]


def pattern(line: str) -> str:
    """A line without its numbers and digests, and without what the page cuts off."""
    text = re.sub(r"-?\b[0-9a-f]*\d[0-9a-f]*\b", "#", line.removesuffix(" ..."))
    return " ".join(text.split())


def missing(shown: list[str], printed: str) -> list[str]:
    """The lines of a page that a command has not printed."""
    lines = "\n".join(pattern(line) for line in printed.splitlines())
    return [line for line in shown if not re.search(re.escape(pattern(line)).replace(r"\.\.\.", ".*"), lines)]


def python(command: str) -> list[str]:
    """What follows `python` for a command of the page."""
    program, *arguments = shlex.split(command)
    assert program in ("fedpareto", "python"), command
    return ["-m", "fedpareto", *arguments] if program == "fedpareto" else arguments


def home(command: str) -> str:
    """The command's program, and the directory that it has for itself."""
    words = shlex.split(command)
    return " ".join(words[1:3] + ([words[words.index("--home") + 1]] if "--home" in words else []))


@dataclass
class Reader:
    """Types what the page shows, every terminal in the same directory.

    `own` are commands that the test runs in another way, `before` what is done before a command is typed.
    A command that asks gets `--yes`, and `worker join` the oldest join string that was made and not used.
    """

    directory: Path
    environment: Callable[[str, str], None]
    own: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    before: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    terminals: list[tuple[str, Process]] = field(default_factory=list)
    fingerprint: str = ""
    join_strings: list[str] = field(default_factory=list)

    def begin(self, *members: str, name: str = "clinic", home: str = "coordinator") -> None:
        """What a page takes for granted: a federation that is served, whose members have joined, each in its home."""
        self.enter(f"fedpareto coordinator init --home {home} --name {name}")
        self.enter(f"fedpareto coordinator serve --home {home}")
        self.enter(f"export FEDPARETO_ADMIN={home}/admin")
        for member in members:
            self.admit(member, member)

    def admit(self, member: str, directory: str) -> None:
        """A member joins."""
        self.enter(f"fedpareto admin join-string {member}")
        self.enter(f"fedpareto worker join --home {directory}")

    def work(self, *directories: str) -> None:
        """Starts workers, each with a part of the digits."""
        for number, name in enumerate(directories, 1):
            self.enter(f"fedpareto worker run --home {name} --task digits --set part={number}/{len(directories)}")

    def run(self, name: str, more: str = "") -> None:
        """Has a run of the digits done; its specification stays in run.toml."""
        (self.directory / "run.toml").write_text(f'name = "{name}"\ntask = "digits"\nrounds = 2\n{more}')
        self.enter("fedpareto admin submit run.toml --watch")

    def read(self, page: str, replaced: Mapping[str, str] = NOTHING) -> int:
        """Types a page, with other words in place of some of its own; returns how many commands it has entered."""
        entered = 0
        for old, new in replaced.items():
            page = page.replace(old, new)
        for kind, block in blocks(page):
            file_name = FILE_NAME.match(block)
            if file_name:
                (self.directory / file_name[1]).write_text(block)
            elif kind == "python" and SCRIPT.match(block):
                self.finish(["-c", block], block)
                entered += 1
            for command, shown in commands(block):
                if command.startswith((*INSTALLING, *self.skipped)):
                    continue
                if command in self.own:
                    self.own[command]()
                    continue
                if command in self.before:
                    self.before[command]()
                self.compare(command, shown)
                entered += 1
        return entered

    def compare(self, command: str, shown: list[str]) -> None:
        """Enters a command, which prints what the page shows: at once, or a little later if it is of the log."""
        printed = self.enter(command)
        if missing(shown, printed) and command.startswith(LATER):
            wait_for(lambda: not missing(shown, self.enter(command)), f"{shown} of {command}:\n{printed}")
        else:
            assert not missing(shown, printed), f"{missing(shown, printed)}\n{command}\n{printed}"

    def enter(self, line: str) -> str:
        """Runs a command line; returns what it printed, a lasting one until the next may follow."""
        if line.startswith("export "):
            self.environment(*line.removeprefix("export ").split("="))
            return ""
        lasting = next((told for command, told in LASTING.items() if command.match(f"{line} ")), None)
        if lasting is not None:
            return self.keep(line, lasting)
        line, _, file = line.partition(" > ")
        joins = line.startswith("fedpareto worker join ") and "--join-file" not in line
        output = self.join_strings.pop(0) if joins else ""
        if ASKING.match(f"{line} ") and "--yes" not in line:
            line += " --yes"
        for command in FINGERPRINT.sub(self.fingerprint, line).split(" | "):
            output = self.finish(python(command), command, output)
        self.fingerprint = self.fingerprint or next(iter(FINGERPRINT.findall(output)), "")
        if " | " not in line and "join-string" in line:
            self.join_strings += JOIN_STRING.findall(output)
        if file:
            (self.directory / file).write_text(output)
        return output

    def finish(self, arguments: list[str], named: str, text: str = "") -> str:
        """Runs Python with these arguments to its end; returns what it printed."""
        done = completed(arguments, cwd=self.directory, text=text, timeout=SECONDS)
        assert done.returncode == 0, f"{named}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def keep(self, line: str, text: str) -> str:
        """Starts a process that goes on, after Ctrl-C in the terminal whose process has the same directory."""
        self.leave(home(line))
        name = f"terminal-{len(self.terminals) + 1}"
        terminal = Process(name, python(line), self.directory / f"{name}.log", cwd=self.directory)
        self.terminals.append((home(line), terminal))
        wait_for(lambda: text in terminal.text or terminal.popen.poll() is not None, f"{text!r} of {line}")
        assert terminal.popen.poll() is None, f"{line}\n{terminal.text}"
        return terminal.text

    def leave(self, directory: str = "") -> None:
        """Ctrl-C in each terminal that has not ended, or in that of one directory; the workers first."""
        for used, terminal in reversed(self.terminals):
            if terminal.popen.poll() is None and directory in ("", used):
                terminal.send(signal.SIGINT)
                assert terminal.popen.wait(SECONDS) == 0, terminal.text

    def close(self) -> None:
        for _, terminal in self.terminals:
            terminal.kill()


def programs() -> str:
    """The path on which external programs find `python` and `fedpareto`, as in an environment that is activated."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
