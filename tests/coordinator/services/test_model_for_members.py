"""The model of a run, for a member that has contributed: who gets it, what is told, and the right to fetch it."""

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.members.access import control
from coordinator.members.access.call_limits import Rate
from coordinator.services.views.member_model import _private_means
from federation.digests import digest
from federation.spec.run_spec import RunSpec
from federation.spec.task_metrics import MetricKind
from federation.trust.envelope import envelope_digest, sign, verify
from federation.v1.common_pb2 import ModelManifest, ReceiptManifest, RunState, SignedEnvelope
from federation.v1.federation_pb2 import FetchBlobRequest, GetModelRequest, GetModelResponse
from storage.models import Round, Run
from storage.states import RoundState
from tests.coordinator.members.scene import rated
from tests.running import SECONDS, command, refused
from tests.stage import Player, Stage, measurements, spec
from worker.ledgers.left_ledger import LeftLedger
from worker.ledgers.left_reading import read_left
from worker.receipts import append, receipt_line

NONCE = bytes(range(16))
FIVE = ("ann", "ben", "cid", "dan", "eve")


def ask(player: Player, run: str, **more: str) -> GetModelResponse:
    return player.member.stub.GetModel(GetModelRequest(run=run, nonce=NONCE, **more), timeout=SECONDS)


def told(player: Player, run: str, **more: str) -> ModelManifest:
    """What the coordinator has signed for a member."""
    key = player.member.files.coordinator.chain.present
    return verify(ask(player, run, **more).model, ModelManifest, key)


def fetch(player: Player, model: str, grant: SignedEnvelope | None, offset: int = 0) -> bytes:
    request = FetchBlobRequest(digest=model, offset=offset, grant=grant)
    return b"".join(part.chunk for part in player.member.stub.FetchBlob(request, timeout=SECONDS))


_played: list[tuple[Stage, str]] = []  # the run that several tests look at: one for each coordinator


@pytest.fixture
def run(stage: Stage) -> str:
    """A completed run of two rounds by five members. Its model is the mean of the models of both rounds."""
    if not _played or _played[-1][0] is not stage:
        name, players = stage.begin(*FIVE, rounds=2, algorithm="afl", more="selection.minimum = 5")
        stage.complete(name, *players)
        _played.append((stage, name))
    return _played[-1][1]


def test_a_member_is_told_which_step_made_the_newest_model_and_fetches_it(stage: Stage, run: str) -> None:
    ann = stage.player("ann")
    answer = ask(ann, stage.run(run).name)
    given = verify(answer.model, ModelManifest, ann.member.files.coordinator.chain.present)
    step, last = stage.step(run, 1), stage.rounds(run)[1]
    assert (given.federation_id, given.client_id, given.nonce) == ("test", "ann", NONCE)
    assert (given.run_id, given.round, given.state) == (run, 1, RunState.RUN_STATE_COMPLETED)
    assert given.step == envelope_digest(SignedEnvelope.FromString(last.step or b""))
    assert (given.model, given.result_model) == (last.deployed_model, step.result_model)
    assert given.model != given.result_model
    assert (digest(answer.spec), given.members) == (given.spec, 5)
    whole = fetch(ann, given.model, answer.model)
    assert (digest(whole), len(whole)) == (given.model, given.model_bytes)
    assert fetch(ann, given.model, answer.model, offset=300) == whole[300:]
    entry = stage.served.entries(action="model.exported", digest=given.model)[-1]
    assert (entry.actor.rpartition("/")[2], entry.subject, entry.detail) == ("ann", run, "after round 1")


def test_a_members_file_is_that_of_administrators_and_its_receipts_confirm_it(
    stage: Stage, run: str, tmp_path: Path
) -> None:
    home, files = tmp_path / "home", stage.player("ann").member.files
    files.save(home)
    left = LeftLedger(home / "left.db")
    for number in (0, 1):
        for phase in (0, 1):
            reply, asked = stage.replies(run, number, phase)["ann"], stage.assignments(run, number, phase)["ann"]
            answer, order, receipt = map(SignedEnvelope.FromString, (reply.envelope, asked.envelope, reply.receipt))
            said = ReceiptManifest.FromString(receipt.manifest)
            append(home / "receipts.jsonl", receipt_line(answer, order, receipt, said))
            left.keep(answer, order, datetime.now(UTC))
            left.acknowledge(receipt, said)
    left.close()
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    card = tmp_path / "card.md"
    told = command("worker", "model", run, "--home", home, "--out", ours).stdout
    assert "compared with this member's assignment of round 1: the same step and model" in told
    stage.served.command("export", run, "--out", theirs, "--card", card)
    assert ours.read_bytes() == theirs.read_bytes()
    assert "5 members: ann, ben, cid, dan, eve" in card.read_text()
    shares = [
        (row.first.round, row.work, row.first.weight, row.coefficient) for row in read_left(home / "left.db").rows
    ]
    trained = {number: stage.replies(run, number)["ann"] for number in (0, 1)}
    for number, work, weight, coefficient in shares:
        known = (trained[number].weight, trained[number].coefficient) if work == "train" else (None, None)
        assert (weight, coefficient) == known
    assert len(shares) == 4


