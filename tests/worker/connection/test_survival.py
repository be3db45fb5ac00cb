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
from federation.trust.envelope import sign
from federation.vectors import narrow, payload_bytes, to_bytes, update_layout
from fedpareto.processes.forked import completed
from tests.harness import Process, wait_for
from tests.scripted import FEDERATION, HungUp, ScriptedCoordinator, files_in
from tests.worker.scene import Scene, trained
from tests.works import ask_bf16
from worker.home import WorkerHome, WorkerHomeError

# Surviving


def test_a_broken_download_goes_on_where_it_broke(scene: Scene) -> None:
    def serve(blob: bytes, offset: int) -> Iterator[bytes]:
        yield blob[offset : offset + 4000]
        if len(scene.coordinator.fetches) < 3:
            raise HungUp
        yield blob[offset + 4000 :]

    scene.coordinator.serve_blob = serve
    scene.worked()
    assert scene.coordinator.fetches == [0, 4000, 8000]


def test_the_same_signed_reply_is_sent_until_it_is_acknowledged_and_no_byte_of_it_before_a_window_allows_it(
    scene: Scene,
) -> None:
    damaged = Refusal("payload-digest", "damaged on the way")
    scene.coordinator.submit_refusals = [HungUp(), damaged, Refusal("stopping", "later"), damaged, HungUp()]
    scene.coordinator.window_bytes = 1000
    ceilings = []

    def at_once(_: float, ceiling: float) -> float:
        ceilings.append(ceiling)
        return 0.0

    running = scene.worked(uniform=at_once)
    assert len(scene.coordinator.submissions) == 6
    assert all(submission == scene.coordinator.submissions[0] for submission in scene.coordinator.submissions)
    size = len(scene.coordinator.submissions[0].payload)
    assert size > 2000
    assert scene.coordinator.chunks == 6 * [(place, min(1000, size - place)) for place in range(0, size, 1000)]
    assert len(running.events("training")) == 1
    assert ceilings == [0.2, 0.4, 0.8, 1.6, 3.2]  # the pauses grow although each attempt sends everything anew


def test_a_reply_that_was_damaged_in_the_spool_is_dropped(scene: Scene) -> None:
    scene.coordinator.hold_submissions = threading.Event()
    scene.coordinator.submit_refusals = [Refusal("payload-digest", "no")]
    scene.assign()
    running = scene.start()
    scene.wait_submitted()
    [payload] = running.home.spool.glob("*.payload")
    payload.write_bytes(bytes(payload.stat().st_size))
    scene.coordinator.hold_submissions.set()
    assert running.wait_for("dropped")[0]["reason"] == "payload-digest"
    wait_for(lambda: not running.spooled() and scene.coordinator.declines, "the spool to empty")
    assert [said.reason for said in scene.coordinator.declines] == ["payload-digest"]
    assert len(scene.coordinator.submissions) == 1


@pytest.mark.parametrize(
    ("reason", "declined"),
    [
        *((reason, []) for reason in ("assignment-closed", "assignment-fulfilled", "deadline", "assignment-unknown")),
        ("mismatch:round", ["mismatch:round"]),
        ("limit:payload", ["limit:payload"]),
    ],
)
def test_a_reply_that_is_refused_for_good_is_dropped(scene: Scene, reason: str, declined: list[str]) -> None:
    scene.coordinator.submit_refusals = [Refusal(reason, "no")]
    scene.assign()
    running = scene.start()
    assert running.wait_for("dropped")[0]["reason"] == reason
    scene.receipts(1, 1)
    running.wait_spooled()
    assert [submission.manifest.round for submission in scene.coordinator.submissions] == [0, 1]
    assert [said.reason for said in scene.coordinator.declines] == declined


def test_a_signed_receipt_that_comes_with_a_refusal_ends_the_matter_and_nothing_is_kept_of_the_reply(
    scene: Scene,
) -> None:
    class Refusing(list[Any]):
        def pop(self, index: Any = 0) -> Refusal:
            super().pop(index)
            receipt = scene.coordinator.honest_receipt(scene.coordinator.submissions[-1])
            receipt.accepted, receipt.reason = False, "non-finite"
            return Refusal("non-finite", "NaN", signed=sign(receipt, scene.coordinator.signing_key).SerializeToString())

    scene.coordinator.submit_refusals = Refusing([None])
    scene.coordinator.assign(ask_bf16(scene.order()))
    running = scene.start()
    [event] = running.wait_for("receipt")
    assert (event["accepted"], event["reason"]) == (False, "non-finite")
    running.wait_spooled()
    assert json.loads(running.home.receipts.read_text())["reason"] == "non-finite"
    assert files_in(running.home.kept) == []
    scene.coordinator.assign(ask_bf16(scene.order(1)))
    assert running.wait_for("receipt", 2)[1]["accepted"]
    [run] = running.home.kept.iterdir()
    assert files_in(run) == ["1.safetensors"]
    # Nothing is left of the refused reply.
    rows = {"loss": narrow(trained(scene.offers["digits"], scene.model, round_=1).rows["loss"])[0]}
    layout = update_layout([("loss", scene.model[0].size, "BF16")])
    assert scene.coordinator.submissions[-1].payload == b"".join(payload_bytes(layout, rows))


