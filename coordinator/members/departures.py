"""A member leaves the federation by its own will: its signed withdrawal. Functions of a session.

Nobody can refuse a withdrawal that the member has signed for its present joining. What has a receipt stays in its
round; the assignments that are open end with the withdrawal, in one transaction, so that no reply is accepted after it.
"""

from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.members.membership import REVOKED
from coordinator.rounds.replies.revoked import LEFT as LEFT_REASON
from coordinator.rounds.transitions import end_assignment, move_client, open_assignments
from coordinator.signing_keys import Signing
from federation.record.joinings import LEFT, WITH_CERTIFICATES, is_of_newest_joining
from federation.refusals import Refusal
from federation.trust.envelope import envelope_digest, verify
from federation.v1.common_pb2 import SignedEnvelope, WithdrawalManifest
from storage import audit
from storage.models import Assignment, AuditEntry, Client, Withdrawal
from storage.states import AssignmentState, ClientState

MAX_BYTES = 4096  # of a withdrawal


def leave(
    session: Session, client_id: str, envelope: SignedEnvelope, *, signing: Signing, by: str, now: datetime
) -> tuple[datetime, set[str]]:
    """Records a member's withdrawal: the envelope of a WithdrawalManifest, sent by `client_id`.

    A member that has left already may say so again; nothing changes.

    Returns:
        When it left, and the runs whose open assignments have ended with it.

    Raises:
        Refusal: `certificate-revoked`, `key-unknown`, `key-ended`, `signature`, `manifest`, `withdrawal`.
    """
    if envelope.ByteSize() > MAX_BYTES:
        raise Refusal("withdrawal", f"a withdrawal of {envelope.ByteSize()} bytes; at most {MAX_BYTES}")
    client = session.get_one(Client, client_id, with_for_update=True, populate_existing=True)
    if client.state is ClientState.REVOKED:
        raise Refusal("certificate-revoked", REVOKED)
    keys = signing.keys_of(session, client_id, client.signing_key, envelope)
    # A former key signs no withdrawal: one that was sent in time is on record, and the member signs a new one.
    if keys.former_of(envelope) is not None:
        raise Refusal("key-ended", "the key of this withdrawal was replaced: sign it with the present one")
    manifest = verify(envelope, WithdrawalManifest, keys.present)
    _check_fits(session, manifest, client_id, signing.federation_id)
    if client.state is ClientState.LEFT and client.left is not None:
        return client.left, set()
    before = client.state
    move_client(client, ClientState.LEFT)
    client.left, client.left_from = now, before
    session.flush()
    ended = open_assignments(session, Assignment.client_id == client_id)
    for assignment in ended:
        end_assignment(assignment, AssignmentState.CANCELLED, now, LEFT_REASON)
    name = envelope_digest(envelope)
    # Replaced if it is there: a backup that was restored can have the withdrawal and not the state.
    session.merge(
        Withdrawal(
            digest=name,
            client_id=client_id,
            envelope=envelope.SerializeToString(deterministic=True),
            forget=manifest.forget,
            received=now,
        )
    )
    # After the assignments are locked, so that the log tells of each accepted reply before it tells of this.
    audit.record(
        session,
        at=now,
        actor=by,
        action=LEFT,
        subject=client_id,
        detail=f"certificate {manifest.certificate}, {before}{', asks to be forgotten' if manifest.forget else ''}",
        digest=name,
    )
    return now, {assignment.phase.round.run_id for assignment in ended}


def _check_fits(session: Session, manifest: WithdrawalManifest, client_id: str, federation_id: str) -> None:
    """Raises the Refusal `withdrawal` unless it is this member's, from its newest joining of this federation."""
    for name, expected in (("federation_id", federation_id), ("client_id", client_id)):
        if (found := getattr(manifest, name)) != expected:
            raise Refusal("withdrawal", f"its {name} is {found[:80]!r}; expected {expected!r}")
    told = (
        select(AuditEntry.action, AuditEntry.detail)
        .where(AuditEntry.subject == client_id, AuditEntry.outcome == "", AuditEntry.action.in_(WITH_CERTIFICATES))
        .order_by(AuditEntry.entry_id)
    )
    rows = [(action, detail) for action, detail in session.execute(told)]
    if not is_of_newest_joining(manifest.certificate, rows):
        raise Refusal(
            "withdrawal",
            f"it names the certificate {manifest.certificate[:40]!r}, which {client_id} did not get since it joined "
            "last: it withdraws from no later joining",
        )


def withdrawn(session: Session, client: Client) -> Refusal:
    """The refusal of a member that has left, with its own signed withdrawal."""
    newest = (
        select(Withdrawal.envelope)
        .where(Withdrawal.client_id == client.client_id)
        .order_by(Withdrawal.received.desc())
        .limit(1)
    )
    since = "" if client.left is None else f" on {client.left:%Y-%m-%d %H:%M} UTC"
    return Refusal(
        LEFT_REASON,
        f"{client.client_id} has left the federation{since}: it comes back with a join string for its name "
        f"(`fedpareto admin join-string {client.client_id} --again`) and its signing key",
        signed=session.scalar(newest) or b"",
    )
