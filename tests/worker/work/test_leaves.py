"""What leaves a site: a text of an owner's code does not, and every field that does is in the table of the document."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor

from federation.tasks import DataSource, initial_model, task
from federation.training.trainers import TrainerChoice
from federation.v1 import common_pb2, enrollment_pb2, federation_pb2
from federation.v1.common_pb2 import EvaluateWork, JacobianWork
from federation.vectors import to_bytes
from tests.owners_code.canary import SECRET
from tests.paths import DOCS, OWNERS_CODE
from tests.scripted import ScriptedCoordinator
from tests.worker.scene import Scene, serving
from tests.works import set_work
from worker.leaves import LEAVES
from worker.service import prepare_offers
from worker.site.policy_file import Policy

TASK = "canary:Canary"
PAGE = DOCS / "member" / "your-site.md"

# Where code fails, what the coordinator asks, and the reason that it gets.
FAILURES = [
    ("train ValueError", "train", "failed"),
    ("train SystemExit", "train", "failed"),
    ("train FileNotFoundError", "train", "failed"),
    ("train DataError", "train", "no-data"),
    ("train WorkError", "train", "failed"),
    ("train MemoryError", "train", "memory"),
    ("returns", "train", "trainer:result"),
    ("augment ValueError", "train", "failed"),
    ("losses KeyError", "train", "failed"),
    ("sample OSError", "train", "no-data"),
    ("samples ValueError", "train", "failed"),
    ("buffers ValueError", "train", "failed"),
    ("layout ValueError", "train", "failed"),
    ("evaluate ValueError", "evaluate", "failed"),
    ("scores", "evaluate", "trainer:result"),
    ("correct ValueError", "evaluate", "failed"),
    ("reset ValueError", "metric", "failed"),
    ("update ValueError", "metric", "failed"),
    ("compute ValueError", "metric", "failed"),
    ("values", "metric", "failed"),
    ("gradients WorkError", "gradients", "failed"),
]


@pytest.fixture
def scene(coordinator: ScriptedCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.syspath_prepend(OWNERS_CODE)
    monkeypatch.delenv("CANARY", raising=False)
    offers, _ = prepare_offers(
        [TASK], DataSource(), device="cpu", threads=1, trainers={TASK: TrainerChoice("canary:Trains")}
    )
    layout, vector = initial_model(task(TASK), 3)
    with serving(Scene(coordinator, tmp_path / "home", offers, (layout, to_bytes(layout, vector)), task=TASK)) as made:
        yield made


def asked_for(scene: Scene, kind: str, number: int) -> None:
    if kind == "evaluate":
        scene.evaluate("test", number=number)
        return
    asked = scene.order(number, **({"max_payload_bytes": 0} if kind == "metric" else {}))
    if kind == "metric":
        set_work(
            asked,
            EvaluateWork(splits=["test"], metrics=[common_pb2.Metric(name="scans", better="higher", largest=1.0)]),
        )
        del asked.rows[:]
    if kind == "gradients":
        set_work(asked, JacobianWork(batch_size=10, objectives=["loss"], sketch="exact", budget=1))
        asked.rows[0].name = "jacobian"
    scene.coordinator.assign(asked)


def received(scene: Scene) -> bytes:
    """All that the coordinator got."""
    got = scene.coordinator
    messages = [*got.hellos, *got.heartbeats, *got.declines, *got.left, *got.consents]
    sent = [part for reply in got.submissions for part in (reply.envelope.SerializeToString(), reply.payload)]
    return b"".join([*(message.SerializeToString() for message in messages), *sent])


def test_the_text_of_an_exception_of_own_code_is_in_no_byte_that_leaves_and_whole_in_the_log(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    running = scene.attending()
    for number, (fails, kind, reason) in enumerate(FAILURES):
        monkeypatch.setenv("CANARY", fails)
        caplog.clear()
        asked_for(scene, kind, number)
        _, *told = scene.declined(number + 1)
        assert told[0] == reason, (fails, told)
        where, _, name = fails.partition(" ")
        if name and where not in (
            "samples",
            "buffers",
            "layout",
        ):  # which the check of an assignment asks for, in the thread that attends
            assert f"{name} at canary:" in told[1], (fails, told)
        assert SECRET in caplog.text, fails
        scene.coordinator.open.clear()
    monkeypatch.setenv("CANARY", "")
    asked_for(scene, "train", len(FAILURES))
    running.wait_for("receipt")
    for part in (SECRET, "Erika", "/data/"):
        assert part.encode() not in received(scene)
    assert b"ValueError at canary:" in received(scene)


def test_the_owner_may_let_the_whole_text_out(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.attending(policy=Policy(error_texts=True))
    monkeypatch.setenv("CANARY", "train ValueError")
    scene.assign()
    assert scene.declined()[1:] == ("failed", f"ValueError: cannot read {SECRET}")


# --- the table


def fields_of(descriptor: Descriptor, found: dict[str, list[str]]) -> None:
    """Adds the fields of a message and of those in it."""
    if descriptor.full_name in found or descriptor.full_name.startswith("google."):
        return
    found[descriptor.full_name] = [f"{descriptor.name}.{field.name}" for field in descriptor.fields]
    for field in descriptor.fields:
        if field.message_type is not None:
            fields_of(field.message_type, found)


def test_every_field_that_a_worker_sends_is_in_the_table_of_what_leaves() -> None:
    sent: dict[str, list[str]] = {}
    for method in federation_pb2.DESCRIPTOR.services_by_name["Federation"].methods:
        fields_of(method.input_type, sent)
    signed = (
        common_pb2.ReplyManifest, common_pb2.DeclineManifest, common_pb2.ConsentManifest, common_pb2.WithdrawalManifest
    )  # fmt: skip
    for message in (enrollment_pb2.EnrollRequest, *signed):
        fields_of(message.DESCRIPTOR, sent)
    assert {field for fields in LEAVES.values() for field in fields} == {f for fields in sent.values() for f in fields}


def test_the_document_has_these_rows() -> None:
    (section,) = re.findall(r"^## What leaves\n(.*?)^\*\*What never", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert re.findall(r"^\| \*\*([^*]+)\*\*", section, re.MULTILINE) == list(LEAVES)
