"""A worker and work on several objectives: what it declines, what it fetches, and the bytes that it makes again."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from federation.digests import digest
from federation.sketches import sketch
from federation.sketches.svd import TwoWaySvd
from federation.spec.train_section import LocalSgd
from federation.tasks import DataSource, Part, initial_model, task
from federation.training.torch_trainer import TorchTrainer
from federation.training.trainer import Trainer
from federation.v1.common_pb2 import AssignmentManifest, Input, JacobianWork, ObjectiveWeight, ResidualWork, Row, Target
from federation.vectors import Layout, to_bytes, update_layout
from tests import trained
from tests.harness import wait_for
from tests.scripted import ScriptedCoordinator, Submission
from tests.worker.scene import Scene, serving
from tests.works import set_train, set_work
from worker.service import prepare_offers

SOURCE = DataSource(part=Part(0, 20))
BOTH = ("left", "right")
WORK = LocalSgd(steps=2, batch_size=10, learning_rate=0.1)
Prepared = dict[tuple[str, ...], dict[str, Trainer]]


@pytest.fixture(scope="module")
def offers() -> Prepared:
    """What a worker offers that serves both objectives, and one that serves the left alone."""
    return {
        serves: prepare_offers(["two-digits"], SOURCE, device="cpu", threads=1, objectives={"two-digits": serves})[0]
        for serves in (BOTH, ("left",))
    }


@pytest.fixture(scope="module")
def model() -> tuple[Layout, bytes]:
    layout, vector = initial_model(task("two-digits"), 3)
    return layout, to_bytes(layout, vector)


@pytest.fixture
def scene(
    coordinator: ScriptedCoordinator, offers: Prepared, model: tuple[Layout, bytes], tmp_path: Path
) -> Iterator[Scene]:
    with serving(Scene(coordinator, tmp_path / "home", offers[BOTH], model, task="two-digits")) as made:
        yield made


def jacobian(name: str = "count", objectives: tuple[str, ...] = BOTH, **changes: Any) -> JacobianWork:
    asked: dict[str, Any] = {"batch_size": 10, "sketch": name, "budget": 0.5, "measure": True, **changes}
    return JacobianWork(objectives=objectives, **asked)


def asking(
    scene: Scene, work: JacobianWork | ResidualWork, number: int = 0, inputs: Sequence[Input] = ()
) -> AssignmentManifest:
    """An assignment with the rows, and as many bytes, as this work gives; the reference is offered as a blob."""
    asked = work.jacobian if isinstance(work, ResidualWork) else work
    name = asked.sketch if asked.sketch in ("svd", "svd-two-way", "exact", "count") else "count"
    budget = asked.budget if 0 < asked.budget < 10 else 0.5
    made = sketch(name, d=scene.model[0].size, objectives=BOTH, budget=budget)
    manifest = scene.order(number)
    del manifest.rows[:]
    set_work(manifest, work)
    manifest.inputs.extend(inputs)
    if isinstance(work, ResidualWork):
        rows = [("residual", len(asked.objectives) * max(1, len(work.objectives)))]
    else:
        rows = list(made.layout(len(asked.objectives) or 1))
    manifest.rows.extend(Row(name=row, dtype="F32", length=length) for row, length in rows)
    manifest.max_payload_bytes = update_layout(rows).file_bytes
    return manifest


def second_leg(scene: Scene) -> list[Input]:
    """The input of a residual: a well-formed reference in the coordinator's store."""
    made = sketch("svd-two-way", d=scene.model[0].size, objectives=BOTH, budget=0.5)
    assert isinstance(made, TwoWaySvd)
    layout = update_layout(made.reference_layout(2))
    blob = to_bytes(layout, np.random.default_rng(0).standard_normal(layout.size).astype(np.float32))
    scene.coordinator.blobs[digest(blob)] = blob
    return [Input(name="reference", digest=digest(blob), size=len(blob))]


