"""Makes the tables of `storage.models`, until the first release.

There is one revision for each set of tables, and none is upgraded to another. `python -m storage.migrations MESSAGE`
writes the first release's migration in place of this file.
"""

from alembic import op

from storage.models import Base
from storage.revisions import unreleased_revision

revision = unreleased_revision()
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Makes the tables."""
    Base.metadata.create_all(op.get_bind(), checkfirst=False)


def downgrade() -> None:
    """Removes the tables."""
    Base.metadata.drop_all(op.get_bind(), checkfirst=False)
