"""What a small round asks of its coordinator: transactions, statements, hand-overs to threads, and syncs of the disk.

The round is whole: ten members fetch the model and hand in different updates at once, the step is made and recorded,
its entries of the audit log are chained, and the next round has asked its members.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from coordinator.alerts import maker
from coordinator.audit import sequencer
from coordinator.rounds.replies.group_commit import GroupCommit
from federation.v1.common_pb2 import AssignmentManifest
from federation.vectors import Layout, Tensor, to_bytes
from storage.database import Database
from storage.states import RoundState
from tests.coordinator.rounds.counting import Counts, counted
from tests.running import SECONDS
from tests.stage import Player, Stage, spec, stage

pytestmark = pytest.mark.full

MEMBERS = 10
LAYOUT = Layout((Tensor("weight", (1000,)),))
MODEL = to_bytes(LAYOUT, np.zeros(1000, np.float32))
RIGHTS = "coordinator.members.access.control.Access._check"
CALLS = (
    RIGHTS,
    "coordinator.services",
    "coordinator.rounds.fleets.consents",
    "coordinator.rounds.replies.intake",
    "coordinator.rounds.replies.uploads",
)
BARS = {"reads": 20, "writes": 12, "statements": 80, "handovers": 25, "syncs": 38}


@contextmanager
def ten(directory: Path, url: str) -> Iterator[tuple[Stage, list[Player], str]]:
    """A run of ten members in a store that has all its directories; nothing looks at the record by the clock."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequencer, "LOOK_SECONDS", 3600.0)
        patch.setattr(maker, "LOOK_SECONDS", 3600.0)
        with stage(directory, url) as made:
            for number in range(256):
                (made.served.home.blobs_dir / "blake3" / f"{number:02x}").mkdir(parents=True, exist_ok=True)
            task, players = made.crew(*(f"member-{number}" for number in range(MEMBERS)))
            more = f"selection.minimum = {MEMBERS}\nselection.quorum = 1.0\nevaluate.every = 0"
            run = made.submit(spec("counted", task, 4, more=more), model=MODEL)
            yield made, players, run


def ordered(players: list[Player]) -> dict[Player, AssignmentManifest]:
    return {player: player.order() for player in players}


def play_at_once(orders: dict[Player, AssignmentManifest]) -> None:
    """Each fetches the model, and hands in its update."""

    def work(player: Player, order: AssignmentManifest) -> None:
        player.fetch(order.base_model)
        player.reply(order)

    with ThreadPoolExecutor(MEMBERS, "members") as pool:
        list(pool.map(work, orders.keys(), orders.values()))


@contextmanager
def held(database: Database, replies: int) -> Iterator[None]:
    """Nobody writes until this number of replies wait for their record."""
    waiting, commit = threading.Semaphore(0), GroupCommit.commit

    def told(self: GroupCommit, item: object) -> object:  # type: ignore[type-arg]
        waiting.release()
        return commit(self, item)

    def let_go() -> None:
        for _ in range(replies):
            assert waiting.acquire(timeout=SECONDS)
        go.set()

    go = threading.Event()

    def hold() -> None:
        with database._writing():
            begun.set()
            assert go.wait(SECONDS)

    begun = threading.Event()
    holder, counter = threading.Thread(target=hold), threading.Thread(target=let_go)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupCommit, "commit", told)
        holder.start()
        assert begun.wait(SECONDS)
        counter.start()
        yield
        holder.join()
        counter.join()


def a_round(made: Stage, players: list[Player], run: str, *, hold: bool) -> Counts:
    """The counts of the second round: in the first one, the run's specification and statements are new."""
    database = made.served.coordinator.record.database
    play_at_once(ordered(players))
    orders = ordered(players)
    made.served.coordinator.record.sequencer.sequence()
    with counted(database) as counts:
        if hold:
            with held(database, MEMBERS):
                play_at_once(orders)
        else:
            play_at_once(orders)
        made.wait_round(run, 1, RoundState.COMPLETED)
        made.served.coordinator.record.sequencer.sequence()
        ordered(players)
    print(counts.table())
    return counts


def test_a_round_of_ten_keeps_its_bars_and_with_several_coordinators_a_call_reads_once(
    tmp_path: Path, database_url: str
) -> None:
    with ten(tmp_path / "home", database_url) as (made, players, run):
        alone = not made.served.database.serves_many
        counts = a_round(made, players, run, hold=alone)
    # Where the file system cannot say whether bytes are in memory, as that of these tests, a thread reads them.
    counts.handovers.pop("posix.preadv", None)
    if alone:
        assert not {name: (number, BARS[name]) for name, number in counts.totals.items() if number > BARS[name]}
        assert counts.writes["coordinator.rounds.replies.group_commit.GroupCommit._commit_all"] == 1
        assert counts.syncs["coordinator.rounds.replies.uploads.Upload.store"] == 2 * MEMBERS  # a file, its directory
    of_calls = {cause: number for cause, number in counts.reads.items() if cause.startswith(CALLS)}
    assert of_calls == ({} if alone else {RIGHTS: 2 * MEMBERS})
