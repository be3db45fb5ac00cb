"""Runs that describe data, from Python: on simulated clients."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fedpareto
from federation.tasks import task
from federation.tasks.digits import bundled
from fedpareto.cli.main import app


def test_simulated_clients_describe_the_columns_of_their_data(tmp_path: Path) -> None:
    spec = {
        "name": "held",
        "kind": "statistics",
        "task": "digits",
        "statistics": {"open": True, "bins": 5, "splits": ["train", "validation", "test"]},
        "simulation": {"clients": 8, "partition": "iid"},
    }
    history = fedpareto.simulate(spec, home=tmp_path / "home", progress=lambda progress: None, threads=1)
    found = history.statistics
    assert history.state == "COMPLETED"
    assert found is not None
    x, y = bundled()
    assert (found["samples"], len(found["members"])) == (len(y), 8)
    assert [column["name"] for column in found["columns"]] == [column.name for column in task("digits").columns()]
    for column, values in zip(found["columns"], x.T / 16, strict=False):
        if column["mean"] is not None:
            assert column["mean"] == pytest.approx(values.mean(), abs=25 * values.std() / len(y))
    counts = np.bincount(y).tolist()
    told = found["columns"][-1]["counts"]
    assert [count for count in told if isinstance(count, int)] == [
        count for count, shown in zip(counts, told, strict=True) if isinstance(shown, int)
    ]
    assert "65 columns of 1,797 samples of 8 members" in repr(history)
    assert shown_by_commands(tmp_path) == found


def printed(*arguments: str) -> str:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*arguments])
    assert done.exit_code == 0, done.output + str(done.exception)
    return done.stdout


def shown_by_commands(directory: Path) -> object:
    """What the command and the report show of the run, and the document that the command prints."""
    home = ("--home", str(directory / "home/admin"))
    lines = printed("admin", *home, "statistics", "held").splitlines()
    assert lines[0].split()[:4] == ["column", "count", "missing", "outside"]
    assert lines[1].split()[:4] == ["x0", "hidden", "<", "10"]
    assert "\n8 members with 1797 samples (train, validation, test). " in "\n".join(lines)
    assert "wrote" in printed("admin", *home, "statistics", "held", "--csv", str(directory / "held.csv"))
    rows = list(csv.reader((directory / "held.csv").read_text().splitlines()))
    assert rows[:2] == [["column", "number", "from", "to", "value"], ["x0", "values", "", "", "1797"]]
    assert ["x1", "bin", "0.0", "0.2"] in [row[:4] for row in rows]
    assert ["y", "class", "9", "9"] in [row[:4] for row in rows]
    printed("report", "held", *home, "--out", str(directory / "held.html"))
    page = (directory / "held.html").read_text()
    assert "<h2>The data</h2>" in page
    assert "<title>class 9: " in page
    assert "How each member fares" not in page
    return json.loads(printed("admin", *home, "statistics", "held", "--json"))
