"""What a worker does not do although its coordinator signed it, and what does not reach its owner."""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.digests import digest
from federation.sketches import sketch
from federation.training.trainer import Trainer
from federation.trust.envelope import seal
from federation.trust.key_chain import CoordinatorKeys
from federation.v1.common_pb2 import AssignmentManifest, JacobianWork, ObjectiveWeight, Row, Target, TrainWork
from federation.v1.federation_pb2 import AttendResponse
from federation.vectors import Layout, Tensor, update_layout
from federation.work.base import Shape
from federation.work.site import Site
from tests.harness import wait_for
from tests.scripted import CLIENT, FEDERATION, ScriptedCoordinator
from tests.worker import scene as worker_stage
from tests.worker.working import Running
from tests.works import set_train, set_work
from worker.events import Events
from worker.home import WorkerHome
from worker.site.assignments import Declined, check_assignment
from worker.site.policy import Policy, PolicyError, WorkLimits

LAYOUT = Layout((Tensor("weight", (4,)),))


class Trained:
    shape, samples = Shape(LAYOUT, ("left", "right"), ("left", "right")), 50
    buffers: frozenset[str] = frozenset()


ALLOWED: Any = {"digits": Trained()}


# --- the policy


def test_a_worker_without_a_policy_file_has_the_defaults(tmp_path: Path) -> None:
    assert Policy.load(tmp_path / "policy.toml") == Policy()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("restore = 'never'", "restore: Input should be 'accept' or 'ask'"),
        ("[limits]\nsample = 3", "limits.sample: no such key"),
        ("[limits]\nsamples = 0", "limits.samples: Input should be greater than or equal to 1; got 0"),
        ("[limits]\nsamples = '3'", "limits.samples: Input should be a valid integer; got '3'"),
        ("[limits]\nhours = nan", "limits.hours: Input should be a finite number"),
        ("limits = 3", "limits: Input should be a valid dictionary"),
        ("tasks = 'digits'", "tasks: Input should be a valid tuple"),
        ("[limits]\nmembers = 0", "limits.members: Input should be greater than or equal to 1; got 0"),
        ("restore", "is not a TOML document"),
        ("\xff", "is not a TOML document"),
    ],
)
def test_a_policy_that_cannot_be_used_is_refused_with_the_key(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(PolicyError) as caught:
        Policy.load(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_policy_is_read_with_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text("restore = 'ask'\n[limits]\nsamples = 32\nhours = 1\n")
    assert Policy.load(path) == Policy(restore="ask", limits=WorkLimits(samples=32, hours=1.0))


def test_a_task_that_the_policy_does_not_name_cannot_be_offered() -> None:
    Policy().must_allow(["digits", "mnist"])
    Policy(tasks=("digits",)).must_allow(["digits"])
    with pytest.raises(PolicyError, match=r"allows the tasks digits; --task names 'mnist'"):
        Policy(tasks=("digits",)).must_allow(["digits", "mnist"])


# --- what is declined


@pytest.fixture(scope="module")
def signer() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


def manifest(**changes: Any) -> AssignmentManifest:
    made = AssignmentManifest(
        federation_id=FEDERATION,
        run_id="run-1",
        round=3,
        assignment_id="a",
        client_id=CLIENT,
        base_model=digest(b"model"),
        base_model_bytes=LAYOUT.file_bytes,
        task="digits",
        rows=[Row(name="loss", dtype="F32", length=LAYOUT.size)],
        max_payload_bytes=10_000,
    )
    set_work(made, TrainWork(steps=1, batch_size=10, learning_rate=0.1))
    made.deadline.FromDatetime(datetime.now(UTC) + timedelta(hours=1))
    set_train(made, **changes)
    return made


def reason(
    signer: Ed25519PrivateKey,
    asked: AssignmentManifest,
    newest: int | None = None,
    site: Site = Site(),  # noqa: B008 - frozen
    **limits: Any,
) -> str:
    """Why an assignment is declined; empty when it is not."""

    class Member:
        federation_id, client_id = FEDERATION, CLIENT
        coordinator = CoordinatorKeys(FEDERATION, signer.public_key())

    try:
        check_assignment(
            seal(asked, signer),
            member=Member(),  # type: ignore[arg-type]
            offers=ALLOWED,
            limits=WorkLimits(**limits),
            site=site,
            newest_round=lambda run: newest,
            now=datetime.now(UTC),
        )
    except Declined as declined:
        return declined.reason
    return ""


def with_rows(count: int) -> AssignmentManifest:
    asked = manifest()
    del asked.rows[:]
    asked.max_payload_bytes = 1 << 30
    for number in range(count):
        asked.rows.append(Row(name=f"row-{number}", dtype="F32", length=LAYOUT.size))
        weights = [ObjectiveWeight(objective="left", weight=1.0)]
        set_train(asked, targets=[Target(row=f"row-{number}", weights=weights)])
    return asked


def with_deadline(seconds: int) -> AssignmentManifest:
    asked = manifest()
    asked.deadline.seconds = seconds
    return asked


def gradients(batch_size: int) -> AssignmentManifest:
    asked = manifest()
    del asked.rows[:]
    set_work(asked, JacobianWork(batch_size=batch_size, objectives=("left", "right"), sketch="exact", budget=1))
    rows = sketch("exact", d=LAYOUT.size, objectives=("left", "right")).rows(("left", "right"))
    asked.rows.extend(Row(name=name, dtype="F32", length=length) for name, length in rows)
    return asked


def asked_of(members: int) -> AssignmentManifest:
    asked = manifest()
    asked.members = members
    return asked


MOVED = LAYOUT.file_bytes + update_layout([("loss", LAYOUT.size, "F32")]).file_bytes  # the model and the update


@pytest.mark.parametrize(
    ("asked", "limits", "expected"),
    [
        (manifest(), {}, ""),
        (with_rows(2), {}, ""),
        (with_rows(3), {}, "limit:rows"),
        (with_rows(2000), {}, "limit:rows"),
        (with_rows(3), {"rows": 3}, ""),
        (manifest(batch_size=1), {}, "limit:samples"),
        (manifest(batch_size=7), {}, "limit:samples"),
        (manifest(batch_size=8), {}, ""),
        (manifest(batch_size=1, steps=8), {}, ""),
        (manifest(batch_size=0), {}, ""),
        (manifest(batch_size=0), {"samples": 51}, "limit:samples"),
        (manifest(batch_size=4, steps=0, epochs=1), {"samples": 50}, ""),
        (gradients(7), {}, "limit:samples"),
        (gradients(8), {}, ""),
        (manifest(steps=4_294_967_295), {}, "limit:steps"),
        (manifest(steps=0, epochs=200_001), {}, "limit:steps"),
        (manifest(steps=0, epochs=200_000), {}, ""),
        (manifest(steps=1), {"steps": 2}, "limit:steps"),
        (manifest(steps=2), {"steps": 2}, ""),
        (manifest(steps=0, epochs=3), {"max_epochs": 2.5}, "limit:epochs"),
        (manifest(steps=0, epochs=2), {"max_epochs": 2}, ""),
        (manifest(steps=16), {"max_epochs": 3}, "limit:epochs"),
        (manifest(steps=15), {"max_epochs": 3}, ""),
        (gradients(8), {"max_epochs": 0.1}, ""),
        (manifest(), {"max_bytes": MOVED - 1}, "limit:bytes"),
        (manifest(), {"max_bytes": MOVED}, ""),
        (asked_of(2), {"members": 3}, "limit:members"),
        (asked_of(3), {"members": 3}, ""),
        (with_deadline(2**62), {}, "deadline"),
        (with_deadline(-(2**62)), {}, "deadline"),
    ],
)
def test_work_beyond_the_bounds_of_its_owner_is_declined_with_its_reason(
    signer: Ed25519PrivateKey, asked: AssignmentManifest, limits: dict[str, Any], expected: str
) -> None:
    assert reason(signer, asked, **limits) == expected


def test_rounds_of_a_run_go_forward_only(signer: Ed25519PrivateKey) -> None:
    assert reason(signer, manifest(), newest=4) == "round"
    assert reason(signer, manifest(), newest=3) == ""
    assert reason(signer, manifest(), newest=4, rounds_forward=False) == ""


def test_an_assignment_is_no_place_for_a_book(signer: Ed25519PrivateKey) -> None:
    asked = manifest()
    asked.spec = "x" * (512 << 10)
    assert reason(signer, asked) == "limit:manifest"


# --- a worker that works


offers = worker_stage.offers
model = worker_stage.model
coordinator = worker_stage.coordinator


Start = Callable[..., Running]


@pytest.fixture
def start(coordinator: ScriptedCoordinator, offers: dict[str, Trainer], tmp_path: Path) -> Iterator[Start]:
    member = coordinator.member()
    started: list[Running] = []

    def run(**limits: Any) -> Running:
        policy = Policy(limits=WorkLimits(**limits))
        started.append(Running(WorkerHome(tmp_path / "home"), member, offers, policy=policy, uniform=lambda *_: 0.01))
        return started[-1]

    yield run
    for running in started:
        running.stop()


def long_work(coordinator: ScriptedCoordinator, model: tuple[Layout, bytes], number: int = 0) -> AssignmentManifest:
    asked = coordinator.assignment(*model, number)
    set_train(asked, steps=1_000_000)
    return asked


def test_the_deadline_ends_work_and_the_next_assignment_is_taken(
    coordinator: ScriptedCoordinator, start: Start, model: tuple[Layout, bytes]
) -> None:
    running = start()
    running.wait_for("attending")
    asked = long_work(coordinator, model)
    asked.deadline.FromDatetime(datetime.now(UTC) + timedelta(seconds=1.5))
    coordinator.assign(asked)
    running.wait_for("training")
    coordinator.assign(coordinator.assignment(*model, 1))
    running.wait_for("receipt")
    assert [(event["assignment_id"], event["reason"]) for event in running.events("declined")] == [
        ("assignment-0", "deadline")
    ]
    assert wait_for(lambda: coordinator.declines, "the decline")[0].reason == "deadline"


def test_work_whose_deadline_passed_while_the_coordinator_was_away_is_dropped(
    coordinator: ScriptedCoordinator, start: Start, model: tuple[Layout, bytes]
) -> None:
    running = start()
    running.wait_for("attending")
    late, waiting = long_work(coordinator, model), coordinator.assignment(*model, 1)
    for asked in (late, waiting):
        asked.deadline.FromDatetime(datetime.now(UTC) + timedelta(seconds=1.5))
        coordinator.assign(asked)
    running.wait_for("training")
    coordinator.stop()
    running.wait_for("declined", 2)
    coordinator.open.clear()
    coordinator.start()
    coordinator.assign(coordinator.assignment(*model, 2))
    running.wait_for("receipt")
    assert [event["assignment_id"] for event in running.events("training")] == ["assignment-0", "assignment-2"]


def test_work_ends_after_the_hours_that_the_owner_allows(
    coordinator: ScriptedCoordinator, start: Start, model: tuple[Layout, bytes]
) -> None:
    running = start(hours=0.0002)
    coordinator.assign(long_work(coordinator, model))
    assert running.wait_for("declined")[0]["reason"] == "limit:hours"


@pytest.mark.full
def test_a_flood_of_assignments_is_declined_beyond_a_bound_and_does_not_grow_the_worker(
    coordinator: ScriptedCoordinator, start: Start, model: tuple[Layout, bytes]
) -> None:
    running = start(waiting=5)
    running.wait_for("attending")
    coordinator.assign(long_work(coordinator, model))
    running.wait_for("training")
    padding = [ObjectiveWeight(objective="loss", weight=1.0)]
    for number in range(1, 1001):
        asked = coordinator.assignment(*model, number)
        asked.spec = "x" * 20_000  # 20 MB in all
        set_train(asked, targets=[Target(row="loss", weights=padding)])
        coordinator._say(AttendResponse(assignment=seal(asked, coordinator.signing_key)))
    wait_for(lambda: len(coordinator.declines) == 995, "995 declines")
    assert len(running.worker._runner._waiting) == 5
    assert {decline.reason for decline in coordinator.declines} == {"limit:waiting"}
    assert len(running.events("declined")) == 1, "the owner hears of a flood once"
    for number in range(6):
        coordinator.cancel(f"assignment-{number}")
    running.wait_for("cancelled", 6)
    coordinator.assign(coordinator.assignment(*model, 2000))
    running.wait_for("receipt")


NASTY = "\x1b[2J\x1b]0;title\x07one\nCRITICAL forged line\r\u202egnp.exe\u2066"


def test_nothing_that_the_coordinator_sends_moves_the_cursor_or_forges_a_line(
    coordinator: ScriptedCoordinator, start: Start, model: tuple[Layout, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    running = start()
    running.wait_for("attending")
    with caplog.at_level(logging.INFO):
        asked = coordinator.assignment(*model, assignment_id=NASTY, run_id=NASTY)
        coordinator.assign(asked)
        running.wait_for("receipt")
        coordinator.assign(coordinator.assignment(*model, 1, task=NASTY, assignment_id=NASTY + "2"))
        running.wait_for("declined")
        coordinator.assign(long_work(coordinator, model, 2))
        running.wait_for("training", 2)
        coordinator.cancel("assignment-2", reason=NASTY)
        running.wait_for("cancelled")
    lines = [record.getMessage() for record in caplog.records if record.name == "fedpareto.worker"]
    assert any(r"\x1b[2J" in line for line in lines)
    assert all(line.isprintable() for line in lines)
    for line in running.out.getvalue().splitlines():
        assert line.isprintable()
        assert all(value.isprintable() for value in json.loads(line).values() if isinstance(value, str))


def test_events_on_a_full_disk_stop_nothing() -> None:
    told = False
    with suppress(OSError), Path("/dev/full").open("w") as full:  # closing it fails
        Events(full).tell("attending", "a line")
        told = True
    assert told
