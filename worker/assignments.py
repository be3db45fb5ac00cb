"""What must hold before an assignment is done: it is the coordinator's word, it is for us, and its owner allowed it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from google.protobuf.message import DecodeError

from federation.digests import parse
from federation.envelope import key_id, unseal
from federation.member_files import MemberFiles
from federation.refusals import Refusal
from federation.v1.common_pb2 import AssignmentManifest, SignedEnvelope
from federation.vectors import Layout
from federation.work.base import RowSchema, Shape, Work, WorkError, payload_layout
from federation.work.registry import decode
from worker.policy import Limits

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


@dataclass(frozen=True, eq=False)
class Order:
    """An assignment that passed every check.

    Attributes:
        envelope: as the coordinator signed it.
        manifest: in the envelope.
        work: what to do.
        shape: of model and task.
        rows: of the reply's payload; none for a reply without one.
        deadline: until when the reply counts.
    """

    envelope: SignedEnvelope
    manifest: AssignmentManifest
    work: Work
    shape: Shape
    rows: tuple[RowSchema, ...]
    deadline: datetime


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
) -> Order:
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
    shape = Shape(task.layout, task.objectives, task.serves)
    try:
        work = decode(manifest.kind, manifest.work, shape)
        _require_within_limits(manifest.assignment_id, work, task, limits)
        rows = work.rows(shape)
        inputs = work.input_sizes(shape)
    except WorkError as error:
        raise Declined(manifest.assignment_id, "work", str(error)[:500]) from None
    asked = tuple(RowSchema(row.name, row.length, row.dtype) for row in manifest.rows)
    require(asked == rows, "rows", f"this work gives {_described(rows)}; asked for is {_described(asked)}"[:500])
    size = payload_layout(rows).file_bytes if rows else 0
    require(manifest.max_payload_bytes >= size, "limit:payload", f"what this work gives takes {size} bytes")
    _require_inputs(manifest, inputs)
    return Order(envelope, manifest, work, shape, rows, deadline_of(manifest))


def deadline_of(manifest: AssignmentManifest) -> datetime:
    """The deadline of an assignment, aware.

    Raises:
        Declined: there is no such time.
    """
    try:
        return manifest.deadline.ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError) as error:
        raise Declined(manifest.assignment_id, "deadline", f"its deadline does not exist: {error}") from None


def _require_within_limits(assignment_id: str, work: Work, task: Allowed, limits: Limits) -> None:
    """Makes sure that work keeps the owner's bounds.

    Raises:
        Declined: `limit:rows`, `limit:steps` or `limit:samples`.
    """
    demand = work.demand(task.samples)
    if demand is None:
        return
    most = limits.rows or len(task.serves)
    if demand.rows > most:
        message = f"{demand.rows} rows are asked for; this worker gives at most {most}"
        raise Declined(assignment_id, "limit:rows", message)
    if demand.steps > limits.max_steps:
        message = f"{demand.steps} steps are asked for; this worker does at most {limits.max_steps}"
        raise Declined(assignment_id, "limit:steps", message)
    if demand.rows and demand.steps < limits.steps:
        message = f"{demand.steps} steps are asked for; this worker does at least {limits.steps}"
        raise Declined(assignment_id, "limit:steps", message)
    if demand.samples < limits.samples:
        message = (
            f"it would be made from {demand.samples} of {task.samples} samples; this worker uses at least "
            f"{limits.samples}"
        )
        raise Declined(assignment_id, "limit:samples", message)


def _require_inputs(manifest: AssignmentManifest, expected: Mapping[str, int]) -> None:
    """Makes sure that the offered inputs are those that the work needs, and not larger.

    Raises:
        Declined: `inputs`.
    """
    offered = {item.name: item for item in manifest.inputs}
    if len(offered) < len(manifest.inputs) or offered.keys() != expected.keys():
        names = [item.name for item in manifest.inputs]
        message = f"the work needs the inputs {sorted(expected)}; offered are {names}"
        raise Declined(manifest.assignment_id, "inputs", message[:500])
    for name, item in offered.items():
        if item.size > expected[name]:
            message = f"input {name!r} has {item.size} bytes; at most {expected[name]} are taken"
            raise Declined(manifest.assignment_id, "inputs", message)
        try:
            parse(item.digest)
        except ValueError as error:
            raise Declined(manifest.assignment_id, "inputs", f"input {name!r}: {error}") from None


def _described(rows: tuple[RowSchema, ...]) -> str:
    return ", ".join(f"{row.name} ({row.dtype}, {row.length})" for row in rows) or "no rows"


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
