"""Alerts are found by their beginning.

Revision 0008, after 0007.
"""

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Makes the change: the newest alerts are listed without a look at all others."""
    op.create_index("ix_alerts_began_alert_id", "alerts", ["began", "alert_id"])


def downgrade() -> None:
    """Takes it back."""
    op.drop_index("ix_alerts_began_alert_id", "alerts")
