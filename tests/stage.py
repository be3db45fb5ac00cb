"""A stage for the engine: a real coordinator in this process, and clients that a test plays by hand."""

import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, bindparam, select
from sqlalchemy.orm import Session

from coordinator import startup
from coordinator.cluster.leases import time_of
from coordinator.services.base import Rounds
from federation.digests import digest
from federation.transport.channels import MAX_CHUNK_BYTES
from federation.trust.envelope import verify
from federation.trust.identity import Role
from federation.v1 import admin_pb2 as admin
from federation.v1.admin_pb2 import SubmitRunRequest
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.common_pb2 import AssignmentManifest, CancelManifest, ReceiptManifest, SignedEnvelope, StepManifest
from federation.v1.federation_pb2 import AttendRequest, AttendResponse, FetchBlobRequest
from federation.vectors import Layout, Tensor, Vector, read_vector, to_bytes, update_layout
from storage.blob_directory import DirectoryStore
from storage.models import Assignment, Client, Evaluation, Phase, Reply, Round, Run
from storage.states import ClientState, RoundState, RunState
from tests.harness import Attending, Member
from tests.running import SECONDS, Clock, Running, made_home, refused, wait_for

T = TypeVar("T")
LAYOUT = Layout((Tensor("layer.weight", (8, 5)), Tensor("layer.bias", (5,))))
MODEL = to_bytes(LAYOUT, np.linspace(-1, 1, LAYOUT.size, dtype=np.float32))
LONG = timedelta(seconds=1000)  # the deadlines of `spec` are shorter, the clock is moved by this
OVER = (RunState.COMPLETED, RunState.FAILED, RunState.STOPPED)
# Built once, since tests look again after each commit.
STATE = select(Run.state, Run.reason).where(Run.run_id == bindparam("run"))
ENDS = (
    select(Round.number)
    .where(Round.run_id == bindparam("run"), Round.number == bindparam("number"))
    .where(Round.state.in_(bindparam("states", expanding=True)))
)
ALL = 1_000_000  # phases or rounds: more than any run has


def spec(name: str, task: str, rounds: int = 1, *, seed: int = 3, algorithm: str = "fedmgda+", more: str = "") -> bytes:
    """A run whose clients train and evaluate within 900 seconds."""
    return f"""
name = "{name}"
task = "{task}"
rounds = {rounds}
seed = {seed}
algorithm.name = "{algorithm}"
train.deadline_seconds = 900
evaluate.splits = ["train", "test"]
evaluate.deadline_seconds = 900
{more}
""".encode()


def submission(
    document: bytes, model: bytes, *, chunk: int = MAX_CHUNK_BYTES, further: Sequence[bytes] = (), **more: Any
) -> list[SubmitRunRequest]:
    """What submits a run with a model, and with further ones to measure; `more` are fields of the header."""
    header = admin.RunHeader(spec=document, model=digest(model), model_bytes=len(model), **more)
    chunks = [file[start : start + chunk] for file in (model, *further) for start in range(0, len(file), chunk)]
    return [SubmitRunRequest(header=header), *(SubmitRunRequest(chunk=chunk) for chunk in chunks)]


def vector(client_id: str, order: AssignmentManifest) -> NDArray[np.float32]:
    """The update that a client makes: of nothing but its name, the run's seed, and round and phase."""
    key = digest(f"{client_id}/{order.seed}/{order.round}/{order.phase}".encode())
    size = sum(row.length for row in order.rows)
    return np.random.default_rng(int(key[7:39], 16)).standard_normal(size).astype(np.float32)


