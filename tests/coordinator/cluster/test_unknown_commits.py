"""The connection breaks between a COMMIT of a conductor and its answer: it does not learn if the record changed."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine, event, make_url, or_, select

from federation.v1.common_pb2 import AssignmentManifest
from storage.models import Assignment, AuditEntry, Phase, Round
from storage.states import RunState
from tests.coordinator.scene import replied
from tests.few import few_of
from tests.running import wait_for
from tests.soak.line import Line
from tests.stage import Player, Stage, stage

Break = Callable[[int], None]  # of the connection of the client with this port
MORE = "selection.minimum = 2"
_WAITING = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
COMMITS = (
    18  # at least, of the conductor of a run of two rounds without a fault, from its first lease to the end of the run
)


@pytest.fixture(scope="module")
def line(url: str) -> Iterator[Line]:
    made = Line(Path(str(make_url(url).query["host"])) / ".s.PGSQL.5432")
    yield made
    made.close()


@pytest.fixture(scope="module")
def connected(url: str, line: Line, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A coordinator whose connections to PostgreSQL are on the line."""
    through = f"postgresql://postgres@127.0.0.1:{line.port}/{make_url(url).database}"
    with (
        pytest.MonkeyPatch.context() as patch,
        stage(tmp_path_factory.mktemp("stage") / "coordinator", through) as made,
    ):
        patch.setattr("coordinator.rounds.conductors.RETRY_SECONDS", 0.01)
        yield made


@contextmanager
def breaking(number: int, act: Break) -> Iterator[list[int]]:
    """Calls `act` before the conductor sends its COMMIT with this number, from 1; yields those that it has sent."""
    sent: list[int] = []

    def listen(connection: Connection) -> None:
        if threading.current_thread().name.startswith("run-"):
            sent.append(len(sent) + 1)
            if len(sent) == number:
                driver: Any = connection.connection.dbapi_connection
                with socket.fromfd(driver.fileno(), socket.AF_INET, socket.SOCK_STREAM) as end:
                    act(end.getsockname()[1])

    event.listen(Engine, "commit", listen)
    try:
        yield sent
    finally:
        event.remove(Engine, "commit", listen)


def played(stage: Stage) -> tuple[str, list[tuple[int, int, str]], list[str]]:
    """Plays a run; returns its model, its phases (round, number, kind), and the actions of the audit log about it."""
    run, players = stage.begin("ann", "ben", rounds=2, algorithm="fedavg", more=MORE)
    left = list[tuple[Player, AssignmentManifest]]()

    def over() -> bool:
        left.extend((player, order) for player in players for _, order in player.orders())
        left[:] = [(player, order) for player, order in left if not replied(player, order, unless="database")]
        row = stage.run(run)
        assert row.state not in (RunState.FAILED, RunState.STOPPED), row.reason
        return row.state is RunState.COMPLETED

    wait_for(over, "the run to be played")
    rows = select(Round.number, Phase.number, Phase.kind).join(Round).where(Round.run_id == run)
    phases = stage.look(lambda session: session.execute(rows.order_by(Phase.phase_id)).all())
    assignments = select(Assignment.assignment_id).join(Phase).join(Round).where(Round.run_id == run)
    about = or_(AuditEntry.subject.startswith(run), AuditEntry.subject.in_(assignments))
    actions = stage.look(lambda session: session.scalars(select(AuditEntry.action).where(about)).all())
    return stage.run(run).model, [(*row,) for row in phases], sorted(actions)


@pytest.fixture(scope="module")
def calm(connected: Stage) -> tuple[object, ...]:
    """What a run leaves on record without a fault."""
    with breaking(0, lambda _: None) as sent:
        made = played(connected)
    assert len(sent) >= COMMITS
    return made


@pytest.mark.parametrize("number", few_of(range(1, COMMITS + 1), 5))  # 5: the first phase
@pytest.mark.parametrize("lost", few_of(["answer", "commit"], "commit"))
def test_a_run_goes_on_when_its_conductor_does_not_learn_if_a_commit_took_place(
    connected: Stage, url: str, line: Line, calm: tuple[object, ...], number: int, lost: str
) -> None:
    """The answer is lost, or the COMMIT arrives when the next conductor waits for the lock of the run."""
    arrives = threading.Event()

    def blocked() -> bool:
        return arrives.is_set() or bool(direct.execute(_WAITING).fetchone())

    def act(port: int) -> None:
        line.break_answer(port) if lost == "answer" else line.break_question(port, arrives)

    def deliver() -> None:
        wait_for(blocked, "the next conductor to wait")
        arrives.set()

    with psycopg.connect(url, autocommit=True) as direct, breaking(number, act) as sent:
        watcher = threading.Thread(target=deliver)
        watcher.start()
        try:
            assert played(connected) == calm
        finally:
            arrives.set()
            watcher.join()
    assert number in sent