def test_a_member_is_told_its_own_part_and_the_mean_and_worst_of_five(stage: Stage, run: str) -> None:
    given = told(stage.player("ann"), run)
    mine = [stage.replies(run, number)["ann"] for number in (0, 1)]
    parts = [(share.round, share.reply, share.weight, share.coefficient) for share in given.shares]
    assert parts == [(number, one.envelope_digest, one.weight, one.coefficient) for number, one in enumerate(mine)]
    losses = [measurements(name, stage.orders(run, 1, 1)[name])["test/loss"] for name in FIVE]
    [score] = [one for one in given.scores if (one.split, one.metric) == ("test", "loss")]
    assert (score.own, score.members, score.worst) == (losses[0], 5, max(losses))
    assert score.mean == pytest.approx(sum(losses) / 5)


def test_the_best_model_is_of_the_round_with_the_best_mean(stage: Stage, run: str) -> None:
    losses = [round_.metrics["loss/test"] for round_ in stage.rounds(run)]
    given = told(stage.player("ann"), run, best="loss", split="test")
    assert given.round == losses.index(min(losses))
    assert given.model == stage.rounds(run)[given.round].deployed_model


def test_of_fewer_than_five_members_a_member_is_told_its_own_values_alone(stage: Stage) -> None:
    run, players = stage.begin("ann", "ben", algorithm="fedavg", more="selection.minimum = 2")
    stage.complete(run, *players)
    scores = told(players[0], run).scores
    assert scores
    assert all(math.isfinite(one.own) and one.members == 0 for one in scores)
    assert all(math.isnan(one.mean) and math.isnan(one.worst) for one in scores)


def test_of_a_private_evaluation_a_member_is_told_the_mean_of_five_alone() -> None:
    spec = RunSpec.parse('name = "a"\ntask = "b"\nrounds = 1\nprivacy.secure = "sum"')
    metrics = {"loss/test": 0.5, "accuracy/mean": 0.25, "metric/auc/mean": 0.75, "evaluated": 5.0}
    round_ = Round(metrics=metrics, run=Run(metrics=(MetricKind("auc"),)))
    means = {(one.split, one.metric): one.mean for one in _private_means(round_, spec)}
    assert means == {("test", "loss"): 0.5, ("test", "accuracy"): 0.25, ("test", "auc"): 0.75}
    for score in _private_means(round_, spec):
        assert (score.members, math.isnan(score.own), math.isnan(score.worst)) == (5, True, True)
    round_.metrics = {**metrics, "evaluated": 4.0}
    assert list(_private_means(round_, spec)) == []


def test_of_a_run_whose_noise_protects_members_nothing_but_the_epsilon_is_told(stage: Stage) -> None:
    more = "train.steps = 1\nprivacy.client_noise = 1.0\nselection.minimum = 2\nselection.pool = 'enrolled'"
    run, players = stage.begin("ann", "ben", algorithm="fedavg-n", more=more)
    stage.play(run, *players)
    given = told(players[0], run)
    assert (given.members, list(given.shares), list(given.scores)) == (0, [], [])
    assert given.numbers["epsilon/clients"] > 0


# --- who gets no model


def test_a_member_learns_nothing_of_runs_that_have_not_asked_it(stage: Stage, run: str) -> None:
    for name in (run, stage.run(run).name, run[:6], "no-such-run", "", "%", "x" * 1000):
        with refused("NOT_FOUND", "run-unknown") as said:
            ask(stage.player("zoe"), name)
        assert "did you mean" not in said[0]


def test_a_member_without_an_accepted_reply_gets_no_model(stage: Stage) -> None:
    run, (ann, ben) = stage.begin("ann", "ben", algorithm="fedavg", more="selection = { minimum = 2, quorum = 0.5 }")
    ben.submit_zeros(ben.order())
    with refused("PERMISSION_DENIED", "not-contributed"):
        ask(ben, run)
    ann.answer()
    stage.wait_round(run, 0, RoundState.STEPPED)
    with refused("PERMISSION_DENIED", "not-contributed"):
        ask(ben, run)
    stage.stop_run(run)


def test_before_the_first_step_there_is_no_model(stage: Stage) -> None:
    run, (ann, _) = stage.begin("ann", "ben", algorithm="fedavg", more="selection.minimum = 2")
    ann.answer()
    with refused("NOT_FOUND", "model-missing"):
        ask(ann, run)
    stage.stop_run(run)


