"""A federation of five members in which something of every kind is on record and under way."""

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.releases.versions import Process, Version, VersionedFederation

MEMBERS = ("ann", "ben", "cyd", "dan", "eve")
OLDER, NEWER = MEMBERS[:3], MEMBERS[3:]
LEDGERS = ("privacy.db", "private-rounds.db", "memory.db", "runs.db")
POLICY = """\
algorithms = ["afl", "fedavg", "fedavg-n"]
[secure]
disclose = ["accuracy", "evaluation", "loss", "norm"]
sessions_per_model = 1000
sums_per_model = 1000
"""
SETTINGS = """
approval = true
two_officers = ["approve"]
"""
_RUN = """\
name = "{name}"
task = "digits"
rounds = {rounds}
seed = 7
train = {{ steps = 2, batch_size = 10, deadline_seconds = 3600.0 }}
evaluate.splits = ["test"]
"""
EVERYBODY = 'selection = { minimum = 5, pool = "enrolled" }\n'
OPEN = 'algorithm.name = "afl"\n' + EVERYBODY
PRIVATE = 'algorithm.name = "fedavg-n"\nprivacy.secure = "sum"\n' + EVERYBODY
NOISY = 'algorithm.name = "fedavg"\nprivacy.sample_noise = 1.0\nselection.members = ["ann"]\nselection.minimum = 1\n'


class Scene(VersionedFederation):
    """The federation, and its workers."""

    def __init__(self, directory: Path, version: Version, crashing: Path = Path()) -> None:
        super().__init__(directory, version)
        self.crashing = crashing  # tests/programs/crashing.py, as it was in the release
        self.workers: dict[str, Process] = {}
        self.coordinator: Process | None = None

    def found(self) -> None:
        """Makes the federation, with a port that it keeps, and its members, who pin each other's keys."""
        self.init()
        self.begin()
        for name in MEMBERS:
            self.join(name)
        card = ["worker", "roster", "card", "--home"]
        cards = "\n".join(self.fedpareto(*card, str(self.directory / name)) for name in MEMBERS)
        (self.directory / "cards").write_text(cards)
        for name in MEMBERS:
            home = ["--home", str(self.directory / name)]
            self.fedpareto("worker", "roster", "pin", str(self.directory / "cards"), "--yes", *home)
            (self.directory / name / "policy.toml").write_text(POLICY)

    def begin(self) -> Process:
        """Starts the coordinator."""
        process = self.serve()
        assert isinstance(process, Process)
        self.coordinator = process
        return process

    def attend(self, *names: str) -> None:
        """Starts the workers of these members, with their parts of the data, and waits until they attend."""
        for name in names:
            process = self.work(name, *self.part(name))
            assert isinstance(process, Process)
            self.workers[name] = process
        self.wait(lambda: set(names) <= self.attending(), f"{names} to attend", *self.processes, pause=0.2)

    def part(self, name: str) -> list[str]:
        """The options of a member's worker: its task, and its part of the data."""
        return ["--task", "digits", "--set", f"part={MEMBERS.index(name) + 1}/5"]

    def attending(self) -> set[str]:
        """The members that attend."""
        return {one["client_id"] for one in self.admin("clients")["clients"] if one.get("attending")}

    def dies(self, name: str, point: str) -> Process:
        """Starts a worker of the release that kills itself at a point of the program of that release."""
        process = self.work(name, *self.part(name), program=[str(self.crashing), point])
        assert isinstance(process, Process)
        return process

    def send(self, name: str, more: str, *, rounds: int = 2) -> str:
        """Submits a run; returns its id."""
        path = self.directory / f"{name}.toml"
        path.write_text(_RUN.format(name=name, rounds=rounds) + more)
        return str(self.admin("submit", str(path))["run"]["run_id"])

    def run(self, name: str) -> Any:
        """A run, as `admin run` shows it."""
        return self.admin("run", name)["run"]

    def ended(self, run: str) -> Any:
        """Waits until a run is completed; returns it."""

        def over() -> bool:
            return self.state(run) not in ("RUNNING", "PENDING")

        self.wait(over, f"the run {run}", *self.processes, pause=0.2)
        found = self.run(run)
        assert found["state"].endswith("COMPLETED"), found
        return found

    def state(self, run: str) -> str:
        """The state of a run: a word without its prefix."""
        return str(self.run(run)["state"]).removeprefix("RUN_STATE_")

    def bundle(self, run: str) -> Path:
        """The bundle of a run, with payloads."""
        path = self.directory / f"{run}.fedpareto"
        self.admin("bundle", run, "--out", str(path), "--payloads", "--yes", "--force")
        return path

    def end(self, *names: str) -> None:
        """Stops the coordinator and all workers."""
        self.stop(*[process for process in self.processes if not names or process.name in names])

    def play(self) -> None:
        """Runs of each kind, which fill the record and the ledgers."""
        self.attend(*MEMBERS)
        for name, more in {"open": OPEN, "private": PRIVATE, "noisy": NOISY}.items():
            self.ended(self.send(name, more))
        self.fedpareto("worker", "approve", "open", "--home", str(self.directory / "ann"))


