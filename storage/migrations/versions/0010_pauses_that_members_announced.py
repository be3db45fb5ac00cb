"""Pauses that members announced.

Revision 0010, after 0009.
"""

import sqlalchemy as sa
from alembic import op

import storage.columns

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Makes the change: members that are away have announced nothing."""
    # Not in a batch, which would copy the table in SQLite: other tables refer to it.
    op.add_column("clients", sa.Column("closed_until", storage.columns.UtcDateTime(), nullable=True))
    op.add_column("clients", sa.Column("paused", sa.Boolean(), server_default=sa.false(), nullable=False))


def downgrade() -> None:
    """Takes it back."""
    with op.batch_alter_table("clients", schema=None) as batch_op:
        batch_op.drop_column("paused")
        batch_op.drop_column("closed_until")
