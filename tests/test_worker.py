"""The worker against a coordinator that misbehaves on purpose, and against its own death."""

import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from forked import completed
from harness import Process, federation, wait_for
from scripted import CLIENT, FEDERATION, HungUp, ScriptedCoordinator, Submission, files_in, opened, scripted
from trained import train
from working import Running
from works import set_train, set_work

from federation.attacks import AttackError, parse_attack
from federation.digests import digest
from federation.envelope import CONTEXTS, seal, unseal
from federation.keys import IdentityError
from federation.member_files import MemberFiles
from federation.refusals import Refusal
from federation.tasks import DataSource, Part, initial_model, task
from federation.training.torch_trainer import TorchTrainer
from federation.training.trainer import Trainer
from federation.v1.common_pb2 import (
    AssignmentManifest,
    EvaluateWork,
    ReceiptManifest,
    Row,
    SignedEnvelope,
    UpdateManifest,
)
from federation.vectors import Layout, Tensor, parse_header, read_vector, to_bytes, update_layout
from federation.work.computation import LocalSgd
from worker.accomplices import Accomplices
from worker.attacker import Attacker
from worker.backoff import Backoff
from worker.cache import ModelCache, ModelMismatch
from worker.enroll import EnrollmentError, enroll
from worker.events import Events
from worker.home import Home, HomeError
from worker.service import prepare_offers
from worker.session import SessionError
from worker.spool import Spool, SpoolError

SOURCE = DataSource(part=Part(0, 8))


@pytest.fixture(scope="module")
def offers() -> dict[str, Trainer]:
    return prepare_offers(["digits"], SOURCE, device="cpu", threads=1)[0]


@pytest.fixture(scope="module")
def model() -> tuple[Layout, bytes]:
    layout, vector = initial_model(task("digits"), 3)
    return layout, to_bytes(layout, vector)


@pytest.fixture
def coordinator() -> Iterator[ScriptedCoordinator]:
    with scripted() as made:
        yield made


Start = Callable[..., Running]


@pytest.fixture
def start(coordinator: ScriptedCoordinator, offers: dict[str, Trainer], tmp_path: Path) -> Iterator[Start]:
    """Starts workers, all with one membership and one home."""
    member = coordinator.member()
    started: list[Running] = []

    def run(**options: Any) -> Running:
        made = Running(Home(tmp_path / "home"), options.pop("member", member), offers, **options)
        started.append(made)
        return made

    yield run
    for running in started:
        running.stop()


# Doing what is asked


def test_an_assignment_is_trained_and_its_reply_is_bound_to_it_and_acknowledged(
    coordinator: ScriptedCoordinator, start: Start, model: tuple[Layout, bytes], offers: dict[str, Trainer]
) -> None:
    layout, data = model
    asked = coordinator.assignment(layout, data, 5)
    running = start()
    running.wait_for("attending")
    coordinator.assign(asked)
    running.wait_for("receipt")

    [submission] = coordinator.submissions
    reply = opened(submission, running.member)
    for name in (
        "federation_id",
        "run_id",
        "round",
        "attempt",
        "phase",
        "assignment_id",
        "client_id",
        "base_model",
        "spec",
        "task",
    ):
        assert getattr(reply, name) == getattr(asked, name), name
    assert list(reply.rows) == list(asked.rows)
    assert (reply.payload, reply.payload_bytes) == (digest(submission.payload), len(submission.payload))
    expected = train(
        offers["digits"],
        np.frombuffer(data[len(layout.header) :], dtype=np.float32),
        LocalSgd(steps=1, batch_size=10, learning_rate=0.1),
        seed=7,
        round=5,
        client_id=CLIENT,
    )
    assert submission.payload == to_bytes(update_layout([("loss", layout.size)]), expected.rows["loss"])
    assert dict(reply.losses) == dict(expected.losses)
    assert dict(reply.metrics) == dict(expected.metrics)
    assert reply.samples == expected.samples
    wait_for(lambda: not running.spooled(), "the spool to empty")
    [line] = running.home.receipts.read_text().splitlines()
    assert json.loads(line)["accepted"] is True
    hello = coordinator.hellos[0]
    assert [(offer.task, offer.samples) for offer in hello.tasks] == [("digits", expected.samples)]


