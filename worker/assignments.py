"""What must hold before an assignment is done: it is the coordinator's word, it is for us, and its owner allowed it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from google.protobuf.message import DecodeError

from federation.digests import parse
from federation.envelope import key_id, unseal
from federation.identity import MemberFiles
from federation.objectives import Targets, joint_target
from federation.refusals import Refusal
from federation.sketches import SketchError, TwoWaySvd
from federation.sketches.asked import second_leg, sketch_of
from federation.v1.common_pb2 import AssignmentManifest, ResidualWork, SignedEnvelope, TrainWork
from federation.vectors import Layout, update_layout
from worker.policy import Limits

SPLITS = ("train", "validation", "test")
# A task of a thousand objectives with names of sixty letters takes about 200 KiB.
MAX_MANIFEST_BYTES = 512 << 10


class Declined(Exception):
    """An assignment that this worker will not do.

    Attributes:
        assignment_id: as far as it is known; empty when nothing could be read.
        reason: a stable reason, told to the coordinator and recorded there.
        message: the reason in words.
    """

    def __init__(self, assignment_id: str, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.assignment_id = assignment_id
        self.reason = reason
        self.message = message


@dataclass(frozen=True)
class Allowed:
    """A task that the owner allowed, as far as an assignment can be checked against it.

    Attributes:
        layout: of the task's model.
        objectives: all of the task's, in its order.
        serves: those that this client serves.
        samples: training samples held.
    """

    layout: Layout
    objectives: tuple[str, ...]
    serves: tuple[str, ...]
    samples: int


def check_assignment(
    envelope: SignedEnvelope,
    *,
    member: MemberFiles,
    allowed: Mapping[str, Allowed],
    limits: Limits,
    newest_round: Callable[[str], int | None],
    now: datetime,
) -> AssignmentManifest:
    """Verifies an assignment against the coordinator's key from enrollment, then every field that says what to do.

    A coordinator that was taken over, or somebody between it and us, can make this worker do nothing but train a task
    that its owner named, from a model of that task's layout, within the bounds that its owner set.

    Args:
        envelope: as received.
        member: who we are, and the coordinator's key.
        allowed: the owner's tasks by name.
        limits: the owner's bounds.
        newest_round: the newest round of a run in which this worker accepted work, by the run's id.
        now: the time by the coordinator's clock.

    Raises:
        Declined: with the reason of the first check that failed.
    """
    if (size := len(envelope.manifest)) > MAX_MANIFEST_BYTES:
        raise Declined(
            _claimed_id(envelope), "limit:manifest", f"an assignment of {size} bytes; at most {MAX_MANIFEST_BYTES}"
        )
    coordinator = key_id(member.coordinator_key)
    try:
        manifest = unseal(
            envelope, AssignmentManifest, lambda name: member.coordinator_key if name == coordinator else None
        )
    except Refusal as refusal:
        reason = "manifest" if refusal.reason == "manifest" else "signature"
        message = f"not signed by the coordinator that this client enrolled with ({refusal.message})"
        raise Declined(_claimed_id(envelope), reason, message) from None

    def require(holds: bool, reason: str, message: str) -> None:
        if not holds:
            raise Declined(manifest.assignment_id, reason, message)

    require(manifest.federation_id == member.federation_id, "mismatch:federation_id", "of another federation")
    require(manifest.client_id == member.client_id, "mismatch:client_id", "issued to another client")
    require(now <= deadline_of(manifest), "deadline", "its deadline has passed")
    newest = newest_round(manifest.run_id) if limits.rounds_forward else None
    require(
        newest is None or manifest.round >= newest,
        "round",
        f"it is of round {manifest.round}; this worker has worked in round {newest} of the run. After a backup was "
        "restored, the coordinator's operator runs `fedpareto coordinator restored`",
    )
    require(manifest.task in allowed, "task-not-allowed", "the owner of this worker did not allow this task")
    task = allowed[manifest.task]
    _require_base_model(manifest, task)
    kind = manifest.WhichOneof("work")
    if kind in ("train", "jacobian", "residual"):
        if (problem := _excess(manifest, task, limits)) is not None:
            raise Declined(manifest.assignment_id, *problem)
        try:
            wanted = _rows(manifest, task)
        except (SketchError, ValueError, OverflowError) as error:
            raise Declined(manifest.assignment_id, "work", str(error)[:500]) from None
        rows = [(row.objective, row.dtype, row.length) for row in manifest.rows]
        expected = [(name, "F32", length) for name, length in wanted]
        require(rows == expected, "rows", f"this work gives the rows {expected}, asked were {rows}"[:500])
        size = update_layout(wanted).file_bytes
        require(manifest.max_payload_bytes >= size, "limit:payload", f"what this work gives takes {size} bytes")
    elif kind == "evaluate":
        require(not manifest.rows, "rows", "an evaluation gives no rows")
        splits = list(manifest.evaluate.splits)
        known = splits and all(split in SPLITS for split in splits) and len(set(splits)) == len(splits)
        require(bool(known), "work", f"cannot evaluate the splits {splits}"[:500])
    else:
        require(False, "work", "it asks for a kind of work that this version does not know: update the worker")
    return manifest


def deadline_of(manifest: AssignmentManifest) -> datetime:
    """The deadline of an assignment, aware.

    Raises:
        Declined: there is no such time.
    """
    try:
        return manifest.deadline.ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError) as error:
        raise Declined(manifest.assignment_id, "deadline", f"its deadline does not exist: {error}") from None


def _excess(manifest: AssignmentManifest, task: Allowed, limits: Limits) -> tuple[str, str] | None:
    """The reason and the message of the first of the owner's bounds that this work does not keep; None when it does."""
    train = manifest.train if manifest.WhichOneof("work") == "train" else None
    asked = manifest.residual.jacobian if manifest.WhichOneof("work") == "residual" else manifest.jacobian
    batch = (train or asked).batch_size or task.samples
    steps = 1
    if train is not None:
        most = limits.rows or len(task.serves)
        if len(train.targets) > most:
            return "limit:rows", f"{len(train.targets)} rows are asked for; this worker gives at most {most}"
        steps = train.steps or train.epochs * -(-task.samples // batch)
        if steps > limits.max_steps:
            return "limit:steps", f"{steps} steps are asked for; this worker does at most {limits.max_steps}"
        if steps < limits.steps:
            return "limit:steps", f"{steps} steps are asked for; this worker does at least {limits.steps}"
    used = min(task.samples, steps * batch)
    if used < limits.samples:
        message = f"it would be made from {used} of {task.samples} samples; this worker uses at least {limits.samples}"
        return "limit:samples", message
    return None


def targets_of(work: TrainWork, serves: tuple[str, ...]) -> Targets:
    """What the rows of an update descend, as an assignment says it.

    Raises:
        ValueError: an objective that is not served, a weight that is no number, or a row that is named twice.
    """
    if not work.targets:
        return joint_target(serves)
    targets = {target.row: {item.objective: item.weight for item in target.weights} for target in work.targets}
    if len(targets) < len(work.targets):
        raise ValueError("a row of the update is named twice")
    if any(len(targets[target.row]) < len(target.weights) for target in work.targets):
        raise ValueError("a row of the update names an objective twice")
    for row, weights in targets.items():
        if not weights or any(name not in serves for name in weights):
            raise ValueError(f"row {row!r} descends {sorted(weights)}; this client serves {', '.join(serves)}")
        if not all(math.isfinite(value) for value in weights.values()):
            raise ValueError(f"row {row!r} descends objectives with weights that are no numbers")
    return targets


def _rows(manifest: AssignmentManifest, task: Allowed) -> list[tuple[str, int]]:
    """The rows, and their lengths, that come of work on what a client holds.

    Raises:
        SketchError, ValueError: it cannot be done.
    """
    if manifest.WhichOneof("work") == "train":
        return [(row, task.layout.size) for row in targets_of(manifest.train, task.serves)]
    second = manifest.WhichOneof("work") == "residual"
    asked = manifest.residual.jacobian if second else manifest.jacobian
    objectives = tuple(asked.objectives)
    if not objectives or objectives != tuple(name for name in task.serves if name in objectives):
        raise ValueError(f"gradients of {list(objectives)} are asked for; this client serves {list(task.serves)}")
    made = sketch_of(asked, task.layout, task.objectives)
    if not second:
        return list(made.rows(objectives))
    return _residual_rows(manifest.residual, second_leg(made), task)


def _residual_rows(work: ResidualWork, made: TwoWaySvd, task: Allowed) -> list[tuple[str, int]]:
    total = tuple(work.objectives)
    if not total or total != tuple(name for name in task.objectives if name in total):
        raise ValueError(f"the reference is of {list(total)}; the objectives of the task are {list(task.objectives)}")
    parse(work.reference)
    size = update_layout(made.reference_layout(len(total))).file_bytes
    if work.reference_bytes != size:
        raise ValueError(f"the reference has {work.reference_bytes} bytes; one of this model has {size}")
    return list(made.residual_layout(len(work.jacobian.objectives), len(total)))


def _require_base_model(manifest: AssignmentManifest, task: Allowed) -> None:
    try:
        parse(manifest.base_model)
    except ValueError as error:
        raise Declined(manifest.assignment_id, "base-model", str(error)) from None
    if manifest.base_model_bytes != task.layout.file_bytes:
        raise Declined(
            manifest.assignment_id,
            "layout",
            f"the base model has {manifest.base_model_bytes} bytes; a model of this task has {task.layout.file_bytes}: "
            "compare the versions of the task",
        )


def _claimed_id(envelope: SignedEnvelope) -> str:
    """The assignment that an unverified envelope speaks of; good for nothing but naming it in a refusal."""
    try:
        return AssignmentManifest.FromString(envelope.manifest).assignment_id[:200]
    except DecodeError:
        return ""
