"""The first tables.

Revision 0001, after nothing.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Makes the change."""
    op.create_table(
        "audit_log",
        sa.Column("entry_id", sa.Integer(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.String(length=200), nullable=False),
        sa.Column("action", sa.String(length=80), nullable=False),
        sa.Column("subject", sa.String(length=200), nullable=False),
        sa.Column("outcome", sa.String(length=80), nullable=False),
        sa.Column("detail", sa.String(length=2000), nullable=False),
        sa.Column("times", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("entry_id", name=op.f("pk_audit_log")),
    )
    with op.batch_alter_table("audit_log", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_audit_log_action"), ["action"], unique=False)
        batch_op.create_index("ix_audit_log_actor_action_at", ["actor", "action", "at"], unique=False)
        batch_op.create_index(batch_op.f("ix_audit_log_at"), ["at"], unique=False)

    op.create_table(
        "clients",
        sa.Column("client_id", sa.String(length=63), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("signing_key", sa.LargeBinary(), nullable=False),
        sa.Column("key_id", sa.String(length=64), nullable=False),
        sa.Column("tasks", sa.JSON(), nullable=False),
        sa.Column("objectives", sa.JSON(), nullable=False),
        sa.Column("device", sa.String(length=200), nullable=False),
        sa.Column("software", sa.String(length=200), nullable=False),
        sa.Column("enrolled", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_seen", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_reason", sa.String(length=400), nullable=False),
        sa.PrimaryKeyConstraint("client_id", name=op.f("pk_clients")),
        sa.UniqueConstraint("key_id", name=op.f("uq_clients_key_id")),
    )
    op.create_table(
        "federations",
        sa.Column("federation_id", sa.String(length=63), nullable=False),
        sa.Column("ca_fingerprint", sa.String(length=64), nullable=False),
        sa.Column("coordinator", sa.String(length=32), nullable=False),
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
        "certificates",
        sa.Column("serial", sa.String(length=40), nullable=False),
        sa.Column("client_id", sa.String(length=63), nullable=True),
        sa.Column("subject", sa.String(length=200), nullable=False),
        sa.Column("certificate", sa.LargeBinary(), nullable=False),
        sa.Column("not_before", sa.DateTime(timezone=True), nullable=False),
        sa.Column("not_after", sa.DateTime(timezone=True), nullable=False),
        sa.Column("revoked", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_seen", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["client_id"], ["clients.client_id"], name=op.f("fk_certificates_client_id_clients")),
        sa.PrimaryKeyConstraint("serial", name=op.f("pk_certificates")),
    )
    with op.batch_alter_table("certificates", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_certificates_client_id"), ["client_id"], unique=False)

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
        sa.Column("state_data", sa.JSON(), nullable=False),
        sa.Column("submitted_by", sa.String(length=200), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["initial_model"], ["models.digest"], name=op.f("fk_runs_initial_model_models")),
        sa.ForeignKeyConstraint(["model"], ["models.digest"], name=op.f("fk_runs_model_models")),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_runs")),
    )
    with op.batch_alter_table("runs", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_runs_name"), ["name"], unique=False)
        batch_op.create_index(batch_op.f("ix_runs_state"), ["state"], unique=False)

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
        sa.Column("step", sa.LargeBinary(), nullable=True),
        sa.Column("selected", sa.JSON(), nullable=False),
        sa.Column("wanted", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("evaluation_phase", sa.Integer(), nullable=True),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("objectives", sa.JSON(), nullable=False),
        sa.Column("started", sa.DateTime(timezone=True), nullable=False),
        sa.Column("stepped", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["base_model"], ["models.digest"], name=op.f("fk_rounds_base_model_models")),
        sa.ForeignKeyConstraint(["result_model"], ["models.digest"], name=op.f("fk_rounds_result_model_models")),
        sa.ForeignKeyConstraint(["deployed_model"], ["models.digest"], name=op.f("fk_rounds_deployed_model_models")),
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
        sa.Column("objectives", sa.JSON(), nullable=False),
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
        "updates",
        sa.Column("update_id", sa.Integer(), nullable=False),
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
        sa.Column("norm", sa.Float(), nullable=True),
        sa.Column("weight", sa.Float(), nullable=True),
        sa.Column("coefficient", sa.Float(), nullable=True),
        sa.Column("cosine", sa.Float(), nullable=True),
        sa.Column("received", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["assignment_id"], ["assignments.assignment_id"], name=op.f("fk_updates_assignment_id_assignments")
        ),
        sa.ForeignKeyConstraint(["client_id"], ["clients.client_id"], name=op.f("fk_updates_client_id_clients")),
        sa.PrimaryKeyConstraint("update_id", name=op.f("pk_updates")),
    )
    with op.batch_alter_table("updates", schema=None) as batch_op:
        batch_op.create_index("ix_updates_assignment_accepted", ["assignment_id", "accepted"], unique=False)
        batch_op.create_index(batch_op.f("ix_updates_client_id"), ["client_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_updates_envelope_digest"), ["envelope_digest"], unique=False)


def downgrade() -> None:
    """Takes it back."""
    with op.batch_alter_table("updates", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_updates_envelope_digest"))
        batch_op.drop_index(batch_op.f("ix_updates_client_id"))
        batch_op.drop_index("ix_updates_assignment_accepted")

    op.drop_table("updates")
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
    with op.batch_alter_table("runs", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_runs_state"))
        batch_op.drop_index(batch_op.f("ix_runs_name"))

    op.drop_table("runs")
    with op.batch_alter_table("certificates", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_certificates_client_id"))

    op.drop_table("certificates")
    op.drop_table("models")
    with op.batch_alter_table("join_strings", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_join_strings_client_id"))

    op.drop_table("join_strings")
    op.drop_table("federations")
    op.drop_table("clients")
    with op.batch_alter_table("audit_log", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_audit_log_at"))
        batch_op.drop_index("ix_audit_log_actor_action_at")
        batch_op.drop_index(batch_op.f("ix_audit_log_action"))

    op.drop_table("audit_log")
