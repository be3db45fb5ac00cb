"""Coordinators of one federation on one PostgreSQL, with their members' workers: real processes, TLS and files."""

import json
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from sqlalchemy import make_url, text
from sqlalchemy.exc import OperationalError

from coordinator.home import read_settings
from coordinator.settings import SETTINGS_FILE
from federation.secure.thresholds import SMALLEST
from federation.transport.channels import server_verified_channel
from federation.trust.admin_files import AdminFiles
from federation.trust.join_string import JoinStringFields
from federation.trust.member_files import MemberFiles, note_addresses
from federation.vectors import Layout, Tensor, to_bytes
from fedpareto.processes.process_federation import COMMAND, serving
from storage.database import Database
from tests.coordinator.scene import front_of
from tests.harness import SECONDS, Federation, Process, wait_for
from tests.paths import PROGRAMS
from tests.soak.line import Line
from tests.worker.work.scene import pin_each_other
from worker.connection.enroll import enroll
from worker.home import WorkerHome

PARAMETERS = 500  # of the model
NAMES = ("one", "two", "three")  # of the coordinators
CLIENTS = tuple(f"clinic-{letter}" for letter in "abcdefgh")
OPEN = """
task = "nothing"
rounds = {rounds}
seed = 3
[algorithm]
name = "fedmgda+"
epsilon = 0.5
[server]
optimizer = "adam"
learning_rate = 0.1
[train]
deadline_seconds = 3600
[selection]
minimum = {members}
pool = "enrolled"
quorum = 1.0
grace_seconds = 3600
[evaluate]
deadline_seconds = 3600
"""
PRIVATE = (
    OPEN.replace('"fedmgda+"\nepsilon = 0.5', '"fedavg-n"').partition("[evaluate]")[0]
    + '[evaluate]\nevery = 0\n[privacy]\nsecure = "sum"\nblur = 0.0\n'
)


# All private runs begin from one model, and no update is blurred, so that their results can be compared.
POLICY = "secure = { blur = 0.0, sessions = 1000000, sessions_per_model = 1000000, sums_per_model = 1000000 }\n"
ENDED = ("COMPLETED", "FAILED", "STOPPED", "PAUSED")


