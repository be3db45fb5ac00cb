"""The federation of the demo: ten hospitals as processes on this machine, each with its own keys and data."""

from collections.abc import Sequence
from pathlib import Path

from federation.tasks import digits, scanners
from federation.trust.member_files import MemberFiles
from federation.v1.admin_pb2 import CreateJoinStringRequest, ListClientsRequest
from federation.v1.admin_pb2_grpc import AdminStub
from fedpareto.admin_messages import whole
from fedpareto.processes.process_federation import Process, ProcessFederation
from worker.home import WorkerHome
from worker.site.roster import Card, Roster

HOSPITALS = tuple(f"hospital-{number + 1}" for number in range(scanners.HOSPITALS))
TWO = tuple(HOSPITALS[index] for index in scanners.TURNED)  # have another scanner
EIGHT = tuple(name for name in HOSPITALS if name not in TWO)
ATTACKER = HOSPITALS[0]
_SECONDS = 180.0  # for anything, on a slow machine


class Hospitals(ProcessFederation):
    """The hospitals; `seed` is that of the deal of the images, `tasks` are those that their workers offer."""

    def __init__(self, directory: Path, *, seed: int, tasks: Sequence[str]) -> None:
        super().__init__(directory, seconds=_SECONDS)
        self._seed, self._tasks = seed, tasks
        self._workers: dict[str, Process] = {}
        self._attack = ""

    def found(self) -> None:
        """Makes the federation, and each hospital's part of the images."""
        making = self.spawn(
            "init", ["-m", "fedpareto", "coordinator", "init", "--home", str(self.home), "--name", "demo"]
        )
        parts = [self.data(name) for name in HOSPITALS]  # written while the other process works
        if "scanners" in self._tasks:
            scanners.write_parts(parts, seed=self._seed)
        if any(task != "scanners" for task in self._tasks):
            digits.write_parts(parts, scheme="iid", seed=self._seed)
        self.finish(making)

    def enroll(self, stub: AdminStub) -> None:
        """Lets each hospital join with a join string, and get its own keys and certificate."""
        joining, files = [], []
        for name in HOSPITALS:
            file = self.data(name) / "join-string"
            file.touch(mode=0o600)
            file.write_text(stub.CreateJoinString(CreateJoinStringRequest(client_id=name)).join_string)
            home = ["--home", str(self.directory / name), "--join-file", str(file)]
            joining.append(self.spawn(name, ["-m", "fedpareto", "worker", "join", *home]))
            files.append(file)
        self.finish(*joining)
        for file in files:
            file.unlink()

    def pin_rosters(self) -> None:
        """Pins a roster of all members at each of them, as their owners would after they have compared it.

        The owners also allow a second sum from one model: the private rounds have a cheater, who spoils the first one.
        """
        members = {name: MemberFiles.load(self.directory / name) for name in HOSPITALS}
        text = "\n".join(Card.of(member).text() for member in members.values())
        for name, member in members.items():
            home = WorkerHome(self.directory / name)
            Roster.parse(text, member).pin(home.roster)
            home.policy.write_text("[secure]\nsums_per_model = 2\n")

    def data(self, name: str) -> Path:
        """The directory of a hospital's images."""
        return self.directory / "data" / name

    def cast(self, stub: AdminStub, attack: str) -> None:
        """Starts the workers, or the attacker's again if its attack changes; waits until all attend.

        An empty `attack` makes the attacker honest.
        """
        if ATTACKER in self._workers and attack != self._attack:
            self.stop(self._workers.pop(ATTACKER))
        self._attack = attack
        options = [option for task in self._tasks for option in ("--task", task)]
        for name in HOSPITALS:
            if name not in self._workers:
                own = ["--data", str(self.data(name)), "--device", "cpu", *options]
                if attack and name == ATTACKER:
                    own += ["--attack", attack]
                self._workers[name] = self.work(name, *own)

        def complete() -> bool:
            clients = whole(stub.ListClients, ListClientsRequest()).clients
            return sum(client.attending for client in clients) == len(HOSPITALS)

        self.wait(complete, "the attendance of the hospitals", *self._workers.values(), pause=0.1)

    def submit(self, name: str, specification: str) -> str:
        """Submits a run; returns its id. Its specification stays in the directory."""
        path = self.directory / "specs" / f"{name}.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(specification)
        return str(self.admin("submit", str(path))["run"]["run_id"])