def test_an_evaluation_sends_measurements_of_the_splits_that_were_asked_and_no_payload(
    coordinator: ScriptedCoordinator, start: Start, model: tuple[Layout, bytes]
) -> None:
    asked = coordinator.assignment(*model)
    set_work(asked, EvaluateWork(splits=["validation", "test"]))
    del asked.rows[:]
    asked.max_payload_bytes = 0
    coordinator.assign(asked)
    running = start()
    running.wait_for("receipt")
    [submission] = coordinator.submissions
    assert submission.payload == b""
    assert submission.manifest.payload == ""
    assert {name.partition("/")[0] for name in submission.manifest.metrics} == {"validation", "test"}


def test_heartbeats_name_the_assignment_in_work(
    coordinator: ScriptedCoordinator, start: Start, model: tuple[Layout, bytes]
) -> None:
    asked = coordinator.assignment(*model)
    set_train(asked, steps=1_000_000)
    coordinator.assign(asked)
    start()
    wait_for(
        lambda: any(beat.assignment_id == "assignment-0" and beat.progress > 0 for beat in coordinator.heartbeats), ""
    )


def test_an_assignment_that_is_sent_twice_is_done_once(
    coordinator: ScriptedCoordinator, start: Start, model: tuple[Layout, bytes]
) -> None:
    running = start()
    running.wait_for("attending")
    envelope = coordinator.assign(coordinator.assignment(*model))
    coordinator.give(envelope)
    running.wait_for("receipt")
    wait_for(lambda: not running.spooled(), "the spool to empty")
    coordinator.give(envelope)
    coordinator.assign(coordinator.assignment(*model, 1))  # done after the one before, if that were done again
    running.wait_for("receipt", 3)
    assert sorted(submission.manifest.round for submission in coordinator.submissions) == [0, 0, 1]
    assert len(running.events("training")) == 2


def test_a_model_that_is_known_is_not_fetched_again(
    coordinator: ScriptedCoordinator, start: Start, model: tuple[Layout, bytes]
) -> None:
    running = start()
    for number in range(3):
        coordinator.assign(coordinator.assignment(*model, number))
    running.wait_for("receipt", 3)
    assert coordinator.fetches == [0]


def test_a_cancelled_assignment_is_dropped_in_the_middle_of_its_training(
    coordinator: ScriptedCoordinator, start: Start, model: tuple[Layout, bytes]
) -> None:
    endless = coordinator.assignment(*model)
    set_train(endless, steps=1_000_000)
    coordinator.assign(endless)
    running = start()
    running.wait_for("training")
    coordinator.cancel("assignment-0", key=Ed25519PrivateKey.generate())
    coordinator.cancel("assignment-0", client_id="another")
    coordinator.cancel("assignment-0", federation_id="another")
    assert [event["reason"] for event in running.wait_for("cancel-refused", 3)] == [
        "key-unknown",
        "mismatch:client_id",
        "mismatch:federation_id",
    ]
    assert not running.events("cancelled")
    coordinator.cancel("assignment-0")
    running.wait_for("cancelled")
    coordinator.assign(coordinator.assignment(*model, 1))
    running.wait_for("receipt")
    assert [submission.manifest.round for submission in coordinator.submissions] == [1]


def test_training_that_diverges_is_declined(
    coordinator: ScriptedCoordinator, start: Start, model: tuple[Layout, bytes]
) -> None:
    asked = coordinator.assignment(*model)
    set_train(asked, learning_rate=1e30, steps=100)
    coordinator.assign(asked)
    start()
    wait_for(lambda: bool(coordinator.declines), "a decline", 60)
    assert [(said.assignment_id, said.reason) for said in coordinator.declines] == [
        ("assignment-0", "training-diverged")
    ]
    assert coordinator.submissions == []


