import math
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from storage.blob_directory import DirectoryStore
from storage.database import Database
from storage.models import Reply, Round, Run
from storage.retention import Collection, collect, is_retained
from storage.states import RoundState
from tests.storage.kept_rounds import OLD, Federation, of_round
from tests.storage.scene import NOON, date_back, stored

GRACE = 3600.0


@pytest.fixture
def federation(database: Database, blobs: DirectoryStore) -> Federation:
    return Federation(database, blobs)


def clean(federation: Federation, keep_rounds: int | None = None) -> Collection:
    return collect(federation.database, federation.blobs, now=NOON, grace_seconds=GRACE, keep_rounds=keep_rounds)


def round_row(session: Session, run_id: str, number: int) -> Round:
    return session.scalars(select(Round).where(Round.run_id == run_id, Round.number == number)).one()


def test_an_empty_store_is_left_empty(federation: Federation) -> None:
    assert clean(federation) == Collection(kept=0, deleted=0, freed=0)


def test_orphans_and_refused_payloads_go_and_what_the_rounds_refer_to_stays(federation: Federation) -> None:
    federation.run("r", rounds=3)
    federation.store("orphan")
    report = clean(federation)
    assert federation.contents() == of_round("r", 0) | of_round("r", 1) | of_round("r", 2)
    freed = sum(map(len, ["orphan", "r refused 0", "r refused 1", "r refused 2"]))
    assert report == Collection(kept=5 + 4 + 4, deleted=4, freed=freed)
    assert clean(federation) == Collection(kept=13, deleted=0, freed=0)


def test_the_first_and_the_last_rounds_of_each_run_are_retained_and_the_initial_and_current_model(
    federation: Federation,
) -> None:
    federation.run("a", rounds=4)
    federation.run("b", rounds=3)
    clean(federation, keep_rounds=1)
    assert federation.contents() == set().union(*(of_round(*each) for each in [("a", 0), ("a", 3), ("b", 0), ("b", 2)]))
    clean(federation, keep_rounds=0)
    assert federation.contents() == of_round("a", 0) | of_round("b", 0) | {"a model 4", "b model 3"}


def test_the_best_round_of_each_run_is_retained_and_whether_a_blob_is_can_be_asked(federation: Federation) -> None:
    measured: dict[str, list[dict[str, float]]] = {
        "a": [{"accuracy/mean": value} for value in (0.1, 0.9, 0.3, 0.9, 0.2)],  # of equals the last
        "b": [{"loss/test": value} for value in (3.0, 2.0, 1.0, math.nan, 5.0)],
        "c": [{}, {}, {}, {}, {}],
        # The best value that stops the run, also where it is no improvement that counts; of equals the lowest loss.
        "d": [
            {"accuracy/mean": 0.1 * number, "stop/value": value, "stop/best": best, "loss/validation": loss}
            for number, (value, best, loss) in enumerate(
                [(0.5, 0.5, 0.1), (0.8, 0.8, 0.2), (0.6, 0.8, 0.1), (0.8, 0.8, 0.3), (0.7, 0.8, 0.1)]
            )
        ],
    }
    for run_id, rounds in measured.items():
        federation.run(run_id, len(rounds))
    with federation.database.begin() as session:
        session.get_one(
            Run, "d"
        ).spec = b'name = "d"\ntask = "digits"\nrounds = 5\nstop = { metric = "auc", patience = 9 }\n'
    for run_id, rounds in measured.items():
        for number, metrics in enumerate(rounds):
            with federation.database.begin() as session:
                round_row(session, run_id, number).metrics = metrics
    every = {federation.blobs.read(digest).decode(): digest for digest in stored(federation.blobs)}
    clean(federation, keep_rounds=1)
    retained = [(run_id, number) for run_id in "abcd" for number in (0, 4)] + [("a", 3), ("b", 2), ("d", 1)]
    assert federation.contents() == set[str]().union(*(of_round(*each) for each in retained))
    with federation.database.read() as session:
        assert {word for word, digest in every.items() if is_retained(session, digest, 1)} == federation.contents()


@pytest.mark.parametrize("state", [RoundState.OPEN, RoundState.STEPPED])
def test_a_round_that_has_not_ended_is_retained_in_any_case(federation: Federation, state: RoundState) -> None:
    federation.run("r", rounds=2)
    federation.round("r", 2, state)
    clean(federation, keep_rounds=0)
    assert federation.contents() == of_round("r", 0) | of_round("r", 2)


