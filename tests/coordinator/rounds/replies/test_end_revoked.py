"""The work of a revoked client ends also if the coordinator loses its database just after the revocation."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine, event
from sqlalchemy.exc import OperationalError

from storage.models import Client
from storage.states import ClientState
from tests.running import refused
from tests.stage import Stage


@contextmanager
def failing_once(statement: str) -> Iterator[list[str]]:
    """The next statement that begins so fails, as when the database is away; yields it."""
    seen: list[str] = []

    def listen(_c: object, _cursor: object, sql: str, *_: object) -> None:
        if not seen and sql.startswith(statement):
            seen.append(sql)
            raise OperationalError(statement, {}, Exception("the connection is lost"))

    event.listen(Engine, "before_cursor_execute", listen)
    try:
        yield seen
    finally:
        event.remove(Engine, "before_cursor_execute", listen)


def test_assignments_that_a_failed_revocation_left_open_are_cancelled_by_the_housekeeper(stage: Stage) -> None:
    leaver = f"leaver-{stage.count}"
    more = "selection.minimum = 2\nselection.quorum = 0.5\nevaluate.every = 0"
    run, (ann, gone) = stage.begin("ann", leaver, more=more)
    mine, _ = ann.order(), gone.order()
    with failing_once("UPDATE assignments") as seen, refused("UNAVAILABLE", "database"):
        stage.revoke(leaver)
    assert seen
    assert stage.look(lambda session: session.get_one(Client, leaver).state) is ClientState.REVOKED
    ann.reply(mine)
    keeper = stage.supervisor._housekeeper
    keeper.tidy()
    assert stage.outcomes(run) == {"ann": ("FULFILLED", ""), leaver: ("CANCELLED", "client-revoked")}
    ended = stage.assignments(run)[leaver].ended
    stage.play(run, ann)
    keeper.tidy()
    assert stage.assignments(run)[leaver].ended == ended
