"""Turns the phases of a session into messages, and back."""

from typing import Any

from google.protobuf.message import DecodeError

from federation.record import bound_fields
from federation.record.bound_fields import repeated
from federation.secure import hashing
from federation.secure.errors import Malformed
from federation.secure.hashing import PublicKeys
from federation.secure.member_keys import check_keys
from federation.secure.thresholds import Mode
from federation.spec.computation import NoisyTraining
from federation.spec.run_facts import unshared_parameters
from federation.spec.sharing import Unshared
from federation.v1.secure_pb2 import (
    Invited,
    SecureConfirmWork,
    SecureDealWork,
    SecureMaskWork,
    SecureOpenWork,
    SecureReadyWork,
    SecureStatement,
    SecureTerms,
    SecureUnmaskWork,
)
from federation.work.base import Shape, WorkError
from federation.work.evaluate import wire as evaluate
from federation.work.jacobian import wire as jacobian
from federation.work.registry import Kind, Statements
from federation.work.secure import terms
from federation.work.secure.deal import Deal, Open
from federation.work.secure.masking import Confirm, Mask, Unmask
from federation.work.secure.ready import Ready
from federation.work.secure.terms import SessionStage, SessionTerms, Statement
from federation.work.site import EVALUATE
from federation.work.statistics import wire as statistics
from federation.work.train import wire as train

# Section 8: no other kind of work can make a vector: it would belong to no phase, and the limits count phases.
_INNER = {kind.KIND.work.name: kind.KIND for kind in (train, jacobian, evaluate, statistics)}
_REPEATED = (*bound_fields.TERMS, "nonce", "length", "clip", "blur")


def terms_bytes(agreed: SessionTerms) -> bytes:
    """The terms as they are sent."""
    message = SecureTerms(**repeated(agreed, _REPEATED))
    message.mode = agreed.mode.value
    message.disclose.extend(agreed.disclose)
    message.invited.extend(Invited(client_id=member.client_id, key_id=member.key_id) for member in agreed.invited)
    name = agreed.work.name
    getattr(message, name).CopyFrom(_INNER[name].to_proto(agreed.work))
    if agreed.unshared != Unshared():
        message.unshared.CopyFrom(unshared_parameters(agreed.unshared))
    # Section 2: serialised once. The session is the digest of these bytes, and everybody hashes them as received.
    return message.SerializeToString(deterministic=True)


def read_terms(data: bytes, shape: Shape) -> SessionTerms:
    """The terms as they were sent, for a model and a task. Raises WorkError if they are malformed."""
    try:
        message = SecureTerms.FromString(data)
    except DecodeError:
        raise WorkError("the terms are not a SecureTerms", reason="terms") from None
    # Section 2: the work is in the terms, so members that are asked for other work are in other sessions.
    name = message.WhichOneof("work")
    if name is None:
        raise WorkError("the session has no work", reason="terms")
    return SessionTerms(
        **repeated(message, _REPEATED),
        mode=_mode(message.mode),
        disclose=tuple(message.disclose),
        invited=tuple(terms.Invited(member.client_id, member.key_id) for member in message.invited),
        work=_INNER[name].from_proto(getattr(message, name), shape),
        unshared=Unshared.of(message.unshared),
    )


def _mode(name: str) -> Mode:
    try:
        return Mode(name)
    except ValueError:
        raise WorkError(f"there is no mode {name[:40]!r}", reason="terms") from None


def statement_to_proto(statement: Statement) -> SecureStatement:
    """The message of a statement."""
    return SecureStatement(
        session=statement.session,
        stage=statement.stage.value,
        opening=statement.opening,
        keys=statement.keys,
        commitment=statement.commitment,
        view=statement.view,
        complaints=statement.complaints,
        measured=statement.measured,
        blur=statement.blur,
        signed=statement.signed,
    )


def statement_from_proto(message: SecureStatement) -> Statement:
    """The statement of a message. Raises ValueError if there is no such phase."""
    return Statement(
        session=message.session,
        stage=SessionStage(message.stage),
        opening=message.opening,
        keys=message.keys,
        commitment=message.commitment,
        view=message.view,
        complaints=tuple(message.complaints),
        measured=message.measured,
        blur=message.blur,
        signed=message.signed,
    )


def _ready_to_proto(work: Ready) -> SecureReadyWork:
    return SecureReadyWork(terms=work.terms_bytes)


def _ready_from_proto(message: SecureReadyWork, shape: Shape) -> Ready:
    return Ready(agreed=read_terms(message.terms, shape), terms_bytes=message.terms)


def _ready_noise(message: SecureReadyWork) -> NoisyTraining | None:
    """The noise of the work in the terms."""
    agreed = SecureTerms.FromString(message.terms)
    name = agreed.WhichOneof("work")
    return None if name is None else _INNER[name].noise(getattr(agreed, name))


def _deal_to_proto(work: Deal) -> SecureDealWork:
    return SecureDealWork(session=work.session, mode=work.mode.value, members=work.members)


def _deal_from_proto(message: SecureDealWork, shape: Shape) -> Deal:
    return Deal(session=message.session, mode=_mode(message.mode), members=tuple(message.members))


def _open_to_proto(work: Open) -> SecureOpenWork:
    return SecureOpenWork(session=work.session, opening=work.opening, members=work.members)


