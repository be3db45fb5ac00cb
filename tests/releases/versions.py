"""Versions of fedpareto side by side: each runs its own packages in processes of its own.

A version is a directory with its packages and its metadata, which is first on the path of its processes: an unpacked
wheel, this tree, or a copy of it. Nothing of another version is imported in them.
"""

import configparser
import json
import os
import signal
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from fedpareto.processes import process_federation as federations
from tests.paths import ROOT

RELEASES = Path(__file__).parent
RELEASE = RELEASES / "0.1.0"  # that tests upgrade from
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("federation", "storage", "coordinator", "worker", "verification", "fedpareto")
# Starts forks of itself, which has imported everything, and answers each line with one.
_LAUNCHER = """
import importlib, json, os, sys
from pathlib import Path

for name in sys.argv[1].split(","):
    place = Path(importlib.import_module(name).__file__)
    assert place.is_relative_to(sys.argv[2]), f"{name} is imported from {place}"

from fedpareto.processes.forked import Forked

processes = {}
for line in sys.stdin:
    asked = json.loads(line)
    if "arguments" in asked:
        files = [None if name is None else Path(name) for name in asked["files"]]
        env = {**os.environ, "COLUMNS": "100", **asked["env"]}
        process = Forked(asked["arguments"], files[1], files[2], text=files[0], cwd=Path(asked["cwd"]), env=env)
        processes[process.pid] = process
        print(process.pid, flush=True)
    else:
        print(json.dumps(processes[asked["poll"]].poll()), flush=True)
"""


class Child:
    """A process of a version. The methods are those of `subprocess.Popen`."""

    def __init__(self, version: "Version", pid: int) -> None:
        self._version, self.pid, self.returncode = version, pid, None

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self.returncode is None:
            self.returncode = self._version.ask(poll=self.pid)
        return self.returncode

    def wait(self, timeout: float = 120.0) -> int:
        """Waits until it ends; returns the exit code."""
        from tests.waiting import wait_for

        wait_for(lambda: self.poll() is not None, f"process {self.pid} to end", seconds=timeout)
        assert self.returncode is not None
        return self.returncode

    def send(self, number: int) -> None:
        """Sends a signal to it and its children, if it still runs."""
        if self.poll() is None:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:  # it has just begun, or has just ended
                with suppress(ProcessLookupError):
                    os.kill(self.pid, number)


class Version:
    """A version of fedpareto. Leaving the context ends all processes of it.

    Attributes:
        name: its version, as its metadata has it.
        path: the directories that its processes import from, before those of the libraries.
    """

    def __init__(self, name: str, *path: Path) -> None:
        self.name, self.path = name, path
        self._launcher: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._launcher is not None:
            self._launcher.kill()
            self._launcher.wait()
            self._launcher = None

    @property
    def env(self) -> dict[str, str]:
        """The environment of its processes."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FEDPARETO"))}
        return {**env, "PYTHONPATH": os.pathsep.join(map(str, self.path)), "GRPC_VERBOSITY": "ERROR"}

    def ask(self, **words: Any) -> Any:
        """Asks the process that starts the others."""
        if self._launcher is None:
            command = [sys.executable, "-P", "-c", _LAUNCHER, ",".join(PACKAGES), str(self.path[-1])]
            pipe = subprocess.PIPE
            self._launcher = subprocess.Popen(command, env=self.env, stdin=pipe, stdout=pipe, text=True, cwd="/")
        assert self._launcher.stdin is not None
        assert self._launcher.stdout is not None
        self._launcher.stdin.write(json.dumps(words) + "\n")
        self._launcher.stdin.flush()
        return json.loads(self._launcher.stdout.readline())

    def start(self, arguments: Sequence[str], output: Path, *, cwd: Path, **more: Any) -> Child:
        """Starts `python ARGUMENTS`; `more` is `text` and `errors`, files, and `env`, what is added to it."""
        files = [more.get("text"), output, more.get("errors")]
        named = [None if file is None else str(file) for file in files]
        return Child(self, self.ask(arguments=[*arguments], files=named, cwd=str(cwd), env=more.get("env", {})))

    def python(self, *arguments: str | Path, cwd: Path, code: int | None = 0, text: str = "") -> str:
        """What `python ARGUMENTS` prints, given `text`; the exit code must be `code`, unless that is None."""
        command = [sys.executable, "-P", *map(str, arguments)]
        done = subprocess.run(command, cwd=cwd, env=self.env, input=text, capture_output=True, text=True, check=False)
        assert code in (None, done.returncode), f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr


def metadata(directory: Path, name: str, **more: dict[str, str]) -> None:
    """Writes the metadata of a version of this tree, as installing it would; `more` is other groups of plug-ins."""
    place = directory / f"fedpareto-{name}.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fedpareto\nVersion: {name}\n")
    points = configparser.ConfigParser(delimiters=("=",))
    points.optionxform = str  # type: ignore[assignment,method-assign] # names keep their capitals
    points.read_dict({"console_scripts": PROJECT["scripts"], **PROJECT["entry-points"], **more})
    with (place / "entry_points.txt").open("w") as file:
        points.write(file)


def of_tree(directory: Path) -> Version:
    """The version of this tree; `directory` gets its metadata."""
    metadata(directory, PROJECT["version"])
    return Version(PROJECT["version"], directory, ROOT)


def of_wheel(wheel: Path, directory: Path) -> Version:
    """The version of a wheel, which is unpacked into `directory`."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    return Version(wheel.name.split("-")[1], directory)


class Process(federations.Process):
    """A process of a version, with a log."""

    def __init__(self, version: Version, arguments: Sequence[str], log: Path) -> None:
        self.name, self.log = log.stem, log
        log.touch()
        self.child = version.start(arguments, log, cwd=log.parent)
        self.popen = self.child  # type: ignore[assignment]

    def send(self, number: int) -> None:
        """Sends a signal to it and its children, if it still runs."""
        self.child.send(number)


class VersionedFederation(federations.ProcessFederation):
    """A federation whose processes are of several versions.

    Attributes:
        version: that of the coordinator, of commands, and of each worker that `versions` does not name.
    """

    def __init__(self, directory: Path, version: Version) -> None:
        super().__init__(directory, seconds=300.0)
        self.version = version
        self.versions: dict[str, Version] = {}

    def process(self, name: str, arguments: Sequence[str]) -> Process:
        """A process of its version."""
        return Process(self.versions.get(name, self.version), arguments, self.directory / f"{name}.log")

    def fedpareto(self, *arguments: str, code: int | None = 0, standard_input: str = "") -> str:
        """Runs `fedpareto ARGUMENTS` of the version to its end; returns its standard output."""
        out, errors, text = (self.directory / f"command.{name}" for name in ("out", "errors", "in"))
        for file in (out, errors):
            file.unlink(missing_ok=True)
        text.write_text(standard_input)
        command = ["-m", "fedpareto", *arguments]
        child = self.version.start(command, out, errors=errors, text=text, cwd=self.directory)
        self.wait(lambda: child.poll() is not None, " ".join(arguments))
        self.errors = errors.read_text()
        if code not in (None, child.returncode):
            raise federations.ProcessError(f"{arguments}: exit code {child.returncode}\n{out.read_text()}{self.errors}")
        return out.read_text()

    def kill(self, process: federations.Process) -> None:
        """Kills a process, and forgets it."""
        process.send(signal.SIGKILL)
        process.popen.wait(60)
        self.processes.remove(process)

    def __exit__(self, *_: object) -> None:
        self.close()
