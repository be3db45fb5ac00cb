"""Payloads are found by their digest.

Revision 0007, after 0006.
"""

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Makes the change: the payloads of a past round are removed without a look at all others."""
    op.create_index("ix_replies_payload", "replies", ["payload"])
    for column in ("combined", "gram", "noise"):
        op.create_index(f"ix_rounds_{column}", "rounds", [column])


def downgrade() -> None:
    """Takes it back."""
    for column in ("combined", "gram", "noise"):
        op.drop_index(f"ix_rounds_{column}", "rounds")
    op.drop_index("ix_replies_payload", "replies")
