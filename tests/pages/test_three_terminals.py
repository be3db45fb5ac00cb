"""The first tutorial, docs/start/three-terminals.md: its commands, run from its text by real processes."""

from pathlib import Path

import numpy as np
import pytest

from federation.tasks.digits import bundled
from tests.pages.reader import Reader
from tests.paths import DOCS

PAGE = (DOCS / "start/three-terminals.md").read_text()
DEMO = "fedpareto demo "  # tests/fedpareto/test_demo.py plays it


def deal(directory: Path) -> None:
    """Writes what data.py writes, without importing scikit-learn, which takes 4 CPU seconds."""
    x, y = bundled()
    for name, digits in (("hospital-a", y < 5), ("hospital-b", y >= 5)):
        (directory / "data" / name).mkdir(parents=True)
        np.savez(directory / "data" / name / "digits.npz", x=x[digits], y=y[digits])


@pytest.mark.full
@pytest.mark.parametrize("rounds", [2, 20])
def test_a_reader_of_the_first_tutorial_sees_what_the_page_shows(
    rounds: int, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    reader.own = {"python data.py": lambda: deal(reader.directory)} if rounds < 20 else {}
    reader.before = {"fedpareto admin runs": reader.leave}
    reader.skipped = (DEMO,)
    assert reader.read(PAGE, {"rounds = 20": f"rounds = {rounds}"}) > 10
