"""The checks of an assignment: the coordinator signed it, it is for this worker, and the owner allows it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from google.protobuf.message import DecodeError

from federation.digests import digest, parse
from federation.member_files import MemberFiles
from federation.refusals import Refusal
from federation.sharing import Sharing, SharingError
from federation.training.own import run_shape
from federation.training.trainer import Trainer
from federation.v1.common_pb2 import AssignmentManifest, CancelManifest, SignedEnvelope
from federation.work.base import Demand, RowSchema, Shape, Shows, Work, WorkError, payload_layout
from federation.work.registry import decode
from federation.work.site import SecurePolicy, Site
from worker.policy import Limits

# A task of a thousand objectives with names of sixty letters takes about 200 KiB.
MAX_MANIFEST_BYTES = 512 << 10
MAX_ROUND = 2**31 - 1  # what the coordinator's tables hold


class Declined(Exception):
    """An assignment that this worker will not do, for a stable reason, which the coordinator records.

    `assignment_id` is empty if it could not be read.
    """

    def __init__(self, assignment_id: str, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.assignment_id = assignment_id
        self.reason = reason
        self.message = message


class Unverified(Declined):
    """An assignment that cannot be shown to be the coordinator's."""


@dataclass(frozen=True, eq=False)
class Order:
    """An assignment that passed every check, as the coordinator signed it.

    The reply has `rows` in its payload; none for a reply without one. It is refused after the deadline, which is aware
    and by the coordinator's clock. `sharing` is None for a run that shares all parameters; otherwise the layout of
    `shape` has only those that are shared. `sent` has the inputs that came with the assignment, by name.
    """

    envelope: SignedEnvelope
    manifest: AssignmentManifest
    work: Work
    shape: Shape
    rows: tuple[RowSchema, ...]
    deadline: datetime
    sharing: Sharing | None = None
    sent: Mapping[str, bytes] = field(default_factory=dict)


def check_assignment(
    envelope: SignedEnvelope,
    *,
    member: MemberFiles,
    offers: Mapping[str, Trainer],
    limits: Limits,
    site: Site,
    newest_round: Callable[[str], int | None],
    now: datetime,
    consent: Callable[[AssignmentManifest], tuple[str, str] | None] = lambda _: None,
) -> Order:
    """Verifies an assignment against the coordinator's key, then every field that says what to do.

    A coordinator that was taken over, or an attacker on the network, can make this worker do nothing but train a task
    that its owner named, from a model of that task's layout, within the bounds that its owner set.

    `newest_round` returns the newest round of a run in which this worker accepted work; `now` is by the coordinator's
    clock; `consent` says why nothing is done for the run, with a reason, and None where it is accepted.

    Raises:
        Declined: with the reason of the first check that failed.
    """
    if (size := len(envelope.manifest)) > MAX_MANIFEST_BYTES:
        message = f"an assignment of {size} bytes; at most {MAX_MANIFEST_BYTES}"
        raise Unverified(_claimed_id(envelope), "limit:manifest", message)
    try:
        manifest = member.coordinator.unseal(envelope, AssignmentManifest)
    except Refusal as refusal:
        reason = "manifest" if refusal.reason == "manifest" else "signature"
        message = f"not signed with the key of the coordinator that this client enrolled with ({refusal.message})"
        raise Unverified(_claimed_id(envelope), reason, message) from None

    def require(holds: bool, reason: str, message: str) -> None:
        if not holds:
            raise Declined(manifest.assignment_id, reason, message[:500])

    def require_digest(text: str, reason: str, what: str = "") -> None:
        try:
            parse(text)
        except ValueError as error:
            require(False, reason, f"{what}{error}")

    require(manifest.federation_id == member.federation_id, "mismatch:federation_id", "of another federation")
    require(manifest.client_id == member.client_id, "mismatch:client_id", "issued to another client")
    deadline = _deadline(manifest)
    require(now <= deadline, "deadline", "its deadline has passed")
    require(manifest.round <= MAX_ROUND, "round", f"it is of round {manifest.round}, which no run reaches")
    newest = newest_round(manifest.run_id) if limits.rounds_forward else None
    require(
        newest is None or manifest.round >= newest,
        "round",
        f"it is of round {manifest.round}; this worker has worked in round {newest} of the run. After a backup was "
        "restored, the coordinator's operator runs `fedpareto coordinator restored`",
    )
    require(manifest.task in offers, "task-not-allowed", "the owner of this worker did not allow this task")
    if (problem := consent(manifest)) is not None:
        require(False, *problem)
    message = f"{manifest.members} clients are asked; this worker takes part with at least {limits.members}"
    require(manifest.members >= limits.members or limits.members == 1, "limit:members", message)
    trainer = offers[manifest.task]
    samples = trainer.samples
    try:
        shape, sharing = run_shape(trainer, manifest.unshared)
    except SharingError as error:
        raise Declined(manifest.assignment_id, "parameters", str(error)[:500]) from None
    require_digest(manifest.base_model, "base-model")
    require(
        manifest.base_model_bytes == shape.layout.file_bytes,
        "layout",
        f"the base model has {manifest.base_model_bytes} bytes; a model of this task has {shape.layout.file_bytes}: "
        "compare the versions of the task",
    )
    try:
        work = decode(manifest.kind, manifest.work, shape)
        for holds, message in _clear(work, site.policy(manifest.task)):
            require(holds, "policy:required", message)
        for holds, reason, message in _bounds(work.demand(samples), samples, shape, limits):
            require(holds, reason, message)
        rows = work.rows(shape)
        largest = work.input_sizes(shape)
    except WorkError as error:
        raise Declined(manifest.assignment_id, "work", str(error)[:500]) from None
    asked = tuple(RowSchema(row.name, row.length, row.dtype) for row in manifest.rows)
    require(asked == rows, "rows", f"this work gives {_described(rows)}; asked for is {_described(asked)}")
    size = payload_layout(rows).file_bytes if rows else 0
    require(manifest.max_payload_bytes >= size, "limit:payload", f"what this work gives takes {size} bytes")
    offered = [item.name for item in manifest.inputs]
    message = f"the work needs the inputs {sorted(largest)}; offered are {offered}"
    require(sorted(offered) == sorted(largest), "inputs", message)
    for item in manifest.inputs:
        most = largest[item.name]
        require(item.size <= most, "inputs", f"input {item.name!r} has {item.size} bytes; at most {most} are taken")
        require_digest(item.digest, "inputs", f"input {item.name!r}: ")
    moved = manifest.base_model_bytes + sum(item.size for item in manifest.inputs) + size
    message = f"{moved} bytes would be moved; this worker moves at most {limits.max_bytes} for an assignment"
    require(not limits.max_bytes or moved <= limits.max_bytes, "limit:bytes", message)
    return Order(envelope, manifest, work, shape, rows, deadline, sharing)