class Player:
    """A client of the federation."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.name = member.files.client_id
        self.stream: Attending | None = None
        self.tasks: dict[str, int] = {}
        self.serves: dict[str, Sequence[str]] = {}  # objectives, by task; of a task that is not named, all
        self.losses: dict[str, float] = {}  # what it reports besides the mean
        self.cancelled: list[CancelManifest] = []
        self.kept: list[tuple[SignedEnvelope, AssignmentManifest]] = []  # to be answered later
        self._seen: set[str] = set()

    def attend(self, **tasks: int) -> None:
        """Attends, with these tasks and samples; an older stream ends."""
        if self.stream is not None:
            self.stream.close()
        self.tasks = tasks
        self.cancelled.clear()
        self.stream = Attending(self.member, tasks, self.serves)
        welcome = self.stream.next()
        assert isinstance(welcome, AttendResponse), welcome

    def leave(self) -> None:
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def orders(self) -> list[tuple[SignedEnvelope, AssignmentManifest]]:
        """The assignments that have come since the last look, each once."""
        found, self.kept = self.kept, []
        while self.stream is not None:
            try:
                message = self.stream.inbox.get_nowait()
            except queue.Empty:
                break
            if not isinstance(message, AttendResponse):
                break
            if message.WhichOneof("message") == "cancel":
                key = self.member.files.coordinator.chain.present
                self.cancelled.append(verify(message.cancel, CancelManifest, key))
            elif message.WhichOneof("message") == "assignment":
                order = self.member.open(message.assignment)
                if order.assignment_id not in self._seen:
                    self._seen.add(order.assignment_id)
                    found.append((message.assignment, order))
        return found

    def order(self) -> AssignmentManifest:
        """Waits for exactly one assignment."""
        found = wait_for(self.orders, f"an assignment for {self.name}")
        assert len(found) == 1, found
        return found[0][1]

    def reply(self, order: AssignmentManifest, update: NDArray[np.float32] | None = None, **changes: object) -> None:
        """Answers, and sees that the answer counts. `changes` are of the manifest."""
        assert self.submit(order, update, **changes).accepted

    def submit(
        self, order: AssignmentManifest, update: NDArray[np.float32] | None = None, **changes: object
    ) -> ReceiptManifest:
        payload = b""
        if order.rows:
            layout = update_layout([(row.name, row.length, row.dtype) for row in order.rows])
            payload = to_bytes(layout, vector(self.name, order) if update is None else update)
        manifest = self.member.manifest(order, payload)
        manifest.samples = max(self.tasks.get(order.task, 0), 1)
        manifest.metrics.clear()
        manifest.metrics.update(measurements(self.name, order))
        manifest.losses.update(self.losses)
        for name, value in changes.items():
            if name in ("metrics", "losses"):
                getattr(manifest, name).update(value)
            elif isinstance(value, Message):
                getattr(manifest, name).CopyFrom(value)
            else:
                setattr(manifest, name, value)
        return self.member.submit(self.member.sign(manifest), payload)

    def say(self, **message: Any) -> None:
        """Says something on its stream."""
        assert self.stream is not None
        self.stream.say(AttendRequest(**message))

    def submit_zeros(self, order: AssignmentManifest) -> None:
        """Submits an update without a direction, which is refused."""
        with refused("INVALID_ARGUMENT", "zero"):
            self.submit(order, np.zeros(sum(row.length for row in order.rows), np.float32))

    def fetch(self, name: str, offset: int = 0) -> bytes:
        """The bytes of a blob from this place on."""
        request = FetchBlobRequest(digest=name, offset=offset)
        return b"".join(part.chunk for part in self.member.stub.FetchBlob(request, timeout=SECONDS))

    def decline(self, order: AssignmentManifest, reason: str, message: str = "") -> None:
        self.say(decline=self.member.declined(order.assignment_id, reason, message))

    def answer(self) -> None:
        """Does what it is asked next."""
        self.reply(self.order())


def answer(*players: Player) -> None:
    """Each of them does what it is asked next."""
    for player in players:
        player.answer()


def reply_to(players: Sequence[Player], asked: Callable[[AssignmentManifest], bool]) -> None:
    """Replies to these orders of those that have come; the others are kept for later."""
    for player in players:
        for envelope, order in player.orders():
            if asked(order):
                player.reply(order)
            else:
                player.kept.append((envelope, order))


def reply(orders: Mapping[Player, AssignmentManifest]) -> None:
    """Each of them does what it was asked."""
    for player, order in orders.items():
        player.reply(order)


def measurements(client_id: str, order: AssignmentManifest) -> dict[str, float]:
    """What a client measures: of its name, round and phase alone."""
    drawn = np.random.default_rng([order.round, order.phase, *client_id.encode()]).uniform(0.1, 0.9, 4).tolist()
    names = ("train/loss", "train/accuracy", "test/loss", "test/accuracy")
    return dict(zip(names, drawn, strict=True)) | {"train/samples": 8.0, "test/samples": 2.0}


def _in_phase(run: str, number: int, phase: int) -> tuple[ColumnElement[bool], ...]:
    return Round.run_id == run, Round.number == number, Phase.number == phase


class Stage:
    """A coordinator with clients; runs are told apart by their tasks, which clients offer for one test only."""

    def __init__(self, served: Running) -> None:
        self.served = served
        self.clock: Clock = served.clock
        self.players: dict[str, Player] = {}
        self.count = 0
        with self._now():
            self._files = served.administrators_files(Role.OPERATOR, Role.SECURITY_OFFICER, Role.VIEWER)
        self._admin = self._administrator()
        self._nobody = self.player("nobody")

    # --- the coordinator

    def restart(self, between: Callable[[], None] = lambda: None) -> None:
        """Stops the coordinator, and starts it again after `between`; the clients that attended come back."""
        self.stop()
        between()
        self.start()
        self.come_back()

    def come_back(self) -> None:
        """Everybody attends: with what they attended with, or, so that nobody waits for them, with nothing."""
        for player in self.players.values():
            player.attend(**(player.tasks if player.stream is not None else {}))

    def stop(self) -> None:
        self.served.stop()

    def start(self) -> None:
        self.served = Running(self.served.home, self.clock)
        self._admin = self._administrator()

    def pass_deadline(self) -> None:
        """It is later than every deadline, and the engine looks at the clock."""
        self.clock.ahead += LONG
        self.nudge()

    def nudge(self) -> None:
        """Wakes every conductor: somebody attends."""
        self._nobody.attend()

    @contextmanager
    def _now(self) -> Iterator[None]:
        """The real time: a certificate from the future is valid for nobody."""
        ahead, self.clock.ahead = self.clock.ahead, timedelta()
        yield
        self.clock.ahead = ahead

    def _administrator(self) -> AdminStub:
        return AdminStub(self._files.channel(address=self.served.address))

    # --- clients

    def player(self, name: str) -> Player:
        """The client of that name, enrolled at first use."""
        if name not in self.players:
            served = self.served
            join = served.join_string(name)
            with self._now():
                self.players[name] = Player(Member.enroll(join))
        return self.players[name]

    def cast(
        self,
        task: str,
        *names: str,
        samples: Sequence[int] = (),
        serves: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> list[Player]:
        """Clients that attend with one task; `serves` says which of its objectives, by client, where it is not all."""
        players = [self.player(name) for name in names]
        for player, size in zip(players, samples or [10] * len(players), strict=True):
            player.kept.clear()
            player.losses.clear()
            player.serves = {task: serves[player.name]} if player.name in serves else {}
            player.attend(**{task: size})
        return players

    def crew(self, *names: str, **given: Any) -> tuple[str, list[Player]]:
        """A new task, and clients that attend with it."""
        task = self.task()
        return task, self.cast(task, *names, **given)

    def task(self) -> str:
        """A task that no other test names."""
        self.count += 1
        return f"task-{self.count}"

    # --- operators

    def submit(self, document: bytes, *, model: bytes = MODEL, paused: bool = False, **more: Any) -> str:
        requests = submission(document, model, paused=paused, **more)
        return str(self._admin.SubmitRun(iter(requests), timeout=SECONDS).run.run_id)

    def dry_run(self, document: bytes, *, size: int = len(MODEL), **more: Any) -> admin.SubmitRunResponse:
        described = {"spec": document, "model": digest(MODEL), "model_bytes": size, "dry_run": True}
        header = admin.RunHeader(**{**described, **more})
        return self._admin.SubmitRun(iter([SubmitRunRequest(header=header)]), timeout=SECONDS)

    def begin(
        self,
        *names: str,
        rounds: int = 1,
        name: str = "",
        samples: Sequence[int] = (),
        model: bytes = MODEL,
        paused: bool = False,
        **keys: Any,
    ) -> tuple[str, list[Player]]:
        """A run of a new task, and the clients of these names, which attend with it; `keys` are those of `spec`."""
        task, players = self.crew(*names, samples=samples)
        return self.submit(spec(name or task, task, rounds, **keys), model=model, paused=paused), players

    def pause(self, run: str) -> None:
        self._admin.PauseRun(admin.PauseRunRequest(run=run), timeout=SECONDS)

    def resume(self, run: str, *players: Player) -> None:
        """Resumes a run, which these players then play to its end."""
        self._admin.ResumeRun(admin.ResumeRunRequest(run=run), timeout=SECONDS)
        if players:
            self.play(run, *players)

    def stop_run(self, run: str, reason: str = "") -> None:
        self._admin.StopRun(admin.StopRunRequest(run=run, reason=reason), timeout=SECONDS)

    def approve(self, client: str) -> None:
        key = self.look(lambda session: session.get_one(Client, client).key_id)
        self._admin.ApproveClient(admin.ApproveClientRequest(client_id=client, key_id=key), timeout=SECONDS)

    def revoke(self, client: str, reason: str = "") -> None:
        self._admin.RevokeClient(admin.RevokeClientRequest(client_id=client, reason=reason), timeout=SECONDS)

    # --- the record

    def look(self, query: Callable[[Session], T]) -> T:
        return self.served.look(query)

    @property
    def parts(self) -> Rounds:
        return self.served.coordinator.rounds

    def step(self, run: str, number: int = 0) -> StepManifest:
        """What the coordinator has signed of a round's step."""
        envelope = SignedEnvelope.FromString(self.rounds(run)[number].step or b"")
        return verify(envelope, StepManifest, self.served.home.signing_key.public_key())

    def run(self, run: str) -> Run:
        return self.look(lambda session: session.get_one(Run, run))

    def state(self, run: str) -> tuple[RunState, str]:
        """State and reason of a run."""
        state, reason = self.look(lambda session: session.connection().execute(STATE, {"run": run}).one())
        return state, reason

    def rounds(self, run: str) -> list[Round]:
        rows = select(Round).where(Round.run_id == run).order_by(Round.number)
        return self.look(lambda session: list(session.scalars(rows)))

    def phases(self, run: str, number: int = 0) -> list[Phase]:
        rows = select(Phase).join(Round).where(Round.run_id == run, Round.number == number).order_by(Phase.number)
        return self.look(lambda session: list(session.scalars(rows)))

    def assignments(self, run: str, number: int = 0, phase: int = 0) -> dict[str, Assignment]:
        rows = select(Assignment).join(Phase).join(Round).where(*_in_phase(run, number, phase))
        return self.look(lambda session: {row.client_id: row for row in session.scalars(rows)})

    def orders(self, run: str, number: int = 0, phase: int = 0) -> dict[str, AssignmentManifest]:
        """What each client is asked."""
        return {
            client: AssignmentManifest.FromString(SignedEnvelope.FromString(row.envelope).manifest)
            for client, row in self.assignments(run, number, phase).items()
        }

    def assignment_ids(self, run: str, number: int = 0, phase: int = 0) -> set[str]:
        return {row.assignment_id for row in self.assignments(run, number, phase).values()}

    def outcomes(self, run: str, number: int = 0, phase: int = 0) -> dict[str, tuple[str, str]]:
        """State and reason of each client's assignment."""
        return {client: (str(a.state), a.reason) for client, a in self.assignments(run, number, phase).items()}

    def replies(self, run: str, number: int = 0, phase: int = 0) -> dict[str, Reply]:
        """The accepted replies."""
        accepted = Reply.accepted, *_in_phase(run, number, phase)
        rows = select(Reply).join(Assignment).join(Phase).join(Round).where(*accepted)
        return self.look(lambda session: {row.client_id: row for row in session.scalars(rows)})

    def evaluations(self, run: str, number: int = 0) -> dict[tuple[str, str], Evaluation]:
        rows = select(Evaluation).join(Round).where(Round.run_id == run, Round.number == number)
        return self.look(lambda session: {(row.client_id, row.split): row for row in session.scalars(rows)})

    @property
    def blobs(self) -> DirectoryStore:
        return DirectoryStore(self.served.home.blobs_dir)

    def parameters(self, model: str | None) -> Vector:
        """The vector that a stored model holds."""
        return read_vector(self.blobs.local(model or ""))[1]

    # --- waiting

    def hang_up(self, *players: Player) -> None:
        """They leave, and the coordinator has noticed."""
        for player in players:
            player.leave()
            wait_for(lambda: player.name not in self.parts.presence.attending(), "it to be gone")  # noqa: B023

    def wait_reason(self, run: str, words: str = "") -> str:
        """Waits until the run gives a reason with these words."""
        return wait_for(lambda: reason if words in (reason := self.state(run)[1]) else "", words)

    def wait_state(self, run: str, state: RunState) -> Run:
        def there() -> bool:
            now, reason = self.state(run)
            assert now is state or now not in OVER, (now, reason)
            return now is state

        wait_for(there, f"run {run} to be {state}")
        return self.run(run)

    def wait_round(self, run: str, number: int, *states: RoundState) -> Round:
        """Waits until the round is in one of the states (it has ended, unless they are given)."""
        wanted = states or (RoundState.COMPLETED, RoundState.SKIPPED)

        asked = {"run": run, "number": number, "states": wanted}

        def there() -> bool:
            return self.look(lambda session: session.connection().scalar(ENDS, asked)) is not None

        wait_for(there, f"round {number} of {run}")
        return self.rounds(run)[number]

    def wait_outcome(self, run: str, client: str, state: str, number: int = 0, phase: int = 0) -> None:
        wait_for(
            lambda: self.outcomes(run, number, phase).get(client, ("", ""))[0] == state,
            f"{client} to be {state} in round {number}",
        )

    def play(
        self,
        run: str,
        *players: Player,
        until: Callable[[], object] | None = None,
        phases: int = ALL,
        rounds: int = ALL,
    ) -> None:
        """The players answer what they are asked until the run has ended, with a step or not, or until what is given.

        Orders of a phase from `phases` on, and those of a round from `rounds` on, are kept for later.
        """

        def over() -> object:
            reply_to(players, lambda order: order.phase < phases and order.round < rounds)
            state, reason = self.state(run)
            if until is not None and until():
                return True
            stepless = state is RunState.FAILED and reason.startswith("no step was made")
            assert stepless or state not in (RunState.FAILED, RunState.STOPPED), reason
            return stepless or state is RunState.COMPLETED

        wait_for(over, f"run {run} to be played")

    def complete(self, run: str, *players: Player) -> None:
        """The players answer what they are asked, and the run must be completed."""
        self.play(run, *players)
        self.wait_state(run, RunState.COMPLETED)

    def clear(self) -> None:
        """Ends what a test has left. Clients stay: after a restart the coordinator waits for those of before."""
        going = select(Run.run_id).where(Run.state.not_in(OVER))
        for run in self.look(lambda session: list(session.scalars(going))):
            try:
                self.stop_run(run)
            except grpc.RpcError:
                assert self.run(run).state in OVER  # it has ended meanwhile
        revoked = select(Client.client_id).where(Client.state == ClientState.REVOKED)
        for client in set(self.look(lambda session: list(session.scalars(revoked)))) & self.players.keys():
            self.players.pop(client).leave()
        self.clock.ahead = timedelta()


@contextmanager
def stage(directory: Path, database: str, **settings: Any) -> Iterator[Stage]:
    """A federation on a database, served until the end.

    PostgreSQL tells the coordinator the time of the stage's clock. Otherwise it would take its own clock for wrong, as
    soon as a test moves it.
    """
    clock = Clock()
    # Players give no sign of life: they are taken for dead after three heartbeats.
    settings = {"database": database, "heartbeat_seconds": 300.0, **settings}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(startup, "database_time", time_of(clock))
        made = Stage(Running(made_home(directory, now=clock(), **settings), clock))
        try:
            yield made
        finally:
            made.clear()
            made.stop()