RESIDUAL = ResidualWork(jacobian=jacobian("svd-two-way"), objectives=BOTH)


def submitted(scene: Scene, count: int = 1) -> list[Submission]:
    wait_for(lambda: len(scene.coordinator.submissions) >= count, f"{count} replies", 60)
    return scene.coordinator.submissions


def check_declines(scene: Scene, asked: AssignmentManifest, reason: str, words: str) -> None:
    """The worker declines, with words in its message, before it has fetched anything."""
    _, told, message = scene.turned_down(asked)
    assert (told, words in message) == (reason, True), message
    assert scene.coordinator.fetches == []


# --- what it declines


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "sketchy"}, "no sketch 'sketchy'"),
        ({"budget": 0.0}, "budget must be finite and positive"),
        ({"budget": float("nan")}, "budget must be finite and positive"),
        ({"budget": -1.0}, "budget must be finite and positive"),
        ({"budget": 1e308}, ""),
        ({"objectives": ("left", "middle")}, "gradients of ['left', 'middle'] are asked for"),
        ({"objectives": ("right", "left")}, "this client serves ['left', 'right']"),
        ({"objectives": ("left", "left")}, "this client serves ['left', 'right']"),
        ({"objectives": ()}, "gradients of [] are asked for"),
    ],
)
def test_gradients_that_make_no_sense_are_declined(scene: Scene, changes: dict[str, Any], words: str) -> None:
    check_declines(scene, asking(scene, jacobian(**changes)), "work", words)


def test_gradients_of_an_objective_that_is_not_served_are_declined(scene: Scene, offers: Prepared) -> None:
    scene.offers = offers[("left",)]
    words = "gradients of ['left', 'right'] are asked for; this client serves ['left']"
    check_declines(scene, asking(scene, jacobian()), "work", words)


def target(row: str, **weights: float) -> Target:
    return Target(row=row, weights=[ObjectiveWeight(objective=name, weight=value) for name, value in weights.items()])


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ([target("loss", middle=1.0)], "row 'loss' descends ['middle']; this client serves left, right"),
        ([target("loss", left=float("nan"))], "weights that are no numbers"),
        ([target("loss", left=0.5, right=float("inf"))], "weights that are no numbers"),
        ([target("loss")], "row 'loss' descends []"),
        ([target("left", left=1.0), target("left", right=1.0)], "a row of the update is named twice"),
        (
            [Target(row="loss", weights=[ObjectiveWeight(objective="left", weight=value) for value in (1.0, 2.0)])],
            "a row of the update names an objective twice",
        ),
    ],
)
def test_targets_that_make_no_sense_are_declined(scene: Scene, targets: list[Target], words: str) -> None:
    asked = scene.order()
    set_train(asked, targets=targets)
    check_declines(scene, asked, "work", words)


def test_rows_that_are_not_those_of_the_targets_are_declined(scene: Scene) -> None:
    asked = scene.order()  # one row, "loss"
    set_train(asked, targets=[target("left", left=1.0), target("right", right=1.0)])
    check_declines(scene, asked, "rows", "")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"objectives": ("left", "middle")}, "the reference is of ['left', 'middle']"),
        ({"objectives": ("left",) * 1000}, "the reference is of ['left', 'left'"),
        ({"objectives": ()}, "the reference is of []"),
        ({"jacobian": JacobianWork(batch_size=10, objectives=BOTH, sketch="count", budget=0.5)}, "no second leg"),
    ],
)
def test_a_second_leg_that_makes_no_sense_is_declined_before_anything_is_fetched(
    scene: Scene, changes: dict[str, Any], words: str
) -> None:
    fields: dict[str, Any] = {"jacobian": jacobian("svd-two-way"), "objectives": BOTH}
    work = ResidualWork(**(fields | changes))
    check_declines(scene, asking(scene, work, inputs=second_leg(scene)), "work", words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"digest": "../../etc/passwd"}, "etc/passwd"),
        ({"digest": ""}, "input 'reference'"),
        ({"size": 10**12}, "input 'reference' has 1000000000000 bytes; at most"),
        ({"name": "another"}, "the work needs the inputs ['reference']; offered are ['another']"),
        (None, "the work needs the inputs ['reference']; offered are []"),
    ],
)
def test_inputs_other_than_those_that_the_work_needs_are_declined_before_anything_is_fetched(
    scene: Scene, changes: dict[str, Any] | None, words: str
) -> None:
    inputs = second_leg(scene)
    for name, value in (changes or {}).items():
        setattr(inputs[0], name, value)
    asked = asking(scene, RESIDUAL, inputs=[] if changes is None else inputs)
    check_declines(scene, asked, "inputs", words)


