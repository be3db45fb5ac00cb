"""A worker that does what a scripted coordinator asks: trains, evaluates, attacks where its owner says so."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.attacks import AttackError, parse_attack
from federation.digests import digest
from federation.process.assignment_log import AssignmentFilter
from federation.process.service_manager import ServiceManager
from federation.task_layout import TaskLayout
from federation.tasks import task
from federation.training.torch_trainer import TorchTrainer
from federation.v1.common_pb2 import EvaluateWork
from federation.vectors import parse_header, to_bytes, update_layout
from tests.harness import wait_for
from tests.scripted import CLIENT, Submission, files_in
from tests.service_manager import WATCHDOG_SECONDS, listening
from tests.worker.scene import SOURCE, Scene, trained
from tests.works import set_work
from worker.service import prepare_offers
from worker.work.accomplices import Accomplices
from worker.work.attacker import Attacker
from worker.work.execution import Execution

# Doing what is asked


def test_an_assignment_is_trained_and_its_reply_is_bound_to_it_and_acknowledged(scene: Scene) -> None:
    layout, _ = scene.model
    asked = scene.order(5)
    running = scene.attending()
    scene.coordinator.assign(asked)
    running.wait_for("receipt")

    [submission] = scene.coordinator.submissions
    reply = scene.reply()
    bound = "federation_id run_id round attempt phase assignment_id client_id base_model spec task"
    for name in bound.split():
        assert getattr(reply, name) == getattr(asked, name), name
    assert list(reply.rows) == list(asked.rows)
    assert (reply.payload, reply.payload_bytes) == (digest(submission.payload), len(submission.payload))
    expected = trained(scene.offers["digits"], scene.model, round_=5)
    assert submission.payload == to_bytes(update_layout([("loss", layout.size)]), expected.rows["loss"])
    assert dict(reply.losses) == dict(expected.losses)
    assert dict(reply.metrics) == dict(expected.metrics)
    assert reply.samples == expected.samples
    running.wait_spooled()
    [line] = running.home.receipts.read_text().splitlines()
    assert json.loads(line)["accepted"] is True
    hello = scene.coordinator.hellos[0]
    assert [(offer.task, offer.samples) for offer in hello.tasks] == [("digits", expected.samples)]
    assert hello.tasks[0].layout.digest == TaskLayout.of(layout).digest
    assert (hello.limits.samples, hello.limits.max_steps, hello.limits.rows) == (8, 1_000_000, 0)


def test_an_evaluation_sends_measurements_of_the_splits_that_were_asked_and_no_payload(scene: Scene) -> None:
    scene.evaluate("validation", "test")
    scene.start().wait_for("receipt")
    [submission] = scene.coordinator.submissions
    assert submission.payload == b""
    assert submission.manifest.payload == ""
    assert {name.partition("/")[0] for name in submission.manifest.metrics} == {"validation", "test"}


def test_messages_of_kinds_that_only_a_newer_coordinator_knows_are_ignored(scene: Scene) -> None:
    scene.coordinator.newer, scene.coordinator.window_bytes = True, 4096
    scene.train()
    scene.start().wait_for("receipt")
    [submission] = scene.coordinator.submissions
    assert submission.manifest.payload == digest(submission.payload)
    offsets = [offset for offset, _ in scene.coordinator.chunks]
    assert offsets == sorted({*offsets}), "the second upload goes on where the first one broke off"
    assert len(offsets) > 2
    assert len(scene.coordinator.hellos) == 1


def test_heartbeats_name_the_assignment_in_work(scene: Scene) -> None:
    scene.train(steps=1_000_000)
    scene.start()
    beats = scene.coordinator.heartbeats
    wait_for(lambda: any(beat.assignment_id == "assignment-0" and beat.progress > 0 for beat in beats), "progress")


def test_a_watchdog_is_fed_while_a_worker_trains_and_no_longer_if_it_hangs(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.service.LOOK_SECONDS", WATCHDOG_SECONDS / 3)
    scene.train(steps=1_000_000)
    with listening(tmp_path / "notify") as manager:
        running = scene.start(manager=ServiceManager.of({**manager.variables}))
        assert manager.until("READY=1") <= {"WATCHDOG=1"}
        running.wait_for("training")
        manager.drain()
        assert [manager.next() for _ in range(3)] == ["WATCHDOG=1"] * 3
        for part in (running.worker._runner, running.worker._attendance):
            with part._changed:  # a lock that nobody gives back
                assert manager.falls_silent()
            assert manager.next() == "WATCHDOG=1"
        scene.coordinator.cancel("assignment-0")
        running.worker.stop()
        assert manager.until("STOPPING=1") <= {"WATCHDOG=1"}


def test_a_model_that_is_known_is_not_fetched_again(scene: Scene) -> None:
    running = scene.start()
    for number in range(3):
        scene.assign(number)
    running.wait_for("receipt", 3)
    assert scene.coordinator.fetches == [0]


def test_a_cancelled_assignment_is_dropped_in_the_middle_of_its_training(scene: Scene) -> None:
    scene.train(steps=1_000_000)
    running = scene.start()
    running.wait_for("training")
    scene.coordinator.cancel("assignment-0", key=Ed25519PrivateKey.generate())
    reasons = ["key-unknown"]
    for name in ("client_id", "federation_id"):
        scene.coordinator.cancel("assignment-0", key=None, **{name: "another"})
        reasons.append(f"mismatch:{name}")
    assert [event["reason"] for event in running.wait_for("cancel-refused", 3)] == reasons
    assert not running.events("cancelled")
    scene.coordinator.cancel("assignment-0")
    running.wait_for("cancelled")
    scene.receipts(1, 1)
    assert [submission.manifest.round for submission in scene.coordinator.submissions] == [1]


def test_an_error_that_nobody_expects_costs_its_assignment_and_not_the_worker(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reply = Execution._reply

    def once(self: Execution, *given: Any) -> None:
        monkeypatch.setattr(Execution, "_reply", reply)
        raise ValueError("cannot mmap an empty file")

    monkeypatch.setattr(Execution, "_reply", once)
    running = scene.attending()
    with caplog.filtering(AssignmentFilter()):
        scene.assign(0)
        declined = running.wait_for("declined")[0]
    assert (declined["reason"], declined["assignment_id"]) == ("failed", "assignment-0")
    assert "ValueError: cannot mmap an empty file" in declined["message"]
    (line,) = (record for record in caplog.records if record.exc_info)
    assert (line.message, vars(line)["assignment_id"]) == ("assignment assignment-0", "assignment-0")
    scene.receipts(1, 1)


def test_training_that_diverges_is_declined(scene: Scene) -> None:
    scene.train(learning_rate=1e30, steps=100)
    scene.start()
    assert scene.declined()[:2] == ("assignment-0", "training-diverged")
    assert scene.coordinator.submissions == []


def test_a_rehearsed_attack_changes_the_update_and_the_reported_loss_alone(scene: Scene) -> None:
    running = scene.worked(attacker=Attacker(parse_attack("scale=100,bias=1000"), CLIENT))
    assert running.events("attack")
    honest = trained(scene.offers["digits"], scene.model)
    [submission] = scene.coordinator.submissions
    np.testing.assert_array_equal(_sent(submission), honest.rows["loss"] * np.float32(100))
    assert submission.manifest.losses["loss"] == 100 * honest.losses["loss"] + 1000
    assert submission.manifest.metrics["train/loss"] == honest.metrics["train/loss"]


def _sent(submission: Submission) -> np.ndarray[Any, np.dtype[np.float32]]:
    _, offset = parse_header(submission.payload)
    return np.frombuffer(submission.payload[offset:], dtype=np.float32)


def test_a_worker_that_scales_its_loss_trains_on_the_scaled_loss(scene: Scene) -> None:
    scene.train(steps=3)
    scene.start(attacker=Attacker(parse_attack("loss-scaling:factor=10"), CLIENT)).wait_for("receipt")
    scaled = trained(scene.offers["digits"], scene.model, steps=3, targets={"loss": {"loss": 10.0}})
    np.testing.assert_array_equal(_sent(scene.coordinator.submissions[0]), scaled.rows["loss"])
    assert scene.coordinator.submissions[0].manifest.losses["loss"] == 10 * scaled.losses["loss"]


def test_an_attack_on_the_data_is_honest_training_on_the_wrong_labels(scene: Scene) -> None:
    flip = parse_attack("label-flip")
    poisoned, _ = prepare_offers(["digits"], SOURCE, device="cpu", threads=1, attack=flip, client_id=CLIENT)
    scene.worked(offers=poisoned, attacker=Attacker(flip, CLIENT))
    splits = task("digits").load(SOURCE)
    wrong = replace(splits, train=replace(splits.train, y=9 - splits.train.y))
    expected = trained(TorchTrainer(task("digits"), wrong, "cpu", 1), scene.model)
    np.testing.assert_array_equal(_sent(scene.coordinator.submissions[0]), expected.rows["loss"])
    assert dict(scene.coordinator.submissions[0].manifest.losses) == dict(expected.losses)


def test_a_free_rider_sends_noise_as_long_as_the_last_change_of_the_model_and_its_measured_loss(scene: Scene) -> None:
    layout, data = scene.model
    first = np.frombuffer(data[len(layout.header) :], dtype=np.float32)
    second, third = first + np.float32(0.25), first + np.float32(0.75)
    evaluate = scene.coordinator.assignment(layout, to_bytes(layout, second), 1, max_payload_bytes=0)
    evaluate.ClearField("rows")
    set_work(evaluate, EvaluateWork(splits=["test"]))
    scene.assign(0)
    scene.coordinator.assign(evaluate)
    scene.coordinator.assign(scene.coordinator.assignment(layout, to_bytes(layout, third), 2))
    scene.start(attacker=Attacker(parse_attack("free-rider"), CLIENT)).wait_for("receipt", 3)
    sent = [_sent(scene.coordinator.submissions[number]) for number in (0, 2)]
    assert [float(row.std()) for row in sent] == pytest.approx([1e-3, 0.5], rel=0.05)
    honest = scene.offers["digits"].measure(third, ("train",))
    assert scene.coordinator.submissions[2].manifest.losses["loss"] == honest["train/loss"]


def test_accomplices_wait_for_each_other_but_not_for_ever_and_leave_nothing(tmp_path: Path) -> None:
    layout = update_layout([("loss", 3)])
    rows = {name: np.full(3, number, dtype=np.float32) for number, name in enumerate(("a", "b"), 1)}
    both = {name: Accomplices(tmp_path, name) for name in rows}
    for one in both.values():
        one.meet()
    pauses: list[float] = []

    def pause(seconds: float) -> None:  # the other comes while the first one waits
        pauses.append(seconds)
        if len(pauses) == 2:
            both["b"].exchange("run/0/0", layout, rows["b"], seconds=0, pause=pause)

    found = both["a"].exchange("run/0/0", layout, rows["a"], seconds=1, pause=pause)
    np.testing.assert_array_equal(found, list(rows.values()))
    assert len(pauses) == 2
    for number in range(1, 5):
        alone = both["a"].exchange(f"run/{number}/0", layout, rows["a"], seconds=0.1, pause=lambda seconds: None)
        np.testing.assert_array_equal(alone, [rows["a"]])
    assert len(files_in(tmp_path / "a")) == 2
    for one in both.values():
        one.leave()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [("alie", "alie:z=NUMBER"), ("model-replacement", "boost=NUMBER"), ("backdoor:boost=0", "boost=NUMBER")],
)
def test_an_attack_that_depends_on_what_a_worker_does_not_know_is_refused_at_the_start(text: str, words: str) -> None:
    with pytest.raises(AttackError, match=words):
        Attacker(parse_attack(text), CLIENT)


def test_a_lone_attacker_is_told_when_its_attack_is_none() -> None:
    assert "no attack" in Attacker(parse_attack("mimic"), CLIENT).warning
    assert "no attack" not in Attacker(parse_attack("sign-flip"), CLIENT).warning