def test_a_rehearsed_attack_changes_the_update_and_the_reported_loss_alone(
    coordinator: ScriptedCoordinator, start: Start, model: tuple[Layout, bytes], offers: dict[str, Trainer]
) -> None:
    layout, data = model
    coordinator.assign(coordinator.assignment(layout, data))
    running = start(attacker=Attacker(parse_attack("scale=100,bias=1000"), CLIENT))
    running.wait_for("receipt")
    assert running.events("attack")
    honest = train(
        offers["digits"],
        np.frombuffer(data[len(layout.header) :], dtype=np.float32),
        LocalSgd(steps=1, batch_size=10, learning_rate=0.1),
        seed=7,
        round=0,
        client_id=CLIENT,
    )
    [submission] = coordinator.submissions
    _, offset = parse_header(submission.payload)
    sent = np.frombuffer(submission.payload[offset:], dtype=np.float32)
    np.testing.assert_array_equal(sent, honest.rows["loss"] * np.float32(100))
    assert submission.manifest.losses["loss"] == 100 * honest.losses["loss"] + 1000
    assert submission.manifest.metrics["train/loss"] == honest.metrics["train/loss"]


def _sent(submission: Submission) -> np.ndarray[Any, np.dtype[np.float32]]:
    _, offset = parse_header(submission.payload)
    return np.frombuffer(submission.payload[offset:], dtype=np.float32)


def test_a_worker_that_scales_its_loss_trains_on_the_scaled_loss(
    coordinator: ScriptedCoordinator, start: Start, model: tuple[Layout, bytes], offers: dict[str, Trainer]
) -> None:
    layout, data = model
    asked = coordinator.assignment(layout, data)
    set_train(asked, steps=3)
    coordinator.assign(asked)
    running = start(attacker=Attacker(parse_attack("loss-scaling:factor=10"), CLIENT))
    running.wait_for("receipt")
    scaled = train(
        offers["digits"],
        np.frombuffer(data[len(layout.header) :], dtype=np.float32),
        LocalSgd(steps=3, batch_size=10, learning_rate=0.1),
        seed=7,
        round=0,
        client_id=CLIENT,
        targets={"loss": {"loss": 10.0}},
    )
    np.testing.assert_array_equal(_sent(coordinator.submissions[0]), scaled.rows["loss"])
    assert coordinator.submissions[0].manifest.losses["loss"] == 10 * scaled.losses["loss"]


def test_an_attack_on_the_data_is_honest_training_on_the_wrong_labels(
    coordinator: ScriptedCoordinator, tmp_path: Path, model: tuple[Layout, bytes]
) -> None:
    layout, data = model
    flip = parse_attack("label-flip")
    poisoned, _ = prepare_offers(["digits"], SOURCE, device="cpu", threads=1, attack=flip, client_id=CLIENT)
    coordinator.assign(coordinator.assignment(layout, data))
    running = Running(Home(tmp_path / "home"), coordinator.member(), poisoned, Attacker(flip, CLIENT))
    try:
        running.wait_for("receipt")
    finally:
        running.stop()
    splits = task("digits").load(SOURCE)
    wrong = replace(splits, train=replace(splits.train, y=9 - splits.train.y))
    expected = train(
        TorchTrainer(task("digits"), wrong, "cpu", 1),
        np.frombuffer(data[len(layout.header) :], dtype=np.float32),
        LocalSgd(steps=1, batch_size=10, learning_rate=0.1),
        seed=7,
        round=0,
        client_id=CLIENT,
    )
    np.testing.assert_array_equal(_sent(coordinator.submissions[0]), expected.rows["loss"])
    assert dict(coordinator.submissions[0].manifest.losses) == dict(expected.losses)


def test_a_free_rider_sends_noise_as_long_as_the_last_change_of_the_model_and_its_measured_loss(
    coordinator: ScriptedCoordinator, start: Start, model: tuple[Layout, bytes], offers: dict[str, Trainer]
) -> None:
    layout, data = model
    first = np.frombuffer(data[len(layout.header) :], dtype=np.float32)
    second, third = first + np.float32(0.25), first + np.float32(0.75)
    evaluate = coordinator.assignment(layout, to_bytes(layout, second), 1, max_payload_bytes=0)
    evaluate.ClearField("rows")
    set_work(evaluate, EvaluateWork(splits=["test"]))
    coordinator.assign(coordinator.assignment(layout, data, 0))
    coordinator.assign(evaluate)
    coordinator.assign(coordinator.assignment(layout, to_bytes(layout, third), 2))
    running = start(attacker=Attacker(parse_attack("free-rider"), CLIENT))
    running.wait_for("receipt", 3)
    sent = [_sent(coordinator.submissions[number]) for number in (0, 2)]
    assert [float(row.std()) for row in sent] == pytest.approx([1e-3, 0.5], rel=0.05)
    honest = offers["digits"].measure(third, ("train",))
    assert coordinator.submissions[2].manifest.losses["loss"] == honest["train/loss"]


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


