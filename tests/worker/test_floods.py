"""A coordinator that was taken over and wants to fill a worker's disk or memory: each file of the worker is bounded."""

import io
import json
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from federation.monitoring import events
from federation.monitoring.events import Events
from federation.trust.envelope import sign
from federation.v1.common_pb2 import ReceiptManifest, SignedEnvelope
from tests.harness import wait_for
from tests.scripted import Submission
from tests.worker.scene import DOCUMENT, Scene, run_request
from worker.ledgers.left_reading import read_declines
from worker.site.policy_file import Policy, WorkLimits
from worker.site.run_requests import MAX_UNDECIDED, MAX_UNDECIDED_BYTES, RunsFile
from worker.work.submitter import MAX_RECEIPT_BYTES

EACH_RUN = Policy(approve="each-run")


def decide(scene: Scene, run: str, answer: str) -> None:
    """The owner decides about a run that has asked, beside the worker."""
    with closing(RunsFile(scene.home.runs)) as file:
        file.decide(file.runs(run)[0], answer, "", datetime.now(UTC))


@pytest.mark.parametrize(
    ("size", "fit"),
    [
        (len(DOCUMENT), 20),
        pytest.param(60_000, MAX_UNDECIDED_BYTES // 60_000, marks=pytest.mark.full),
        pytest.param(len(DOCUMENT), MAX_UNDECIDED, marks=pytest.mark.full),
    ],
)
def test_runs_that_ask_without_end_are_refused_beyond_a_bound_and_an_approved_one_goes_on(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, size: int, fit: int
) -> None:
    if fit == 20:
        monkeypatch.setattr("worker.site.run_requests.MAX_UNDECIDED", fit)
    running = scene.attending(policy=EACH_RUN)
    wanted = scene.coordinator.ask(DOCUMENT, "wanted")
    running.wait_for("run-waits")
    decide(scene, "wanted", "approved")
    scene.answers(2)
    scene.coordinator.consents.clear()
    document, more = (DOCUMENT + b"# chapter\n" * 6000)[:size], 20
    for number in range(fit + more):
        scene.coordinator.ask(document, f"run-{number}")
    scene.answers(fit + more)
    answers = Counter((said.answer, said.reason) for said in scene.coordinator.consents)
    assert answers == {("waiting", "owner"): fit, ("refused", "limit:runs"): more}
    (told,) = running.events("runs-crowded")
    assert "`fedpareto worker refuse` makes room" in told["message"]
    assert running.home.runs.stat().st_size < 2 * MAX_UNDECIDED_BYTES
    scene.receipts(1, run_id="wanted", spec=wanted.spec)
    decide(scene, "run-0", "refused")
    wait_for(lambda: scene.coordinator.consents[-1].reason == "owner", "the owner's refusal")
    scene.coordinator.ask(document, "another")
    wait_for(lambda: scene.coordinator.consents[-1].run_id == "another", "the next answer")
    assert scene.coordinator.consents[-1].answer == "waiting"
    running.stop()
    scene.attending(policy=EACH_RUN)
    scene.coordinator.ask(document, "after the restart")
    wait_for(lambda: scene.coordinator.consents[-1].run_id == "after the restart", "its answer")
    assert scene.coordinator.consents[-1].answer == "waiting"  # runs that have not asked since made room


def test_the_owners_decision_does_not_wait_for_specifications_that_never_come(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.site.consents.FETCH_SECONDS", 0.2)
    scene.attending(policy=EACH_RUN)
    scene.coordinator.ask(DOCUMENT, "wanted")
    scene.answers(1)
    over = threading.Event()

    def never(blob: bytes, offset: int) -> Iterator[bytes]:
        over.wait(60)
        yield b""

    scene.coordinator.serve_blob = never
    for number in range(200):
        scene.coordinator.ask(DOCUMENT, f"run-{number}")
    wait_for(lambda: len(scene.coordinator.fetches) > 2, "the first fetches")
    decide(scene, "wanted", "refused")
    wait_for(lambda: scene.coordinator.consents[-1].reason == "owner", "the owner's refusal")
    assert len(scene.coordinator.fetches) < 100
    over.set()


def test_a_run_that_asks_with_a_very_long_name_is_not_kept(scene: Scene) -> None:
    running = scene.attending(policy=EACH_RUN)
    scene.coordinator.ask(DOCUMENT, "long", name="x" * 10_000)
    scene.coordinator.ask(DOCUMENT, "short")
    scene.answers(1)
    with closing(sqlite3.connect(running.home.runs)) as database:
        assert database.execute("SELECT run FROM runs").fetchall() == [("short",)]
    assert "at most 8192" in running.events("run-invalid")[0]["message"]


def test_runs_that_do_not_wait_for_the_owner_make_room_for_others(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    with closing(RunsFile(path)) as file:
        for number in range(MAX_UNDECIDED + 5):
            assert file.make_room(len(DOCUMENT), ())
            file.add(run_request(f"run-{number:04}"))
        assert [run.run for run in file.runs()] == [f"run-{number:04}" for number in range(5, MAX_UNDECIDED + 5)]
        assert not file.make_room(MAX_UNDECIDED_BYTES + 1, ())
        assert file.runs() == []


def test_replies_without_receipts_count_as_assignments_that_wait(scene: Scene) -> None:
    scene.coordinator.hold_submissions = threading.Event()
    running = scene.attending(policy=Policy(limits=WorkLimits(waiting=2)))
    for number in range(2):
        scene.assign(number)
        running.wait_for("done", number + 1)
        wait_for(lambda: len(running.worker._runner.spool.entries()) > number, "the reply")  # noqa: B023
    scene.assign(2)
    *declined, message = scene.declined()
    assert declined == ["assignment-2", "limit:waiting"]
    assert "2 assignments, or finished replies without a receipt, wait here already" in message
    scene.coordinator.hold_submissions.set()
    running.wait_for("receipt", 2)
    scene.receipts(3, 3)


def test_a_worker_whose_files_take_more_than_its_policy_allows_takes_no_assignment(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.home.MEASURE_SECONDS", 0.0)
    running = scene.attending(policy=Policy(limits=WorkLimits(home_bytes=1 << 20)))
    filled = running.home.directory / "receipts.jsonl"
    filled.write_bytes(bytes(1 << 20))
    scene.assign()
    _, reason, message = scene.declined()
    assert reason == "limit:disk"
    assert "its policy allows 1048576" in message
    [declined] = read_declines(scene.home.left)
    assert (declined.reason, declined.count, declined.run, declined.message) == (reason, 1, "run-1", message)
    filled.unlink()
    scene.receipts(1, 1)


def test_a_receipt_of_megabytes_is_not_kept(scene: Scene) -> None:
    def long(submission: Submission, receipt: ReceiptManifest) -> SignedEnvelope:
        scene.coordinator.receipt = None
        receipt.message = "x" * MAX_RECEIPT_BYTES
        return sign(receipt, scene.coordinator.signing_key)

    scene.coordinator.receipt = long
    running = scene.worked()
    assert f"at most {MAX_RECEIPT_BYTES}" in running.events("receipt-invalid")[0]["message"]
    assert running.home.receipts.stat().st_size < MAX_RECEIPT_BYTES


def test_a_flood_of_messages_to_the_owner_is_thinned_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "BURST", 3)
    monkeypatch.setattr(events, "PER_SECOND", 0.0)
    out = io.StringIO()
    told = Events(out)
    for number in range(10):
        told.warn("declined", f"number {number}")
    told.tell("receipt", "another event")
    monkeypatch.setattr(events, "PER_SECOND", 1e12)
    told.warn("declined", "the last")
    assert [json.loads(line)["message"] for line in out.getvalue().splitlines()] == [
        *(f"number {number}" for number in range(3)),
        "another event",
        "the last (7 messages of this kind were left out)",
    ]
