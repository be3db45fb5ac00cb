"""What several threads hand in at the same time is written in one transaction."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import Session

from coordinator.rounds.replies import group_commit
from coordinator.rounds.replies.group_commit import GroupCommit
from storage.database import Database
from storage.models import Model
from tests.harness import wait_for
from tests.storage.scene import NOON


class Writer:
    """Writes models by their digest, and notes each group; a group with the item that is `held` waits for `go`."""

    def __init__(self, database: Database, held: str = "") -> None:
        self.groups: list[list[str]] = []
        self.held, self.begun, self.go = held, threading.Event(), threading.Event()
        self.commits = GroupCommit(database, self.write)
        self.ends: dict[str, object] = {}
        self.failure: Exception | None = None
        self.once = False

    def write(self, session: Session, items: Sequence[str]) -> list[str]:
        self.groups.append([*items])
        if self.held in items:
            self.begun.set()
            assert self.go.wait(60)
            if self.failure is not None:
                failure, self.failure = self.failure, None if self.once else self.failure
                raise failure
        for item in items:
            session.add(Model(digest=item.rstrip("!"), size=1, parameters=1, created=NOON))
        session.flush()
        return [f"{item} is written" for item in items]

    def commit(self, item: str) -> None:
        try:
            self.ends[item] = self.commits.commit(item)
        except (IntegrityError, OperationalError) as error:
            self.ends[item] = type(error)

    def all_at_once(self, items: Sequence[str]) -> None:
        """Hands in all items; the first one is held until the others wait."""
        threads = [threading.Thread(target=self.commit, args=(item,)) for item in items]
        threads[0].start()
        assert self.begun.wait(60)
        for thread in threads[1:]:
            thread.start()
        wait_for(lambda: len(self.commits._waiting) == len(items) - 1, "the others to wait")
        self.go.set()
        for thread in threads:
            thread.join()


def names(count: int) -> list[str]:
    return [f"model-{number}" for number in range(count)]


def on_record(database: Database) -> set[str]:
    with database.read() as session:
        return set(session.scalars(select(Model.digest)))


def test_nine_behind_a_held_commit_make_one_transaction(database: Database) -> None:
    writer = Writer(database, held="model-0")
    writer.all_at_once(names(10))
    assert sorted(map(len, writer.groups)) == [1, 9]
    assert on_record(database) == set(names(10))
    assert writer.ends == {name: f"{name} is written" for name in names(10)}


def test_ten_in_turn_make_ten_and_none_waits_for_another(database: Database) -> None:
    writer = Writer(database)
    for name in names(10):
        writer.commit(name)
    assert writer.groups == [[name] for name in names(10)]


def test_one_that_fails_takes_no_other_of_its_group_with_it(database: Database) -> None:
    writer = Writer(database, held="model-0")
    writer.all_at_once([*names(4), "model-0!", "model-1!"])  # the last two are on record when they are written
    assert on_record(database) == set(names(4))
    wrong = {writer.ends["model-0!"], writer.ends["model-1"], writer.ends["model-1!"]}
    assert IntegrityError in wrong
    assert [writer.ends[name] for name in ("model-2", "model-3")] == ["model-2 is written", "model-3 is written"]
    assert sum(end is IntegrityError for end in writer.ends.values()) == 2


def test_all_that_wait_are_told_when_the_database_cannot_be_written_and_may_try_again(database: Database) -> None:
    writer = Writer(database, held="model-0")
    writer.failure = OperationalError("INSERT", {}, OSError("disk full"))
    writer.all_at_once(names(4))
    assert writer.ends == dict.fromkeys(names(4), OperationalError)
    assert (len(writer.groups), on_record(database)) == (1, set())
    writer.failure = None
    writer.commit("model-1")
    assert on_record(database) == {"model-1"}


class Deadlock(Exception):
    """As psycopg tells it."""

    sqlstate = "40P01"


def test_each_is_tried_alone_when_the_group_and_another_transaction_waited_for_each_other(database: Database) -> None:
    writer = Writer(database, held="model-0")
    writer.failure, writer.once = OperationalError("INSERT", {}, Deadlock()), True
    writer.all_at_once(names(4))
    assert on_record(database) == set(names(4))
    assert writer.ends == {name: f"{name} is written" for name in names(4)}


def test_what_fails_before_its_turn_to_write_leaves_the_others_theirs(database: Database) -> None:
    writer, serves, broken = Writer(database), database.begin, [ValueError("not now")]

    @contextmanager
    def begin() -> Iterator[Session]:
        if broken:
            raise broken.pop()
        with serves() as session:
            yield session

    database.begin = begin  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="not now"):
        writer.commits.commit("model-0")
    assert writer.commits._waiting == []
    writer.commit("model-1")
    assert on_record(database) == {"model-1"}


@contextmanager
def keeping_locked(database: Database, name: str) -> Iterator[None]:
    """Another coordinator has changed the row of a model, and is frozen before it commits."""
    with Session(database.engine) as session, session.begin():
        session.execute(update(Model).where(Model.digest == name).values(size=5))
        yield
        session.rollback()


class Changer(Writer):
    """Changes the sizes of models."""

    def write(self, session: Session, items: Sequence[str]) -> list[str]:
        self.groups.append([*items])
        if self.held in items and not self.begun.is_set():
            self.begun.set()
            assert self.go.wait(60)
        for item in sorted(items):
            session.execute(update(Model).where(Model.digest == item).values(size=2))
        return [f"{item} is written" for item in items]


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_row_that_another_coordinator_keeps_locked_holds_up_its_own_item_alone(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "LOCK_SECONDS", 0.1)
    monkeypatch.setattr(group_commit, "PAUSES", (0.01, 0.01))
    Writer(database).commits.commit("model-1")
    for name in ("model-0", "model-2", "model-3"):
        Writer(database).commits.commit(name)
    writer = Changer(database, held="model-0")
    with keeping_locked(database, "model-2"):
        writer.all_at_once(names(4))
        assert writer.ends == {
            "model-2": OperationalError,
            **{name: f"{name} is written" for name in ("model-0", "model-1", "model-3")},
        }
        writer.commit("model-2")  # alone from the start
        assert writer.ends.pop("model-2") is OperationalError
    writer.commit("model-2")
    assert writer.ends["model-2"] == "model-2 is written"
    with database.read() as session:
        assert set(session.scalars(select(Model.size))) == {2}


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("freed_in", [1, 2])
def test_an_item_whose_row_is_free_again_soon_is_written_without_being_handed_in_again(
    database: Database, monkeypatch: pytest.MonkeyPatch, freed_in: int
) -> None:
    Writer(database).commits.commit("model-0")
    monkeypatch.setattr(group_commit, "LOCK_SECONDS", 0.1)
    writer, pauses = Changer(database), list[float]()
    with Session(database.engine) as other:
        other.execute(update(Model).values(size=5))

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            assert not writer.commits._turn.locked()  # others go on meanwhile
            if len(pauses) == freed_in:
                other.commit()

        monkeypatch.setattr(group_commit, "sleep", pause)
        writer.commit("model-0")
    assert writer.ends == {"model-0": "model-0 is written"}
    assert pauses == [*group_commit.PAUSES[:freed_in]]
    with database.read() as session:
        assert session.scalar(select(Model.size)) == 2


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("count", [1, 3])
def test_after_a_deadlock_each_waits_for_the_other_transaction_which_goes_on_only_now(
    database: Database, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(group_commit, "monotonic", lambda: 0.0)  # no time passes
    waits = list[str]()

    def write(session: Session, items: Sequence[str]) -> list[str]:
        waits.append(str(session.scalar(text("SHOW lock_timeout"))))
        if len(waits) == 1:
            raise OperationalError("UPDATE", {}, Deadlock())
        return [*items]

    commits = GroupCommit[str, str](database, write)
    places = [commits.hand_in(name) for name in names(count - 1)]
    assert commits.commit("last") == "last"
    assert [place.outcome() for place in places] == names(count - 1)
    assert waits == ["2s"] * (1 + count)


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_other_transactions_wait_for_locks_as_long_as_before(database: Database) -> None:
    Writer(database).commits.commit("model-0")
    with database.begin() as session:
        assert session.scalar(text("SHOW lock_timeout")) == "0"
