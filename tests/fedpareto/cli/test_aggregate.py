"""`fedpareto aggregate`, as a process."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from federation.aggregation.registry import ALGORITHMS, common_hyperparameters
from fedpareto.offline_aggregation import aggregate
from tests.few import few
from tests.harness import fedpareto

U = np.random.default_rng(0).standard_normal((5, 40))


run = partial(fedpareto, "aggregate", NO_COLOR="1", COLUMNS="100")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "updates.npz"
    np.savez(path, updates=U, samples=np.arange(1, 6), losses=np.ones(5))
    return path


def test_json_gives_what_the_library_gives_and_out_the_direction(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "direction"
    done = run(file, "--algorithm", "fedmgda+", "--param", "epsilon=0.1", "--json", "--out", out)
    document = json.loads(done.stdout)
    expected = aggregate("fedmgda+", U, samples=np.arange(1, 6), epsilon=0.1)
    assert document["coefficients"] == np.asarray(expected.coefficients).tolist()
    assert document["weights"] == expected.weights.tolist()
    assert document["diagnostics"] == expected.diagnostics
    np.testing.assert_array_equal(np.load(out), expected.direction)


def test_people_get_a_table(file: Path) -> None:
    shown = run(file).stdout
    assert "weight λ" in shown
    assert "direction_norm" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_the_list_names_every_hyperparameter() -> None:
    document = json.loads(run("--list", "--json").stdout)
    entries = {entry["name"]: entry for entry in document["algorithms"]}
    assert list(entries) == list(ALGORITHMS)
    assert [field["name"] for field in document["common"]] == [field.name for field in common_hyperparameters()]
    assert [field["name"] for field in entries["fedmgda+"]["hyperparameters"]] == [
        "epsilon",
        "drop_zero",
        "epsilon_decay",
        "preferences",
    ]
    assert "epsilon" in run("--list").stdout


def test_a_dropped_row_is_shown(tmp_path: Path) -> None:
    broken = U.copy()
    broken[2, 0] = np.inf
    np.savez(tmp_path / "u.npz", updates=broken)
    assert "dropped: not finite" in run(tmp_path / "u.npz", "-a", "fedavg").stdout


@few(
    "no algorithm 'fedfoo'; there are fedavg",
    "expected KEY=VALUE",
    "(m, d) is needed",
    "holds Python objects, which are not read",
)
@pytest.mark.parametrize(
    ("arrays", "arguments", "message"),
    [
        ({"updates": U}, ["-a", "fedfoo"], "no algorithm 'fedfoo'; there are fedavg"),
        ({"updates": U}, ["-p", "epsilom=1"], "epsilom: fedmgda+ has no such hyper-parameter; did you mean 'epsilon'?"),
        ({"updates": U}, ["-p", "epsilon=2"], 'epsilon must be "auto" or lie in [0, 1]'),
        ({"updates": U}, ["-p", "epsilon"], "expected KEY=VALUE"),
        ({"update": U}, [], "no use for array 'update'"),
        ({"samples": np.ones(5)}, [], "no array `updates`"),
        ({"updates": U[0]}, [], "(m, d) is needed"),
        ({"updates": U, "samples": np.ones(4)}, [], "samples has shape (4,)"),
        ({"updates": U.astype(str)}, [], "updates must be numbers"),
        ({"updates": U, "state": np.array("[1]")}, [], "state must be the text of a JSON object"),
        ({"updates": np.array([{"a": 1}], dtype=object)}, [], "holds Python objects, which are not read"),
    ],
)
def test_bad_usage_is_explained_and_exits_2(
    tmp_path: Path, arrays: dict[str, Any], arguments: list[str], message: str
) -> None:
    np.savez(tmp_path / "u.npz", **arrays)
    said = run(tmp_path / "u.npz", *arguments, code=2).stderr
    assert message in said
    assert "Traceback" not in said


def test_what_is_no_npz_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    np.save(tmp_path / "one.npy", U)
    (tmp_path / "zip.npz").write_bytes(b"PK\x03\x04garbage")
    for name in ("missing.npz", "text", "one.npy", "zip.npz"):
        said = run(tmp_path / name, code=2).stderr
        assert name in said
        assert "Traceback" not in said
    run(code=2)


def test_the_state_of_one_call_goes_into_the_next(tmp_path: Path) -> None:
    np.savez(tmp_path / "u.npz", updates=U, state=np.array('{"round": 3}'))
    run(tmp_path / "u.npz", "--json")
