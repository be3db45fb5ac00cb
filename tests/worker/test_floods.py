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

from federation.digests import digest
from federation.trust.envelope import seal
from federation.v1.common_pb2 import ReceiptManifest, SignedEnvelope
from federation.vectors import Layout
from tests.harness import wait_for
from tests.scripted import ScriptedCoordinator, Submission
from tests.worker import scene as worker_stage
from tests.worker.scene import Start
from worker import events
from worker.events import Events
from worker.site.asked_runs import MAX_UNDECIDED, MAX_UNDECIDED_BYTES, AskedRun, RunsFile
from worker.site.policy import Policy, WorkLimits
from worker.work.submitter import MAX_RECEIPT_BYTES

offers = worker_stage.offers
model = worker_stage.model
coordinator = worker_stage.coordinator
start = worker_stage.start

SPEC = b'name = "trial"\ntask = "digits"\nrounds = 2\nalgorithm.name = "fedavg"\n'
EACH_RUN = Policy(approve="each-run")


def asked(run: str) -> AskedRun:
    return AskedRun(
        run=run, spec=digest(SPEC), name="trial", task="digits", submitted_by="alice", document=SPEC, asked="2026",
        owner="", words="", decided="",
    )  # fmt: skip


def answers(coordinator: ScriptedCoordinator, count: int) -> Counter[tuple[str, str]]:
    wait_for(lambda: len(coordinator.consents) >= count, f"{count} answers")
    return Counter((said.answer, said.reason) for said in coordinator.consents)


