"""A federation on this machine whose members are given by name: each with keys, a certificate and data of its own."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from federation.secure.thresholds import SMALLEST
from federation.trust.member_files import MemberFiles
from federation.v1.admin_pb2 import CreateJoinStringRequest, ListClientsRequest
from federation.v1.admin_pb2_grpc import AdminStub
from fedpareto.admin_messages import whole
from fedpareto.processes.process_federation import Process, ProcessFederation
from worker.home import WorkerHome
from worker.site.roster import Card, Roster

_SECONDS = 180.0  # for anything, on a slow machine


class LocalFederation(ProcessFederation):
    """The coordinator, and a worker for each member.

    Attributes:
        members: the names of the members.
        workers: the workers that run, by member.
    """

    def __init__(self, directory: Path, members: Sequence[str]) -> None:
        super().__init__(directory, seconds=_SECONDS)
        self.members = tuple(members)
        self.workers: dict[str, Process] = {}

    def founding(self, name: str) -> Process:
        """Starts to make a federation of this name; `finish` waits for it."""
        return self.spawn("init", ["-m", "fedpareto", "coordinator", "init", "--home", str(self.home), "--name", name])

    def enroll(self, stub: AdminStub) -> None:
        """Lets each member join with a join string, and get its own keys and certificate."""
        joining, files = [], []
        for name in self.members:
            file = self.directory / f"{name}.join-string"
            file.touch(mode=0o600)
            file.write_text(stub.CreateJoinString(CreateJoinStringRequest(client_id=name)).join_string)
            home = ["--home", str(self.directory / name), "--join-file", str(file)]
            joining.append(self.spawn(name, ["-m", "fedpareto", "worker", "join", *home]))
            files.append(file)
        self.finish(*joining)
        for file in files:
            file.unlink()

    def pin_rosters(self, policy: str = "") -> None:
        """Pins a roster of all members at each of them, as their owners would after they have compared it.

        `policy` is the text of each owner's policy.toml; empty for none. Workers read both when they start. Members
        that are too few for private rounds pin no roster.
        """
        members = {name: MemberFiles.load(self.directory / name) for name in self.members}
        text = "\n".join(Card.of(member).text() for member in members.values())
        for name, member in members.items():
            home = WorkerHome(self.directory / name)
            if len(self.members) >= SMALLEST:
                Roster.parse(text, member).pin(home.roster)
            if policy:
                home.policy.write_text(policy)

    def open_console(self, *runs: str) -> str:
        """Starts the console with the page of some runs, or of the federation; its address, which works once."""
        where = ["--home", str(self.home / "admin"), "--port", "0", "--json"]
        process = self.spawn("console", ["-m", "fedpareto", "console", *runs, *where])
        self.wait(lambda: process.text.rstrip().endswith("}"), "the start of the console", process)
        return str(json.loads(process.text[process.text.index("{") :])["url"])

    def attend(self, stub: AdminStub, options: Mapping[str, Sequence[str]]) -> None:
        """Starts the worker of each member that has none, with its options, and waits until all attend."""
        for name in self.members:
            if name not in self.workers:
                self.workers[name] = self.work(name, *options[name])

        def complete() -> bool:
            clients = whole(stub.ListClients, ListClientsRequest()).clients
            return sum(client.attending for client in clients) == len(self.members)

        self.wait(complete, "the attendance of the members", *self.workers.values(), pause=0.1)

    def submit(self, name: str, specification: str, *options: str) -> str:
        """Submits a run, with further options; returns its id. Its specification stays in the directory."""
        path = self.directory / "specs" / f"{name}.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(specification, encoding="utf-8")
        return str(self.admin("submit", str(path), *options)["run"]["run_id"])
