"""What a worker does not do although its coordinator signed it, and what does not reach its owner."""

import json
import logging
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from federation.monitoring.events import Events
from federation.trust.envelope import sign
from federation.v1.common_pb2 import AssignmentManifest, ObjectiveWeight, Row, Target
from federation.v1.federation_pb2 import AttendResponse
from federation.vectors import update_layout
from federation.work.site import Site
from tests.harness import wait_for
from tests.worker.scene import ALLOWED, LAYOUT, Scene, gradients, reason, training
from tests.works import set_train
from worker.site.hello import Introduction
from worker.site.policy_file import Policy, PolicyError, WorkLimits

ENDLESS = 1_000_000  # steps

# --- the policy


def test_a_worker_without_a_policy_file_has_the_defaults(tmp_path: Path) -> None:
    assert Policy.load(tmp_path / "policy.toml") == Policy()


def test_a_policy_is_read_with_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text("restore = 'ask'\n[limits]\nsamples = 32\nhours = 1\n")
    assert Policy.load(path) == Policy(restore="ask", limits=WorkLimits(samples=32, hours=1.0))


def test_a_number_that_no_message_holds_is_told_as_the_largest_one() -> None:
    policy = Policy.model_validate({"limits": {"max_bytes": 10**30}, "secure": {"sessions": 10**30}})
    hello = Introduction({}, "cpu", Site(), policy).hello()
    assert (hello.limits.max_bytes, hello.limits.samples) == (2**53, 8)
    left = Introduction(
        {"digits": ALLOWED["digits"]}, "cpu", Site(policies={"digits": policy.secure.of("digits")}), policy
    )
    assert [sessions.training for sessions in left.left_beside("digits")] == [2**53]


def test_a_task_that_the_policy_does_not_name_cannot_be_offered() -> None:
    Policy().check_allows(["digits", "mnist"])
    Policy(tasks=("digits",)).check_allows(["digits"])
    with pytest.raises(PolicyError, match=r"allows the tasks digits; --task or worker.toml names 'mnist'"):
        Policy(tasks=("digits",)).check_allows(["digits", "mnist"])


# --- what is declined


def with_rows(count: int) -> AssignmentManifest:
    asked = training()
    del asked.rows[:]
    asked.max_payload_bytes = 1 << 30
    weights = [ObjectiveWeight(objective="left", weight=1.0)]
    names = [f"row-{number}" for number in range(count)]
    asked.rows.extend(Row(name=name, dtype="F32", length=LAYOUT.size) for name in names)
    set_train(asked, targets=[Target(row=name, weights=weights) for name in names])
    return asked


def changed(**fields: Any) -> AssignmentManifest:
    asked = training()
    asked.MergeFrom(AssignmentManifest(**fields))
    return asked


MOVED = LAYOUT.file_bytes + update_layout([("loss", LAYOUT.size, "F32")]).file_bytes  # the model and the update


@pytest.mark.parametrize(
    ("asked", "limits", "expected"),
    [
        (training(), {}, ""),
        (with_rows(2), {}, ""),
        (with_rows(3), {}, "limit:rows"),
        (with_rows(2000), {}, "limit:rows"),
        (with_rows(3), {"rows": 3}, ""),
        (training(batch_size=1), {}, "limit:samples"),
        (training(batch_size=7), {}, "limit:samples"),
        (training(batch_size=8), {}, ""),
        (training(batch_size=1, steps=8), {}, ""),
        (training(batch_size=0), {}, ""),
        (training(batch_size=0), {"samples": 51}, "limit:samples"),
        (training(batch_size=4, steps=0, epochs=1), {"samples": 50}, ""),
        (gradients(7), {}, "limit:samples"),
        (gradients(8), {}, ""),
        (training(steps=2_147_483_647), {}, "limit:steps"),
        (training(steps=2_147_483_648), {}, "work"),
        (training(steps=0, epochs=200_001), {}, "limit:steps"),
        (training(steps=0, epochs=200_000), {}, ""),
        (training(steps=1), {"steps": 2}, "limit:steps"),
        (training(steps=2), {"steps": 2}, ""),
        (training(steps=0, epochs=3), {"max_epochs": 2.5}, "limit:epochs"),
        (training(steps=0, epochs=2), {"max_epochs": 2}, ""),
        (training(steps=16), {"max_epochs": 3}, "limit:epochs"),
        (training(steps=15), {"max_epochs": 3}, ""),
        (gradients(8), {"max_epochs": 0.1}, ""),
        (training(), {"max_bytes": MOVED - 1}, "limit:bytes"),
        (training(), {"max_bytes": MOVED}, ""),
        (changed(members=2), {"members": 3}, "limit:members"),
        (changed(members=3), {"members": 3}, ""),
        (changed(deadline=Timestamp(seconds=2**62)), {}, "deadline"),
        (changed(deadline=Timestamp(seconds=-(2**62))), {}, "deadline"),
    ],
)
def test_work_beyond_the_bounds_of_its_owner_is_declined_with_its_reason(
    asked: AssignmentManifest, limits: dict[str, Any], expected: str
) -> None:
    assert reason(asked, **limits) == expected