class Coordinator(Federation):
    """One coordinator: its directory, its line to PostgreSQL, and the process that serves now."""

    def __init__(self, directory: Path, line: Line, database_url: str) -> None:
        super().__init__(directory, seconds=SECONDS)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.line = line
        self.database_url = database_url

    @property
    def name(self) -> str:
        """Its name, which is that of its directory."""
        return self.directory.name

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self.serving.popen.pid

    @property
    def alive(self) -> bool:
        """True if its process runs, or is frozen."""
        return self.coordinator is not None and self.coordinator.popen.poll() is None

    @property
    def address(self) -> str:
        """Its address for members."""
        return f"localhost:{json.loads((self.home / 'kept-ports.json').read_text())['federation']}"

    def freeze(self) -> None:
        """Stops its process (SIGSTOP), as a machine that is suspended; the front listener goes on for a while."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Lets it go on (SIGCONT)."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def begin(self) -> None:
        """Starts its process, and does not wait until it serves."""
        (self.home / "ports.json").unlink(missing_ok=True)
        arguments = [*COMMAND, "coordinator", "serve", "--home", str(self.home)]
        self.coordinator = self.spawn("coordinator", arguments)

    @property
    def has_served(self) -> bool:
        """True if its newest process serves, or served until it ended."""
        return serving(self.home) == self.pid

    @property
    def serves(self) -> bool:
        """True if its process runs, and has begun to serve."""
        return self.alive and self.has_served

    def die(self) -> None:
        """Kills its process with SIGKILL; its front listener ends by itself."""
        os.kill(self.pid, signal.SIGKILL)
        self.serving.wait_killed()

    @property
    def healthy(self) -> bool:
        """True if it serves, and its health service says so."""
        if not self.serves:
            return False
        ports = json.loads((self.home / "ports.json").read_text())
        ca = (self.home / "ca.pem").read_bytes()
        with suppress(grpc.RpcError), server_verified_channel(f"localhost:{ports['enrollment']}", ca) as channel:
            answer = HealthStub(channel).Check(HealthCheckRequest(), timeout=5)
            return bool(answer.status == HealthCheckResponse.SERVING)
        return False

    def front(self) -> int:
        """The process id of its front listener; 0 if none runs."""
        return front_of(self.serving)


class Cluster:
    """Coordinators that serve one federation, and workers of its members.

    Args:
        directory: holds everything.
        url: of an empty database on a server that listens on a Unix socket. Each coordinator has a line to it.
        names: of the coordinators.
        settings: of the federation, by key.
    """

    def __init__(self, directory: Path, url: str, names: Sequence[str], **settings: Any) -> None:
        self.directory = directory
        self.coordinators: dict[str, Coordinator] = {}
        self.workers: dict[str, Process] = {}
        self._settings = {"blobs": str(directory / "blobs"), **settings}
        self._database = Database.open(url)
        self._model = directory / "model.safetensors"
        self._runs = 0
        server = make_url(url)
        for name in names:
            line = Line(Path(str(server.query["host"])) / ".s.PGSQL.5432")
            through = f"postgresql://postgres@127.0.0.1:{line.port}/{server.database}"
            self.coordinators[name] = Coordinator(directory / name, line, through)

    @property
    def first(self) -> Coordinator:
        """The coordinator that made the federation."""
        return next(iter(self.coordinators.values()))

    @property
    def processes(self) -> list[Process]:
        """The processes that serve now, and the workers."""
        return [coordinator.serving for coordinator in self.coordinators.values()] + [*self.workers.values()]

    def start(self, clients: Sequence[str], *, forks: bool = True) -> None:
        """Makes the federation, starts the coordinators, enrolls the members, and starts their workers.

        With `forks` False, the first coordinator is an interpreter of its own, whose memory holds only its own imports.
        """
        first, *further = self.coordinators.values()
        first.forks = forks
        first.init("--database", first.database_url)
        self._set(first, **self._settings)
        first.serve()
        first.forks = True  # the workers
        for coordinator in further:
            self._copy_keys(coordinator)
            coordinator.serve()
            self._copy_administrator(coordinator)
        layout = Layout((Tensor("weight", (PARAMETERS,)),))
        self._model.write_bytes(to_bytes(layout, np.zeros(PARAMETERS, np.float32)))
        for client in clients:
            enroll(WorkerHome(self.directory / client), JoinStringFields.decode(first.join_string(client)))
        if len(clients) >= SMALLEST:
            pin_each_other([WorkerHome(self.directory / client) for client in clients], POLICY)
        self._spread(clients)
        for client in clients:
            self.work(client)
        self.attending(*clients)

    def close(self) -> None:
        """Kills every process."""
        for coordinator in self.coordinators.values():
            coordinator.line.close()
            coordinator.close()
        self._database.close()

    def work(self, client: str) -> Process:
        """Starts a member's worker."""
        self.workers[client] = self.start_worker(self.directory / client)
        return self.workers[client]

    def start_worker(self, home: Path) -> Process:
        """Starts a worker in a home."""
        program = str(PROGRAMS / "resident_worker.py")
        return self.first.spawn(home.name, [program, str(home), str(PARAMETERS), "repeatable"])

    def move(self, client: str, coordinator: Coordinator) -> None:
        """Starts a member's worker again, with this coordinator as the first one that it tries."""
        self.workers[client].kill()
        home = self.directory / client
        others = [one for one in MemberFiles.load(home).addresses if one != coordinator.address]
        note_addresses(home, MemberFiles.name_key, addresses=(coordinator.address, *others))
        self.work(client)

    def attending(self, *clients: str) -> None:
        """Waits until these members attend, by any coordinator."""
        self.first.attending(*clients)

    def wait_serving(self) -> None:
        """Waits until every coordinator answers, its health is good, and every member attends."""
        for coordinator in self.coordinators.values():
            wait_for(lambda: coordinator.healthy, f"coordinator {coordinator.name} to serve")  # noqa: B023
        wait_for(self._all_attend, "the members to attend")

    def _all_attend(self) -> bool:
        rows = self.query(
            "select client_id from attendances a join coordinators c using (coordinator) "
            "where a.left is null and c.last_seen > clock_timestamp() - make_interval(secs => 2)"
        )
        return {row[0] for row in rows} >= {*self.workers}

    def submit(self, coordinator: Coordinator, spec: str, *, rounds: int = 2, crash: bool = False) -> str:
        """Submits a run to a coordinator; returns its id. `crash`: the coordinator may die before it has answered."""
        self._runs += 1
        name = f"run-{self._runs}"
        path = self.directory / f"{name}.toml"
        path.write_text(f'name = "{name}"\n' + spec.format(rounds=rounds, members=len(self.workers)))
        coordinator.admin("submit", str(path), "--model", str(self._model), code=None if crash else 0)
        return str(self.query("select run_id from runs where name = :name", name=name)[0][0])

    def state(self, run: str) -> tuple[str, str]:
        """The state of a run, and the reason."""
        return tuple(self.query("select state, reason from runs where run_id = :run", run=run)[0])

    def wait_ended(self, run: str, seconds: float = SECONDS) -> None:
        """Waits until a run has ended, or is paused."""
        wait_for(lambda: self.state(run)[0] in ENDED, f"run {run} to end", seconds)

    def wait_completed(self, run: str) -> str:
        """Waits until a run is completed, and returns the digest of its model."""
        self.wait_ended(run)
        assert self.state(run)[0] == "COMPLETED", self.state(run)
        return str(self.query("select model from runs where run_id = :run", run=run)[0][0])

    def conducts(self, run: str) -> Coordinator | None:
        """The coordinator that has, or had, the lease of a run; None if its process has been replaced."""
        found = self.query(
            "select c.address from runs r join coordinators c on c.coordinator = r.conductor where r.run_id = :run",
            run=run,
        )
        port = found[0][0].rpartition(":")[2] if found else ""
        every = self.coordinators.values()
        return next((one for one in every if one.address.rpartition(":")[2] == port), None)

    def query(self, sql: str, **parameters: object) -> list[Any]:
        """Looks into the database, without a line; waits while PostgreSQL is away."""
        found: list[list[Any]] = []

        def read() -> bool:
            rows = self.glance(sql, **parameters)
            found.extend([] if rows is None else [rows])
            return bool(found)

        wait_for(read, "PostgreSQL to answer")
        return found[0]

    def glance(self, sql: str, **parameters: object) -> list[Any] | None:
        """Looks into the database; None if PostgreSQL is away."""
        with suppress(OperationalError), self._database.read() as session:
            return list(session.execute(text(sql), parameters).all())
        return None

    def _set(self, coordinator: Coordinator, **values: Any) -> None:
        """Changes settings in a coordinator's directory."""
        changed = read_settings(coordinator.home).model_copy(update=values)
        (coordinator.home / SETTINGS_FILE).write_text(changed.render())

    def _copy_keys(self, coordinator: Coordinator) -> None:
        """Makes the directory of a further coordinator."""
        given = ("--home", str(coordinator.home), "--port", "0", "--enrollment-port", "0")
        url = coordinator.database_url
        coordinator.fedpareto("coordinator", "copy-keys", str(self.first.home), *given, "--database", url)

    def _copy_administrator(self, coordinator: Coordinator) -> None:
        """Gives the administrator a directory with the address of this coordinator."""
        directory = coordinator.home / "admin"
        shutil.copytree(self.first.home / "admin", directory)
        ports = json.loads((coordinator.home / "ports.json").read_text())
        note_addresses(
            directory,
            AdminFiles.name_key,
            addresses=(f"localhost:{ports['federation']}",),
            enrollment_addresses=(f"localhost:{ports['enrollment']}",),
        )

    def _spread(self, clients: Sequence[str]) -> None:
        """Lets each coordinator be the first one of some members. By their own orders one could have none of so few."""
        for number, client in enumerate(clients):
            home = self.directory / client
            addresses = MemberFiles.load(home).addresses
            first = number % len(addresses)
            note_addresses(home, MemberFiles.name_key, addresses=(*addresses[first:], *addresses[:first]))


@contextmanager
def cluster(
    directory: Path, url: str, names: Sequence[str] = NAMES, clients: Sequence[str] = CLIENTS, **settings: Any
) -> Iterator[Cluster]:
    """Coordinators and workers that attend; every process is killed at the end."""
    made = Cluster(directory, url, names, **settings)
    try:
        made.start(clients)
        yield made
    finally:
        made.close()
