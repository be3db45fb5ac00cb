"""What must survive: `kill -9` of either side at any instant, and a cut connection.

Real processes throughout. In each case the run completes, no accepted update is lost or counted twice, and the digest
of the final model equals that of the undisturbed run.
"""

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from federation.tasks import initial_model, task
from federation.vectors import write_vectors
from tests.harness import SECONDS, Federation, Process, federation, wait_for

CLIENTS = ("clinic-a", "clinic-b", "clinic-c")
SPEC = """
task = "digits"
rounds = 2
seed = 11
[algorithm]
name = "fedmgda+"
epsilon = 0.2
[train]
epochs = 2
batch_size = 20
deadline_seconds = 300
[selection]
minimum = 3
pool = "{pool}"
quorum = 1.0
[evaluate]
deadline_seconds = 300
"""


class Scene:
    def __init__(self, fed: Federation) -> None:
        self.fed = fed
        self.workers: dict[str, Process] = {}
        self.count = 0
        # Made once: making it costs the import of torch.
        self.model = fed.directory / "initial.safetensors"
        layout, vector = initial_model(task("digits"), seed=11)
        write_vectors(self.model, layout, vector)

    def work(self, client: str, *, crash: str = "") -> Process:
        part = CLIENTS.index(client)
        options = ("--part", f"{part + 1}/3", "--partition", "shards:2", "--part-seed", "5")
        process = self.fed.work(client, *options, crash=crash)
        self.workers[client] = process
        return process

    def submit(self, *, crash: bool = False, pool: str = "enrolled", spec: str = SPEC) -> str:
        self.count += 1
        spec = spec.replace("{pool}", pool)
        return self.fed.submit(f"survival-{self.count}", spec, "--model", str(self.model), crash=crash)

    def remembered(self, run: str) -> tuple[str, str]:
        """The digest of the model of a run that completes, and what it remembers: JSON, with the digests of vectors."""
        final = str(self.fed.wait_completed(run))
        ((state,),) = self.fed.query("select state_data from runs where run_id = :run", run=run)
        return final, str(state)

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


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with federation(tmp_path_factory.mktemp("survival")) as fed:
        fed.serve()
        for client in CLIENTS:
            fed.join(client)
        scene = Scene(fed)
        for client in CLIENTS:
            scene.work(client)
        fed.attending(*CLIENTS)
        yield scene


@pytest.fixture(scope="module")
def undisturbed(scene: Scene) -> str:
    """The digest of the final model when nothing happens."""
    run = scene.submit()
    final = scene.fed.wait_completed(run)
    scene.check_counted_once(run)
    return str(final)


def test_the_same_specification_gives_the_same_model(scene: Scene, undisturbed: str) -> None:
    assert scene.fed.wait_completed(scene.submit()) == undisturbed


def points(*always: str, full: tuple[str, ...]) -> pytest.MarkDecorator:
    """Where to kill: in `make test` at some points, in `make test-full` at all of them."""
    return pytest.mark.parametrize("point", [*always, *(pytest.param(point, marks=pytest.mark.full) for point in full)])


@points(
    "one-update-in",
    "stored",
    full=(
        "dispatching",
        "model-written",
        "before-dispatch",
        "all-updates-in",
        "aggregating",
        "one-evaluation-in",
        "evaluated",
        "between-rounds",
    ),
)
def test_a_killed_coordinator_goes_on_where_it_was(scene: Scene, undisturbed: str, point: str) -> None:
    assert scene.fed.coordinator is not None
    scene.fed.coordinator.kill()
    crashing = scene.fed.serve(crash=point)
    # A pool of those who attend is the harder case: after the restart nobody does, at first.
    run = scene.submit(crash=True, pool="attending")
    crashing.wait_killed()
    scene.fed.serve()
    assert scene.fed.wait_completed(run) == undisturbed
    scene.check_counted_once(run)


REMEMBERING = """[algorithm]
name = "afl"
[server]
optimiser = "yogi"
learning_rate = 0.02
""".join([SPEC.partition("[algorithm]")[0], "[train]" + SPEC.partition("[train]")[2]])


@pytest.fixture(scope="module")
def remembered(scene: Scene) -> tuple[str, str]:
    """What a run that remembers comes to when nothing happens: its model, and what it remembers."""
    return scene.remembered(scene.submit(spec=REMEMBERING))


