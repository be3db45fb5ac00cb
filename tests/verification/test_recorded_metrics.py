"""Each metric on record that follows from what was signed is verified, and what does not follow is named."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from federation.aggregation.metrics.model_metrics import scores
from federation.aggregation.metrics.run_metrics import Earlier, RunMetrics, StepFacts
from federation.aggregation.phases import PhaseReply, Replies
from federation.aggregation.registry import algorithm
from federation.record.bundle import BundleReader
from federation.record.metric_definitions import Basis, basis
from federation.spec.run_spec import RunSpec
from federation.trust.envelope import envelope_digest
from federation.v1.common_pb2 import ReceiptManifest, ReplyManifest, SamplePrivacy
from federation.v1.record_pb2 import RoundRecord
from fedpareto.cli.main import app
from storage.states import RunState
from tests.compared_metrics import MEASURED, Compared, check_exact, differences, watched
from tests.federation.aggregation.scene import reply
from tests.running import wait_for
from tests.stage import Player, Stage, measurements, spec
from tests.verification.record_vectors import KEYS, OUTCOMES, change, vector
from tests.verification.scene import NAMES, Edited, checked, exported, played, refusal, signed_again, verified
from verification.run import verify


def with_metric(bundle: Edited, number: int, name: str, value: float) -> Edited:
    return bundle.with_round(number, partial(change, edit={"metrics": {name: value}}))


@pytest.fixture
def expected(monkeypatch: pytest.MonkeyPatch) -> list[Compared]:
    """What each round that is verified must have on record, and has."""
    return watched(monkeypatch)


@pytest.mark.parametrize("name", OUTCOMES)
def test_each_metric_of_a_round_is_refused_if_it_is_changed(
    tmp_path: Path, expected: list[Compared], name: str
) -> None:
    bundle = Edited.of(vector(name))
    found = checked(bundle, tmp_path)
    check_exact(expected)
    last = bundle.about.rounds - 1
    recorded = bundle.round(last).metrics
    assert {*found[last].measured} == MEASURED & {*recorded}
    for metric, value in recorded.items() if name == "open" else [("bytes/down", 0.0), ("step/rate", 1.0)]:
        edited = with_metric(bundle, last, metric, value + 1)
        if metric in MEASURED:
            assert checked(edited, tmp_path) == found, "only the coordinator measured it"
        else:
            assert refusal(edited, tmp_path).startswith(f"round {last}: the record says {metric} = {value + 1!r};")
    said = refusal(with_metric(bundle, last, "bytes/down", math.inf), tmp_path)
    assert said == f"round {last}: the record says bytes/down = inf, which is no finite number"


@pytest.mark.parametrize("entry", [math.nan, -1.0, math.inf, 1e308])
def test_a_signed_matrix_that_is_no_gram_matrix_has_no_metrics(entry: float) -> None:
    run = RunSpec.parse(spec("hostile", "digits", algorithm="median"))
    computed = RunMetrics(run, algorithm("median", {}), ("loss",), (), conceals=False)
    K = np.array([[entry, 0.0], [0.0, entry]])
    told = [reply("a", np.ones(2)), reply("b", np.ones(2))]
    facts: dict[str, Any] = {"number": 0, "steps": 1, "rate": 1.0, "weights": {}, "epsilons": []}
    step = StepFacts(K=K, coefficients=np.ones(2), made=None, measured=None, replies=told, told=told, **facts)
    with np.errstate(all="ignore"):
        if entry == 1e308:
            assert computed.of_step(step).problem({})
        else:
            with pytest.raises(ValueError, match="K "):
                computed.of_step(step)


def test_the_bundle_names_all_objectives_that_members_were_asked_for(tmp_path: Path) -> None:
    bundle = Edited.of(vector("objectives")).telling(lambda about: about.objectives.remove("right"))
    assert "the bundle has the objectives ['left', 'mid']" in refusal(bundle, tmp_path)


def test_the_command_names_the_metrics_that_it_did_not_verify() -> None:
    path = str(vector("multi-gradient"))
    done = CliRunner().invoke(app, ["verify", path])
    told = "metrics not verified, because only the coordinator measured them: bytes/down, iterations, residual"
    assert done.output.count(told) == 1
    document = json.loads(CliRunner().invoke(app, ["verify", path, "--json"]).stdout)
    assert [one["metrics_not_verified"] for one in document["rounds"]] == [sorted(MEASURED)] * 2


def test_a_reply_that_is_signed_and_names_a_loss_that_is_no_number_frees_no_metric(tmp_path: Path) -> None:
    def edit(found: RoundRecord) -> None:
        answer = found.phases[1].exchanges[0].answers[0]

        nan = {"train/loss": math.nan}
        signed_again(answer.reply, ReplyManifest, KEYS["ann"], lambda said: said.metrics.update(nan))
        named = ReceiptManifest(envelope=envelope_digest(answer.reply))
        signed_again(answer.receipt, ReceiptManifest, KEYS["coordinator"], lambda said: said.MergeFrom(named))
        found.metrics["loss/train"] = 0.01

    said = refusal(Edited.of(vector("open")).with_round(1, edit), tmp_path)
    assert said == "round 1: a reply of ann was accepted, and train/loss is nan"


def evaluated(stage: Stage, more: str, change: Callable[[Player, dict[str, float]], object], rounds: int = 1) -> str:
    """A run of three members, in which each changes what it measures of a model."""
    task, players = stage.crew(*NAMES[:3])
    text = spec(f"metrics-{stage.count}", task, rounds, algorithm="fedavg", more=f"selection.minimum = 3\n{more}")
    run = stage.submit(text)

    def over() -> bool:
        for player in players:
            for _, order in player.orders():
                told = measurements(player.name, order)
                if order.kind == "evaluate":
                    change(player, told)
                player.reply(order, metrics=told)
        return stage.run(run).state is RunState.COMPLETED

    wait_for(over, f"run {run} to be played")
    return run


@pytest.mark.full
def test_accuracies_that_are_no_shares_stops_and_metrics_of_the_task_are_verified(
    stage: Stage, tmp_path: Path, expected: list[Compared]
) -> None:
    def measured(player: Player, told: dict[str, float]) -> None:
        told["test/accuracy"] = 7.0 if player.name == NAMES[0] else told["test/accuracy"]
        told |= {"test/auc/a": told["test/loss"], "test/auc/b": told["train/loss"]}

    stop = 'stop = { metric = "loss", split = "test", of = "worst", patience = 9 }\nevaluate.metrics.auc = {}'
    run = evaluated(stage, stop, measured, rounds=3)
    assert len(verified(stage, run, tmp_path)) == 3
    last = expected[-1][1]
    assert {"stop/value", "stop/best", "stop/since", "accuracy/mean", "metric/auc/a/weighted"} <= last.keys()
    assert last["accuracy/best"] < 1
    assert differences(stage, run) == []
    check_exact(expected)
    bundle = Edited.of(tmp_path / "run.fedpareto")
    lower = bundle.telling(lambda about: setattr(about.metrics[0], "better", "lower"))
    assert "the bundle has other metrics than the specification" in refusal(lower, tmp_path)


def test_of_a_model_that_members_have_measured_privately_the_value_that_stops_the_run_stands() -> None:
    stop = 'stop = { metric = "loss", split = "test", patience = 9 }\nprivacy.secure = "sum"\nevaluate.every = 1'
    run = RunSpec.parse(spec("private", "digits", 3, algorithm="fedavg-n", more=stop))
    computed = RunMetrics(run, algorithm("fedavg-n", {}), ("loss",), (), conceals=False)
    earlier = Earlier()
    assert computed.of_same_model(0, "a", earlier).problem({}) == "", "nobody could measure it"
    earlier.add(0, "a", {"evaluated": 5.0, "loss/test": 2.0, "stop/value": 2.0})
    assert computed.of_same_model(1, "b", earlier).problem({}) == ""
    stands = {"stop/value": 2.0, "stop/best": 2.0, "stop/since": 1.0}
    found = computed.of_same_model(1, "a", earlier)
    assert found.problem(stands) == ""
    assert found.problem({}) == "the record lacks stop/value; what was signed gives 2.0"
    assert found.problem({**stands, "evaluated": 5.0})


@pytest.mark.full
def test_a_run_without_evaluations_has_no_metrics_of_models(
    stage: Stage, tmp_path: Path, expected: list[Compared]
) -> None:
    run = played(stage, "median", "evaluate.every = 0", rounds=2)
    verified(stage, run, tmp_path)
    assert differences(stage, run) == []
    recorded = expected[0][1]
    assert not [name for name in recorded if basis(name) is Basis.MODEL]
    assert recorded["direction_norm"] > 0
    check_exact(expected[:2])


def test_epsilons_and_the_members_that_a_skipped_round_lacks_are_shown(
    stage: Stage, tmp_path: Path, expected: list[Compared]
) -> None:
    names = NAMES[:2]
    more = f"selection = {{ minimum = 2, required = {json.dumps(names)} }}"
    run, players = stage.begin(*names, rounds=2, algorithm="fedavg", more=more)
    for player, epsilon in zip(players, (3.0, 2.0), strict=True):
        player.reply(player.order(), privacy=SamplePrivacy(epsilon=epsilon))
    for player in players:
        player.reply(player.order())
    stage.wait_round(run, 0)
    players[0].decline(players[0].order(), "no-data")
    players[1].reply(players[1].order())
    stage.wait_state(run, RunState.COMPLETED)
    first, second = verified(stage, run, tmp_path)
    assert differences(stage, run) == []
    assert expected[0][1]["epsilon/samples"] == 3.0
    assert (first.measured, second.measured) == (("bytes/down",), ("bytes/down", "required/missing"))
    check_exact(expected[:1])


def test_metrics_of_a_coordinate_wise_direction_need_the_updates(stage: Stage, tmp_path: Path) -> None:
    run = played(stage, "median", "", rounds=1)
    with BundleReader(exported(stage, run, tmp_path / "run.fedpareto", payloads=False)) as bundle:
        (found,) = verify(bundle)
    assert found.unchecked == ("descent_min", "descent_share", "direction_norm", "stationary")
    assert found.missing[-1].startswith("metrics: descent_min, descent_share, direction_norm, stationary: blake3:")
    output = CliRunner().invoke(app, ["verify", str(tmp_path / "run.fedpareto")]).output
    assert "not verified: K and the model, metrics, because the file has no updates" in output
    assert (
        "metrics not verified, because they need what the file lacks: descent_min, descent_share, direction_norm"
        in output
    )


def test_a_run_that_is_stopped_while_its_model_is_measured_has_no_metrics_of_it(stage: Stage, tmp_path: Path) -> None:
    run, players = stage.begin(*NAMES[:2], rounds=2, algorithm="fedavg", more="selection.minimum = 2")
    for player in players:
        player.reply(player.order())
    players[0].reply(players[0].order())
    stage.stop_run(run, "enough")
    stage.wait_state(run, RunState.STOPPED)
    verified(stage, run, tmp_path)
    assert differences(stage, run) == []
    bundle = Edited.of(tmp_path / "run.fedpareto")
    assert "evaluated" not in bundle.round(0).metrics
    said = refusal(with_metric(bundle, 0, "accuracy/mean", 1.0), tmp_path)
    assert "the record says accuracy/mean = 1.0; nothing that was signed gives this number" in said


@pytest.mark.parametrize("late", [False, True])
def test_a_member_that_is_revoked_after_it_has_measured_counts_unless_the_evaluation_went_on(
    stage: Stage, tmp_path: Path, late: bool
) -> None:
    names = (*NAMES[:2], f"leaving-{stage.count}")
    run, players = stage.begin(*names, algorithm="fedavg", more="selection.minimum = 3")
    for player in players:
        player.reply(player.order())
    orders = [player.order() for player in players]
    players[2].reply(orders[2])
    if not late:
        stage.revoke(names[2])
    for player, order in zip(players[:2], orders[:2], strict=True):
        player.reply(order)
    stage.wait_state(run, RunState.COMPLETED)
    if late:
        stage.revoke(names[2])
    verified(stage, run, tmp_path)
    assert differences(stage, run) == []
    bundle = Edited.of(tmp_path / "run.fedpareto")
    assert bundle.round(0).metrics["evaluated"] == (3 if late else 2)

    def without_it(record: RoundRecord) -> None:
        told = (
            PhaseReply(client_id=name, samples=1, losses={}, metrics=measurements(name, orders[0])) for name in names
        )
        record.metrics.update(scores(Replies([*told][:2]), ("loss",)))

    if late:
        assert "what was signed gives" in refusal(bundle.with_round(0, without_it), tmp_path)
    else:
        assert checked(bundle.with_round(0, without_it), tmp_path)
        assert "what was signed gives" in refusal(with_metric(bundle, 0, "evaluated", 1.0), tmp_path)