def test_a_worker_comes_back_by_itself_and_hands_in_what_it_finished_meanwhile(scene: Scene) -> None:
    scene.coordinator.hold_submissions = threading.Event()
    scene.assign()
    running = scene.start()
    running.wait_for("submitting")
    scene.wait_submitted()
    scene.coordinator.stop()
    running.wait_for("disconnected")
    scene.coordinator.hold_submissions.set()
    scene.coordinator.start()
    running.wait_for("attending", 2)
    running.wait_for("receipt")
    assert len(running.events("training")) == 1
    assert all(submission == scene.coordinator.submissions[0] for submission in scene.coordinator.submissions)


def test_a_certificate_that_the_coordinator_calls_expired_ends_the_worker(scene: Scene) -> None:
    scene.coordinator.attend_refusals = [Refusal("stopping", "not yet"), Refusal("certificate-expired", "no")]
    running = scene.start()
    assert "certificate-expired" in running.ended()
    assert len(scene.coordinator.hellos) == 2


def test_a_worker_whose_place_is_taken_ends(scene: Scene) -> None:
    running = scene.attending()
    scene.coordinator.end_stream(Refusal("superseded", "another stream took over"))
    assert "another worker with this client's identity" in running.ended()


def test_an_expired_certificate_ends_the_worker_before_it_knocks(scene: Scene) -> None:
    running = scene.start(member=scene.coordinator.member(lifetime=timedelta(seconds=-1)))
    assert "expired" in running.ended()
    assert scene.coordinator.hellos == []


def test_a_worker_does_nothing_for_the_coordinator_of_another_federation(scene: Scene) -> None:
    scene.coordinator.federation_id = "another"
    running = scene.start()
    assert "'another'" in running.wait_for("refused")[0]["message"]
    scene.coordinator.federation_id = FEDERATION
    running.wait_for("attending")


# Processes


def _arguments(home: Path) -> list[str]:
    command = "-m fedpareto worker run --task digits --set part=1/8 --set threads=1 --device cpu --home"
    return [*command.split(), str(home)]


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
    scene: Scene, member_home: Path
) -> None:
    scene.coordinator.hold_submissions = threading.Event()
    scene.assign()
    with _process(member_home) as process:
        scene.wait_submitted()
        process.kill()
    scene.coordinator.hold_submissions.set()
    scene.coordinator.open = scene.coordinator.open or [sign(scene.order(), scene.coordinator.signing_key)]
    with _process(member_home) as process:
        process.wait_for_text("receipt accepted")
        assert process.text.count(": training\n") == 1
        assert all(submission == scene.coordinator.submissions[0] for submission in scene.coordinator.submissions)
        assert process.stop() == 0


@pytest.mark.full
def test_training_that_sigkill_cut_short_is_done_again_to_the_same_bytes(scene: Scene, member_home: Path) -> None:
    layout, _ = scene.model
    scene.train(steps=3000)
    with _process(member_home) as process:
        process.wait_for_text(": training\n")
        process.kill()
    assert files_in(member_home / "spool") == []
    with _process(member_home) as process:
        process.wait_for_text("receipt accepted")
    expected = trained(scene.offers["digits"], scene.model, steps=3000).rows["loss"]
    [submission] = scene.coordinator.submissions
    assert submission.payload == to_bytes(update_layout([("loss", layout.size)]), expected)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_ends_the_worker_cleanly_in_the_middle_of_its_training(
    scene: Scene, member_home: Path, number: int
) -> None:
    scene.train(steps=1_000_000)
    with _process(member_home, "--json") as process:
        process.wait_for_text('"event": "training"')
        os.kill(process.popen.pid, number)
        assert process.popen.wait(60) == 0, process.text
        assert "Traceback" not in process.text


def test_a_second_worker_on_one_home_refuses_to_start(scene: Scene, member_home: Path) -> None:
    with _process(member_home) as process:
        process.wait_for_text("attending")
        second = completed(_arguments(member_home))
        assert second.returncode == 1
        assert f"another worker (process {process.popen.pid})" in second.stderr
        assert "Traceback" not in second.stderr


def test_a_home_without_a_membership_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(WorkerHomeError, match="worker join"):
        WorkerHome(tmp_path).check_joined()
