"""The kinds of runs that a worker knows.

Revision 0006, after 0005.
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Makes the change: workers of before take part in runs that train, and in no others."""
    with op.batch_alter_table("clients", schema=None) as batch_op:
        batch_op.add_column(sa.Column("run_kinds", sa.JSON(), server_default="[]", nullable=False))


def downgrade() -> None:
    """Takes it back."""
    with op.batch_alter_table("clients", schema=None) as batch_op:
        batch_op.drop_column("run_kinds")