# Refusing


def _changed(**changes: Any) -> Callable[[AssignmentManifest], None]:
    def change(manifest: AssignmentManifest) -> None:
        for name, value in changes.items():
            setattr(manifest, name, value)

    return change


def _past(manifest: AssignmentManifest) -> None:
    manifest.deadline.FromDatetime(datetime.now(UTC) - timedelta(seconds=1))


def _other_rows(manifest: AssignmentManifest) -> None:
    manifest.rows.append(Row(name="another", dtype="F32", length=3))


def _other_splits(manifest: AssignmentManifest) -> None:
    set_work(manifest, EvaluateWork(splits=["test", "/etc/passwd"]))
    del manifest.rows[:]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_changed(federation_id="another"), "mismatch:federation_id"),
        (_changed(client_id="hospital-b"), "mismatch:client_id"),
        (_past, "deadline"),
        (_changed(task="os:system"), "task-not-allowed"),
        (_changed(base_model="../../etc/passwd"), "base-model"),
        (_changed(base_model_bytes=10**12), "layout"),
        (_other_rows, "rows"),
        (_changed(max_payload_bytes=10), "limit:payload"),
        (_other_splits, "work"),
        (lambda manifest: manifest.ClearField("kind"), "work"),
    ],
)
def test_an_assignment_that_the_coordinator_signed_is_declined_when_it_is_not_for_us_to_do(
    coordinator: ScriptedCoordinator,
    start: Start,
    model: tuple[Layout, bytes],
    change: Callable[[AssignmentManifest], None],
    reason: str,
) -> None:
    asked = coordinator.assignment(*model)
    change(asked)
    coordinator.assign(asked)
    running = start()
    wait_for(lambda: bool(coordinator.declines), "a decline", 60)
    assert [(said.assignment_id, said.reason) for said in coordinator.declines] == [("assignment-0", reason)]
    assert coordinator.fetches == []
    assert coordinator.submissions == []
    assert not running.events("training")


def _tampered(coordinator: ScriptedCoordinator, manifest: AssignmentManifest) -> SignedEnvelope:
    envelope = seal(manifest, coordinator.signing_key)
    set_train(manifest, learning_rate=10.0)
    return SignedEnvelope(manifest=manifest.SerializeToString(), key_id=envelope.key_id, signature=envelope.signature)


def _other_key(coordinator: ScriptedCoordinator, manifest: AssignmentManifest) -> SignedEnvelope:
    return seal(manifest, Ed25519PrivateKey.generate())


def _claimed_key(coordinator: ScriptedCoordinator, manifest: AssignmentManifest) -> SignedEnvelope:
    honest = seal(manifest, coordinator.signing_key)
    forged = seal(manifest, Ed25519PrivateKey.generate())
    return SignedEnvelope(manifest=forged.manifest, key_id=honest.key_id, signature=forged.signature)


def _unsigned(coordinator: ScriptedCoordinator, manifest: AssignmentManifest) -> SignedEnvelope:
    return SignedEnvelope(manifest=manifest.SerializeToString())


def _another_context(coordinator: ScriptedCoordinator, manifest: AssignmentManifest) -> SignedEnvelope:
    # The bytes of an assignment under a signature that the coordinator's key made for a receipt.
    honest = seal(manifest, coordinator.signing_key)
    signature = coordinator.signing_key.sign(CONTEXTS[ReceiptManifest] + b"\0" + honest.manifest)
    return SignedEnvelope(manifest=honest.manifest, key_id=honest.key_id, signature=signature)


