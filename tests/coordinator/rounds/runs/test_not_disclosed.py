"""What privacy hides is said to be not disclosed, in every output that shows numbers of a run."""

import json
import math
import re
from html import unescape
from pathlib import Path

import pytest

from coordinator.rounds.runs.disclosure import undisclosed
from federation.record.metric_definitions import DEFINITIONS
from federation.spec.run_spec import RunSpec
from federation.v1.admin_pb2 import Participation, RoundSummary
from fedpareto import simulate
from fedpareto.cli.admin.watch import header, row
from fedpareto.experiments import measures
from fedpareto.experiments.comparison_tables import NOT_DISCLOSED, Spread
from fedpareto.formatting import number, percent, recorded, size, whole
from tests.coordinator.rounds.runs.scene import PRIVATE
from tests.running import command

RUN = PRIVATE.replace('["test"]', '["train", "test"]')
HIDDEN = {"accuracy/worst5", "accuracy/worst", "accuracy/std", "improved", "conflicts", "stationarity", "evaluation"}


@pytest.fixture(scope="module", params=["hidden", pytest.param("disclosed", marks=pytest.mark.full)])
def private(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    """The directory of a simulated private run, and whether its evaluation is disclosed."""
    directory, disclosed = tmp_path_factory.mktemp("private"), request.param == "disclosed"
    spec = directory / "run.toml"
    spec.write_text(RUN.replace('"sum"', '"sum"\nprivacy.disclose = ["evaluation"]') if disclosed else RUN)
    done = command("simulate", spec, "--home", directory / "home", "--threads", "1")
    (directory / "simulate.txt").write_text(done.output)
    return directory, disclosed


def shown(directory: Path, *arguments: str) -> str:
    return command("admin", "--home", directory / "home/admin", *arguments).stdout


def test_tables_and_documents_name_what_is_not_disclosed(private: tuple[Path, bool]) -> None:
    directory, disclosed = private
    assert ("not disclosed" in (directory / "simulate.txt").read_text()) or disclosed
    assert ("not disclosed" in shown(directory, "runs")) != disclosed
    rounds = shown(directory, "rounds", "private")
    hidden = "improved, conflicts" if disclosed else "worst 5 %, improved, conflicts, worst member"
    assert f"not disclosed: {hidden}" in rounds
    one = shown(directory, "round", "private", "0")
    assert f"not disclosed: samples, loss, norm, cosine{'' if disclosed else ', test'}" in one
    assert re.search(r"conflicts +not disclosed", shown(directory, "run", "private"))
    assert ("not disclosed" in shown(directory, "compare", "private", "private")) or disclosed
    assert "nan" not in rounds + one

    summary = json.loads(shown(directory, "round", "private", "0", "--json"))["summary"]
    names = set(summary["undisclosed"])
    assert names >= ({"conflicts", "improved"} if disclosed else HIDDEN)
    assert not names & set(summary["metrics"])
    assert names - DEFINITIONS.keys() <= {field.name for field in Participation.DESCRIPTOR.fields}
    [part, *_] = json.loads(shown(directory, "round", "private", "0", "--json"))["participations"]
    assert (part["update_norm"], part["loss_before"], part["cosine"]) == (None, None, None)


def test_a_report_names_what_is_not_disclosed(private: tuple[Path, bool]) -> None:
    directory, disclosed = private
    page = directory / "report.html"
    command("report", "private", "--home", directory / "home/admin", "--out", page)
    text = unescape(re.sub(r"<[^>]+>", " ", re.sub(r"<style.*?</style>", "", page.read_text(), flags=re.DOTALL)))
    assert "Not disclosed: the privacy of this run hides it." in text
    assert not re.search(r"\bnan\b|No member reported|No round of this run has (made|been)", text)
    words = " ".join(text.split())
    if disclosed:
        assert "percentage points apart" in words
    else:
        assert "not disclosed standard deviation, worst member" in words
        assert "percentage points" not in words
        assert "0.0 % worst 5 %" not in words


def spec_of(more: str) -> RunSpec:
    return RunSpec.parse(RUN.replace('privacy.secure = "sum"', more).encode())


EVALUATED = {"evaluated": 5.0, "accuracy/mean": 0.5, "metric/auc/mean": 0.5}


def test_an_open_run_hides_nothing_and_neither_does_a_round_without_a_step() -> None:
    assert undisclosed(spec_of(""), {}, stepped=True, conceals=False) == ()
    assert undisclosed(spec_of('privacy.secure = "sum"'), {}, stepped=False, conceals=False) == ()


def test_what_is_hidden_follows_from_the_privacy_of_the_run_and_the_numbers_of_the_round() -> None:
    private = spec_of('privacy.secure = "sum"')
    hidden = set(undisclosed(private, EVALUATED, stepped=True, conceals=False))
    assert hidden > HIDDEN | {"metric/auc/worst", "metric/auc/weighted"}
    assert not hidden & EVALUATED.keys()
    unevaluated = set(undisclosed(private, {}, stepped=True, conceals=False))
    assert not unevaluated & {"accuracy/worst5", "evaluation", "improved"}
    open_evaluation = spec_of('privacy.secure = "sum"\nprivacy.disclose = ["evaluation"]')
    assert "evaluation" not in undisclosed(open_evaluation, EVALUATED, stepped=True, conceals=False)
    noisy = spec_of("privacy.client_noise = 1.0")
    assert {"accuracy/mean", "weight", "direction_norm"} <= set(undisclosed(noisy, {}, stepped=True, conceals=True))
    assert "conflicts" not in undisclosed(private, {"conflicts": 2.0}, stepped=True, conceals=False)


def test_numbers_that_are_none_have_their_own_words() -> None:
    numbers = {"loss/test": math.inf, "loss/train": math.nan}
    texts = [recorded(name, numbers, ["improved"]) for name in ("loss/test", "loss/train", "improved", "accuracy/mean")]
    assert texts == ["infinite", "not a number", "not disclosed", "–"]
    for text_of in (number, percent, size, whole):
        assert (text_of(math.nan), text_of(math.inf), text_of(-math.inf)) == ("–", "infinite", "-infinite")


def test_a_line_of_a_round_has_the_words_under_its_title() -> None:
    summary = RoundSummary(round=3, metrics={"accuracy/mean": 0.5}, undisclosed=["accuracy/worst5"], seconds=1.0)
    line = row(summary).plain
    assert line[: header().index("worst 5 %") + len("worst 5 %")].endswith("not disclosed")
    assert len(line) == len(header())


@pytest.mark.full
def test_an_experiment_takes_the_means_and_says_that_the_rest_is_not_disclosed() -> None:
    found = measures.final(simulate(RUN, threads=1, progress=lambda _: None))
    assert 0 <= found["mean"] <= 100
    assert "worst" not in found
    assert all(measures.hides(found, name) for name in ("worst", "agreement"))
    assert not any(measures.hides(found, name) for name in ("mean", "backdoor"))
    assert str(Spread(math.nan, missing=NOT_DISCLOSED)) == "not disclosed"