def test_a_reference_other_than_the_promised_one_is_declined(scene: Scene) -> None:
    inputs = second_leg(scene)
    scene.coordinator.blobs[inputs[0].digest] = bytes(inputs[0].size)
    assert scene.turned_down(asking(scene, RESIDUAL, inputs=inputs))[1] == "base-model"


def test_a_reference_that_is_no_sketch_is_declined(scene: Scene) -> None:
    inputs = second_leg(scene)
    other = bytes(inputs[0].size)
    scene.coordinator.blobs[digest(other)] = other
    inputs[0].digest = digest(other)
    _, reason, message = scene.turned_down(asking(scene, RESIDUAL, inputs=inputs))
    assert (reason, "the reference: " in message) == ("failed", True), message


# --- what it does


def test_a_client_gives_the_gradients_of_those_of_its_objectives_that_are_asked_for(scene: Scene) -> None:
    layout, blob = scene.model
    scene.coordinator.assign(asking(scene, jacobian("exact", ("right",))))
    scene.start()
    (reply,) = submitted(scene)
    base = np.frombuffer(blob[-4 * layout.size :], np.float32)
    digits = task("two-digits")
    trainer = TorchTrainer(digits, digits.load(SOURCE), threads=1)
    rows = trained.jacobian(trainer, base, WORK.batch_size, seed=7, round=0, client_id="hospital-a").rows
    assert reply.payload[-4 * layout.size :] == rows["right"].tobytes()
    assert [row.name for row in reply.manifest.rows] == ["jacobian"]
    assert set(reply.manifest.losses) == {"left", "right", "loss"}


@pytest.mark.parametrize("kind", ["jacobian", "residual", "train"])
def test_a_worker_that_was_restarted_between_the_phases_sends_the_very_same_bytes(scene: Scene, kind: str) -> None:
    def order(number: int) -> AssignmentManifest:
        """The first is of a Jacobian; the second, of the same round, builds on its gradients."""
        if number == 0 or kind == "jacobian":
            asked = asking(scene, jacobian("svd-two-way"), number)
        elif kind == "residual":
            asked = asking(scene, RESIDUAL, number, second_leg(scene))
        else:
            asked = scene.order(number)
            set_train(asked, targets=[target("loss", left=0.3, right=0.7)], from_jacobian=True, steps=3)
        asked.round, asked.phase = 0, number
        return asked

    running = scene.start()
    scene.coordinator.assign(order(0))
    submitted(scene, 1)
    scene.coordinator.assign(order(1))
    submitted(scene, 2)
    running.stop()
    # another process, as it were: nothing is known but what is on its disk
    scene.offers = prepare_offers(["two-digits"], SOURCE, device="cpu", threads=1)[0]
    again = order(1)
    again.assignment_id = f"again-{random.Random(kind).random()}"
    scene.coordinator.assign(again)
    scene.start()
    first, second, third = submitted(scene, 3)
    assert second.payload == third.payload
    assert (second.payload == first.payload) == (kind == "jacobian")
    assert dict(second.manifest.losses) == dict(third.manifest.losses)
