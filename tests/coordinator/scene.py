"""Real processes of a federation, which tests kill, cut off, and take directories from."""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from federation.tasks import initial_model, task
from federation.transport.channels import refusal_from_rpc_error
from federation.v1.common_pb2 import AssignmentManifest
from federation.vectors import write_vectors
from tests.harness import Federation, Process, federation, wait_for
from tests.stage import Player, Stage

NOT_SERVING, SERVING = HealthCheckResponse.NOT_SERVING, HealthCheckResponse.SERVING
CLIENTS = ("clinic-a", "clinic-b", "clinic-c")
SPEC = """
task = "digits"
rounds = 2
seed = 11
algorithm = { name = "fedmgda+", epsilon = 0.2 }
train = { epochs = 2, batch_size = 20, deadline_seconds = 300 }
selection = { minimum = 3, pool = "{pool}", quorum = 1.0 }
evaluate.deadline_seconds = 300
"""


class Scene:
    """A coordinator and workers that attend."""

    def __init__(self, fed: Federation) -> None:
        self.fed = fed
        self.count = 0
        # Made once: making it costs the import of torch.
        self.model = fed.directory / "initial.safetensors"
        layout, vector = initial_model(task("digits"), seed=11)
        write_vectors(self.model, layout, vector)

    def restart(self, *, crash: str = "") -> Process:
        """Kills the coordinator and starts it again."""
        self.fed.serving.kill()
        return self.fed.serve(crash=crash)

    def survives(self, point: str, **options: Any) -> str:
        """Submits a run whose coordinator is killed at a point, and starts it again; returns the run's id."""
        crashing = self.restart(crash=point)
        run = self.submit(crash=True, **options)
        crashing.wait_killed()
        self.fed.serve()
        return run

    def completes(self, run: str, final: object) -> None:
        """The run completes with this model, and each update counted once."""
        assert self.fed.wait_completed(run) == final
        self.check_counted_once(run)

    def work(self, client: str, *, crash: str = "") -> Process:
        part = CLIENTS.index(client)
        options = ("--set", f"part={part + 1}/3", "--set", "partition=shards:2", "--set", "part_seed=5")
        return self.fed.work(client, *options, crash=crash)

    def submit(self, *, crash: bool = False, pool: str = "enrolled", spec: str = SPEC) -> str:
        self.count += 1
        spec = spec.replace("{pool}", pool)
        return self.fed.submit(f"survival-{self.count}", spec, "--model", str(self.model), crash=crash)

    def check_counted_once(self, run: str) -> None:
        """Every client took part in every phase, and each assignment was fulfilled by exactly one update."""
        rows = self.fed.query(
            "select a.client_id, r.number, p.number, a.state, count(u.reply_id) from assignments a "
            "join phases p on p.phase_id = a.phase_id join rounds r on r.round_id = p.round_id "
            "left join replies u on u.assignment_id = a.assignment_id and u.accepted "
            "where r.run_id = :run group by a.client_id, r.number, p.number, a.state",
            run=run,
        )
        assert len(rows) == 2 * 2 * 3, rows
        assert all(row[3] == "FULFILLED" and row[4] == 1 for row in rows), rows


@contextmanager
def attended(directory: Path, *options: str) -> Iterator[Scene]:
    with federation(directory, *options) as fed:
        fed.serve()
        for client in CLIENTS:
            fed.join(client)
        made = Scene(fed)
        for client in CLIENTS:
            made.work(client)
        fed.attending(*CLIENTS)
        yield made


def begun(made: Stage, rounds: int = 1, **keys: Any) -> tuple[str, dict[Player, AssignmentManifest]]:
    """A run, and what it asks its two members first; another seed gives other updates, and so other blobs."""
    run, players = made.begin("ann", "ben", rounds=rounds, algorithm="fedavg", more="selection.minimum = 2", **keys)
    return run, {player: player.order() for player in players}


def replied(player: Player, order: AssignmentManifest, *, unless: str) -> bool:
    """Replies, and sees that the reply counts; False if it is refused for this reason."""
    try:
        player.reply(order)
    except grpc.RpcError as error:
        if refusal_from_rpc_error(error).reason != unless:
            raise
        return False
    return True


def health(made: Stage, service: str = "") -> int:
    """What the coordinator tells of its health."""
    with made.served.newcomer() as channel:
        return int(HealthStub(channel).Check(HealthCheckRequest(service=service), timeout=30).status)


def front_of(coordinator: Process) -> int:
    """The process id of a coordinator's front listener; 0 if none runs."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            runs = int(parent) == coordinator.popen.pid and state != "Z"
            if runs and b"coordinator.front.forwarder" in (stat.parent / "cmdline").read_bytes():
                return int(stat.parent.name)
    return 0


def with_constants(module: str, **values: float) -> str:
    """A Python program that runs the command, with other values of some constants of a module."""
    changes = "".join(f"changed.{name} = {value}\n" for name, value in values.items())
    return f"import {module} as changed\n{changes}from fedpareto.__main__ import main\nmain()\n"


def under_way(scene: Scene, run: str) -> None:
    """Waits until a run has asked its members."""
    asked = "select count(*) from assignments a join phases p using (phase_id) join rounds r using (round_id) where "
    wait_for(lambda: scene.fed.query(asked + "r.run_id = :run", run=run)[0][0], "the first assignments")
