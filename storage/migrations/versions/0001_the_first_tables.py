"""The first tables.

Revision 0001, after nothing. Constraints and indexes get their names from `storage.models.NAMES`.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

NAME = sa.String(63)
DIGEST = sa.String(71)
STATE = sa.String(16)
TIME = sa.DateTime(timezone=True)


def _column(name: str, kind: Any, *constraints: sa.ForeignKey, nullable: bool = False, **options: Any) -> Any:
    return sa.Column(name, kind, *constraints, nullable=nullable, **options)


def upgrade() -> None:
    """Makes the change."""
    op.create_table(
        "audit_log",
        _column("entry_id", sa.Integer, primary_key=True),
        _column("at", TIME, index=True),
        _column("actor", sa.String(200), index=True),
        _column("action", sa.String(80)),
        _column("subject", sa.String(200)),
        _column("outcome", sa.String(80)),
        _column("detail", sa.String(2000)),
        _column("digest", DIGEST),
        _column("times", sa.Integer),
        _column("number", sa.Integer, nullable=True, unique=True),
        _column("leaf", sa.LargeBinary, nullable=True),
        _column("tag", sa.LargeBinary, nullable=True, unique=True),
    )
    op.create_table(
        "audit_checkpoints",
        _column("size", sa.Integer, primary_key=True, autoincrement=False),
        _column("envelope", sa.LargeBinary),
    )
    op.create_table(
        "clients",
        _column("client_id", NAME, primary_key=True),
        _column("state", STATE),
        _column("signing_key", sa.LargeBinary),
        _column("key_id", sa.String(64), unique=True),
        _column("tasks", sa.JSON),
        _column("objectives", sa.JSON),
        _column("sessions_left", sa.JSON),
        _column("abilities", sa.JSON),
        _column("tags", sa.JSON),
        _column("consents", sa.Boolean),
        _column("device", sa.String(200)),
        _column("software", sa.String(200)),
        _column("enrolled", TIME),
        _column("last_seen", TIME, nullable=True),
        _column("revoked", TIME, nullable=True),
        _column("revoked_reason", sa.String(400)),
        _column("forgotten", TIME, nullable=True),
    )
    op.create_table(
        "federations",
        _column("federation_id", NAME, primary_key=True),
        _column("ca_fingerprint", sa.String(64)),
        _column("coordinator", sa.String(32)),
        _column("created", TIME),
    )
    op.create_table(
        "join_strings",
        _column("secret_hash", sa.String(64), primary_key=True),
        _column("client_id", NAME, index=True),
        _column("created_by", sa.String(200)),
        _column("created", TIME),
        _column("expires", TIME),
        _column("used", TIME, nullable=True),
        _column("cancelled", TIME, nullable=True),
    )
    op.create_table(
        "models",
        _column("digest", DIGEST, primary_key=True),
        _column("size", sa.BigInteger),
        _column("parameters", sa.BigInteger),
        _column("created", TIME),
    )
    op.create_table(
        "administrators",
        _column("key_id", sa.String(64), primary_key=True),
        _column("name", NAME, index=True),
        _column("signing_key", sa.LargeBinary),
        _column("roles", sa.JSON),
        _column("issued", TIME),
        _column("last_seen", TIME, nullable=True),
        _column("ended", TIME, nullable=True),
    )
    op.create_table(
        "action_requests",
        _column("request_id", DIGEST, primary_key=True),
        _column("state", STATE, index=True),
        _column("requested_by", sa.String(64), sa.ForeignKey("administrators.key_id")),
        _column("envelope", sa.LargeBinary),
        _column("created", TIME),
        _column("expires", TIME),
        _column("decided_by", sa.String(64), sa.ForeignKey("administrators.key_id"), nullable=True),
        _column("decision", sa.LargeBinary, nullable=True),
        _column("ended", TIME, nullable=True),
    )
    op.create_table(
        "rotations",
        _column("key_id", sa.String(64), primary_key=True),
        _column("client_id", NAME, sa.ForeignKey("clients.client_id"), index=True),
        _column("number", sa.Integer),
        _column("rotation", sa.LargeBinary),
    )
    op.create_table(
        "certificates",
        _column("serial", sa.String(40), primary_key=True),
        _column("client_id", NAME, sa.ForeignKey("clients.client_id"), index=True, nullable=True),
        _column("administrator", sa.String(64), sa.ForeignKey("administrators.key_id"), index=True, nullable=True),
        _column("subject", sa.String(200)),
        _column("certificate", sa.LargeBinary),
        _column("login", DIGEST, nullable=True, unique=True),
        _column("not_before", TIME),
        _column("not_after", TIME),
        _column("revoked", TIME, nullable=True),
    )
    op.create_table(
        "runs",
        _column("run_id", sa.String(32), primary_key=True),
        _column("name", NAME, index=True),
        _column("state", STATE, index=True),
        _column("reason", sa.String(400)),
        _column("spec", sa.LargeBinary),
        _column("spec_digest", DIGEST),
        _column("initial_model", DIGEST, sa.ForeignKey("models.digest")),
        _column("model", DIGEST, sa.ForeignKey("models.digest")),
        _column("objectives", sa.JSON),
        _column("metrics", sa.JSON),
        _column("state_data", sa.JSON),
        _column("submitted_by", sa.String(200)),
        _column("created", TIME),
        _column("started", TIME, nullable=True),
        _column("ended", TIME, nullable=True),
    )
    op.create_table(
        "consents",
        _column("run_id", sa.String(32), sa.ForeignKey("runs.run_id"), primary_key=True),
        _column("client_id", NAME, sa.ForeignKey("clients.client_id"), primary_key=True),
        _column("answer", STATE),
        _column("reason", sa.String(80)),
        _column("message", sa.String(400)),
        _column("envelope", sa.LargeBinary),
        _column("at", TIME),
    )
    op.create_table(
        "rounds",
        _column("round_id", sa.Integer, primary_key=True),
        _column("run_id", sa.String(32), sa.ForeignKey("runs.run_id")),
        _column("number", sa.Integer),
        _column("state", STATE),
        _column("reason", sa.String(400)),
        _column("base_model", DIGEST, sa.ForeignKey("models.digest")),
        _column("result_model", DIGEST, sa.ForeignKey("models.digest"), nullable=True),
        _column("deployed_model", DIGEST, sa.ForeignKey("models.digest"), nullable=True),
        _column("gram", DIGEST, nullable=True),
        _column("combined", DIGEST, nullable=True),
        _column("noise", DIGEST, nullable=True),
        _column("step", sa.LargeBinary, nullable=True),
        _column("state_after", sa.JSON),
        _column("selected", sa.JSON),
        _column("not_asked", sa.JSON),
        _column("wanted", sa.Integer),
        _column("attempt", sa.Integer),
        _column("voided", sa.JSON),
        _column("named", sa.JSON),
        _column("evaluation_phase", sa.Integer, nullable=True),
        _column("metrics", sa.JSON),
        _column("objectives", sa.JSON),
        _column("started", TIME),
        _column("stepped", TIME, nullable=True),
        _column("ended", TIME, nullable=True),
        sa.UniqueConstraint("run_id", "number"),
    )
    op.create_table(
        "evaluations",
        _column("evaluation_id", sa.Integer, primary_key=True),
        _column("round_id", sa.Integer, sa.ForeignKey("rounds.round_id")),
        _column("client_id", NAME, sa.ForeignKey("clients.client_id")),
        _column("model", DIGEST, sa.ForeignKey("models.digest")),
        _column("split", sa.String(20)),
        _column("loss", sa.Float, nullable=True),
        _column("accuracy", sa.Float, nullable=True),
        _column("others", sa.JSON),
        _column("samples", sa.BigInteger),
        sa.UniqueConstraint("round_id", "client_id", "split"),
    )
    op.create_table(
        "phases",
        _column("phase_id", sa.Integer, primary_key=True),
        _column("round_id", sa.Integer, sa.ForeignKey("rounds.round_id")),
        _column("number", sa.Integer),
        _column("attempt", sa.Integer),
        _column("kind", sa.String(32)),
        _column("decides", sa.Boolean),
        _column("state", STATE),
        _column("wanted", sa.Integer),
        _column("started", TIME),
        _column("deadline", TIME),
        _column("ended", TIME, nullable=True),
        sa.UniqueConstraint("round_id", "number"),
    )
    op.create_table(
        "assignments",
        _column("assignment_id", sa.String(32), primary_key=True),
        _column("phase_id", sa.Integer, sa.ForeignKey("phases.phase_id"), index=True),
        _column("client_id", NAME, sa.ForeignKey("clients.client_id")),
        _column("state", STATE),
        _column("reason", sa.String(80)),
        _column("message", sa.String(400)),
        _column("base_model", DIGEST, sa.ForeignKey("models.digest"), index=True),
        _column("objectives", sa.JSON),
        _column("envelope", sa.LargeBinary),
        _column("decline", sa.LargeBinary, nullable=True),
        _column("created", TIME),
        _column("ended", TIME, nullable=True),
        sa.UniqueConstraint("phase_id", "client_id"),
        sa.Index("ix_assignments_open", "client_id", "state"),
    )
    op.create_table(
        "inputs",
        _column("assignment_id", sa.String(32), sa.ForeignKey("assignments.assignment_id"), primary_key=True),
        _column("name", NAME, primary_key=True),
        _column("digest", DIGEST, index=True),
        _column("size", sa.BigInteger),
    )
    op.create_table(
        "replies",
        _column("reply_id", sa.Integer, primary_key=True),
        _column("assignment_id", sa.String(32), sa.ForeignKey("assignments.assignment_id")),
        _column("client_id", NAME, sa.ForeignKey("clients.client_id"), index=True),
        _column("accepted", sa.Boolean),
        _column("reason", sa.String(80)),
        _column("envelope", sa.LargeBinary),
        _column("envelope_digest", DIGEST, index=True),
        _column("receipt", sa.LargeBinary),
        _column("payload", DIGEST),
        _column("payload_bytes", sa.BigInteger),
        _column("samples", sa.BigInteger),
        _column("losses", sa.JSON),
        _column("metrics", sa.JSON),
        _column("privacy", sa.JSON),
        _column("unrepeatable", sa.Boolean),
        _column("norm", sa.Float, nullable=True),
        _column("weight", sa.Float, nullable=True),
        _column("coefficient", sa.Float, nullable=True),
        _column("cosine", sa.Float, nullable=True),
        _column("received", TIME),
        sa.Index("ix_replies_assignment_accepted", "assignment_id", "accepted"),
    )


def downgrade() -> None:
    """Takes it back."""
    for table in (
        "replies",
        "inputs",
        "assignments",
        "phases",
        "evaluations",
        "rounds",
        "consents",
        "runs",
        "certificates",
        "action_requests",
        "administrators",
        "rotations",
        "models",
        "join_strings",
        "federations",
        "clients",
        "audit_checkpoints",
        "audit_log",
    ):
        op.drop_table(table)