def _open_from_proto(message: SecureOpenWork, shape: Shape) -> Open:
    return Open(session=message.session, opening=message.opening, members=tuple(message.members))


def _mask_to_proto(work: Mask) -> SecureMaskWork:
    return SecureMaskWork(
        session=work.session, members=work.members, coefficients=work.coefficients, length=work.length
    )


def _mask_from_proto(message: SecureMaskWork, shape: Shape) -> Mask:
    return Mask(
        session=message.session,
        members=tuple(message.members),
        coefficients=tuple(message.coefficients),
        length=message.length,
    )


def _confirm_to_proto(work: Confirm) -> SecureConfirmWork:
    return SecureConfirmWork(
        session=work.session, members=work.members, masked=work.masked, tau1=work.tau1, commitment=work.commitment
    )


def _confirm_from_proto(message: SecureConfirmWork, shape: Shape) -> Confirm:
    return Confirm(
        session=message.session,
        members=tuple(message.members),
        masked=tuple(message.masked),
        tau1=message.tau1,
        commitment=message.commitment,
    )


def _unmask_to_proto(work: Unmask) -> SecureUnmaskWork:
    return SecureUnmaskWork(session=work.session, members=work.members, lost=work.lost, tau2=work.tau2)


def _unmask_from_proto(message: SecureUnmaskWork, shape: Shape) -> Unmask:
    return Unmask(session=message.session, members=tuple(message.members), lost=tuple(message.lost), tau2=message.tau2)


def problem(asked: Any, statement: Statement) -> str:
    """The error of a statement as the answer to the message of a phase; empty if it is valid."""
    # Section 2: of the terms as they were sent: written anew, they could have another digest, and every reply would be
    # refused.
    session = hashing.session(asked.terms) if isinstance(asked, SecureReadyWork) else asked.session
    stage = next(stage for stage, kind in KINDS.items() if kind.message is type(asked))
    # Section 2: a signed statement of another session or phase is genuine, too; counted here, it would confirm what its
    # member never saw.
    if (statement.session, statement.stage, statement.opening) != (session, stage, getattr(asked, "opening", 0)):
        return "the statement is of another session, phase or opening"
    if len(statement.view) != (0 if statement.stage is SessionStage.READY else hashing.DIGEST):
        return f"the view has {len(statement.view)} bytes"
    # Section 2.6: at DEAL and only there: a commitment after shares were opened commits to nothing.
    if len(statement.commitment) != (hashing.DIGEST if statement.stage is SessionStage.DEAL else 0):
        return f"the commitment has {len(statement.commitment)} bytes"
    # Section 2.4: at opening 0 alone, where W is settled; later ones would have no rule by which members leave.
    if statement.complaints and (statement.stage, statement.opening) != (SessionStage.OPEN, 0):
        return "there are complaints at a phase that takes none"
    if len(statement.keys) != (2 * hashing.KEY if statement.stage is SessionStage.READY else 0):
        return f"the keys have {len(statement.keys)} bytes"
    # Section 2c: refused before U1 is formed: at DEAL, all other members would decline with `blur`.
    if statement.blur != _blur(asked):
        return f"the blur is {statement.blur:g}; the terms say {_blur(asked):g}"
    if statement.signed and statement.stage is not SessionStage.READY:
        return "negative coefficients are accepted at a phase that does not ask"
    # Section 2b: refused here: at DEAL, all other members would decline with `metrics`.
    if len(statement.measured) != _entries(asked) or not set(statement.measured) <= {0, 1}:
        return "there is not one byte, 0 or 1, for each metric of an evaluation"
    # Section 2.2: before another member sees them: one bad key at DEAL makes every member decline.
    if statement.keys:
        try:
            check_keys([PublicKeys(statement.keys[: hashing.KEY], statement.keys[hashing.KEY :])])
        except Malformed as error:
            return str(error)
    return ""


def _blur(asked: Any) -> float:
    """The blur in the terms at READY; 0 at later phases."""
    return SecureTerms.FromString(asked.terms).blur if isinstance(asked, SecureReadyWork) else 0.0


def _entries(asked: Any) -> int:
    """The number of metrics that the message of a phase asks for: at READY for an evaluation, otherwise 0."""
    if not isinstance(asked, SecureReadyWork):
        return 0
    agreed = SecureTerms.FromString(asked.terms)
    return agreed.length if agreed.WhichOneof("work") == EVALUATE else 0


_STATEMENTS = Statements(SecureStatement, statement_to_proto, statement_from_proto, problem)
KINDS = {
    kind.work.name: kind
    for kind in (
        Kind(Ready, SecureReadyWork, _ready_to_proto, _ready_from_proto, _STATEMENTS, _ready_noise),
        Kind(Deal, SecureDealWork, _deal_to_proto, _deal_from_proto, _STATEMENTS),
        Kind(Open, SecureOpenWork, _open_to_proto, _open_from_proto, _STATEMENTS),
        Kind(Mask, SecureMaskWork, _mask_to_proto, _mask_from_proto, _STATEMENTS),
        Kind(Confirm, SecureConfirmWork, _confirm_to_proto, _confirm_from_proto, _STATEMENTS),
        Kind(Unmask, SecureUnmaskWork, _unmask_to_proto, _unmask_from_proto, _STATEMENTS),
    )
}