def sent_inputs(manifest: AssignmentManifest, inputs: Sequence[bytes]) -> dict[str, bytes]:
    """The inputs that came with an assignment, by name. One that differs from what was signed is left out."""
    return {
        item.name: content
        for item, content in zip(manifest.inputs, inputs, strict=False)
        if len(content) == item.size and digest(content, parse(item.digest)[0]) == item.digest
    }


def check_cancel(envelope: SignedEnvelope, member: MemberFiles) -> CancelManifest:
    """The cancellation in an envelope, verified against the coordinator's key.

    Raises:
        Refusal: the coordinator has not signed it, or not for this client.
    """
    manifest = member.coordinator.unseal(envelope, CancelManifest)
    for name in ("federation_id", "client_id"):
        if getattr(manifest, name) != getattr(member, name):
            raise Refusal(f"mismatch:{name}", f"the cancellation is for another {name}")
    return manifest


def _deadline(manifest: AssignmentManifest) -> datetime:
    try:
        return manifest.deadline.ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError) as error:
        raise Declined(manifest.assignment_id, "deadline", f"its deadline does not exist: {error}") from None


def _clear(work: Work, policy: SecurePolicy) -> Iterator[tuple[bool, str]]:
    """What an owner who requires private rounds refuses to show in the clear: whether it is kept, and why if not."""
    if policy.required:
        yield (
            work.shows is not Shows.UPDATE,
            f"the owner requires private rounds, and {work.name!r} shows an update or a gradient in the clear",
        )
        yield (
            work.shows is not Shows.METRICS or "evaluation" in policy.disclose,
            "the owner requires private rounds, and does not disclose evaluations in the clear",
        )


def _bounds(demand: Demand | None, samples: int, shape: Shape, limits: Limits) -> Iterator[tuple[bool, str, str]]:
    """Each bound of the owner: whether the work keeps it, the reason to decline if not, and the reason in words."""
    if demand is None:
        return
    rows, steps = limits.rows or len(shape.serves), f"{demand.steps} steps are asked for; this worker does at"
    yield demand.rows <= rows, "limit:rows", f"{demand.rows} rows are asked for; this worker gives at most {rows}"
    yield demand.steps <= limits.max_steps, "limit:steps", f"{steps} most {limits.max_steps}"
    yield (
        not limits.max_epochs or demand.epochs <= limits.max_epochs,
        "limit:epochs",
        f"{demand.epochs:g} passes over the samples are asked for; this worker makes at most {limits.max_epochs:g}",
    )
    yield not demand.rows or demand.steps >= limits.steps, "limit:steps", f"{steps} least {limits.steps}"
    yield (
        demand.samples >= limits.samples,
        "limit:samples",
        f"it would be made from {demand.samples} of {samples} samples; this worker uses at least {limits.samples}",
    )


def _described(rows: tuple[RowSchema, ...]) -> str:
    return ", ".join(f"{row.name} ({row.dtype}, {row.length})" for row in rows) or "no rows"


def _claimed_id(envelope: SignedEnvelope) -> str:
    """The assignment that an unverified envelope names, to name it in a refusal."""
    try:
        return AssignmentManifest.FromString(envelope.manifest).assignment_id[:200]
    except DecodeError:
        return ""