def test_rounds_of_a_run_go_forward_only() -> None:
    assert reason(training(), newest=4) == "round"
    assert reason(training(), newest=3) == ""
    assert reason(training(), newest=4, rounds_forward=False) == ""


def test_an_assignment_is_no_place_for_a_book() -> None:
    assert reason(changed(spec="x" * (512 << 10))) == "limit:manifest"


# --- a worker that works


def policy(**limits: Any) -> Policy:
    return Policy(limits=WorkLimits(**limits))


def test_the_deadline_ends_work_and_the_next_assignment_is_taken(scene: Scene) -> None:
    running = scene.attending()
    asked = scene.order()
    set_train(asked, steps=ENDLESS)
    asked.deadline.FromDatetime(datetime.now(UTC) + timedelta(seconds=1.5))
    scene.coordinator.assign(asked)
    running.wait_for("training")
    scene.receipts(1, 1)
    [event] = running.events("declined")
    assert (event["assignment_id"], event["reason"]) == scene.declined()[:2] == ("assignment-0", "deadline")


@pytest.mark.full
def test_work_whose_deadline_passed_while_the_coordinator_was_away_is_dropped(scene: Scene) -> None:
    running = scene.attending()
    late, waiting = scene.order(), scene.order(1)
    set_train(late, steps=ENDLESS)
    # Of both: otherwise the second one could begin when the first one ends.
    soon = datetime.now(UTC) + timedelta(seconds=1.5)
    for asked in (late, waiting):
        asked.deadline.FromDatetime(soon)
        scene.coordinator.assign(asked)
    running.wait_for("training")
    scene.coordinator.stop()
    running.wait_for("declined", 2)
    scene.coordinator.open.clear()
    scene.coordinator.start()
    scene.receipts(1, 2)
    assert [event["assignment_id"] for event in running.events("training")] == ["assignment-0", "assignment-2"]


def test_work_ends_after_the_hours_that_the_owner_allows(scene: Scene) -> None:
    running = scene.start(policy=policy(hours=0.0002))
    scene.train(steps=ENDLESS)
    assert running.wait_for("declined")[0]["reason"] == "limit:hours"


@pytest.mark.full
def test_a_flood_of_assignments_is_declined_beyond_a_bound_and_does_not_grow_the_worker(scene: Scene) -> None:
    running = scene.attending(policy=policy(waiting=5))
    scene.train(steps=ENDLESS)
    running.wait_for("training")
    padding = [ObjectiveWeight(objective="loss", weight=1.0)]
    for number in range(1, 1001):
        asked = scene.order(number)
        asked.spec = "x" * 20_000  # 20 MB in all
        set_train(asked, targets=[Target(row="loss", weights=padding)])
        scene.coordinator._say(AttendResponse(assignment=sign(asked, scene.coordinator.signing_key)))
    wait_for(lambda: len(scene.coordinator.declines) == 995, "995 declines")
    assert len(running.worker._runner._waiting) == 5
    assert {decline.reason for decline in scene.coordinator.declines} == {"limit:waiting"}
    assert len(running.events("declined")) == 1, "the owner hears of a flood once"
    for number in range(6):
        scene.coordinator.cancel(f"assignment-{number}")
    running.wait_for("cancelled", 6)
    scene.receipts(1, 2000)


NASTY = "\x1b[2J\x1b]0;title\x07one\nCRITICAL forged line\r\u202egnp.exe\u2066"


def test_nothing_that_the_coordinator_sends_moves_the_cursor_or_forges_a_line(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    running = scene.attending()
    with caplog.at_level(logging.INFO):
        scene.receipts(1, assignment_id=NASTY, run_id=NASTY)
        scene.assign(1, task=NASTY, assignment_id=NASTY + "2")
        running.wait_for("declined")
        scene.train(2, steps=ENDLESS)
        running.wait_for("training", 2)
        scene.coordinator.cancel("assignment-2", reason=NASTY)
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
