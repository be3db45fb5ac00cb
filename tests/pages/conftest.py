"""What the tests of pages share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages.reader import Reader, programs
from tests.paths import DOCS


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    """A reader in a directory with the examples of the documents, as in the directory of the source."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("PATH", programs())
    monkeypatch.delenv("FEDPARETO_ADMIN", raising=False)
    monkeypatch.delenv("FEDPARETO_CODE", raising=False)
    (tmp_path / "docs").symlink_to(DOCS)
    made = Reader(tmp_path, monkeypatch.setenv)
    yield made
    made.close()
