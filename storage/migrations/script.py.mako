"""${message.capitalize()}.

Revision ${up_revision}, after ${down_revision or "nothing"}.
"""

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}
revision = "${up_revision}"
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Makes the change."""
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    """Takes it back."""
    ${downgrades if downgrades else "pass"}
