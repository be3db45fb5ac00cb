"""The checks of an assignment: the coordinator signed it, it is for this worker, and the owner allows it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from google.protobuf.message import DecodeError

from federation.digests import digest, parse
from federation.owners_code import TwoTexts
from federation.refusals import Refusal
from federation.spec.sharing import Sharing, SharingError
from federation.training.own import run_shape
from federation.training.reasons import texts_of
from federation.training.trainer import Trainer
from federation.trust.member_files import MemberFiles
from federation.v1.common_pb2 import AssignmentManifest, CancelManifest, SignedEnvelope
from federation.vectors import Layout
from federation.work.base import RowSchema, Shape, Shows, Work, WorkError, payload_layout
from federation.work.registry import STAGES, decode
from federation.work.secure.ready import Ready
from federation.work.secure.stage import StageWork
from federation.work.site import SecurePolicy, Site
from federation.work.statistics.work import Statistics
from federation.work.work_bounds import Problem, WorkBounds
from worker.site import specified
from worker.site.policy_file import WorkLimits
from worker.site.run_requests import APPROVED, RunRequest

# A task of a thousand objectives with names of sixty letters takes about 200 KiB.
MAX_MANIFEST_BYTES = 512 << 10
MAX_NAME = 200  # characters of the id of a run or an assignment, which name files and rows here
MAX_ROUND = 2**31 - 1  # the largest that the coordinator's tables can store

COMPARE = "compare the versions of the task"
# Returns the run of the assignment as it is kept here, if it is; raises Declined if the run is not accepted.
Consent = Callable[[AssignmentManifest], Sequence[RunRequest]]


class Declined(Exception):
    """An assignment that this worker will not do, for a stable reason, which the coordinator records.

    A message as text has nothing of the owner's: it leaves the site. With `repeated`, the owner has seen the same
    warning before, and is not warned again.
    """

    def __init__(self, reason: str, message: str | TwoTexts, *, repeated: bool = False) -> None:
        self.texts = TwoTexts.same(message) if isinstance(message, str) else message
        super().__init__(f"{reason}: {self.texts.local}")
        self.repeated = repeated
        self.reason = reason


class UnverifiedAssignment(Declined):
    """An assignment without a valid signature of the coordinator."""


class OtherModel(Declined):
    """An assignment whose model has another size than those of this task in the run.

    `digest` and `layout` are those of the assignment's model and of this task's: who can look into the former says
    where they differ.
    """

    def __init__(self, manifest: AssignmentManifest, layout: Layout) -> None:
        super().__init__(
            "layout",
            f"the base model has {manifest.base_model_bytes} bytes; a model of this task has {layout.file_bytes}: "
            f"{COMPARE}",
        )
        self.digest = manifest.base_model
        self.layout = layout


@dataclass(frozen=True, eq=False)
class CheckedAssignment:
    """An assignment that passed every check, as the coordinator signed it.

    `rows` are those of the reply's payload, empty for a reply without one. The coordinator refuses the reply after the
    deadline, which is aware and by its clock. `sharing` is None for a run that shares all parameters; otherwise the
    layout of `shape` has only those that are shared. `sent` has the inputs that came with the assignment, by name.
    `measures` has the models that the owner allows this run to measure, by approving it; `approved` is True if the
    owner has approved it with this specification.
    """

    envelope: SignedEnvelope
    manifest: AssignmentManifest
    work: Work
    shape: Shape
    rows: tuple[RowSchema, ...]
    deadline: datetime
    sharing: Sharing | None = None
    sent: Mapping[str, bytes] = field(default_factory=dict)
    measures: frozenset[str] = frozenset()
    approved: bool = False


def check_assignment(
    envelope: SignedEnvelope,
    inputs: Sequence[bytes] = (),
    *,
    member: MemberFiles,
    offers: Mapping[str, Trainer],
    limits: WorkLimits,
    site: Site,
    newest_round: Callable[[str], int | None],
    now: datetime,
    consent: Consent = lambda _: (),
) -> CheckedAssignment:
    """Verifies an assignment against the coordinator's key, then every field that says what to do.

    A coordinator that was taken over, or an attacker on the network, can make this worker do nothing but train a task
    that its owner named, from a model of that task's layout, within the bounds that its owner set.

    `inputs` are the contents of its inputs, in their order, if they came with it. `newest_round` returns the newest
    round of a run in which this worker accepted work; `now` is by the coordinator's clock.

    Raises:
        OtherModel, Declined: with the reason of the first check that failed.
    """
    manifest = _opened(envelope, member)
    newest = newest_round(manifest.run_id) if limits.rounds_forward else None
    bounds = limits.bounds
    _check_address(manifest, member)
    deadline = _check_time(manifest, newest, now)
    trainer, kept = _check_consent(manifest, offers, bounds, consent)
    try:
        # Protocol, A client of your own: signature, address, deadline and task are checked by now: nothing else of a
        # stranger's is read.
        named = [run for run in kept if run.spec == manifest.spec]
        # Statistics take no model, so none of its tensors has a treatment.
        modelless = _takes_no_model(manifest, trainer.shape, named)
        shape, sharing = (trainer.shape, None) if modelless else run_shape(trainer, manifest.unshared)
        work = decode(manifest.kind, manifest.work, shape)
        _check_model(manifest, shape)
        fits = not trainer.unfit or _describes(work)
        _require(
            fits,
            "statistics:alone",
            "this task is offered for statistics alone: the model has no finite loss on its data",
        )
        # Section 3, rule 4: before `_check_clear`: what a kept run says holds also where the owner requires nothing.
        _check_specified(manifest, work, kept, site.policy(manifest.task))
        _check_clear(work, site.policy(manifest.task))
        _check_bound(bounds.problem_of_work(work, samples=trainer.samples, objectives=len(shape.serves)))
        rows = _check_transfers(manifest, work, shape, bounds)
    except SharingError as error:
        wire = "the run's [parameters] do not suit the model of this task here"
        raise Declined("parameters", TwoTexts.of(str(error)[:500], wire)) from None
    except WorkError as error:
        raise Declined("work", texts_of(error)) from None
    sent = _check_digests(manifest, inputs)
    measures = frozenset(name for run in named for name in run.approved_models)
    approved = any(run.owner == APPROVED for run in named)
    return CheckedAssignment(envelope, manifest, work, shape, rows, deadline, sharing, sent, measures, approved)


def check_cancel(envelope: SignedEnvelope, member: MemberFiles) -> CancelManifest:
    """The cancellation in an envelope, verified against the coordinator's key.

    Raises:
        Refusal: the coordinator has not signed it, or not for this client.
    """
    manifest = member.coordinator.verify(envelope, CancelManifest)
    for name in ("federation_id", "client_id"):
        if getattr(manifest, name) != getattr(member, name):
            raise Refusal(f"mismatch:{name}", f"the cancellation is for another {name}")
    return manifest


def _require(holds: bool, reason: str, message: str) -> None:
    """Raises Declined unless `holds`."""
    if not holds:
        raise Declined(reason, message[:500])


def _takes_no_model(manifest: AssignmentManifest, whole: Shape, named: Sequence[RunRequest]) -> bool:
    """True for statistics, in the open or as the vector of a session, and for the later phases of such a session.

    Args:
        manifest: the assignment.
        whole: the shape of the task's model.
        named: the run as it is kept here with the specification that the assignment names, if it is.

    Raises:
        WorkError: the work of READY is malformed.
    """
    if manifest.kind == Ready.name:
        ready = decode(manifest.kind, manifest.work, whole)
        return isinstance(ready, Ready) and ready.describes
    # A later phase does not say what its session sums. At READY of statistics the owner has approved the run, so it is
    # kept here; `check_origin` declines a phase that names another specification than READY did.
    return manifest.kind == Statistics.name or (
        manifest.kind in STAGES and any(run.describes is not None for run in named)
    )


def _describes(work: Work) -> bool:
    """True for statistics, in the open or as the vector of a session, and for the later phases of a session."""
    return work.describes if isinstance(work, Ready) else isinstance(work, Statistics | StageWork)


def _check_bound(problem: Problem | None) -> None:
    """Raises Declined for work beyond a bound of the owner."""
    if problem is not None:
        raise Declined(*problem)


# The checks, in their order. Each raises Declined.


def _opened(envelope: SignedEnvelope, member: MemberFiles) -> AssignmentManifest:
    """The assignment in an envelope. Raises UnverifiedAssignment unless the coordinator signed it."""
    if (size := envelope.ByteSize()) > MAX_MANIFEST_BYTES:
        message = f"an assignment of {size} bytes; at most {MAX_MANIFEST_BYTES}"
        raise UnverifiedAssignment("limit:manifest", message)
    try:
        # Protocol, The envelope: the signature first: no other check may depend on bytes that the coordinator has not
        # signed.
        return member.coordinator.verify(envelope, AssignmentManifest)
    except Refusal as refusal:
        reason = "manifest" if refusal.reason == "manifest" else "signature"
        message = f"not signed with the key of the coordinator that this client enrolled with ({refusal.message})"
        raise UnverifiedAssignment(reason, message) from None


def _check_address(manifest: AssignmentManifest, member: MemberFiles) -> None:
    _require(manifest.federation_id == member.federation_id, "mismatch:federation_id", "of another federation")
    _require(manifest.client_id == member.client_id, "mismatch:client_id", "issued to another client")
    for kind, name in (("a run", manifest.run_id), ("an assignment", manifest.assignment_id)):
        message = f"the id of {kind} has {len(name)} characters; at most {MAX_NAME}"
        _require(len(name) <= MAX_NAME, "limit:manifest", message)


def _check_time(manifest: AssignmentManifest, newest: int | None, now: datetime) -> datetime:
    """Returns the deadline."""
    try:
        deadline = manifest.deadline.ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError) as error:
        raise Declined("deadline", f"its deadline does not exist: {error}") from None
    _require(now <= deadline, "deadline", "its deadline has passed")
    _require(manifest.round <= MAX_ROUND, "round", f"it is of round {manifest.round}, which no run reaches")
    _require(
        newest is None or manifest.round >= newest,
        "round",
        f"it is of round {manifest.round}; this worker has worked in round {newest} of the run. After a backup was "
        "restored, the coordinator's operator runs `fedpareto coordinator restored`",
    )
    return deadline


def _check_consent(
    manifest: AssignmentManifest, offers: Mapping[str, Trainer], bounds: WorkBounds, consent: Consent
) -> tuple[Trainer, Sequence[RunRequest]]:
    """Returns the trainer of the task, and the run as it is kept here."""
    _require(manifest.task in offers, "task-not-allowed", "the owner of this worker did not allow this task")
    kept = consent(manifest)
    _check_bound(bounds.problem_of_members(manifest.members))
    return offers[manifest.task], kept


def _check_model(manifest: AssignmentManifest, shape: Shape) -> None:
    if manifest.base_model_bytes != shape.layout.file_bytes:
        raise OtherModel(manifest, shape.layout)


def _check_specified(
    manifest: AssignmentManifest, work: Work, kept: Sequence[RunRequest], policy: SecurePolicy
) -> None:
    """Declines work that the run, as it is kept here, does not ask for."""
    # Section 7: each specification of the run that is kept: an assignment that names another one does not free it.
    for run in kept:
        if (problem := specified.problem(run, manifest, work, policy)) is not None:
            _require(False, *problem)


def _check_clear(work: Work, policy: SecurePolicy) -> None:
    """Declines results in the clear that an owner who requires private rounds does not disclose."""
    if policy.required:
        _require(
            work.shows is not Shows.UPDATE,  # section 3, rule 4: without masks, it is this member's alone
            "policy:required",
            f"the owner requires private rounds, and {work.name!r} shows an update or a gradient in the clear",
        )
        _require(
            work.shows is not Shows.METRICS or "evaluation" in policy.disclose,  # section 3, rule 4: as above
            "policy:required",
            "the owner requires private rounds, and does not disclose evaluations in the clear",
        )


def _check_transfers(
    manifest: AssignmentManifest, work: Work, shape: Shape, bounds: WorkBounds
) -> tuple[RowSchema, ...]:
    """Checks the reply, the inputs and the bytes of all transfers. Returns the rows of the reply."""
    rows, largest = work.rows(shape), work.input_sizes(shape)
    asked = tuple(RowSchema(row.name, row.length, row.dtype) for row in manifest.rows)
    _require(asked == rows, "rows", f"this work gives {_described(rows)}; asked for is {_described(asked)}")
    size = payload_layout(rows).file_bytes if rows else 0
    _require(manifest.max_payload_bytes >= size, "limit:payload", f"what this work gives takes {size} bytes")
    offered = [item.name for item in manifest.inputs]
    message = f"the work needs the inputs {sorted(largest)}; offered are {offered}"
    _require(sorted(offered) == sorted(largest), "inputs", message)
    for item in manifest.inputs:
        most = largest[item.name]
        _require(
            item.size <= most,
            "inputs",
            f"input {item.name!r} has {item.size} bytes; at most {most} are taken",
        )
    moved = manifest.base_model_bytes + sum(item.size for item in manifest.inputs) + size
    _check_bound(bounds.problem_of_bytes(moved))
    return rows


def _check_digests(manifest: AssignmentManifest, inputs: Sequence[bytes]) -> dict[str, bytes]:
    """Returns the inputs that came with an assignment, by name, without those whose digest or size is wrong."""
    sent = dict(zip((item.name for item in manifest.inputs), inputs, strict=False))
    try:
        parse(manifest.base_model)
    except ValueError as error:
        raise Declined("base-model", str(error)[:500]) from None
    for item in manifest.inputs:
        try:
            algorithm, _ = parse(item.digest)
        except ValueError as error:
            raise Declined("inputs", f"input {item.name!r}: {error}"[:500]) from None
        content = sent.get(item.name)
        # Protocol, A client of your own: inputs beside the envelope are not signed, only their digests are. Others are
        # fetched again.
        if content is not None and (len(content) != item.size or digest(content, algorithm) != item.digest):
            del sent[item.name]
    return sent


def _described(rows: tuple[RowSchema, ...]) -> str:
    return ", ".join(f"{row.name} ({row.dtype}, {row.length})" for row in rows) or "no rows"


def claimed_id(envelope: SignedEnvelope) -> str:
    """The id of the assignment in an envelope, not verified, for a decline; empty if it is unreadable."""
    try:
        return AssignmentManifest.FromString(envelope.manifest).assignment_id[:200]
    except DecodeError:
        return ""