class Together(Scene):
    """A federation in which the first three members have the release, and the others a later version."""

    def found_of(self, old: Version, coordinator: Version) -> None:
        """Makes it with 0.1.0, and starts the coordinator of a version."""
        later = self.version
        self.version = old
        self.found()
        self.end()
        self.version = coordinator
        self.versions = dict.fromkeys(OLDER, old) | dict.fromkeys(NEWER, later)
        self.begin()
        self.attend(*MEMBERS)

    def software(self) -> dict[str, str]:
        """The version of each member, as it is on record."""
        return {one["client_id"]: one["software"] for one in self.admin("clients")["clients"]}


def rows(path: Path) -> dict[str, list[Any]]:
    """The rows of all tables of a SQLite file."""
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        named = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name").fetchall()
        return {name: connection.execute(f'SELECT * FROM "{name}"').fetchall() for (name,) in named}


class UnderWay(Scene):
    """A federation that its version has left in the middle of everything.

    A round of a paused run has three replies on record and one in the spool of ben's worker, which was killed, as was
    eve's before it replied. Fay waits for her approval, which one of two officers has requested. Gil has a join string.
    """

    run_id = ""
    gils = ""

    def leave(self) -> None:
        """Plays until there, and stops everything; makes a backup."""
        self.found()
        self.play()
        self.end()
        self.officers()
        self.begin()
        self.fedpareto("worker", "join", *self.at("fay"), standard_input=self.join_string("fay"))
        self.admin("approve", "fay", "--yes")
        self.gils = self.join_string("gil")
        self.attend("ann", "cyd", "dan")
        dying = [self.dies("ben", "spooled"), self.dies("eve", "trained")]
        self.run_id = self.send("paused", OPEN)
        self.wait(lambda: all(one.popen.poll() is not None for one in dying), "two workers to die", pause=0.2)
        self.wait(lambda: self.replied() == 3, "three replies", pause=0.2)
        self.admin("pause", self.run_id)
        self.end()
        self.fedpareto("coordinator", "backup", str(self.directory / "backup"), "--home", str(self.home))

    def officers(self) -> None:
        """Lets members wait for the approval of two officers, and makes the second one."""
        file = self.home / "coordinator.toml"
        file.write_text(SETTINGS + re.sub(r"(?m)^(approval|two_officers) = .*$", "", file.read_text()))
        self.fedpareto(
            *("coordinator", "admin", "bea", "--role", "security-officer"),
            *("--out", str(self.directory / "bea"), "--home", str(self.home)),
        )

    def name_database(self, url: str) -> None:
        """Names a database in the settings."""
        file = self.home / "coordinator.toml"
        file.write_text(re.sub(r"(?m)^database = .*$", lambda _: f'database = "{url}"', file.read_text()))

    def at(self, name: str) -> tuple[str, str]:
        """The option that names the directory of a member."""
        return "--home", str(self.directory / name)

    def replied(self) -> int:
        """The replies on record of the first round of the paused run."""
        found = self.admin("round", self.run_id, "0", code=None) or {"phases": []}  # until the round has begun
        return sum(phase["replied"] for phase in found["phases"])

    def resumed(self) -> str:
        """Resumes the paused run with workers of the present version; the digest of its model."""
        self.attend(*MEMBERS)
        self.admin("resume", self.run_id)
        return str(self.ended(self.run_id)["model"])
