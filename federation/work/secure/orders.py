"""Applies the members' rules to the assignments of private rounds, those of voided attempts included.

An outsider, an auditor and a member use it to find assignments that every honest member should have refused.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction

from google.protobuf.message import DecodeError

from federation.record.bound_fields import repeated
from federation.secure import hashing
from federation.secure.bounds import EVALUATION, INTEGERS, Bounds, problem, uncovered
from federation.secure.cover import cover, covers
from federation.secure.errors import Malformed
from federation.secure.thresholds import Mode, Thresholds
from federation.spec.run_spec import RunSpec
from federation.spec.sharing import Unshared
from federation.v1.common_pb2 import AssignmentManifest, ReplyManifest, SignedEnvelope
from federation.v1.secure_pb2 import (
    SecureConfirmWork,
    SecureDealWork,
    SecureMaskWork,
    SecureOpenWork,
    SecureReadyWork,
    SecureStatement,
    SecureTerms,
    SecureUnmaskWork,
)
from federation.vectors import update_layout
from federation.work.base import Origin, Shape
from federation.work.secure.allowed import least_cover, run_bounds
from federation.work.secure.sessions import difference
from federation.work.secure.terms import SessionStage
from federation.work.secure.wire import read_terms
from federation.work.site import EVALUATE, STATISTICS

_Later = SecureDealWork | SecureOpenWork | SecureMaskWork | SecureConfirmWork | SecureUnmaskWork
_LATER: dict[str, type[_Later]] = {
    SessionStage.DEAL: SecureDealWork,
    SessionStage.OPEN: SecureOpenWork,
    SessionStage.MASK: SecureMaskWork,
    SessionStage.CONFIRM: SecureConfirmWork,
    SessionStage.UNMASK: SecureUnmaskWork,
}
_FIXED = {EVALUATE: EVALUATION, STATISTICS: INTEGERS}
_ORIGIN = tuple(item.name for item in fields(Origin) if item.name != "unshared")
Coefficients = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Owner:
    """The requirement of a member's owner: E*, 0 for the default of each cohort."""

    client_id: str
    effective_members: float = 0.0


@dataclass(eq=False)
class _Asked:
    """The assignments of one session: each value that any member got; and what members said at READY."""

    terms: SecureTerms | None = None
    difference: str = ""
    cohorts: set[tuple[str, ...]] = field(default_factory=set)
    coefficients: set[Coefficients] = field(default_factory=set)
    survivors: set[tuple[str, ...]] = field(default_factory=set)
    samples: dict[str, int] = field(default_factory=dict)
    signed: dict[str, bool] = field(default_factory=dict)


def order_problems(
    spec: RunSpec,
    orders: Iterable[AssignmentManifest],
    replies: Iterable[ReplyManifest],
    owner: Owner | None = None,
) -> Iterator[str]:
    """Yields the problems for which members should have refused, as text.

    Args:
        spec: of the run.
        orders: all assignments of a round, of every attempt and of evaluations.
        replies: the accepted replies to them, for the samples that members claimed.
        owner: checks the cover of one member by its owner's requirement; None checks the cover of all by the run's.
    """
    sessions: dict[bytes, _Asked] = {}
    for order in orders:
        try:
            _read(spec, order, sessions)
        except (DecodeError, ValueError) as error:
            # Named, not skipped: an order that cannot be read can be the one that members should have refused.
            yield f"the work of an assignment of {order.client_id} in phase {order.phase} is malformed: {error}"
    for reply in replies:
        if reply.statement:
            try:
                statement = SecureStatement.FromString(reply.statement)
            except DecodeError:
                continue  # a reply to another kind of work
            # Section 3.5: samples and `signed` count as they were signed at READY, the phase whose numbers members get
            # at DEAL.
            if statement.stage == SessionStage.READY and statement.session in sessions:
                sessions[statement.session].samples[reply.client_id] = reply.samples
                sessions[statement.session].signed[reply.client_id] = statement.signed
    for session, asked in sessions.items():
        for problem_text in _problems(spec, asked, owner):
            yield f"session {session.hex()[:16]}: {problem_text}"


def asked_coefficients(envelopes: Iterable[bytes]) -> dict[bytes, tuple[int, ...]]:
    """The coefficients of W in the assignments of masked vectors, by session.

    `envelopes` are signed assignments of MASK, serialized.
    """
    orders = (AssignmentManifest.FromString(SignedEnvelope.FromString(data).manifest) for data in envelopes)
    asked = (SecureMaskWork.FromString(order.work) for order in orders)
    return {mask.session: tuple(mask.coefficients) for mask in asked}


def session_of(order: AssignmentManifest) -> str:
    """The session of an assignment of OPEN or MASK, hexadecimal; empty for another kind of work.

    Raises:
        DecodeError: the work is malformed.
    """
    if order.kind == SessionStage.OPEN:
        return SecureOpenWork.FromString(order.work).session.hex()
    return SecureMaskWork.FromString(order.work).session.hex() if order.kind == SessionStage.MASK else ""