@pytest.mark.parametrize("kind", ["secure-deal", "secure-mask"])
def test_of_a_private_round_that_has_ended_masked_vectors_stay_and_ciphertexts_and_inputs_go(
    federation: Federation, kind: str
) -> None:
    federation.run("r")
    federation.round("r", 0, kind=kind)
    federation.round("r", 1, RoundState.OPEN, kind=kind)
    clean(federation)
    ended = of_round("r", 0) - ({"r update 0"} if kind == "secure-deal" else set())
    assert federation.contents() == ended | of_round("r", 1) | {"r input 1"}


def test_what_an_algorithm_keeps_in_blobs_stays(federation: Federation) -> None:
    kept = federation.store("momentum")
    federation.run("r", blobs=[kept], other="x")
    federation.run("s", blobs=[])
    clean(federation)
    assert federation.contents() == {"momentum", "r model 0", "s model 0"}


def test_a_blob_that_two_runs_share_stays_while_one_of_them_needs_it(federation: Federation) -> None:
    federation.run("a", rounds=3)
    shared = federation.store("a update 1")
    federation.run("b", blobs=[shared])
    clean(federation, keep_rounds=1)
    assert "a update 1" in federation.contents()
    assert "a gram 1" not in federation.contents()


def test_young_orphans_stay_until_the_grace_is_over(federation: Federation) -> None:
    federation.store("younger", at=NOON.timestamp() - GRACE + 1)
    federation.store("just", at=NOON.timestamp() - GRACE)
    federation.store("older", at=NOON.timestamp() - GRACE - 1)
    assert clean(federation).deleted == 1
    assert federation.contents() == {"younger", "just"}


def test_a_claimed_blob_stays(federation: Federation) -> None:
    federation.blobs.claim(federation.store("offered"))
    federation.store("not")
    clean(federation)
    assert federation.contents() == {"offered"}


def test_negative_numbers_are_refused(federation: Federation) -> None:
    for arguments in ({"grace_seconds": -1.0}, {"grace_seconds": 1.0, "keep_rounds": -1}):
        with pytest.raises(ValueError, match="negative numbers"):
            collect(federation.database, federation.blobs, now=NOON, **arguments)  # type: ignore[arg-type]


def test_collecting_without_pause_beside_live_runs_takes_nothing_that_they_refer_to(federation: Federation) -> None:
    """Two runs go on while another thread collects all but two rounds of what is older than a minute.

    What the runs store is young when it is stored (the real clock), and is made old before the first collection that
    begins after its row is there, so that from then on nothing but the rows protects it. Each run also stores again,
    each round, a blob that was an old orphan until then.
    """
    done = threading.Event()
    collections: list[Collection] = []
    settled: queue.SimpleQueue[str] = queue.SimpleQueue()

    def collect_now() -> Collection:
        now = datetime.now(UTC)
        return collect(federation.database, federation.blobs, now=now, grace_seconds=60, keep_rounds=2)

    def collect_on() -> None:
        while not done.is_set():
            while not settled.empty():
                digest = settled.get()
                if federation.blobs.exists(digest):
                    date_back(federation.blobs, digest, OLD)
            collections.append(collect_now())

    def train(run_id: str) -> None:
        for number in range(25):
            federation.store(f"{run_id} update {number}")
            federation.round(run_id, number, at=datetime.now(UTC).timestamp())
            for digest in references(federation, run_id, number):
                assert federation.blobs.exists(digest)
                settled.put(digest)

    federation.run("a")
    federation.run("b")
    with ThreadPoolExecutor(3) as pool:
        collector = pool.submit(collect_on)
        runs = [pool.submit(train, run_id) for run_id in ("a", "b")]
        try:
            for run in runs:
                run.result()
        finally:
            done.set()
        collector.result()
    assert sum(report.deleted for report in collections) > 0
    assert collect_now().kept == len(federation.contents())
    for run_id in ("a", "b"):
        assert of_round(run_id, 24) | of_round(run_id, 23) | {f"{run_id} model 0"} <= federation.contents()


def references(federation: Federation, run_id: str, number: int) -> Iterator[str]:
    with federation.database.read() as session:
        made = round_row(session, run_id, number)
        assert made.result_model is not None
        assert made.deployed_model is not None
        assert made.gram is not None
        update = session.scalars(select(Reply).where(Reply.assignment_id == f"{run_id}-{number}", Reply.accepted)).one()
        yield from (made.base_model, made.result_model, made.deployed_model, made.gram, update.payload)