@pytest.mark.parametrize("forge", [_tampered, _other_key, _claimed_key, _unsigned, _another_context])
def test_an_assignment_that_the_coordinator_did_not_sign_is_refused(
    coordinator: ScriptedCoordinator,
    start: Start,
    model: tuple[Layout, bytes],
    forge: Callable[[ScriptedCoordinator, AssignmentManifest], SignedEnvelope],
) -> None:
    coordinator.give(forge(coordinator, coordinator.assignment(*model)))
    running = start()
    wait_for(lambda: bool(coordinator.declines), "a decline", 60)
    assert [said.reason for said in coordinator.declines] == ["signature"]
    assert coordinator.fetches == []
    assert not running.events("training")


def test_a_model_other_than_the_promised_one_is_refused_and_leaves_no_trace(
    coordinator: ScriptedCoordinator, start: Start, model: tuple[Layout, bytes]
) -> None:
    layout, data = model
    other = data[:-1] + bytes([data[-1] ^ 1])
    coordinator.serve_blob = lambda blob, offset: iter([other[offset:]])
    coordinator.assign(coordinator.assignment(layout, data))
    running = start()
    wait_for(lambda: bool(coordinator.declines), "a decline", 60)
    assert [said.reason for said in coordinator.declines] == ["base-model"]
    assert [path for path in running.home.cache.rglob("*") if path.is_file()] == []
    assert not running.events("training")


def test_a_model_of_another_layout_is_refused_even_when_its_size_is_right(
    coordinator: ScriptedCoordinator, start: Start, model: tuple[Layout, bytes]
) -> None:
    layout, _ = model
    names = [tensor.name for tensor in layout.tensors]
    renamed = Layout(
        tuple(Tensor(name[::-1], tensor.shape) for name, tensor in zip(names, layout.tensors, strict=True))
    )
    data = to_bytes(renamed, np.zeros(layout.size, dtype=np.float32))
    coordinator.assign(coordinator.assignment(layout, data))
    start()
    wait_for(lambda: bool(coordinator.declines), "a decline", 60)
    assert [said.reason for said in coordinator.declines] == ["layout"]


@pytest.mark.parametrize("lie", ["key", "signature", "envelope", "payload", "assignment_id", "run_id", "round"])
def test_a_receipt_that_proves_nothing_leaves_the_work_in_the_spool(
    coordinator: ScriptedCoordinator, start: Start, model: tuple[Layout, bytes], lie: str
) -> None:
    def receipt(submission: Submission, honest: ReceiptManifest) -> SignedEnvelope:
        if len(coordinator.submissions) > 1:
            return seal(honest, coordinator.signing_key)
        if lie == "key":
            return seal(honest, Ed25519PrivateKey.generate())
        if lie == "signature":
            sealed = seal(honest, coordinator.signing_key)
            return SignedEnvelope(manifest=sealed.manifest, key_id=sealed.key_id, signature=bytes(64))
        setattr(honest, lie, 77 if lie == "round" else digest(b"another"))
        return seal(honest, coordinator.signing_key)

    coordinator.receipt = receipt
    coordinator.assign(coordinator.assignment(*model))
    running = start()
    running.wait_for("receipt-invalid")
    running.wait_for("receipt")
    first, second = coordinator.submissions
    assert first == second
    assert len(running.home.receipts.read_text().splitlines()) == 1


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
    coordinator.submit_refusals = [HungUp(), Refusal("stopping", "later"), HungUp()]
    coordinator.assign(coordinator.assignment(*model))
    running = start()
    running.wait_for("receipt")
    assert len(coordinator.submissions) == 4
    assert all(submission == coordinator.submissions[0] for submission in coordinator.submissions)
    assert len(running.events("training")) == 1


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


def test_a_signed_receipt_that_comes_with_a_refusal_ends_the_matter(
    coordinator: ScriptedCoordinator, start: Start, model: tuple[Layout, bytes]
) -> None:
    class Refusing(list[Any]):
        def pop(self, index: Any = 0) -> Refusal:
            super().pop(index)
            receipt = coordinator.honest_receipt(coordinator.submissions[-1])
            receipt.accepted, receipt.reason = False, "non-finite"
            return Refusal("non-finite", "NaN", signed=seal(receipt, coordinator.signing_key))

    coordinator.submit_refusals = Refusing([None])
    coordinator.assign(coordinator.assignment(*model))
    running = start()
    [event] = running.wait_for("receipt")
    assert (event["accepted"], event["reason"]) == (False, "non-finite")
    wait_for(lambda: not running.spooled(), "the spool to empty")
    assert json.loads(running.home.receipts.read_text())["reason"] == "non-finite"


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
    assert isinstance(running.failure, SessionError)
    assert "certificate-expired" in str(running.failure)
    assert len(coordinator.hellos) == 2


