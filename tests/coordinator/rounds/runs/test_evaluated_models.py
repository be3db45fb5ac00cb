"""Runs that evaluate: each round measures one model at the members, makes no step, and verifies."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from coordinator.rounds.runs.on_record import check_unmeasured
from federation.digests import digest
from federation.record.bundle import SPECIFICATION
from federation.refusals import Refusal
from federation.spec.run_spec import RunSpec, SpecError, with_models
from federation.tasks import task
from federation.transport.channels import refusal_from_rpc_error
from federation.v1.admin_pb2 import (
    ExportModelRequest,
    ExportRoundsResponse,
    GetRoundRequest,
    ListRoundsRequest,
    MeasuredModel,
)
from federation.v1.admin_pb2 import Run as RunMessage
from federation.vectors import to_bytes
from fedpareto.cli.admin import upload
from fedpareto.cli.failure import CommandFailure
from fedpareto.cli.show.metric_tables import comparison
from fedpareto.simulation.history import History
from fedpareto.simulation.simulate import Simulation
from fedpareto.web.report import page
from fedpareto.web.sections.shown_run import ShownRun
from storage.database import Database
from storage.states import RoundState, RunState
from tests.coordinator.members.scene import problems
from tests.harness import Attending
from tests.paths import OWNERS_CODE
from tests.stage import LAYOUT, Player, Stage, measurements
from tests.verification.independent_verifier import Wrong
from tests.verification.independent_verifier import verify as verify_independently
from tests.verification.scene import Edited, refusal, verified

MODELS = [to_bytes(LAYOUT, np.full(LAYOUT.size, scale, np.float32)) for scale in (0.25, 0.5, 0.75)]
DIGESTS = [digest(model) for model in MODELS]


def document(name: str, task: str, models: Sequence[str] = DIGESTS, more: str = "") -> bytes:
    """A run that measures models on two splits."""
    text = f'name = "{name}"\ntask = "{task}"\nkind = "evaluate"\nevaluate.splits = ["train", "test"]\n'
    return with_models((text + "evaluate.deadline_seconds = 900\n" + more).encode(), models)


def begin(stage: Stage, *names: str, more: str = "") -> tuple[str, list[Player]]:
    """A run that measures three models at new members of these names."""
    task, players = stage.crew(*names)
    return submit(stage, document(task, task, more=more)), players


def submit(stage: Stage, text: bytes, models: Sequence[bytes] = MODELS) -> str:
    headers = [MeasuredModel(digest=digest(model), size=len(model)) for model in models]
    return stage.submit(text, model=models[0], models=headers, further=models[1:])


def test_a_run_that_evaluates_measures_each_model_once_and_makes_no_step(stage: Stage, tmp_path: Path) -> None:
    run, players = begin(stage, "ada", "ben", "cleo")
    stage.complete(run, *players)
    rounds = stage.rounds(run)
    assert [row.state for row in rounds] == [RoundState.COMPLETED] * 3
    assert [(row.base_model, row.deployed_model, row.result_model, row.step) for row in rounds] == [
        (name, name, None, None) for name in DIGESTS
    ]
    assert stage.run(run).model == DIGESTS[0], "the run has made no model"
    assert [problem for problem in problems(stage) if run in problem] == []
    for number, row in enumerate(rounds):
        orders = stage.orders(run, number)
        assert {order.base_model for order in orders.values()} == {DIGESTS[number]}
        told = [measurements(name, order)["test/accuracy"] for name, order in orders.items()]
        assert row.metrics["accuracy/mean"] == pytest.approx(np.mean(told))
    found = verified(stage, run, tmp_path)
    assert [(one.number, one.words.split(";")[0]) for one in found] == [
        (number, f"3 members measured {name}") for number, name in enumerate(DIGESTS)
    ]
    pieces = [next(stage._admin.ExportModel(ExportModelRequest(run=run, round=number))) for number in range(3)]
    assert [piece.digest for piece in pieces] == DIGESTS
    assert [piece.chunk for piece in pieces] == MODELS
    assert verify_independently(tmp_path / "run.fedpareto").missing == []
    file = Edited.of(tmp_path / "run.fedpareto")
    for change, words in (
        (lambda record: record.metrics.update({"accuracy/mean": 0.99}), "accuracy/mean"),
        (lambda record: setattr(record, "state", "SKIPPED"), "nothing that was signed gives"),
        (lambda record: record.phases.pop(), "0 phases"),
        (lambda record: record.phases[0].exchanges.pop(), "members"),
    ):
        edited = file.with_round(1, change)
        assert re.search(words, said := refusal(edited, tmp_path)), said
        with pytest.raises(Wrong):
            verify_independently(edited.write(tmp_path / "other"))
    other = file.entries[SPECIFICATION].replace(DIGESTS[1].encode(), DIGESTS[1].replace("b", "c", 2).encode())
    assert "spec" in refusal(file.having({SPECIFICATION: other}), tmp_path)


def test_a_member_whose_worker_does_not_know_this_kind_of_run_is_not_asked(stage: Stage) -> None:
    task, (player, old) = stage.crew("ada", "old")
    old.leave()
    old.stream = Attending(old.member, {task: 10}, run_kinds=())
    old.stream.next()
    of_models = [MeasuredModel(digest=digest(model), size=len(model)) for model in MODELS]
    header: dict[str, Any] = {"model": DIGESTS[0], "models": of_models}
    told = stage.dry_run(document(task, task), **header)
    assert [(other.client_id, other.reason) for other in told.others] == [("old", "old")]
    assert told.others[0].message == "its worker does not know runs of the kind 'evaluate': it needs a newer release"
    private = document(task, task, more='privacy.secure = "sum"\nselection.minimum = 5\n')
    told = stage.dry_run(private, **header)
    assert [(other.client_id, other.reason) for other in told.others] == [("ada", "evaluations"), ("old", "old")]
    run = submit(stage, document(task, task))
    stage.complete(run, player)
    assert [row.selected for row in stage.rounds(run)] == [["ada"]] * 3


def test_a_member_that_was_away_is_asked_when_the_others_have_answered(stage: Stage, tmp_path: Path) -> None:
    task, (ada, ben, late) = stage.crew("ada", "ben", "late")
    stage.hang_up(late)
    run = submit(stage, document(task, task, DIGESTS[:1]), MODELS[:1])
    first = [player.order() for player in (ada, ben)]
    late.attend(**{task: 10})
    for player, order in zip((ada, ben), first, strict=True):
        player.reply(order)
    second = late.order()
    assert (second.phase, second.members, second.base_model) == (1, 1, DIGESTS[0])
    stage.restart()
    for player in (ada, ben, late):
        player.attend(**{task: 10})
    late.reply(second)
    stage.complete(run, ada, ben, late)
    (row,) = stage.rounds(run)
    told = [measurements(order.client_id, order)["test/accuracy"] for order in (*first, second)]
    assert row.metrics["evaluated"] == 3.0
    assert row.metrics["accuracy/mean"] == pytest.approx(float(np.mean(told)))
    (summary,) = stage._admin.ListRounds(ListRoundsRequest(run=run)).rounds
    assert (summary.asked, summary.accepted, summary.missing) == (3, 3, 0)
    parts = stage._admin.GetRound(GetRoundRequest(run=run, round=0)).participations
    assert [(part.client_id, part.reason) for part in parts] == [("ada", ""), ("ben", ""), ("late", "")]
    assert [one.words.split(" blake3")[0] for one in verified(stage, run, tmp_path)] == ["3 members measured"]
    assert verify_independently(tmp_path / "run.fedpareto").missing == []
    file = Edited.of(tmp_path / "run.fedpareto")
    for change, words in (
        (lambda record: record.phases.add().CopyFrom(record.phases[0]), "phase 0 is at the place of phase 2"),
        (lambda record: record.phases.pop(), "accuracy/mean"),
    ):
        assert words in refusal(file.with_round(0, change), tmp_path)


def test_a_member_that_is_revoked_while_others_are_asked_again_does_not_count(stage: Stage, tmp_path: Path) -> None:
    task, (dora, emil, fay, late) = stage.crew("dora", "emil", "fay", "later")
    stage.hang_up(late)
    run = submit(stage, document(task, task, DIGESTS[:1]), MODELS[:1])
    first = [player.order() for player in (dora, emil, fay)]
    late.attend(**{task: 10})
    for player, order in zip((dora, emil, fay), first, strict=True):
        player.reply(order)
    second = late.order()
    stage.revoke("dora")
    late.reply(second)
    stage.complete(run, emil, fay, late)
    told = [measurements(order.client_id, order)["test/accuracy"] for order in (*first[1:], second)]
    (row,) = stage.rounds(run)
    assert row.metrics["accuracy/mean"] == pytest.approx(float(np.mean(told)))
    assert [one.words.split(" blake3")[0] for one in verified(stage, run, tmp_path)] == ["3 members measured"]


def test_a_run_without_any_measured_model_has_failed(stage: Stage) -> None:
    run, players = begin(stage, "ada", "ben", more="selection.quorum = 1.0\n")
    for _ in range(3):
        players[0].answer()
        players[1].decline(players[1].order(), "busy")
    row = stage.wait_state(run, RunState.FAILED)
    assert row.reason.startswith("3 rounds in a row were skipped, with busy in 3 of 3 failed answers; the last one: ")
    assert [(one.state, one.deployed_model) for one in stage.rounds(run)] == [(RoundState.SKIPPED, None)] * 3
    assert stage.rounds(run)[0].reason == "quorum: 1 of 2 members replied (evaluate), 2 are needed"


@pytest.mark.full
def test_a_restart_in_the_middle_asks_nobody_twice(stage: Stage) -> None:
    run, players = begin(stage, "ada", "ben")
    players[0].answer()
    stage.restart()
    for player in players:
        player.attend(**player.tasks)
    stage.complete(run, *players)
    assert [len(stage.phases(run, number)) for number in range(3)] == [1, 1, 1]
    assert {row.state for row in stage.rounds(run)} == {RoundState.COMPLETED}


def test_a_submission_must_bring_the_models_that_its_specification_names(stage: Stage) -> None:
    task, _ = stage.crew("ada")

    def reason(text: bytes, models: Sequence[bytes], **more: bool) -> str:
        headers = [MeasuredModel(digest=digest(model), size=len(model), **more) for model in models]
        with pytest.raises(grpc.RpcError) as error:
            stage.submit(text, model=models[0], models=headers, further=models[1:])
        return refusal_from_rpc_error(error.value).reason

    assert reason(document(task, task), MODELS[:2]) == "argument"
    assert reason(document(task, task), MODELS[::-1]) == "argument"
    template = document(task, task, []).replace(b"models = [\n]\n", b"")
    assert reason(template, MODELS[:1]) == "spec", "it names no model"
    made = [to_bytes(LAYOUT, np.full(LAYOUT.size, 9, np.float32))]
    assert reason(document(task, task, [digest(made[0])]), made, stored=True) == "model-missing"
    assert not stage.blobs.exists(digest(made[0]))


def test_keys_that_another_kind_of_run_has_are_refused_by_name() -> None:
    head = 'name = "x"\ntask = "digits"\n'
    for more, words in (
        ('kind = "evaluate"\nrounds = 3', "rounds: a run of kind"),
        ('kind = "evaluate"\nalgorithm.name = "fedavg"', "algorithm: a run of kind"),
        ('kind = "evaluate"\nstop.metric = "loss"', "stop: a run of kind"),
        ('kind = "evaluate"\nprivacy.client_noise = 1.0', "privacy.client_noise: a run of kind"),
        ('kind = "evaluate"\nprivacy = {secure = "verified"}', '"sum" in place of "verified"'),
        ('kind = "evaluate"\nprivacy = {secure = "sum", disclose = ["evaluation"]}', "privacy.disclose: a run of kind"),
        ('kind = "evaluate"\nparameters.personal = ["head.*"]', "no personal parameters"),
        (f'kind = "evaluate"\nmodels = ["{DIGESTS[0]}", "{DIGESTS[0]}"]', "twice"),
        (f'rounds = 1\nmodels = ["{DIGESTS[0]}"]', 'models: only a run of kind = "evaluate"'),
    ):
        with pytest.raises(SpecError, match=words):
            RunSpec.parse(head + more)


def test_a_specification_gets_the_seed_and_the_parameters_of_the_run_that_made_its_models() -> None:
    head = 'name = "x"\ntask = "digits"\n'
    source = RunSpec.parse(head + 'rounds = 1\nseed = 7\nparameters = {frozen = ["a.*"], buffers = "averaged"}')
    named = RunSpec.parse(with_models((head + 'kind = "evaluate"\n').encode(), DIGESTS, source))
    assert (named.models, named.rounds, named.seed) == (tuple(DIGESTS), 3, 7)
    assert named.parameters == source.parameters
    with pytest.raises(SpecError, match="seed: it differs"):
        with_models((head + 'kind = "evaluate"\nseed = 8').encode(), DIGESTS, source)
    personal = RunSpec.parse(head + 'rounds = 1\nparameters.personal = ["a.*"]')
    with pytest.raises(SpecError, match="no personal parameters"):
        with_models((head + 'kind = "evaluate"').encode(), DIGESTS, personal)


def test_a_model_of_a_run_is_measured_where_it_is_with_the_seed_of_that_run(stage: Stage) -> None:
    made, players = stage.begin("ada", "ben", rounds=2, seed=8, more='selection.minimum = 2\nresults = "admins"')
    stage.complete(made, *players)
    task = RunSpec.parse(stage.run(made).spec).task
    text = f'name = "{task}-eval"\ntask = "{task}"\nkind = "evaluate"\nevaluate.splits = ["train", "test"]\n'.encode()
    named, models = upload.model_of_run(stage._admin, text, made, "")
    run = upload.submit(stage._admin, named, models).run.run_id
    stage.complete(run, *players)
    (row,) = stage.rounds(run)
    assert (row.base_model, row.state) == (stage.rounds(made)[-1].deployed_model, RoundState.COMPLETED)
    assert RunSpec.parse(stage.run(run).spec).seed == 8
    with pytest.raises(grpc.RpcError, match="has no metric"):
        upload.model_of_run(stage._admin, text, made, "auc")


def test_the_sources_of_models_must_suit_the_kind_of_the_run(tmp_path: Path) -> None:
    trains, measures = (
        f'name = "x"\ntask = "digits"\n{line}\n'.encode() for line in ("rounds = 1", 'kind = "evaluate"')
    )
    one = tmp_path / "one.safetensors"
    for text, files, run, best, words in (
        (trains, [one, one], "", "", "begins with one model"),
        (trains, [], "r", "", "begins with one model"),
        (measures, [], "", "", "give the models to measure"),
        (measures, [one], "r", "", "give the models to measure"),
        (measures, [one], "", "loss", "give --model-of RUN, too"),
    ):
        with pytest.raises(CommandFailure, match=words):
            upload.given_models(text, RunSpec.parse(text), files, run, best)


@dataclass(frozen=True)
class Measured:
    """A model with BatchNorm's buffers: what eight members measured, in the open and privately, and on the data of all.

    `histories` are those of the simulations, of the runs open and private; `home` has their directories.
    """

    rows: Mapping[str, Mapping[str, Any]]
    pooled: Mapping[str, float]
    loss: float
    histories: Mapping[str, History]
    home: Path


@pytest.fixture(scope="module")
def normed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    directory = tmp_path_factory.mktemp("normed")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(OWNERS_CODE))
        yield measured(directory)


def measured(directory: Path) -> Measured:
    torch.manual_seed(5)
    model = task("normed_task:Normed").model()
    buffers = dict(model.named_buffers())
    for name in ("norm.running_mean", "norm.running_var"):
        buffers[name].copy_(torch.rand(8) + 0.5)
    save_file(model.state_dict(), directory / "model")
    head = 'task = "normed_task:Normed"\nsimulation = {clients = 8, sizes = "lognormal:0.5"}\n'
    head += 'kind = "evaluate"\nevaluate.splits = ["test"]\nparameters.buffers = "averaged"\n'
    rows, histories, tested = {}, {}, []
    for name, secure in (("open", "off"), ("private", "sum")):
        text = f'name = "{name}"\n{head}privacy.secure = "{secure}"\n'
        with Simulation(text.encode(), directory / name, given=[directory / "model"]) as simulation:
            histories[name] = simulation.run()
            (rows[name],) = histories[name].round_records
            tested = [own.test for own in simulation._population.splits.values() if own.test is not None]
    assert len(tested) == 8
    right, losses = [], []
    for own in tested:
        logits = model.eval()(own.x.float())
        right.append((logits.argmax(1) == own.y).float().mean().item())
        losses.append(torch.nn.functional.cross_entropy(logits, own.y).item())
    sizes = [len(own.y) for own in tested]
    pooled = {"accuracy/weighted": float(np.average(right, weights=sizes)), "accuracy/mean": float(np.mean(right))}
    return Measured(rows, pooled, float(np.mean(losses)), histories, directory)


def test_the_weighted_accuracy_of_a_model_with_buffers_is_that_on_the_data_of_all_members(normed: Measured) -> None:
    found = normed.rows["open"]
    assert found["accuracy/weighted"] == pytest.approx(normed.pooled["accuracy/weighted"], rel=1e-6)
    assert found["state"] == "COMPLETED"


def test_private_means_are_within_four_deviations_of_the_members_own(normed: Measured) -> None:
    found = normed.rows["private"]
    noise = found["evaluation/noise"]
    assert noise == pytest.approx(0.1 / math.sqrt((6 - 2) * 8))
    assert abs(found["accuracy/mean"] - normed.pooled["accuracy/mean"]) < 4 * noise
    assert abs(found["loss/test"] - normed.loss) < 4 * 10 * noise
    assert not {"accuracy/worst", "accuracy/std", "accuracy/weighted"} & found.keys()


def test_a_model_that_was_measured_privately_is_refused_with_its_numbers(normed: Measured) -> None:
    spec = RunSpec.parse(RunMessage.FromString(normed.histories["private"].message).spec)
    check_recorded(normed.home / "open", spec)  # what members have told in the open is no private sum
    with pytest.raises(Refusal, match=r"round 0 of the run private; its numbers stand: accuracy/mean 0\.") as refused:
        check_recorded(normed.home / "private", spec)
    assert refused.value.reason == "model-evaluated"
    check_recorded(normed.home / "private", spec.model_copy(update={"task": "digits"}))
    check_recorded(normed.home / "private", spec.model_copy(update={"models": (digest(b"another"),)}))


def check_recorded(home: Path, spec: RunSpec) -> None:
    database = Database.open(f"sqlite:///{home / 'coordinator.db'}")
    try:
        with database.read() as session:
            check_unmeasured(session, spec)
    finally:
        database.close()


def test_models_are_shown_by_members_or_as_means_with_their_noise(normed: Measured) -> None:
    shown_all = [shown_of(history) for history in normed.histories.values()]
    pages = dict(zip(normed.histories, map(page, shown_all), strict=True))
    assert ">spread<" in pages["open"]
    assert ">spread<" not in pages["private"]
    assert "own value is known, so there is no worst one and no spread." in pages["private"]
    assert "No round of this run has been evaluated" not in pages["private"]
    beside = comparison([(shown.run, [line.summary for line in shown.lines]) for shown in shown_all])
    assert [(run["algorithm"], run["evaluated_round"]) for run in beside["runs"]] == [("evaluate", 0)] * 2
    assert len({run["model"] for run in beside["runs"]}) == 1
    for history in normed.histories.values():
        assert "replies: 8 of 8 accepted" in repr(history)
        assert list(history.compare(history)) == [f"{history.spec.name} ({at}), model 0" for at in (1, 2)]


def shown_of(history: History) -> ShownRun:
    return ShownRun.of(RunMessage.FromString(history.message), map(ExportRoundsResponse.FromString, history.exported))