@pytest.mark.full
@points("model-written", full=("between-rounds",))
def test_what_a_run_remembers_survives(scene: Scene, remembered: tuple[str, str], point: str) -> None:
    assert scene.fed.coordinator is not None
    scene.fed.coordinator.kill()
    crashing = scene.fed.serve(crash=point)
    run = scene.submit(crash=True, spec=REMEMBERING)
    crashing.wait_killed()
    scene.fed.serve()
    assert scene.remembered(run) == remembered
    assert all(name in remembered[1] for name in ("first", "second", "average", "lambda"))


LOOKING_BACK = REMEMBERING.replace('name = "afl"', 'name = "fedfv"\ntau = 2\nalpha = 0').replace(
    "rounds = 2", "rounds = 4"
)
LOOKING_BACK = LOOKING_BACK.replace("[selection]", '[selection]\nmethod = "count"\ncount = 2')


@pytest.mark.full
def test_the_updates_of_earlier_rounds_survive(scene: Scene) -> None:
    assert scene.fed.coordinator is not None
    undisturbed, _ = scene.remembered(scene.submit(spec=LOOKING_BACK))
    scene.fed.coordinator.kill()
    crashing = scene.fed.serve(crash="between-rounds")
    run = scene.submit(crash=True, spec=LOOKING_BACK)
    crashing.wait_killed()
    scene.fed.serve()
    final, state = scene.remembered(run)
    assert final == undisturbed
    history = json.loads(state)["rule"]["history"]
    assert {entry["round"] for entry in history.values()} == {2, 3}
    assert {entry["payload"] for entry in history.values()} <= set(json.loads(state)["blobs"])


@points("uploading", full=("training", "before-receipt", "trained", "spooled", "after-receipt"))
def test_a_killed_worker_does_its_work_once_it_is_back(scene: Scene, undisturbed: str, point: str) -> None:
    victim = CLIENTS[1]
    scene.workers[victim].kill()
    crashing = scene.work(victim, crash=point)
    run = scene.submit()
    crashing.wait_killed()
    scene.work(victim)
    assert scene.fed.wait_completed(run) == undisturbed
    scene.check_counted_once(run)


