"""A federation on one machine: real processes and certificates, and each member with its own data."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from federation.member_files import MemberFiles
from federation.v1.admin_pb2 import CreateJoinStringRequest, ListClientsRequest
from federation.v1.admin_pb2_grpc import AdminStub
from fedpareto.cli.failure import USAGE, Failure
from fedpareto.cli.processes import Child, Processes, start_coordinator, wait_for_all, wait_until
from fedpareto.messages import whole
from worker.home import Home
from worker.roster import Card, Roster

MARKER = "demo.json"
_START_SECONDS = 180.0  # of ten workers that import torch on a slow disk


@contextmanager
def fresh_directory(directory: Path) -> Iterator[None]:
    """Makes the demo's directory, in place of one that an earlier demo left; holds it while the block runs.

    Raises:
        Failure: it holds something else, or is in use.
    """
    marker = directory / MARKER
    if directory.exists() and not directory.is_dir():
        raise Failure(f"{directory} is not a directory", code=USAGE)
    if directory.exists() and any(directory.iterdir()) and not marker.is_file():
        raise Failure(
            f"{directory} holds files that are not of a demo; nothing was touched: name another directory with --dir",
            code=USAGE,
        )
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with ExitStack() as stack:
        _hold(stack, marker, f"another demo is running in {directory}: wait for it, or name another one with --dir")
        database_lock = directory / "coordinator" / "coordinator.db.lock"
        if database_lock.exists():
            with ExitStack() as brief:
                _hold(brief, database_lock, f"a coordinator is serving {directory / 'coordinator'}: stop it first")
        for path in directory.iterdir():
            if path.name != MARKER:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        marker.write_text(json.dumps({"made_by": "fedpareto demo"}) + "\n")
        yield


def _hold(stack: ExitStack, path: Path, otherwise: str) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Failure(otherwise) from None


class Rehearsal:
    """A federation of processes on this machine; `seed` is that of the partition of the data."""

    def __init__(self, directory: Path, processes: Processes, *, members: int, seed: int) -> None:
        self.directory = directory
        self.home = directory / "coordinator"
        self.names = tuple(f"member-{number + 1}" for number in range(members))
        self.attacker = self.names[-1]  # may be malicious
        self.left_only = self.names[0]  # has no labels for the right one of two digits
        self._processes = processes
        self._seed = seed
        self._logs = directory / "logs"
        self._workers: dict[str, Child] = {}
        self._attack = ""

    def found(self) -> None:
        """Makes the federation, and each member's part of the digits."""
        self._logs.mkdir()
        options = ["--home", str(self.home), "--name", "demo", "--database", "sqlite:///coordinator.db"]
        init = self._processes.start("coordinator init", ["coordinator", "init", *options], self._logs / "init.log")
        from federation.tasks.digits import write_parts  # while the other process works

        write_parts([self._member(name) / "data" for name in self.names], scheme="shards:2", seed=self._seed)
        wait_for_all([init], _START_SECONDS)
        self._processes.forget(init)

    def serve(self) -> None:
        """Starts the coordinator, and waits until it serves."""
        start_coordinator(self._processes, self.home, self._logs / "coordinator.log")

    def enroll(self, stub: AdminStub) -> None:
        """Lets each member join with a join string and get its own keys and certificate."""
        joining = []
        for name in self.names:
            join = stub.CreateJoinString(CreateJoinStringRequest(client_id=name)).join_string
            arguments = ["worker", "join", "--home", str(self._member(name) / "home")]
            log = self._logs / f"{name}.log"
            joining.append(self._processes.start(f"{name} (joining)", arguments, log, standard_input=join.encode()))
        wait_for_all(joining, _START_SECONDS)
        self._processes.forget(*joining)

    def pin_rosters(self) -> None:
        """Pins a roster of all members at each of them, as their owners would after they have compared it."""
        files = {name: MemberFiles.load(self._member(name) / "home") for name in self.names}
        cards = tuple(Card.of(member) for member in files.values())
        text = "\n".join(card.text() for card in cards)
        for name, member in files.items():
            Roster.parse(text, member).pin(Home(self._member(name) / "home").roster)

    def data(self, name: str) -> Path:
        """The directory of a member's data."""
        return self._member(name) / "data"

    def cast(self, attack: str) -> None:
        """Starts each worker that does not run yet, and restarts the attacker's if its attack changes.

        An empty `attack` makes the attacker honest.
        """
        if self.attacker in self._workers and attack != self._attack:
            self._processes.stop(self._workers.pop(self.attacker))
        self._attack = attack
        for name in self.names:
            if name not in self._workers:
                self._work(name, attack if name == self.attacker else "")

    def _work(self, name: str, attack: str) -> None:
        member = self._member(name)
        arguments = ["worker", "run", "--home", str(member / "home"), "--data", str(member / "data")]
        arguments += ["--task", "digits", "--task", "two-digits", "--device", "cpu", "--threads", "1"]
        if name == self.left_only:
            arguments += ["--objectives", "two-digits=left"]
        if attack:
            arguments += ["--attack", attack]
        self._workers[name] = self._processes.start(f"the worker of {name}", arguments, self._logs / f"{name}.log")

    def assemble(self, stub: AdminStub) -> None:
        """Waits until every member attends."""

        def complete() -> bool:
            clients = whole(stub.ListClients, ListClientsRequest()).clients
            return sum(client.attending for client in clients) == len(self.names)

        wait_until(complete, "the members' attendance", _START_SECONDS, self._workers.values(), pause=0.2)

    def keep_spec(self, name: str, text: str) -> Path:
        """Writes the specification of a run into the demo's directory; returns its path."""
        path = self.directory / "specs" / f"{name}.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    def _member(self, name: str) -> Path:
        return self.directory / "members" / name
