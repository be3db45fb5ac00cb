"""Homes that are copied.

Revision 0004, after 0003.
"""

import sqlalchemy as sa
from alembic import op

import storage.columns

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Makes the change: of members of before, no start is on record, so that their next one is taken."""
    with op.batch_alter_table("clients", schema=None) as batch_op:
        batch_op.add_column(sa.Column("start", sa.String(length=32), server_default="", nullable=False))
        batch_op.add_column(sa.Column("copied", storage.columns.UtcDateTime(), nullable=True))


def downgrade() -> None:
    """Takes it back."""
    with op.batch_alter_table("clients", schema=None) as batch_op:
        batch_op.drop_column("copied")
        batch_op.drop_column("start")
