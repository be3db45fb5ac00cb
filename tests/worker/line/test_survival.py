"""A worker whose line breaks, whose process is killed, or whose certificate ends."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from federation.refusals import Refusal
from federation.training.trainer import Trainer
from federation.trust.envelope import seal
from federation.vectors import Layout, narrow, payload_bytes, to_bytes, update_layout
from fedpareto.processes.forked import completed
from tests.harness import Process, wait_for
from tests.scripted import FEDERATION, HungUp, ScriptedCoordinator, files_in
from tests.worker import scene as worker_stage
from tests.worker.scene import Start, trained
from tests.works import ask_bf16, set_train
from worker.home import WorkerHome, WorkerHomeError
from worker.line.attendance import AttendanceError

# Fixtures
offers = worker_stage.offers
model = worker_stage.model
coordinator = worker_stage.coordinator
start = worker_stage.start


# Surviving


def test_a_broken_download_goes_on_where_it_broke(
    coordinator: ScriptedCoordinator, start: Start, model: tuple[Layout, bytes]
) -> None:
    def serve(blob: bytes, offset: int) -> Iterator[bytes]:
        yield blob[offset : offset + 4000]
        if len(coordinator.fetches) < 3:
            raise HungUp
        yield blob[offset + 4000 :]

    coordinator.serve_blob = serve
    coordinator.assign(coordinator.assignment(*model))
    running = start()
    running.wait_for("receipt")
    assert coordinator.fetches == [0, 4000, 8000]


def test_the_same_signed_reply_is_sent_until_it_is_acknowledged(
    coordinator: ScriptedCoordinator, start: Start, model: tuple[Layout, bytes]
) -> None:
    damaged = Refusal("payload-digest", "damaged on the way")
    coordinator.submit_refusals = [HungUp(), damaged, Refusal("stopping", "later"), damaged, HungUp()]
    coordinator.window_bytes = 1000
    ceilings = []

    def at_once(_: float, ceiling: float) -> float:
        ceilings.append(ceiling)
        return 0.0

    coordinator.assign(coordinator.assignment(*model))
    running = start(uniform=at_once)
    running.wait_for("receipt")
    assert len(coordinator.submissions) == 6
    assert all(submission == coordinator.submissions[0] for submission in coordinator.submissions)
    assert len(running.events("training")) == 1
    assert ceilings == [0.2, 0.4, 0.8, 1.6, 3.2]  # the pauses grow although each attempt sends everything anew


def test_a_reply_that_was_damaged_in_the_spool_is_dropped(
    coordinator: ScriptedCoordinator, start: Start, model: tuple[Layout, bytes]
) -> None:
    coordinator.hold_submissions = threading.Event()
    coordinator.submit_refusals = [Refusal("payload-digest", "no")]
    coordinator.assign(coordinator.assignment(*model))
    running = start()
    wait_for(lambda: bool(coordinator.submissions), "the upload")
    [payload] = running.home.spool.glob("*.payload")
    payload.write_bytes(bytes(payload.stat().st_size))
    coordinator.hold_submissions.set()
    assert running.wait_for("dropped")[0]["reason"] == "payload-digest"
    wait_for(lambda: not running.spooled() and coordinator.declines, "the spool to empty")
    assert [said.reason for said in coordinator.declines] == ["payload-digest"]
    assert len(coordinator.submissions) == 1


def test_no_byte_goes_out_before_a_window_allows_it(
    coordinator: ScriptedCoordinator, start: Start, model: tuple[Layout, bytes]
) -> None:
    coordinator.window_bytes = 1000
    coordinator.assign(coordinator.assignment(*model))
    running = start()
    running.wait_for("receipt")
    size = len(coordinator.submissions[0].payload)
    assert size > 2000
    assert coordinator.chunks == [(place, min(1000, size - place)) for place in range(0, size, 1000)]


@pytest.mark.parametrize(
    ("reason", "declined"),
    [
        ("assignment-closed", []),
        ("assignment-fulfilled", []),
        ("deadline", []),
        ("assignment-unknown", []),
        ("mismatch:round", ["mismatch:round"]),
        ("limit:payload", ["limit:payload"]),
    ],
)
def test_a_reply_that_is_refused_for_good_is_dropped(
    coordinator: ScriptedCoordinator, start: Start, model: tuple[Layout, bytes], reason: str, declined: list[str]
) -> None:
    coordinator.submit_refusals = [Refusal(reason, "no")]
    coordinator.assign(coordinator.assignment(*model))
    running = start()
    assert running.wait_for("dropped")[0]["reason"] == reason
    coordinator.assign(coordinator.assignment(*model, 1))
    running.wait_for("receipt")
    wait_for(lambda: not running.spooled(), "the spool to empty")
    assert [submission.manifest.round for submission in coordinator.submissions] == [0, 1]
    assert [said.reason for said in coordinator.declines] == declined


def test_a_signed_receipt_that_comes_with_a_refusal_ends_the_matter_and_nothing_is_kept_of_the_reply(
    coordinator: ScriptedCoordinator, start: Start, model: tuple[Layout, bytes], offers: dict[str, Trainer]
) -> None:
    class Refusing(list[Any]):
        def pop(self, index: Any = 0) -> Refusal:
            super().pop(index)
            receipt = coordinator.honest_receipt(coordinator.submissions[-1])
            receipt.accepted, receipt.reason = False, "non-finite"
            return Refusal("non-finite", "NaN", signed=seal(receipt, coordinator.signing_key).SerializeToString())

    coordinator.submit_refusals = Refusing([None])
    coordinator.assign(ask_bf16(coordinator.assignment(*model)))
    running = start()
    [event] = running.wait_for("receipt")
    assert (event["accepted"], event["reason"]) == (False, "non-finite")
    wait_for(lambda: not running.spooled(), "the spool to empty")
    assert json.loads(running.home.receipts.read_text())["reason"] == "non-finite"
    assert files_in(running.home.kept) == []
    coordinator.assign(ask_bf16(coordinator.assignment(*model, 1)))
    assert running.wait_for("receipt", 2)[1]["accepted"]
    [run] = running.home.kept.iterdir()
    assert files_in(run) == ["1.safetensors"]
    # Nothing is left of the refused reply.
    rows = {"loss": narrow(trained(offers["digits"], model, round_=1).rows["loss"])[0]}
    layout = update_layout([("loss", model[0].size, "BF16")])
    assert coordinator.submissions[-1].payload == b"".join(payload_bytes(layout, rows))


def test_a_worker_comes_back_by_itself_and_hands_in_what_it_finished_meanwhile(
    coordinator: ScriptedCoordinator, start: Start, model: tuple[Layout, bytes]
) -> None:
    coordinator.hold_submissions = threading.Event()
    coordinator.assign(coordinator.assignment(*model))
    running = start()
    running.wait_for("submitting")
    wait_for(lambda: bool(coordinator.submissions), "the upload")
    coordinator.stop()
    running.wait_for("disconnected")
    coordinator.hold_submissions.set()
    coordinator.start()
    running.wait_for("attending", 2)
    running.wait_for("receipt")
    assert len(running.events("training")) == 1
    assert all(submission == coordinator.submissions[0] for submission in coordinator.submissions)


def test_a_certificate_that_the_coordinator_calls_expired_ends_the_worker(
    coordinator: ScriptedCoordinator, start: Start
) -> None:
    coordinator.attend_refusals = [Refusal("stopping", "not yet"), Refusal("certificate-expired", "no")]
    running = start()
    running.thread.join(60)
    assert isinstance(running.failure, AttendanceError)
    assert "certificate-expired" in str(running.failure)
    assert len(coordinator.hellos) == 2


def test_a_worker_whose_place_is_taken_ends(coordinator: ScriptedCoordinator, start: Start) -> None:
    running = start()
    running.wait_for("attending")
    coordinator.end_stream(Refusal("superseded", "another stream took over"))
    running.thread.join(60)
    assert isinstance(running.failure, AttendanceError)
    assert "another worker with this client's identity" in str(running.failure)


def test_an_expired_certificate_ends_the_worker_before_it_knocks(
    coordinator: ScriptedCoordinator, start: Start
) -> None:
    running = start(member=coordinator.member(lifetime=timedelta(seconds=-1)))
    running.thread.join(60)
    assert isinstance(running.failure, AttendanceError)
    assert "expired" in str(running.failure)
    assert coordinator.hellos == []


def test_a_worker_does_nothing_for_the_coordinator_of_another_federation(
    coordinator: ScriptedCoordinator, start: Start
) -> None:
    coordinator.federation_id = "another"
    running = start()
    assert "'another'" in running.wait_for("refused")[0]["message"]
    coordinator.federation_id = FEDERATION
    running.wait_for("attending")


# Processes


def _arguments(home: Path) -> list[str]:
    return [
        "-m",
        "fedpareto",
        "worker",
        "run",
        "--home",
        str(home),
        "--task",
        "digits",
        "--part",
        "1/8",
        "--threads",
        "1",
    ]


@contextmanager
def _process(home: Path, *more: str) -> Iterator[Process]:
    process = Process([*_arguments(home), *more], home.with_name("worker.log"))
    try:
        yield process
    finally:
        process.kill()


@pytest.fixture
def member_home(coordinator: ScriptedCoordinator, tmp_path: Path) -> Path:
    home = tmp_path / "member"
    coordinator.member().save(home)
    return home


def test_work_that_waits_for_its_receipt_survives_sigkill_and_is_not_done_again(
    coordinator: ScriptedCoordinator, member_home: Path, model: tuple[Layout, bytes]
) -> None:
    coordinator.hold_submissions = threading.Event()
    coordinator.assign(coordinator.assignment(*model))
    with _process(member_home) as process:
        wait_for(lambda: bool(coordinator.submissions), "the upload")
        process.kill()
    coordinator.hold_submissions.set()
    coordinator.open = coordinator.open or [seal(coordinator.assignment(*model), coordinator.signing_key)]
    with _process(member_home) as process:
        process.wait_for_text("receipt accepted")
        assert process.text.count(": training\n") == 1
        assert all(submission == coordinator.submissions[0] for submission in coordinator.submissions)
        assert process.stop() == 0


def test_training_that_sigkill_cut_short_is_done_again_to_the_same_bytes(
    coordinator: ScriptedCoordinator, member_home: Path, model: tuple[Layout, bytes], offers: dict[str, Trainer]
) -> None:
    layout, data = model
    asked = coordinator.assignment(layout, data)
    set_train(asked, steps=3000)
    coordinator.assign(asked)
    with _process(member_home) as process:
        process.wait_for_text(": training\n")
        process.kill()
    assert files_in(member_home / "spool") == []
    with _process(member_home) as process:
        process.wait_for_text("receipt accepted")
    expected = trained(offers["digits"], model, steps=3000).rows["loss"]
    [submission] = coordinator.submissions
    assert submission.payload == to_bytes(update_layout([("loss", layout.size)]), expected)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_ends_the_worker_cleanly_in_the_middle_of_its_training(
    coordinator: ScriptedCoordinator, member_home: Path, model: tuple[Layout, bytes], number: int
) -> None:
    endless = coordinator.assignment(*model)
    set_train(endless, steps=1_000_000)
    coordinator.assign(endless)
    with _process(member_home, "--json") as process:
        process.wait_for_text('"event": "training"')
        os.kill(process.popen.pid, number)
        assert process.popen.wait(60) == 0, process.text
        assert "Traceback" not in process.text


def test_a_second_worker_on_one_home_refuses_to_start(coordinator: ScriptedCoordinator, member_home: Path) -> None:
    with _process(member_home) as process:
        process.wait_for_text("attending")
        second = completed(_arguments(member_home))
        assert second.returncode == 1
        assert f"another worker (process {process.popen.pid})" in second.stderr
        assert "Traceback" not in second.stderr


def test_a_home_without_a_membership_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(WorkerHomeError, match="worker join"):
        WorkerHome(tmp_path).require_joined()
