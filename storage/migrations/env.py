"""Run by Alembic, never imported: applies the migrations to the connection that `storage.migrations` handed over."""

from typing import Any, Literal

from alembic import context
from sqlalchemy import Enum
from sqlalchemy.types import TypeDecorator

from storage.models import Base

connection = context.config.attributes["connection"]
if connection is None:
    raise RuntimeError("these migrations run through storage.database.Database.migrate, not through alembic.ini")


def render(kind: str, item: Any, autogenerate: object) -> str | Literal[False]:
    """Writes our own column types as SQL types: a migration must not change when `storage.models` does."""
    if kind == "type" and isinstance(item, TypeDecorator):
        return f"sa.{item.impl_instance!r}"
    if kind == "type" and isinstance(item, Enum):
        return f"sa.String(length={item.length})"
    return False


context.configure(
    connection=connection,
    target_metadata=Base.metadata,
    render_as_batch=True,  # SQLite changes a table by making a new one
    render_item=render,
    compare_type=True,
)
with context.begin_transaction():
    context.run_migrations()
