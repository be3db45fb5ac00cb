"""Members pause their sites.

Revision 0003, after 0002.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Makes the change: members of before were not paused."""
    with op.batch_alter_table("attendances", schema=None) as batch_op:
        batch_op.add_column(sa.Column("paused", sa.Boolean(), server_default=sa.false(), nullable=False))


def downgrade() -> None:
    """Takes it back."""
    with op.batch_alter_table("attendances", schema=None) as batch_op:
        batch_op.drop_column("paused")