def asked_session(order: AssignmentManifest) -> bytes:
    """The digest of the session that an assignment of any phase belongs to; empty for another kind of work.

    Raises:
        DecodeError: the work is malformed.
    """
    if order.kind == SessionStage.READY:
        return hashing.session(SecureReadyWork.FromString(order.work).terms)
    message = _LATER.get(order.kind)
    return b"" if message is None else message.FromString(order.work).session


def _read(spec: RunSpec, order: AssignmentManifest, sessions: dict[bytes, _Asked]) -> None:
    """Adds an assignment of one member."""
    if order.kind == SessionStage.READY:
        terms = SecureReadyWork.FromString(order.work).terms
        asked = sessions.setdefault(hashing.session(terms), _Asked())
        asked.terms, asked.difference = SecureTerms.FromString(terms), _difference(spec, order, terms)
    elif order.kind == SessionStage.DEAL:
        deal = SecureDealWork.FromString(order.work)
        sessions.setdefault(deal.session, _Asked()).cohorts.add(tuple(deal.members))
    elif order.kind == SessionStage.MASK:
        mask = SecureMaskWork.FromString(order.work)
        coefficients = tuple(zip(mask.members, mask.coefficients, strict=True))
        sessions.setdefault(mask.session, _Asked()).coefficients.add(coefficients)
    elif order.kind == SessionStage.CONFIRM:
        confirm = SecureConfirmWork.FromString(order.work)
        sessions.setdefault(confirm.session, _Asked()).survivors.add(tuple(confirm.members))


def _difference(spec: RunSpec, order: AssignmentManifest, data: bytes) -> str:
    """The text on a field of terms that differs from the specification; empty if there is none.

    The owners of members may allow a plug-in by name, which is assumed here. `length` follows from a model that is not
    known here.
    """
    objectives = tuple(order.objectives)
    terms = read_terms(data, Shape(update_layout([("model", 1)]), objectives, objectives))
    origin = Origin(**repeated(order, _ORIGIN), unshared=Unshared.of(order.unshared))
    return difference(spec, terms, origin, objectives, terms.length, by_name=True)


def _problems(spec: RunSpec, asked: _Asked, owner: Owner | None) -> Iterator[str]:
    if asked.difference:
        yield f"{SessionStage.READY.value}: {asked.difference}"
    # A session that was void before MASK: no vector was asked for, so nothing of one can have been shown.
    if not asked.coefficients and not asked.survivors:
        return
    for noun, values in (
        ("cohorts", asked.cohorts),
        ("lists of coefficients", asked.coefficients),
        ("lists of members whose vectors arrived", asked.survivors),
    ):
        # Section 2.1: one session, one list. Two lists are two sums of the same vectors, which members must never be
        # asked for.
        if len(values) > 1:
            yield f"members were given {len(values)} different {noun}"
    # A record without READY or DEAL must not hide that MASK was asked for.
    if asked.terms is None or not asked.cohorts or not asked.coefficients:
        yield "members were asked for masked vectors, and not for what comes before"
        return
    try:
        cohort = Thresholds(len(min(asked.cohorts)), Mode(asked.terms.mode))
        rule = _FIXED.get(asked.terms.WhichOneof("work") or "") or run_bounds(spec)
        least = least_cover(spec.privacy.effective_members if owner is None else owner.effective_members, cohort)
    except (Malformed, ValueError) as error:
        yield str(error)
        return
    for coefficients in asked.coefficients:
        # Section 3.5, rule 3: one member of W that does not accept negative coefficients rules them out for all.
        signed = rule.signed and all(asked.signed.get(name, False) for name, _ in coefficients)
        yield from _of_coefficients(replace(rule, signed=signed), least, cohort, dict(coefficients), asked, owner)


def _of_coefficients(
    rule: Bounds,
    least: Fraction,
    cohort: Thresholds,
    coefficients: Mapping[str, int],
    asked: _Asked,
    owner: Owner | None,
) -> Iterator[str]:
    # Section 3.5: lambda0 needs the samples of all of W. Left out, a claim of samples could hide a coefficient.
    if unknown := sorted(coefficients.keys() - asked.samples.keys()):
        yield f"{unknown[0]} has a coefficient, and no accepted reply to {SessionStage.READY.value}"
        return
    if wrong := problem(rule, coefficients, asked.samples, cohort) or _uncovered(coefficients, cohort.t, least, owner):
        yield f"{SessionStage.MASK.value}: {wrong}"
    # Section 3.5, rule 1: again over V: the losses after MASK can take a member's cover away.
    for names in asked.survivors:
        left = {name: coefficients[name] for name in names if name in coefficients}
        if len(left) < len(names):
            yield f"{SessionStage.CONFIRM.value}: a member has no coefficient"
        elif wrong := _uncovered(left, cohort.t, least, owner):
            yield f"{SessionStage.CONFIRM.value}: {wrong}"


def _uncovered(coefficients: Mapping[str, int], t: int, least: Fraction, owner: Owner | None) -> str:
    if owner is None:
        return uncovered(coefficients, t, least)
    if owner.client_id not in coefficients or covers(coefficients, owner.client_id, t, least):
        return ""
    actual = float(cover(coefficients, owner.client_id, t))
    return f"the cover of {owner.client_id} was {actual:.2f} effective members; its owner requires {float(least):g}"
