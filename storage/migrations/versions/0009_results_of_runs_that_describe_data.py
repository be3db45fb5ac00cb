"""Results of runs that describe data.

Revision 0009, after 0008.
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Makes the change: rounds of before have no result about data."""
    with op.batch_alter_table("rounds", schema=None) as batch_op:
        batch_op.add_column(sa.Column("result", sa.LargeBinary(), nullable=True))
        batch_op.add_column(sa.Column("document", sa.LargeBinary(), nullable=True))


def downgrade() -> None:
    """Takes it back."""
    with op.batch_alter_table("rounds", schema=None) as batch_op:
        batch_op.drop_column("document")
        batch_op.drop_column("result")
