"""Engines of one process share their compiled statements."""

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.sql.compiler import SQLCompiler

from storage.database import Database


def test_a_statement_is_compiled_once_for_all_sqlite_databases_of_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = list[str]()
    process = SQLCompiler.__init__

    def counted(self: SQLCompiler, *arguments: Any, **options: Any) -> None:
        process(self, *arguments, **options)
        compiled.append(str(self))

    monkeypatch.setattr(SQLCompiler, "__init__", counted)
    table = sa.table("numbers_of_this_test", sa.column("value", sa.Integer))
    for name in ("one", "two", "three"):
        database = Database.open(f"sqlite:///{tmp_path / name}.db")
        with database.begin() as session:
            session.execute(sa.text("CREATE TABLE numbers_of_this_test (value INTEGER)"))
            session.execute(sa.insert(table).values(value=len(name)))
        with database.read() as session:
            assert session.scalars(sa.select(table.c.value)).all() == [len(name)]
        database.close()
    ours = [statement for statement in compiled if "numbers_of_this_test" in statement]
    assert [statement.split()[0] for statement in ours] == ["CREATE", "INSERT", "SELECT"]