class Proxy:
    """A TCP proxy that cuts the connection once, after a number of bytes towards the coordinator."""

    def __init__(self, port: int, cut_after: int) -> None:
        self.target = port
        self.left: int | None = cut_after
        self.cuts = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                near.close()
                continue
            threading.Thread(target=self._pump, args=(near, far, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, upwards: bool) -> None:
        try:
            while data := source.recv(4096):
                if upwards and self.left is not None:
                    self.left -= len(data)
                    if self.left <= 0:
                        self.left = None
                        self.cuts += 1
                        break
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def test_a_connection_cut_in_the_middle_of_an_upload_is_made_again(scene: Scene, undisturbed: str) -> None:
    victim = CLIENTS[2]
    scene.workers[victim].kill()
    # An update of digits takes about 20 kB: the hello and the handshake fit before the cut, the first upload does not.
    member = scene.fed.directory / victim / "member.toml"
    description = member.read_text()
    port = int(description.rpartition(":")[2].split('"')[0])
    proxy = Proxy(port, cut_after=12_000)
    member.write_text(description.replace(f":{port}", f":{proxy.port}"))
    try:
        scene.work(victim)
        run = scene.submit()
        assert scene.fed.wait_completed(run) == undisturbed
        scene.check_counted_once(run)
        assert proxy.cuts == 1
    finally:
        member.write_text(description)
        proxy.listener.close()
        scene.workers[victim].kill()
        scene.work(victim)


def front_of(coordinator: Process) -> int:
    """The process id of a coordinator's front listener; 0 if none runs."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            runs = int(parent) == coordinator.popen.pid and state != "Z"
            if runs and b"coordinator.front.process" in (stat.parent / "cmdline").read_bytes():
                return int(stat.parent.name)
    return 0


def next_front(coordinator: Process, ended: int) -> int:
    """The front listener that the coordinator has started instead of one that has ended."""

    def found() -> int:
        front = front_of(coordinator)
        return front if front != ended else 0

    return wait_for(found, "another front listener")


def under_way(scene: Scene, run: str) -> None:
    """Waits until a run has asked its members."""
    asked = "select count(*) from assignments a join phases p using (phase_id) join rounds r using (round_id) where "
    wait_for(lambda: scene.fed.query(asked + "r.run_id = :run", run=run)[0][0], "the first assignments")


@pytest.mark.parametrize("number", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.full)])
def test_a_front_listener_that_hangs_or_dies_is_replaced(
    scene: Scene, undisturbed: str, number: signal.Signals
) -> None:
    coordinator = scene.fed.coordinator
    assert coordinator is not None
    front, run = front_of(coordinator), scene.submit()
    under_way(scene, run)
    os.kill(front, number)
    next_front(coordinator, front)
    assert scene.fed.wait_completed(run) == undisturbed
    scene.check_counted_once(run)
    if number is signal.SIGSTOP:
        assert "the front listener does not answer (State: T (stopped)): it is killed" in coordinator.text
    assert "the front listener was killed by SIGKILL" in coordinator.text


@pytest.mark.full
def test_a_front_listener_that_is_killed_ten_times_in_a_row_is_started_ten_times_and_those_who_watch_go_on(
    scene: Scene, undisturbed: str
) -> None:
    coordinator = scene.fed.coordinator
    assert coordinator is not None
    scene.workers[CLIENTS[2]].kill()  # so the run waits
    run, front = scene.submit(), front_of(coordinator)
    command = ["-m", "fedpareto", "admin", "--home", str(scene.fed.home / "admin"), "watch", run, "--json"]
    watching = scene.fed.process("watch", command)
    watching.wait_for_text(run)
    for _ in range(10):
        os.kill(front, signal.SIGKILL)
        front = next_front(coordinator, front)
    assert "started again in 10 s; it has failed 10 times in a row" in coordinator.text
    scene.work(CLIENTS[2])
    assert scene.fed.wait_completed(run) == undisturbed
    scene.check_counted_once(run)
    assert watching.popen.wait(SECONDS) == 0, watching.text
    assert "lost the coordinator" in watching.text
    assert "the coordinator answers again" in watching.text


def test_a_front_listener_that_is_stopped_ends_with_a_killed_coordinator_and_leaves_the_port(scene: Scene) -> None:
    coordinator = scene.fed.coordinator
    assert coordinator is not None
    front = front_of(coordinator)
    os.kill(front, signal.SIGSTOP)
    os.kill(coordinator.popen.pid, signal.SIGKILL)
    coordinator.wait_killed()
    scene.fed.serve()  # on the same port
    wait_for(lambda: not Path(f"/proc/{front}").exists(), "the front listener to end")
    scene.fed.attending(*CLIENTS)


HASTY = """
from coordinator.front import listener
listener.UNHEARD_SECONDS = 1.0
from fedpareto.__main__ import main
main()
"""


@pytest.mark.full
def test_a_front_listener_leaves_a_coordinator_that_hangs_and_is_there_again_when_it_goes_on(
    scene: Scene, undisturbed: str
) -> None:
    assert scene.fed.coordinator is not None
    scene.fed.coordinator.kill()
    coordinator = scene.fed.serve(program=HASTY)
    scene.fed.attending(*CLIENTS)
    front, run = front_of(coordinator), scene.submit()
    under_way(scene, run)
    os.kill(coordinator.popen.pid, signal.SIGSTOP)
    wait_for(lambda: front_of(coordinator) == 0, "the front listener to end")
    os.kill(coordinator.popen.pid, signal.SIGCONT)
    assert next_front(coordinator, 0) != front
    assert scene.fed.wait_completed(run) == undisturbed
    scene.check_counted_once(run)
    assert "the front listener ended, because this process gave no sign of life for 1 s" in coordinator.text
    scene.fed.coordinator.kill()
    scene.fed.serve()


def test_a_second_coordinator_on_the_same_database_refuses_to_start(scene: Scene) -> None:
    second = Process(
        ["-m", "fedpareto", "coordinator", "serve", "--home", str(scene.fed.home)], scene.fed.directory / "2"
    )
    assert second.popen.wait(60) == 1
    assert scene.fed.coordinator is not None
    assert str(scene.fed.coordinator.popen.pid) in second.text
    assert "Traceback" not in second.text
    assert scene.fed.admin("runs")


@pytest.mark.full
def test_a_stopped_coordinator_ends_cleanly_and_its_workers_come_back(scene: Scene, undisturbed: str) -> None:
    assert scene.fed.coordinator is not None
    assert scene.fed.coordinator.stop() == 0
    scene.fed.serve()
    assert scene.fed.wait_completed(scene.submit()) == undisturbed


def test_a_worker_that_is_told_to_stop_ends_with_0(scene: Scene) -> None:
    worker = scene.workers[CLIENTS[0]]
    os.kill(worker.popen.pid, signal.SIGTERM)
    assert worker.popen.wait(60) == 0
    scene.work(CLIENTS[0])
    wait_for(lambda: scene.workers[CLIENTS[0]].text, "the worker's first word")
