"""Models whose first layer is filled from statistics, on simulated clients: from Python and on the command line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file
from typer.testing import CliRunner

import fedpareto
from federation.digests import digest
from federation.spec.run_spec import RunSpec
from federation.spec.sharing import SharingError
from federation.statistics.result import written
from federation.statistics.scale import ScaleError, scale_of
from fedpareto.cli.main import app
from fedpareto.starter import starter_files
from fedpareto.starter.made_data import SITES


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mine")
    starter_files.write("tabular", directory, "")
    spec = directory / "run.toml"
    spec.write_text(spec.read_text().replace("rounds = 20", "rounds = 2"))
    return directory


def command(*arguments: object, code: int = 0) -> str:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*map(str, arguments)])
    assert getattr(done.exception, "code", done.exit_code) == code, done.output + str(done.exception)
    return done.stdout if not code else done.output + str(done.exception)


@pytest.mark.full
def test_a_history_of_statistics_fills_the_first_layer_and_the_exported_model_predicts_from_inputs_as_they_are(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(mine))
    members = {site: mine / "data" / site for site in SITES}
    quiet: dict[str, Any] = {"members": members, "threads": 1, "progress": lambda progress: None}
    held = fedpareto.simulate(mine / "held.toml", **quiet)
    assert held.statistics is not None
    told = written(held.statistics)
    history = fedpareto.simulate(mine / "run.toml", statistics=held, **quiet)
    assert history.spec.parameters.statistics == digest(told)
    module = history.module()
    scale = scale_of(told, [column["name"] for column in held.statistics["columns"][:6]])
    assert np.array_equal(module.state_dict()["0.mean"].numpy(), scale.mean)
    assert np.array_equal(module.state_dict()["0.deviation"].numpy(), scale.deviation)
    rows = np.genfromtxt(mine / "data/site-a/visits.csv", delimiter=",", skip_header=1)
    assert np.isnan(rows).any()
    assert scale.mean.min() > 90

    # The same from a file, a dict and a specification, and the record in the file.
    save_file(history.state_dict(), tmp_path / "visits.safetensors")
    file = tmp_path / "held.json"
    file.write_text(json.dumps(held.statistics))
    again = fedpareto.simulate(mine / "run.toml", statistics=file, **quiet)
    assert np.array_equal(again.model, history.model)
    sites = [word for site in SITES for word in ("--member", f"{site}={members[site]}")]
    for number, statistics in enumerate((mine / "held.toml", file)):
        options = ("--statistics", statistics, *sites, "--code", mine, "--threads", 1, "--json")
        document = json.loads(command("simulate", mine / "run.toml", *options, "--home", tmp_path / f"sim-{number}"))
        assert [one["loss/train"] for one in document["rounds"]] == [one["loss/train"] for one in history.round_records]
    evaluated = {"name": "e", "kind": "evaluate", "task": "visits:Visits"}
    measured = fedpareto.simulate(evaluated, model=tmp_path / "visits.safetensors", **quiet)
    assert measured.spec.parameters.fixed == ("0.mean", "0.deviation")
    assert measured.round_records[0]["loss/test"] == pytest.approx(history.round_records[-1]["loss/test"])


def test_a_specification_that_is_not_filled_and_a_result_of_others_are_refused(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(mine))
    text = (mine / "run.toml").read_text()
    with pytest.raises(SharingError, match=r"has a layer Standardise \('0'\)"):
        fedpareto.simulate(text)
    columns = [{"name": f"measurement_{number}", "mean": 1.0, "deviation": 2.0} for number in (2, 1, 3, 4, 5, 6)]
    for given, error, words in (
        ({"format": 1, "columns": columns}, ScaleError, "column 1 of the model is 'measurement_1'"),
        ({"format": 1, "columns": columns[:1]}, ScaleError, "the model is 'measurement_1', and that of the result"),
        ({"a": 1}, ScaleError, "no result of statistics"),
        (3, fedpareto.Error, "needed is a History"),
        (tmp_path / "nowhere.json", fedpareto.Error, r"cannot read .*nowhere\.json"),
    ):
        with pytest.raises(error, match=words):
            fedpareto.simulate(text, statistics=given)  # type: ignore[arg-type]
    plain = text.replace("visits:Visits", "digits")
    with pytest.raises(ScaleError, match="the model of digits has no layer Standardise"):
        fedpareto.simulate(plain, statistics={"format": 1, "columns": columns})
    named = f'{text}\n[parameters]\nfixed = ["0.*"]\nstatistics = "{digest(b"x")}"\n'
    assert RunSpec.parse(named).parameters.statistics
    with pytest.raises(fedpareto.Error, match="give its document, too"):
        fedpareto.simulate(named)
    (tmp_path / "named.toml").write_text(named)
    assert "--statistics RUN" in command("admin", "submit", tmp_path / "named.toml", "--code", mine, code=2)
    assert "has a layer Standardise" in command("admin", "submit", mine / "run.toml", "--code", mine, code=2)
    assert 'a run of kind = "statistics" is needed' in command(
        "local", mine / "run.toml", "--member", f"a={mine}", "--statistics", mine / "run.toml", code=2
    )