def test_a_worker_whose_place_is_taken_ends(coordinator: ScriptedCoordinator, start: Start) -> None:
    running = start()
    running.wait_for("attending")
    coordinator.end_stream(Refusal("superseded", "another stream took over"))
    running.thread.join(60)
    assert isinstance(running.failure, SessionError)
    assert "another worker with this client's identity" in str(running.failure)


def test_an_expired_certificate_ends_the_worker_before_it_knocks(
    coordinator: ScriptedCoordinator, start: Start
) -> None:
    running = start(member=coordinator.member(lifetime=timedelta(seconds=-1)))
    running.thread.join(60)
    assert isinstance(running.failure, SessionError)
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
    expected = train(
        offers["digits"],
        np.frombuffer(data[len(layout.header) :], dtype=np.float32),
        LocalSgd(steps=3000, batch_size=10, learning_rate=0.1),
        seed=7,
        round=0,
        client_id=CLIENT,
    )
    [submission] = coordinator.submissions
    assert submission.payload == to_bytes(update_layout([("loss", layout.size)]), expected.rows["loss"])


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
    with pytest.raises(HomeError, match="worker join"):
        Home(tmp_path).require_joined()


# Joining


def test_joining_makes_a_private_directory_that_a_worker_can_run_from(
    coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    home = Home(tmp_path / "deep" / "member")
    enrolled = enroll(home, coordinator.join(), passphrase=b"secret")
    assert files_in(home.directory.parent) == ["member"]
    for name in ("tls.key", "signing.key"):
        path = home.directory / name
        assert path.stat().st_mode & 0o777 == 0o600
        assert b"ENCRYPTED" in path.read_bytes()
    loaded = MemberFiles.load(home.directory, b"secret")
    assert loaded.certificate == enrolled.member.certificate
    assert loaded.client_id == CLIENT
    with pytest.raises(IdentityError, match="passphrase"):
        MemberFiles.load(home.directory, b"wrong")
    with pytest.raises(EnrollmentError, match="holds a membership already"):
        enroll(home, coordinator.join())


@pytest.mark.parametrize("reason", ["join-string-invalid", "join-string-expired", "join-string-used"])
def test_a_refused_join_string_is_explained_and_leaves_nothing_behind(
    coordinator: ScriptedCoordinator, tmp_path: Path, reason: str
) -> None:
    coordinator.enrollment_refusal = Refusal(reason, "no")
    with pytest.raises(EnrollmentError, match=f"{reason}: .*new one"):
        enroll(Home(tmp_path / "member"), coordinator.join())
    assert files_in(tmp_path) == []


def test_a_coordinator_with_another_ca_never_sees_the_secret(coordinator: ScriptedCoordinator, tmp_path: Path) -> None:
    with scripted() as impostor:
        join = coordinator.join()
        diverted = type(join)(impostor.join().address, join.ca_fingerprint, join.secret, join.client_id)
        impostor.enrollment_refusal = Refusal("join-string-invalid", "seen")
        with pytest.raises(EnrollmentError, match="fingerprint"):
            enroll(Home(tmp_path / "member"), diverted)
    assert files_in(tmp_path) == []


@pytest.mark.parametrize(
    ("field", "value"), [("client_id", "hospital-b"), ("federation_id", "another"), ("coordinator_key", b"short")]
)
def test_an_enrollment_that_is_not_what_was_promised_is_refused(
    coordinator: ScriptedCoordinator, tmp_path: Path, field: str, value: Any
) -> None:
    coordinator.change_enrollment = lambda response: setattr(response, field, value)
    with pytest.raises(EnrollmentError, match="not what the join string"):
        enroll(Home(tmp_path / "member"), coordinator.join())
    assert files_in(tmp_path) == []


def test_joining_does_not_touch_a_directory_that_holds_something_else(
    coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    (tmp_path / "diary.txt").write_text("mine")
    with pytest.raises(EnrollmentError, match="not empty"):
        enroll(Home(tmp_path), coordinator.join())
    assert files_in(tmp_path) == ["diary.txt"]


def test_nobody_at_the_address_is_said_so(coordinator: ScriptedCoordinator, tmp_path: Path) -> None:
    coordinator.stop()
    with pytest.raises(EnrollmentError, match="no coordinator answers at 127"):
        enroll(Home(tmp_path / "member"), coordinator.join())
    assert files_in(tmp_path) == []


# Parts


KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
ASSIGNMENT = seal(AssignmentManifest(previous_step="blake3:1"), KEY)


def _reply(name: str, payload: str = "", size: int = 0) -> UpdateManifest:
    return UpdateManifest(assignment_id=name, payload=payload, payload_bytes=size)


def test_the_spool_holds_what_was_added_and_nothing_half_made(tmp_path: Path) -> None:
    directory = tmp_path / "spool"
    spool = Spool(Home(tmp_path), KEY, Events())
    layout = update_layout([("loss", 5)])
    vector = np.arange(5, dtype=np.float32)
    spool.add(_reply("../a"), layout, {"loss": vector}, ASSIGNMENT)
    spool.add(_reply("b"), None, {}, ASSIGNMENT)
    spool.add(_reply("unwanted"), layout, {"loss": vector}, ASSIGNMENT, lambda: False)
    assert len(files_in(directory)) == 5
    # A process that dies at the worst moments leaves these.
    spool._write_payload("c", layout, {"loss": vector})
    (directory / "orphan.payload").write_bytes(b"no envelope")
    (directory / "lonely.envelope").write_bytes(seal(_reply("d", digest(b"no payload"), 10), KEY).SerializeToString())
    (directory / "lonely.assignment").write_bytes(ASSIGNMENT.SerializeToString())
    (directory / "unasked.envelope").write_bytes(seal(_reply("e"), KEY).SerializeToString())

    again = Spool(Home(tmp_path), KEY, Events())
    assert [entry.assignment_id for entry in again.entries()] == ["../a", "b"]
    first = again.entries()[0]
    assert (first.envelope, first.assignment) == (spool.entries()[0].envelope, ASSIGNMENT)
    assert unseal(first.envelope, UpdateManifest, KEY.public_key()) == first.manifest
    assert isinstance(first.payload, Path)
    assert digest(first.payload.read_bytes()) == first.manifest.payload
    np.testing.assert_array_equal(read_vector(first.payload)[1], vector)
    assert len(files_in(directory)) == 5
    again.settle(first)
    assert len(files_in(directory)) == 2
    assert again.renew("../a")
    assert len(files_in(directory)) == 5
    assert not again.renew("b")
    again.remove("../a")
    again.remove("b")
    assert not again.renew("../a")
    assert files_in(directory) == []


def test_a_damaged_spool_is_named(tmp_path: Path) -> None:
    spool = Spool(Home(tmp_path), KEY, Events())
    spool.add(_reply("a"), update_layout([("loss", 2)]), {"loss": np.ones(2, dtype=np.float32)}, ASSIGNMENT)
    [entry] = spool.entries()
    assert isinstance(entry.payload, Path)
    entry.payload.write_bytes(b"1234")
    with pytest.raises(SpoolError, match="move the file away"):
        Spool(Home(tmp_path), KEY, Events())


def test_delays_grow_to_a_ceiling_with_full_jitter_and_start_again_after_success() -> None:
    ceilings = Backoff(lambda low, high: high)
    assert [ceilings.delay() for _ in range(10)] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]
    ceilings.reset()
    assert ceilings.delay() == 0.2
    jittered = Backoff(random.Random(1).uniform)
    drawn = [jittered.delay() for _ in range(2000)]
    assert all(0 <= delay <= 30 for delay in drawn)
    assert min(drawn[10:]) < 1
    assert max(drawn) > 29


def test_the_cache_keeps_the_last_models_and_checks_what_an_earlier_process_left(tmp_path: Path) -> None:
    models = [bytes([number]) * 100 for number in range(5)]
    cache = ModelCache(tmp_path, keep=2)
    for data in models:
        assert cache.get(digest(data), 100, lambda offset, data=data: iter([data[offset:]])).read_bytes() == data
    assert len(files_in(tmp_path)) == 2
    path = cache.get(digest(models[4]), 100, lambda offset: iter([]))
    path.write_bytes(b"rotten" * 20)
    fresh = ModelCache(tmp_path, keep=2)
    assert fresh.get(digest(models[4]), 100, lambda offset: iter([models[4][offset:]])).read_bytes() == models[4]


def test_the_cache_starts_over_when_the_rest_does_not_fit_and_bounds_what_it_takes(tmp_path: Path) -> None:
    data = bytes(range(100))
    cache = ModelCache(tmp_path)
    algorithm, _, value = digest(data).partition(":")
    (tmp_path / f"{algorithm}-{value}.part").write_bytes(b"something else")
    offsets: list[int] = []

    def fetch(offset: int) -> Iterator[bytes]:
        offsets.append(offset)
        yield data[offset:]

    assert cache.get(digest(data), 100, fetch).read_bytes() == data
    assert offsets == [14, 0]

    def endless(offset: int) -> Iterator[bytes]:
        while True:
            yield bytes(1000)

    with pytest.raises(ModelMismatch, match="more than the 100 bytes"):
        cache.get(digest(b"another"), 100, endless)


# With the coordinator as shipped


def test_workers_join_a_real_federation_and_carry_a_run_to_its_end(tmp_path: Path) -> None:
    with federation(tmp_path) as made:
        made.serve()
        word = made.join_string("a")
        made.fedpareto("worker", "join", "--home", str(tmp_path / "a"), standard_input=word)
        made.fedpareto("worker", "join", "--home", str(tmp_path / "again"), code=1, standard_input=word)
        assert not (tmp_path / "again").exists()
        made.join("b")
        workers = [made.work(name, "--part", f"{number}/2") for number, name in enumerate("ab", 1)]
        for worker in workers:
            worker.wait_for_text("attending federation")
        run = made.submit("two-rounds", 'task = "digits"\nrounds = 2\n[selection]\nminimum = 2\n')
        made.wait_completed(run)
        for worker, name in zip(workers, "ab", strict=True):
            worker.wait_for_text("receipt accepted", 4)  # the last one is on its way when the run is over
            assert worker.stop() == 0
            assert worker.text.count(": training\n") == 2
            receipts = [json.loads(line) for line in (tmp_path / name / "receipts.jsonl").read_text().splitlines()]
            assert sum(bool(receipt["payload"]) for receipt in receipts) == 2
            assert all(receipt["accepted"] for receipt in receipts)
            assert files_in(tmp_path / name / "spool") == []


def test_attackers_of_a_real_federation_collude_or_are_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    together = ["--attack", "alie:z=1", "--accomplices", str(tmp_path / "shared")]
    options = {"a": together, "b": together, "c": ["--attack", "nan"]}
    with federation(tmp_path) as made:
        made.serve()
        for name in options:
            made.join(name)
        workers = {
            name: made.work(name, "--part", f"{number}/3", *more)
            for number, (name, more) in enumerate(options.items(), 1)
        }
        for worker in workers.values():
            worker.wait_for_text("attending federation")
        run = made.submit("attacked", 'task = "digits"\nrounds = 2\n[selection]\nminimum = 3\n')
        made.wait_completed(run)
        for name in options:
            assert "REHEARSAL OF AN ATTACK" in workers[name].text
        found = made.query("select client_id, accepted, reason, payload from updates where payload_bytes > 0")
        for client_id, accepted, reason, _ in found:
            assert (bool(accepted), reason) == ((False, "non-finite") if client_id == "c" else (True, ""))
        digests = {name: {row.payload for row in found if row.client_id == name} for name in "ab"}
        assert len(digests["a"]) == 2
        assert digests["a"] == digests["b"]
        for name in "ab":
            assert workers[name].stop() == 0
        assert list((tmp_path / "shared").iterdir()) == []
