"""The statements that read the standing of replies: built once, since they run for each reply."""

from sqlalchemy import and_, bindparam, select

from storage.models import Assignment, Client, Phase, Reply, Round, Run

# The assignment that a reply names, and an earlier receipt for the same envelope, in one query.
STANDING = (
    select(
        Assignment.client_id,
        Assignment.state,
        Assignment.reason,
        Assignment.message,
        Assignment.envelope,
        Phase.deadline,
        Run.spec,
        Client.signing_key,
        Client.start,
        Reply.accepted,
        Reply.reason.label("refused"),
        Reply.receipt,
    )
    .join_from(Assignment, Phase)
    .join(Round)
    .join(Run)
    .join(Client, Client.client_id == Assignment.client_id)
    .outerjoin(
        Reply,
        and_(Reply.assignment_id == Assignment.assignment_id, Reply.envelope_digest == bindparam("envelope")),
    )
    .where(Assignment.assignment_id == bindparam("assignment"))
)
# The members of replies, before their assignments, as a withdrawal locks them: a revocation or withdrawal waits until
# the replies are on record, or they wait for it and find it. SQLite needs no such statement: it has one writer.
LOCKED_MEMBERS = (
    select(Client.client_id)
    .where(Client.client_id.in_(bindparam("members", expanding=True)))
    .order_by(Client.client_id)  # all that lock several take them in this order
    .with_for_update(read=True)
)
LOCKED = (  # no mutant: SQLite has one writer
    select(
        Assignment.assignment_id,
        Assignment.state,
        Assignment.reason,
        Assignment.message,
        Client.start,
        Client.state.label("member"),
    )
    .join(Client, Client.client_id == Assignment.client_id)
    .where(Assignment.assignment_id.in_(bindparam("assignments", expanding=True)))
    .order_by(Assignment.assignment_id)  # all that lock several take them in this order
    .with_for_update(of=Assignment)
)
