"""The first tables, of version 0.1.0.

Revision 0002, after nothing.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Makes the tables."""
    op.create_table(
        "administrators",
        sa.Column("key_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("signing_key", sa.LargeBinary(), nullable=False),
        sa.Column("roles", sa.JSON(), nullable=False),
        sa.Column("issued", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_seen", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("key_id", name=op.f("pk_administrators")),
    )
    with op.batch_alter_table("administrators", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_administrators_name"), ["name"], unique=False)

    op.create_table(
        "alerts",
        sa.Column("alert_id", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("severity", sa.String(length=16), nullable=False),
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("client_id", sa.String(length=63), nullable=False),
        sa.Column("message", sa.String(length=600), nullable=False),
        sa.Column("remedy", sa.String(length=400), nullable=False),
        sa.Column("first_round", sa.Integer(), nullable=True),
        sa.Column("last_round", sa.Integer(), nullable=True),
        sa.Column("began", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("alert_id", name=op.f("pk_alerts")),
        sa.UniqueConstraint("kind", "run_id", "client_id", "began", name=op.f("uq_alerts_kind_run_id_client_id_began")),
    )
    with op.batch_alter_table("alerts", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_alerts_client_id"), ["client_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_alerts_ended"), ["ended"], unique=False)
        batch_op.create_index(batch_op.f("ix_alerts_run_id"), ["run_id"], unique=False)

    op.create_table(
        "audit_checkpoints",
        sa.Column("size", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("envelope", sa.LargeBinary(), nullable=False),
        sa.Column("shown", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("size", name=op.f("pk_audit_checkpoints")),
    )
    op.create_table(
        "audit_log",
        sa.Column("entry_id", sa.Integer(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.String(length=200), nullable=False),
        sa.Column("action", sa.String(length=80), nullable=False),
        sa.Column("subject", sa.String(length=200), nullable=False),
        sa.Column("outcome", sa.String(length=80), nullable=False),
        sa.Column("detail", sa.String(length=2000), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("times", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=True),
        sa.Column("leaf", sa.LargeBinary(), nullable=True),
        sa.Column("tag", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("entry_id", name=op.f("pk_audit_log")),
        sa.UniqueConstraint("number", name=op.f("uq_audit_log_number")),
        sa.UniqueConstraint("tag", name=op.f("uq_audit_log_tag")),
    )
    with op.batch_alter_table("audit_log", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_audit_log_actor"), ["actor"], unique=False)
        batch_op.create_index(batch_op.f("ix_audit_log_at"), ["at"], unique=False)

    op.create_table(
        "blob_claims",
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("claimed", sa.DateTime(timezone=True), nullable=False),
        sa.Column("deletion_ends", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_blob_claims")),
    )
    op.create_table(
        "clients",
        sa.Column("client_id", sa.String(length=63), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("signing_key", sa.LargeBinary(), nullable=False),
        sa.Column("key_id", sa.String(length=64), nullable=False),
        sa.Column("tasks", sa.JSON(), nullable=False),
        sa.Column("objectives", sa.JSON(), nullable=False),
        sa.Column("sessions_left", sa.JSON(), nullable=False),
        sa.Column("abilities", sa.JSON(), nullable=False),
        sa.Column("layouts", sa.JSON(), nullable=False),
        sa.Column("private_only", sa.JSON(), nullable=False),
        sa.Column("noise_budgets", sa.JSON(), nullable=False),
        sa.Column("limits", sa.JSON(), nullable=False),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("contact", sa.String(length=200), nullable=False),
        sa.Column("consents", sa.Boolean(), nullable=False),
        sa.Column("device", sa.String(length=200), nullable=False),
        sa.Column("software", sa.String(length=200), nullable=False),
        sa.Column("enrolled", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_seen", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_reason", sa.String(length=400), nullable=False),
        sa.Column("forgotten", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("client_id", name=op.f("pk_clients")),
        sa.UniqueConstraint("key_id", name=op.f("uq_clients_key_id")),
    )
    op.create_table(
        "coordinators",
        sa.Column("coordinator", sa.String(length=32), nullable=False),
        sa.Column("address", sa.String(length=300), nullable=False),
        sa.Column("enrollment_address", sa.String(length=300), nullable=False),
        sa.Column("software", sa.String(length=200), nullable=False),
        sa.Column("keys", sa.String(length=71), nullable=False),
        sa.Column("settings", sa.String(length=71), nullable=False),
        sa.Column("started", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_seen", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("coordinator", name=op.f("pk_coordinators")),
    )
    op.create_table(
        "federations",
        sa.Column("federation_id", sa.String(length=63), nullable=False),
        sa.Column("ca_fingerprint", sa.String(length=64), nullable=False),
        sa.Column("shared_blob", sa.String(length=71), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("federation_id", name=op.f("pk_federations")),
    )
    op.create_table(
        "join_strings",
        sa.Column("secret_hash", sa.String(length=64), nullable=False),
        sa.Column("client_id", sa.String(length=63), nullable=False),
        sa.Column("created_by", sa.String(length=200), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires", sa.DateTime(timezone=True), nullable=False),
        sa.Column("used", sa.DateTime(timezone=True), nullable=True),
        sa.Column("cancelled", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("secret_hash", name=op.f("pk_join_strings")),
    )
    with op.batch_alter_table("join_strings", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_join_strings_client_id"), ["client_id"], unique=False)

    op.create_table(
        "models",
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("parameters", sa.BigInteger(), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_models")),
    )
    op.create_table(
        "action_requests",
        sa.Column("request_id", sa.String(length=71), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("requested_by", sa.String(length=64), nullable=False),
        sa.Column("envelope", sa.LargeBinary(), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires", sa.DateTime(timezone=True), nullable=False),
        sa.Column("decided_by", sa.String(length=64), nullable=True),
        sa.Column("decision", sa.LargeBinary(), nullable=True),
        sa.Column("ended", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["decided_by"], ["administrators.key_id"], name=op.f("fk_action_requests_decided_by_administrators")
        ),
        sa.ForeignKeyConstraint(
            ["requested_by"], ["administrators.key_id"], name=op.f("fk_action_requests_requested_by_administrators")
        ),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_action_requests")),
    )
    with op.batch_alter_table("action_requests", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_action_requests_state"), ["state"], unique=False)

    op.create_table(
        "attendances",
        sa.Column("client_id", sa.String(length=63), nullable=False),
        sa.Column("coordinator", sa.String(length=32), nullable=False),
        sa.Column("stream", sa.Integer(), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_seen", sa.DateTime(timezone=True), nullable=False),
        sa.Column("left", sa.DateTime(timezone=True), nullable=True),
        sa.Column("closed_until", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["client_id"], ["clients.client_id"], name=op.f("fk_attendances_client_id_clients")),
        sa.PrimaryKeyConstraint("client_id", name=op.f("pk_attendances")),
    )
    with op.batch_alter_table("attendances", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_attendances_coordinator"), ["coordinator"], unique=False)

    op.create_table(
        "certificates",
        sa.Column("serial", sa.String(length=40), nullable=False),
        sa.Column("client_id", sa.String(length=63), nullable=True),
        sa.Column("administrator", sa.String(length=64), nullable=True),
        sa.Column("subject", sa.String(length=200), nullable=False),
        sa.Column("certificate", sa.LargeBinary(), nullable=False),
        sa.Column("login", sa.String(length=71), nullable=True),
        sa.Column("not_before", sa.DateTime(timezone=True), nullable=False),
        sa.Column("not_after", sa.DateTime(timezone=True), nullable=False),
        sa.Column("revoked", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["administrator"], ["administrators.key_id"], name=op.f("fk_certificates_administrator_administrators")
        ),
        sa.ForeignKeyConstraint(["client_id"], ["clients.client_id"], name=op.f("fk_certificates_client_id_clients")),
        sa.PrimaryKeyConstraint("serial", name=op.f("pk_certificates")),
        sa.UniqueConstraint("login", name=op.f("uq_certificates_login")),
    )
    with op.batch_alter_table("certificates", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_certificates_administrator"), ["administrator"], unique=False)
        batch_op.create_index(batch_op.f("ix_certificates_client_id"), ["client_id"], unique=False)

    op.create_table(
        "rotations",
        sa.Column("key_id", sa.String(length=64), nullable=False),
        sa.Column("client_id", sa.String(length=63), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("rotation", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["client_id"], ["clients.client_id"], name=op.f("fk_rotations_client_id_clients")),
        sa.PrimaryKeyConstraint("key_id", name=op.f("pk_rotations")),
    )
    with op.batch_alter_table("rotations", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_rotations_client_id"), ["client_id"], unique=False)

    op.create_table(
        "runs",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(length=400), nullable=False),
        sa.Column("spec", sa.LargeBinary(), nullable=False),
        sa.Column("spec_digest", sa.String(length=71), nullable=False),
        sa.Column("initial_model", sa.String(length=71), nullable=False),
        sa.Column("model", sa.String(length=71), nullable=False),
        sa.Column("objectives", sa.JSON(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("state_data", sa.JSON(), nullable=False),
        sa.Column("submitted_by", sa.String(length=200), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended", sa.DateTime(timezone=True), nullable=True),
        sa.Column("conductor", sa.String(length=32), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["initial_model"], ["models.digest"], name=op.f("fk_runs_initial_model_models")),
        sa.ForeignKeyConstraint(["model"], ["models.digest"], name=op.f("fk_runs_model_models")),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_runs")),
    )
    with op.batch_alter_table("runs", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_runs_name"), ["name"], unique=False)
        batch_op.create_index(batch_op.f("ix_runs_state"), ["state"], unique=False)
        batch_op.create_index(
            "uq_runs_open_name",
            ["name"],
            unique=True,
            postgresql_where=sa.text("state IN ('PENDING', 'RUNNING', 'PAUSED')"),
            sqlite_where=sa.text("state IN ('PENDING', 'RUNNING', 'PAUSED')"),
        )

    op.create_table(
        "consents",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("client_id", sa.String(length=63), nullable=False),
        sa.Column("answer", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(length=80), nullable=False),
        sa.Column("message", sa.String(length=400), nullable=False),
        sa.Column("envelope", sa.LargeBinary(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["client_id"], ["clients.client_id"], name=op.f("fk_consents_client_id_clients")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_consents_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "client_id", name=op.f("pk_consents")),
    )
    op.create_table(
        "rounds",
        sa.Column("round_id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(length=400), nullable=False),
        sa.Column("base_model", sa.String(length=71), nullable=False),
        sa.Column("result_model", sa.String(length=71), nullable=True),
        sa.Column("deployed_model", sa.String(length=71), nullable=True),
        sa.Column("gram", sa.String(length=71), nullable=True),
        sa.Column("combined", sa.String(length=71), nullable=True),
        sa.Column("noise", sa.String(length=71), nullable=True),
        sa.Column("step", sa.LargeBinary(), nullable=True),
        sa.Column("state_after", sa.JSON(), nullable=False),
        sa.Column("selected", sa.JSON(), nullable=False),
        sa.Column("not_asked", sa.JSON(), nullable=False),
        sa.Column("wanted", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("voided", sa.JSON(), nullable=False),
        sa.Column("named", sa.JSON(), nullable=False),
        sa.Column("evaluation_phase", sa.Integer(), nullable=True),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("objectives", sa.JSON(), nullable=False),
        sa.Column("started", sa.DateTime(timezone=True), nullable=False),
        sa.Column("stepped", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["base_model"], ["models.digest"], name=op.f("fk_rounds_base_model_models")),
        sa.ForeignKeyConstraint(["deployed_model"], ["models.digest"], name=op.f("fk_rounds_deployed_model_models")),
        sa.ForeignKeyConstraint(["result_model"], ["models.digest"], name=op.f("fk_rounds_result_model_models")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_rounds_run_id_runs")),
        sa.PrimaryKeyConstraint("round_id", name=op.f("pk_rounds")),
        sa.UniqueConstraint("run_id", "number", name=op.f("uq_rounds_run_id_number")),
    )
    op.create_table(
        "evaluations",
        sa.Column("evaluation_id", sa.Integer(), nullable=False),
        sa.Column("round_id", sa.Integer(), nullable=False),
        sa.Column("client_id", sa.String(length=63), nullable=False),
        sa.Column("model", sa.String(length=71), nullable=False),
        sa.Column("split", sa.String(length=20), nullable=False),
        sa.Column("loss", sa.Float(), nullable=True),
        sa.Column("accuracy", sa.Float(), nullable=True),
        sa.Column("others", sa.JSON(), nullable=False),
        sa.Column("samples", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["client_id"], ["clients.client_id"], name=op.f("fk_evaluations_client_id_clients")),
        sa.ForeignKeyConstraint(["model"], ["models.digest"], name=op.f("fk_evaluations_model_models")),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.round_id"], name=op.f("fk_evaluations_round_id_rounds")),
        sa.PrimaryKeyConstraint("evaluation_id", name=op.f("pk_evaluations")),
        sa.UniqueConstraint("round_id", "client_id", "split", name=op.f("uq_evaluations_round_id_client_id_split")),
    )
    op.create_table(
        "phases",
        sa.Column("phase_id", sa.Integer(), nullable=False),
        sa.Column("round_id", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("decides", sa.Boolean(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("wanted", sa.Integer(), nullable=False),
        sa.Column("conversation", sa.JSON(), nullable=False),
        sa.Column("started", sa.DateTime(timezone=True), nullable=False),
        sa.Column("deadline", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.round_id"], name=op.f("fk_phases_round_id_rounds")),
        sa.PrimaryKeyConstraint("phase_id", name=op.f("pk_phases")),
        sa.UniqueConstraint("round_id", "number", name=op.f("uq_phases_round_id_number")),
    )
    op.create_table(
        "assignments",
        sa.Column("assignment_id", sa.String(length=32), nullable=False),
        sa.Column("phase_id", sa.Integer(), nullable=False),
        sa.Column("client_id", sa.String(length=63), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(length=80), nullable=False),
        sa.Column("message", sa.String(length=400), nullable=False),
        sa.Column("base_model", sa.String(length=71), nullable=False),
        sa.Column("objectives", sa.JSON(), nullable=False),
        sa.Column("envelope", sa.LargeBinary(), nullable=False),
        sa.Column("decline", sa.LargeBinary(), nullable=True),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["base_model"], ["models.digest"], name=op.f("fk_assignments_base_model_models")),
        sa.ForeignKeyConstraint(["client_id"], ["clients.client_id"], name=op.f("fk_assignments_client_id_clients")),
        sa.ForeignKeyConstraint(["phase_id"], ["phases.phase_id"], name=op.f("fk_assignments_phase_id_phases")),
        sa.PrimaryKeyConstraint("assignment_id", name=op.f("pk_assignments")),
        sa.UniqueConstraint("phase_id", "client_id", name=op.f("uq_assignments_phase_id_client_id")),
    )
    with op.batch_alter_table("assignments", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_assignments_base_model"), ["base_model"], unique=False)
        batch_op.create_index("ix_assignments_open", ["client_id", "state"], unique=False)
        batch_op.create_index(batch_op.f("ix_assignments_phase_id"), ["phase_id"], unique=False)

    op.create_table(
        "inputs",
        sa.Column("assignment_id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["assignment_id"], ["assignments.assignment_id"], name=op.f("fk_inputs_assignment_id_assignments")
        ),
        sa.PrimaryKeyConstraint("assignment_id", "name", name=op.f("pk_inputs")),
    )
    with op.batch_alter_table("inputs", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_inputs_digest"), ["digest"], unique=False)

    op.create_table(
        "replies",
        sa.Column("reply_id", sa.Integer(), nullable=False),
        sa.Column("assignment_id", sa.String(length=32), nullable=False),
        sa.Column("client_id", sa.String(length=63), nullable=False),
        sa.Column("accepted", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.String(length=80), nullable=False),
        sa.Column("envelope", sa.LargeBinary(), nullable=False),
        sa.Column("envelope_digest", sa.String(length=71), nullable=False),
        sa.Column("receipt", sa.LargeBinary(), nullable=False),
        sa.Column("payload", sa.String(length=71), nullable=False),
        sa.Column("payload_bytes", sa.BigInteger(), nullable=False),
        sa.Column("samples", sa.BigInteger(), nullable=False),
        sa.Column("losses", sa.JSON(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("privacy", sa.JSON(), nullable=False),
        sa.Column("unrepeatable", sa.Boolean(), nullable=False),
        sa.Column("norm", sa.Float(), nullable=True),
        sa.Column("weight", sa.Float(), nullable=True),
        sa.Column("coefficient", sa.Float(), nullable=True),
        sa.Column("cosine", sa.Float(), nullable=True),
        sa.Column("received", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["assignment_id"], ["assignments.assignment_id"], name=op.f("fk_replies_assignment_id_assignments")
        ),
        sa.ForeignKeyConstraint(["client_id"], ["clients.client_id"], name=op.f("fk_replies_client_id_clients")),
        sa.PrimaryKeyConstraint("reply_id", name=op.f("pk_replies")),
    )
    with op.batch_alter_table("replies", schema=None) as batch_op:
        batch_op.create_index("ix_replies_assignment_accepted", ["assignment_id", "accepted"], unique=False)
        batch_op.create_index(batch_op.f("ix_replies_client_id"), ["client_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_replies_envelope_digest"), ["envelope_digest"], unique=False)


def downgrade() -> None:
    """Removes the tables."""
    with op.batch_alter_table("replies", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_replies_envelope_digest"))
        batch_op.drop_index(batch_op.f("ix_replies_client_id"))
        batch_op.drop_index("ix_replies_assignment_accepted")

    op.drop_table("replies")
    with op.batch_alter_table("inputs", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_inputs_digest"))

    op.drop_table("inputs")
    with op.batch_alter_table("assignments", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_assignments_phase_id"))
        batch_op.drop_index("ix_assignments_open")
        batch_op.drop_index(batch_op.f("ix_assignments_base_model"))

    op.drop_table("assignments")
    op.drop_table("phases")
    op.drop_table("evaluations")
    op.drop_table("rounds")
    op.drop_table("consents")
    with op.batch_alter_table("runs", schema=None) as batch_op:
        batch_op.drop_index(
            "uq_runs_open_name",
            postgresql_where=sa.text("state IN ('PENDING', 'RUNNING', 'PAUSED')"),
            sqlite_where=sa.text("state IN ('PENDING', 'RUNNING', 'PAUSED')"),
        )
        batch_op.drop_index(batch_op.f("ix_runs_state"))
        batch_op.drop_index(batch_op.f("ix_runs_name"))

    op.drop_table("runs")
    with op.batch_alter_table("rotations", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_rotations_client_id"))

    op.drop_table("rotations")
    with op.batch_alter_table("certificates", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_certificates_client_id"))
        batch_op.drop_index(batch_op.f("ix_certificates_administrator"))

    op.drop_table("certificates")
    with op.batch_alter_table("attendances", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_attendances_coordinator"))

    op.drop_table("attendances")
    with op.batch_alter_table("action_requests", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_action_requests_state"))

    op.drop_table("action_requests")
    op.drop_table("models")
    with op.batch_alter_table("join_strings", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_join_strings_client_id"))

    op.drop_table("join_strings")
    op.drop_table("federations")
    op.drop_table("coordinators")
    op.drop_table("clients")
    op.drop_table("blob_claims")
    with op.batch_alter_table("audit_log", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_audit_log_at"))
        batch_op.drop_index(batch_op.f("ix_audit_log_actor"))

    op.drop_table("audit_log")
    op.drop_table("audit_checkpoints")
    with op.batch_alter_table("alerts", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_alerts_run_id"))
        batch_op.drop_index(batch_op.f("ix_alerts_ended"))
        batch_op.drop_index(batch_op.f("ix_alerts_client_id"))

    op.drop_table("alerts")
    with op.batch_alter_table("administrators", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_administrators_name"))

    op.drop_table("administrators")