def test_a_run_whose_results_are_for_administrators_gives_members_no_model(stage: Stage) -> None:
    more = "selection.minimum = 2\n"
    task, players = stage.crew("ann", "ben")
    run = stage.submit(b'results = "admins"\n' + spec(task, task, algorithm="fedavg", more=more))
    stage.complete(run, *players)
    with refused("PERMISSION_DENIED", "results"):
        ask(players[0], run)
    assert stage.served.document("export", run, "--out", stage.served.home.directory / "admins.safetensors")["size"]


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"best": "auc"}, ("NOT_FOUND", "metric-unknown")),
        ({"best": "loss", "split": "holdout"}, ("NOT_FOUND", "metric-unknown")),
        ({"best": "l" * 1000}, ("INVALID_ARGUMENT", "argument")),
        ({"nonce": b""}, ("INVALID_ARGUMENT", "argument")),
        ({"nonce": bytes(65)}, ("INVALID_ARGUMENT", "argument")),
    ],
)
def test_a_malformed_question_is_refused(
    stage: Stage, run: str, request_: dict[str, Any], reason: tuple[str, str]
) -> None:
    with refused(*reason):
        stage.player("ann").member.stub.GetModel(GetModelRequest(**dict[str, Any](run=run, nonce=NONCE) | request_))


def test_a_member_that_asks_too_often_is_told_to_wait(stage: Stage, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "HOLD_SECONDS", 0.0)
    rated(stage.served, monkeypatch, GetModel=Rate(2, 0.01))
    before = len(stage.served.entries(action="model.exported"))
    for _ in range(2):
        ask(stage.player("ann"), run)
    for _ in range(3):
        with refused("RESOURCE_EXHAUSTED", "limit:rate"):
            ask(stage.player("ann"), run)
    assert len(stage.served.entries(action="model.exported")) == before + 2


# --- the right to fetch


Forged = Callable[[Stage, GetModelResponse, ModelManifest], SignedEnvelope]


def resigned(key: Ed25519PrivateKey, given: ModelManifest, **changes: str) -> SignedEnvelope:
    for name, value in changes.items():
        setattr(given, name, value)
    return sign(given, key)


def changed(answer: GetModelResponse) -> SignedEnvelope:
    answer.model.manifest = answer.model.manifest.replace(b"ann", b"eva")
    return answer.model


GRANTS: dict[str, Forged] = {
    "empty": lambda stage, answer, given: SignedEnvelope(),
    "changed": lambda stage, answer, given: changed(answer),
    "signed by the member": lambda stage, answer, given: resigned(
        stage.player("zoe").member.files.signing_key, given, client_id="zoe"
    ),
    "of another member": lambda stage, answer, given: answer.model,
    "for another model": lambda stage, answer, given: resigned(
        stage.served.home.signing_key, given, client_id="zoe", model=digest(b"another")
    ),
    "of another federation": lambda stage, answer, given: resigned(
        stage.served.home.signing_key, given, client_id="zoe", federation_id="other"
    ),
    "an assignment": lambda stage, answer, given: SignedEnvelope.FromString(
        next(iter(stage.assignments(given.run_id).values())).envelope
    ),
}


@pytest.mark.parametrize("forge", GRANTS.values(), ids=GRANTS)
def test_a_right_that_the_coordinator_did_not_give_this_member_is_none(stage: Stage, run: str, forge: Forged) -> None:
    answer = ask(stage.player("ann"), run)
    given = ModelManifest.FromString(answer.model.manifest)
    model = given.model
    with refused("PERMISSION_DENIED", "blob-not-offered"):
        fetch(stage.player("zoe"), model, forge(stage, answer, given))


def test_the_right_to_fetch_a_model_ends_after_a_day(stage: Stage, run: str) -> None:
    ann = stage.player("ann")
    answer = ask(ann, run)
    model = ModelManifest.FromString(answer.model.manifest).model
    with stage.clock.moved(timedelta(hours=23)):
        assert fetch(ann, model, answer.model)
    with stage.clock.moved(timedelta(hours=25)), refused("PERMISSION_DENIED", "blob-not-offered"):
        fetch(ann, model, answer.model)


def test_a_revoked_member_gets_no_model_and_none_that_it_was_given(stage: Stage) -> None:
    run, players = stage.begin("ann", "rex", algorithm="fedavg", more="selection.minimum = 2")
    stage.complete(run, *players)
    answer = ask(players[1], run)
    stage.revoke("rex")
    with refused("UNAUTHENTICATED", "certificate-revoked"):
        ask(players[1], run)
    with refused("UNAUTHENTICATED", "certificate-revoked"):
        fetch(players[1], ModelManifest.FromString(answer.model.manifest).model, answer.model)
