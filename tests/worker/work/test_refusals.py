"""What a worker refuses to do for a coordinator."""

import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.digests import digest
from federation.process.assignment_log import AssignmentFilter
from federation.trust.envelope import CONTEXTS, sign
from federation.v1.common_pb2 import AssignmentManifest, EvaluateWork, ReceiptManifest, Row, SignedEnvelope
from federation.vectors import Layout, Tensor, to_bytes
from tests.harness import wait_for
from tests.scripted import ScriptedCoordinator, Submission
from tests.worker.scene import Scene
from tests.works import set_train, set_work


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
        (_changed(run_id="x" * 201), "limit:manifest"),
        (_past, "deadline"),
        (_changed(round=2**63), "round"),
        (_changed(task="os:system"), "task-not-allowed"),
        (_changed(base_model="../../etc/passwd"), "base-model"),
        (_other_rows, "rows"),
        (_changed(max_payload_bytes=10), "limit:payload"),
        (_other_splits, "work"),
        (lambda manifest: manifest.ClearField("kind"), "work"),
    ],
)
def test_an_assignment_that_the_coordinator_signed_is_declined_when_it_is_not_for_us_to_do(
    scene: Scene, change: Callable[[AssignmentManifest], None], reason: str
) -> None:
    asked = scene.order()
    change(asked)
    assert scene.turned_down(asked)[:2] == ("assignment-0", reason)
    assert scene.coordinator.fetches == []
    assert scene.coordinator.submissions == []
    assert not scene.started[0].events("training")


def test_a_decline_of_another_model_names_the_first_tensor_that_differs_and_reads_its_header_alone(
    scene: Scene,
) -> None:
    ours, told = scene.model[0], threading.Event()
    renamed = Tensor("a\nb", (3, 9))
    layout = Layout((ours.tensors[0], renamed, *ours.tensors[2:]))
    model = to_bytes(layout, np.zeros(layout.size, np.float32))

    def serve(blob: bytes, offset: int) -> Iterator[bytes]:
        yield blob[:5]
        yield blob[5 : len(layout.header)]
        told.wait(60)  # nobody waits for the rest
        yield blob[len(layout.header) :]

    scene.coordinator.serve_blob = serve
    found = scene.turned_down(scene.coordinator.assignment(layout, model))
    told.set()
    there = f"{ours.tensors[1].name!r} {list(ours.tensors[1].shape)}"
    difference = f"tensor 2 is 'a\\nb' [3, 9] in the model of the run, and {there} in this task"
    assert found == ("assignment-0", "layout", f"{difference}: compare the versions of the task")
    scene.coordinator.serve_blob = lambda blob, offset: iter([b"{" * 100])  # no model
    scene.coordinator.assign(scene.coordinator.assignment(layout, model, 1))
    wait_for(lambda: len(scene.coordinator.declines) == 2, "another decline")
    sizes = f"the base model has {len(model)} bytes; a model of this task has {ours.file_bytes}: compare the versions"
    assert scene.coordinator.declines[1].message.startswith(sizes)
    assert not scene.started[0].events("training")


def _tampered(coordinator: ScriptedCoordinator, manifest: AssignmentManifest) -> SignedEnvelope:
    envelope = sign(manifest, coordinator.signing_key)
    set_train(manifest, learning_rate=10.0)
    return SignedEnvelope(manifest=manifest.SerializeToString(), key_id=envelope.key_id, signature=envelope.signature)


def _other_key(coordinator: ScriptedCoordinator, manifest: AssignmentManifest) -> SignedEnvelope:
    return sign(manifest, Ed25519PrivateKey.generate())


def _claimed_key(coordinator: ScriptedCoordinator, manifest: AssignmentManifest) -> SignedEnvelope:
    honest = sign(manifest, coordinator.signing_key)
    forged = sign(manifest, Ed25519PrivateKey.generate())
    return SignedEnvelope(manifest=forged.manifest, key_id=honest.key_id, signature=forged.signature)


def _unsigned(coordinator: ScriptedCoordinator, manifest: AssignmentManifest) -> SignedEnvelope:
    return SignedEnvelope(manifest=manifest.SerializeToString())


def _another_context(coordinator: ScriptedCoordinator, manifest: AssignmentManifest) -> SignedEnvelope:
    # The bytes of an assignment under a signature that the coordinator's key made for a receipt.
    honest = sign(manifest, coordinator.signing_key)
    signature = coordinator.signing_key.sign(CONTEXTS[ReceiptManifest] + b"\0" + honest.manifest)
    return SignedEnvelope(manifest=honest.manifest, key_id=honest.key_id, signature=signature)


@pytest.mark.parametrize("forge", [_tampered, _other_key, _claimed_key, _unsigned, _another_context])
def test_an_assignment_that_the_coordinator_did_not_sign_is_refused(
    scene: Scene,
    caplog: pytest.LogCaptureFixture,
    forge: Callable[[ScriptedCoordinator, AssignmentManifest], SignedEnvelope],
) -> None:
    scene.coordinator.give(forge(scene.coordinator, scene.order()))
    with caplog.filtering(AssignmentFilter()):
        running = scene.start()
        claimed, reason, _ = scene.declined()
    assert reason == "signature"
    (line,) = (record for record in caplog.records if "declined, signature" in record.message)
    assert vars(line)["assignment_id"] == claimed
    assert scene.coordinator.fetches == []
    assert not running.events("training")


def test_a_model_other_than_the_promised_one_is_refused_and_leaves_no_trace(scene: Scene) -> None:
    _, data = scene.model
    other = data[:-1] + bytes([data[-1] ^ 1])
    scene.coordinator.serve_blob = lambda blob, offset: iter([other[offset:]])
    assert scene.turned_down(scene.order())[1] == "base-model"
    assert scene.models() == []
    assert not scene.started[0].events("training")


def test_a_model_of_another_layout_is_refused_even_when_its_size_is_right(scene: Scene) -> None:
    layout, _ = scene.model
    renamed = Layout(tuple(Tensor(tensor.name[::-1], tensor.shape) for tensor in layout.tensors))
    data = to_bytes(renamed, np.zeros(layout.size, dtype=np.float32))
    first = layout.tensors[0]
    difference = f"tensor 1 is {first.name[::-1]!r} {list(first.shape)} in the model of the run, and {first.name!r}"
    declined = scene.turned_down(scene.coordinator.assignment(layout, data))
    assert declined[1:] == (
        "layout",
        f"{difference} {list(first.shape)} in this task: compare the versions of the task",
    )


@pytest.mark.parametrize("lie", ["key", "signature", "envelope", "payload", "assignment_id", "run_id", "round"])
def test_a_receipt_that_proves_nothing_leaves_the_work_in_the_spool(scene: Scene, lie: str) -> None:
    def receipt(submission: Submission, honest: ReceiptManifest) -> SignedEnvelope:
        if len(scene.coordinator.submissions) > 1:
            return sign(honest, scene.coordinator.signing_key)
        if lie == "key":
            return sign(honest, Ed25519PrivateKey.generate())
        if lie == "signature":
            signed = sign(honest, scene.coordinator.signing_key)
            return SignedEnvelope(manifest=signed.manifest, key_id=signed.key_id, signature=bytes(64))
        setattr(honest, lie, 77 if lie == "round" else digest(b"another"))
        return sign(honest, scene.coordinator.signing_key)

    scene.coordinator.receipt = receipt
    running = scene.worked()
    assert running.events("receipt-invalid")
    first, second = scene.coordinator.submissions
    assert first == second
    assert len(running.home.receipts.read_text().splitlines()) == 1