@pytest.mark.parametrize(
    ("size", "fit"),
    [
        (len(SPEC), 20),
        pytest.param(60_000, MAX_UNDECIDED_BYTES // 60_000, marks=pytest.mark.full),
        pytest.param(len(SPEC), MAX_UNDECIDED, marks=pytest.mark.full),
    ],
)
def test_runs_that_ask_without_end_are_refused_beyond_a_bound_and_an_approved_one_goes_on(
    coordinator: ScriptedCoordinator,
    start: Start,
    model: tuple[Layout, bytes],
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    fit: int,
) -> None:
    if fit == 20:
        monkeypatch.setattr("worker.site.asked_runs.MAX_UNDECIDED", fit)
    running = start(policy=EACH_RUN)
    running.wait_for("attending")
    wanted = coordinator.ask(SPEC, "wanted")
    running.wait_for("run-waits")
    with closing(RunsFile(running.home.runs)) as file:
        (run,) = file.runs()
        file.decide(run, "approved", "", datetime.now(UTC))
    answers(coordinator, 2)
    coordinator.consents.clear()
    document, more = (SPEC + b"# chapter\n" * 6000)[:size], 20
    for number in range(fit + more):
        coordinator.ask(document, f"run-{number}")
    assert answers(coordinator, fit + more) == {("waiting", "owner"): fit, ("refused", "limit:runs"): more}
    (told,) = running.events("runs-crowded")
    assert "`fedpareto worker refuse` makes room" in told["message"]
    assert running.home.runs.stat().st_size < 2 * MAX_UNDECIDED_BYTES
    coordinator.assign(coordinator.assignment(*model, run_id="wanted", spec=wanted.spec))
    running.wait_for("receipt")
    with closing(RunsFile(running.home.runs)) as file:
        file.decide(file.runs("run-0")[0], "refused", "no", datetime.now(UTC))
    wait_for(lambda: coordinator.consents[-1].reason == "owner", "the owner's refusal")
    coordinator.ask(document, "another")
    wait_for(lambda: coordinator.consents[-1].run_id == "another", "the next answer")
    assert coordinator.consents[-1].answer == "waiting"
    running.stop()
    again = start(policy=EACH_RUN)
    again.wait_for("attending")
    coordinator.ask(document, "after the restart")
    wait_for(lambda: coordinator.consents[-1].run_id == "after the restart", "its answer")
    assert coordinator.consents[-1].answer == "waiting"  # runs that have not asked since made room


def test_the_owners_decision_does_not_wait_for_specifications_that_never_come(
    coordinator: ScriptedCoordinator, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.site.consents.FETCH_SECONDS", 0.2)
    running = start(policy=EACH_RUN)
    running.wait_for("attending")
    coordinator.ask(SPEC, "wanted")
    answers(coordinator, 1)
    over = threading.Event()

    def never(blob: bytes, offset: int) -> Iterator[bytes]:
        over.wait(60)
        yield b""

    coordinator.serve_blob = never
    for number in range(200):
        coordinator.ask(SPEC, f"run-{number}")
    wait_for(lambda: len(coordinator.fetches) > 2, "the first fetches")
    with closing(RunsFile(running.home.runs)) as file:
        file.decide(file.runs("wanted")[0], "refused", "no", datetime.now(UTC))
    wait_for(lambda: coordinator.consents[-1].reason == "owner", "the owner's refusal")
    assert len(coordinator.fetches) < 100
    over.set()


def test_a_run_that_asks_with_a_very_long_name_is_not_kept(coordinator: ScriptedCoordinator, start: Start) -> None:
    running = start(policy=EACH_RUN)
    running.wait_for("attending")
    coordinator.ask(SPEC, "long", name="x" * 10_000)
    coordinator.ask(SPEC, "short")
    answers(coordinator, 1)
    with closing(sqlite3.connect(running.home.runs)) as database:
        assert database.execute("SELECT run FROM runs").fetchall() == [("short",)]
    assert "at most 8192" in running.events("run-invalid")[0]["message"]


def test_runs_that_do_not_wait_for_the_owner_make_room_for_others(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    with closing(RunsFile(path)) as file:
        for number in range(MAX_UNDECIDED + 5):
            assert file.make_room(len(SPEC), ())
            file.add(asked(f"run-{number:04}"))
        assert [run.run for run in file.runs()] == [f"run-{number:04}" for number in range(5, MAX_UNDECIDED + 5)]
        assert not file.make_room(MAX_UNDECIDED_BYTES + 1, ())
        assert file.runs() == []


def test_replies_without_receipts_count_as_assignments_that_wait(
    coordinator: ScriptedCoordinator, start: Start, model: tuple[Layout, bytes]
) -> None:
    coordinator.hold_submissions = threading.Event()
    running = start(policy=Policy(limits=WorkLimits(waiting=2)))
    running.wait_for("attending")
    for number in range(2):
        coordinator.assign(coordinator.assignment(*model, number))
        running.wait_for("done", number + 1)
        wait_for(lambda number=number: len(running.worker._runner.spool.entries()) > number, "the reply")
    coordinator.assign(coordinator.assignment(*model, 2))
    declined = wait_for(lambda: coordinator.declines, "the decline")[0]
    assert (declined.assignment_id, declined.reason) == ("assignment-2", "limit:waiting")
    assert "2 assignments, or finished replies without a receipt, wait here already" in declined.message
    coordinator.hold_submissions.set()
    running.wait_for("receipt", 2)
    coordinator.assign(coordinator.assignment(*model, 3))
    running.wait_for("receipt", 3)


def test_a_worker_whose_files_take_more_than_its_policy_allows_takes_no_assignment(
    coordinator: ScriptedCoordinator, start: Start, model: tuple[Layout, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.home.MEASURE_SECONDS", 0.0)
    running = start(policy=Policy(limits=WorkLimits(home_bytes=1 << 20)))
    running.wait_for("attending")
    filled = running.home.directory / "receipts.jsonl"
    filled.write_bytes(bytes(1 << 20))
    coordinator.assign(coordinator.assignment(*model))
    declined = wait_for(lambda: coordinator.declines, "the decline")[0]
    assert declined.reason == "limit:disk"
    assert "its policy allows 1048576" in declined.message
    filled.unlink()
    coordinator.assign(coordinator.assignment(*model, 1))
    running.wait_for("receipt")


def test_a_receipt_of_megabytes_is_not_kept(
    coordinator: ScriptedCoordinator, start: Start, model: tuple[Layout, bytes]
) -> None:
    def long(submission: Submission, receipt: ReceiptManifest) -> SignedEnvelope:
        coordinator.receipt = None
        receipt.message = "x" * MAX_RECEIPT_BYTES
        return seal(receipt, coordinator.signing_key)

    coordinator.receipt = long
    running = start()
    running.wait_for("attending")
    coordinator.assign(coordinator.assignment(*model))
    assert f"at most {MAX_RECEIPT_BYTES}" in running.wait_for("receipt-invalid")[0]["message"]
    running.wait_for("receipt")
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
