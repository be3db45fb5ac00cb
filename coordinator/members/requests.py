"""Actions that need two security officers: one signs a request, another one a decision. Functions of a session.

The action is read from the first officer's signed request, never from a column, and it is performed in the
transaction of the second officer's consent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from google.protobuf.timestamp_pb2 import Timestamp
from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from coordinator.members.administrators import administrators, officers, revoke_administrator
from coordinator.members.logged_rights import DECIDED, LoggedRights
from coordinator.members.membership import approve, forget, revoke
from coordinator.settings import Settings
from federation.refusals import Refusal
from federation.trust.envelope import envelope_digest, verify
from federation.trust.identity import Action, Role
from federation.v1.common_pb2 import DecisionManifest, RequestManifest, SignedEnvelope
from storage import audit
from storage.models import ActionRequest, Administrator, Client
from storage.states import RequestState

MADE = "request.made"  # an entry of the log
TOLERANCE = timedelta(minutes=5)  # between an administrator's clock and the coordinator's
MAX_MANIFEST_BYTES = 8192
LEAST = 2  # officers, for actions that need two
_DIGITS = 12  # of a request's id, in a message


SignedT = TypeVar("SignedT", RequestManifest, DecisionManifest)


@dataclass(frozen=True)
class Done:
    """A decision and its effect; `client` is the client that was revoked, if any."""

    row: ActionRequest
    action: Action
    subject: str
    client: Client | None = None


def officers_caution(session: Session, settings: Settings) -> str | None:
    """A warning if an action needs two officers and there are fewer; None otherwise."""
    names = officers(session)
    if not settings.two_officers or len(names) >= LEAST:
        return None
    return (
        f"two_officers = [{', '.join(settings.two_officers)}], and the federation has {len(names)} security officers "
        f"({', '.join(names) or 'none'}): none of this can be done. Issue another one on this machine: `fedpareto "
        "coordinator admin NAME --role security-officer --out DIR`"
    )


def must_not_take_two(settings: Settings, action: Action) -> None:
    """Raises the Refusal `two-officers` if an action needs two officers."""
    if action in settings.two_officers:
        raise Refusal(
            "two-officers",
            f"in this federation {action} takes two security officers: sign a request, to which another officer "
            "consents (`fedpareto admin` does so by itself)",
        )


def make_request(
    session: Session,
    envelope: SignedEnvelope,
    *,
    federation_id: str,
    settings: Settings,
    rights: LoggedRights,
    by: str,
    now: datetime,
) -> ActionRequest:
    """Puts an officer's request on record. The action is tried and rolled back, so that a bad one is refused now.

    `by` is the URI of the caller, who must be the officer who signed.

    Raises:
        Refusal: `manifest`, `key-unknown`, `signature`, `mismatch`, `signed-time`, `argument`: this takes one officer,
            or the request is open for too long; `request-exists`: it was made already, or another one for this action
            and subject is open; `unlogged`: the audit log does not tell of the officer; those of the action.
    """
    officer, manifest = _signed(session, envelope, RequestManifest, federation_id=federation_id, by=by, now=now)
    rights.must_tell_of(officer)
    if manifest.action not in settings.two_officers:
        raise Refusal("argument", f"{manifest.action[:40]!r} does not take two officers in this federation")
    expires = _time(manifest.expires, now)
    if not timedelta() < expires - now <= timedelta(seconds=settings.request_seconds) + TOLERANCE:
        raise Refusal("argument", f"a request is open for at most {settings.request_seconds} s from now on")
    request_id = envelope_digest(envelope)
    if session.get(ActionRequest, request_id) is not None:
        raise Refusal("request-exists", "this request was made already: make a new one")
    _must_be_the_only_one(session, manifest, rights, now)
    with session.begin_nested() as trial:
        _perform(session, manifest, by=by, now=now, consent="")
        trial.rollback()
    row = ActionRequest(
        request_id=request_id,
        state=RequestState.OPEN,
        requested_by=officer.key_id,
        envelope=envelope.SerializeToString(deterministic=True),
        created=now,
        expires=expires,
    )
    session.add(row)
    session.flush()
    detail = f"{manifest.action} {manifest.subject}"
    audit.record(session, at=now, actor=by, action=MADE, subject=request_id, detail=detail, digest=request_id)
    return row


def _must_be_the_only_one(session: Session, manifest: RequestManifest, rights: LoggedRights, now: datetime) -> None:
    """Raises the Refusal `request-exists` if another request for this action and subject can be consented to."""
    administrators(session, lock=True)  # two officers who ask at the same moment wait for each other
    rows = select(ActionRequest).where(ActionRequest.state == RequestState.OPEN, ActionRequest.expires > now)
    for row in session.scalars(rows):
        officer = session.get_one(Administrator, row.requested_by)
        try:
            requested = open_request(row, officer)
            rights.must_tell_of(officer)
            rights.must_be_undecided(row.request_id)
        except Refusal:  # a row that was inserted or changed: nobody can consent to it
            continue
        if _counts(officer) and (requested.action, requested.subject) == (manifest.action, manifest.subject):
            name, until = row.request_id.rpartition(":")[2][:_DIGITS], f"{row.expires:%Y-%m-%d %H:%M} UTC"
            raise Refusal(
                "request-exists",
                f"{officer.name} has asked for this already: request {name}, {requested.action} {requested.subject}, "
                f"open until {until}; another security officer consents to it (`fedpareto admin consent {name}`), or "
                f"withdraw it before you ask anew (`fedpareto admin withdraw {name}`)",
            )


def decide(
    session: Session, envelope: SignedEnvelope, *, federation_id: str, rights: LoggedRights, by: str, now: datetime
) -> Done:
    """Takes an officer's decision on a request; with a consent, performs the requested action.

    Raises:
        Refusal: `manifest`, `key-unknown`, `signature`, `mismatch`, `signed-time`, `request-unknown`, `request-state`,
            `request-expired`, `request-own`, `request-officer`; `unlogged`: the audit log does not tell of one of the
            officers, or tells of a decision; those of the action; the request then stays open.
    """
    officer, manifest = _signed(session, envelope, DecisionManifest, federation_id=federation_id, by=by, now=now)
    rights.must_tell_of(officer)
    row = session.get(ActionRequest, manifest.request[:71], with_for_update=True, populate_existing=True)
    if row is None:
        raise Refusal("request-unknown", "there is no such request: `fedpareto admin requests` lists the open ones")
    if row.state is not RequestState.OPEN:
        raise Refusal("request-state", f"the request is {row.state} since {row.ended:%Y-%m-%d %H:%M} UTC")
    if now >= row.expires:
        raise Refusal("request-expired", f"the request has expired at {row.expires:%Y-%m-%d %H:%M} UTC: make a new one")
    administrators(session, lock=True)  # all in one order, before the action does so: no two consents can deadlock
    first = session.get_one(Administrator, row.requested_by)
    requested = open_request(row, first)
    rights.must_be_undecided(row.request_id)
    by_requester = first.name == officer.name
    if manifest.consent and by_requester:
        raise Refusal("request-own", "the request is your own: another security officer has to consent")
    if now >= _time(requested.expires, now):
        raise Refusal("signature", "the end of the request on record is not the one that was signed")
    if not _counts(officer):
        raise Refusal("key-unknown", f"{officer.name} was revoked at this moment")
    if manifest.consent and not _counts(first):
        raise Refusal("request-officer", f"{first.name}, who made the request, is no security officer any more")
    if manifest.consent:
        rights.must_tell_of(first)
    row.state = (
        RequestState.DONE if manifest.consent else RequestState.WITHDRAWN if by_requester else RequestState.REFUSED
    )
    row.decided_by, row.ended = officer.key_id, now
    row.decision = envelope.SerializeToString(deterministic=True)
    consent = envelope_digest(envelope)
    reason = f"{': ' if manifest.reason else ''}{manifest.reason}"
    detail = f"{requested.action} {requested.subject}, asked by {first.name}{reason}"
    audit.record(
        session, at=now, actor=by, action=DECIDED[row.state], subject=row.request_id, detail=detail, digest=consent
    )
    client = _perform(session, requested, by=by, now=now, consent=consent) if manifest.consent else None
    return Done(row, Action(requested.action), requested.subject, client)


def open_request(row: ActionRequest, officer: Administrator) -> RequestManifest:
    """The manifest of a request on record, as the officer signed it.

    Raises:
        Refusal: `signature`: the row was changed since.
    """
    envelope = SignedEnvelope.FromString(row.envelope)
    if envelope_digest(envelope) != row.request_id:
        raise Refusal("signature", "the request on record is not the one that was signed")
    return verify(envelope, RequestManifest, Ed25519PublicKey.from_public_bytes(officer.signing_key))


def requests(session: Session, *, every: bool, now: datetime, start: int, count: int) -> Sequence[ActionRequest]:
    """The open requests, or every one, newest first: at most `count` of them, after the first `start`."""
    fit: tuple[ColumnElement[bool], ...] = ()
    if not every:
        fit = (ActionRequest.state == RequestState.OPEN, ActionRequest.expires > now)
    query = select(ActionRequest).where(*fit).order_by(ActionRequest.created.desc(), ActionRequest.request_id)
    return session.scalars(query.offset(start).limit(count)).all()


def _signed(
    session: Session, envelope: SignedEnvelope, kind: type[SignedT], *, federation_id: str, by: str, now: datetime
) -> tuple[Administrator, SignedT]:
    """The officer who signed an envelope, who must be the caller, and its manifest, which must be recent."""
    if len(envelope.manifest) > MAX_MANIFEST_BYTES:
        raise Refusal("manifest", f"what an officer signs has at most {MAX_MANIFEST_BYTES} bytes")
    name = by.rpartition("/")[2]
    officer = session.get(Administrator, envelope.key_id.hex()[:64])
    if officer is None or officer.name != name or not _counts(officer):
        raise Refusal("key-unknown", f"this is not signed by the present signing key of the security officer {name}")
    manifest = verify(envelope, kind, Ed25519PublicKey.from_public_bytes(officer.signing_key))
    for field, expected in (("federation_id", federation_id), ("officer", name)):
        if (signed_value := getattr(manifest, field)) != expected:
            raise Refusal(f"mismatch:{field}", f"what was signed is for {signed_value[:63]!r}, not for {expected!r}")
    if abs(_time(manifest.created, now) - now) > TOLERANCE:
        raise Refusal(
            "signed-time",
            f"this was signed more than five minutes from {now:%Y-%m-%d %H:%M:%S} UTC, the coordinator's time: set the "
            "clock",
        )
    return officer, manifest


def _counts(administrator: Administrator) -> bool:
    return administrator.ended is None and Role.SECURITY_OFFICER in administrator.roles


def _time(stamp: Timestamp, now: datetime) -> datetime:
    try:
        return stamp.ToDatetime(now.tzinfo)
    except (ValueError, OverflowError):
        raise Refusal("signed-time", "a time in what was signed is not a time") from None


def _perform(session: Session, requested: RequestManifest, *, by: str, now: datetime, consent: str) -> Client | None:
    match Action(requested.action):
        case Action.APPROVE:
            approve(session, requested.subject, requested.key_id, by=by, now=now, consent=consent)
        case Action.REVOKE:
            return revoke(session, requested.subject, requested.reason, by=by, now=now, consent=consent)
        case Action.FORGET:
            forget(session, requested.subject, requested.reason, by=by, now=now, consent=consent)
        case Action.REVOKE_ADMIN:
            revoke_administrator(
                session, requested.subject, requested.reason, least=LEAST, by=by, now=now, consent=consent
            )
    return None
