"""What members claim of themselves: how far it counts, and what an operator is told about it."""

from datetime import UTC, timedelta
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import select

from coordinator.rounds import selection
from federation.digests import digest
from federation.spec.run_spec import RunSpec
from federation.trust.envelope import verify
from federation.v1 import admin_pb2 as admin
from federation.v1.common_pb2 import ReceiptManifest, SignedEnvelope
from fedpareto.offline_aggregation import aggregate
from storage.models import Reply
from storage.states import RoundState
from tests.running import SECONDS, refused
from tests.stage import LAYOUT, MODEL, Stage, answer, spec
from tests.verification.scene import verified

ABSURD = 2**53


def receipt_of(stage: Stage, client: str) -> ReceiptManifest:
    """The receipt of a client's newest reply."""
    rows = select(Reply.receipt).where(Reply.client_id == client).order_by(Reply.reply_id.desc()).limit(1)
    envelope = SignedEnvelope.FromString(stage.look(lambda session: session.scalars(rows).one()))
    return verify(envelope, ReceiptManifest, stage.players[client].member.files.coordinator.chain.present)


def test_a_row_beyond_the_limit_is_refused_for_good_and_adam_goes_on_without_it(stage: Stage) -> None:
    more = 'selection.minimum = 3\nserver = { optimizer = "adam", learning_rate = 0.01 }'
    run, (ann, ben, cleo) = stage.begin("ann", "ben", "cleo", algorithm="fedavg", more=more)
    largest = np.full(LAYOUT.size, np.finfo(np.float32).max)
    with refused("RESOURCE_EXHAUSTED", "limit:norm") as messages:
        ann.submit(ann.order(), largest)
    assert "row 'loss' has the norm 2.283e+39; at most 1e+12 is taken" in messages[0]
    assert stage.outcomes(run)["ann"] == ("REFUSED", "limit:norm")
    receipt = receipt_of(stage, "ann")
    assert (receipt.accepted, receipt.reason) == (False, "limit:norm")
    assert receipt.message == messages[0]
    assert abs(receipt.created.ToDatetime(UTC) - stage.clock()) < timedelta(minutes=10)
    stage.play(run, ann, ben, cleo)
    assert stage.rounds(run)[0].state is RoundState.COMPLETED
    assert stage.run(run).model != digest(MODEL)


def test_the_limit_of_the_norm_is_the_specifications_and_a_row_of_just_that_norm_is_taken(stage: Stage) -> None:
    more = "selection = { minimum = 2, quorum = 0.5 }\nlimits.norm = 5.0"
    run, (ann, ben) = stage.begin("ann", "ben", algorithm="fedavg", more=more)
    update = np.zeros(LAYOUT.size, np.float32)
    update[:2] = 3, 4
    ann.reply(ann.order(), update)
    with refused("RESOURCE_EXHAUSTED", "limit:norm"):
        ben.submit(ben.order(), np.nextafter(update, np.float32(9)))
    stage.play(run, ann, ben)


def test_a_statement_that_the_kind_of_work_does_not_have_is_refused_for_good(stage: Stage) -> None:
    run, (ann,) = stage.begin("ann", algorithm="fedavg")
    with refused("INVALID_ARGUMENT", "statement") as messages:
        ann.submit(ann.order(), statement=b"x")
    assert "replies to work of the kind 'train' have no statement" in messages[0]
    assert stage.outcomes(run)["ann"] == ("REFUSED", "statement")


def test_an_absurd_offer_of_samples_is_drawn_no_more_often_than_the_largest_that_is_taken(stage: Stage) -> None:
    names, samples = ("ann", "ben", "cleo", "dora", "emil"), [10, 10, 10, ABSURD, ABSURD]
    more = 'selection = { minimum = 5, method = "count", count = 2, by = "samples" }'
    more += "\nlimits.samples = 10\nevaluate.every = 0"
    run, players = stage.begin(*names, rounds=4, samples=samples, algorithm="fedavg", more=more, paused=True)
    rule = RunSpec.parse(stage.run(run).spec).selection
    expected = [selection.select(rule, dict.fromkeys(names, 10), seed=3, round_number=t) for t in range(4)]
    assert {name for chosen in expected for name in chosen} - {"dora", "emil"}
    for player in players[3:]:
        player.tasks = dict.fromkeys(player.tasks, 10)  # what their updates claim
    stage.resume(run, *players)
    assert [round_.selected for round_ in stage.rounds(run)] == expected


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("", ()),
        ('algorithm.prior = "samples"', ("algorithm.prior",)),
        ('selection = { method = "count", count = 1, by = "samples" }', ("selection.by",)),
        ('selection = { by = "samples" }', ()),  # everybody is asked
    ],
)
def test_submit_says_what_claims_of_samples_steer(stage: Stage, more: str, words: tuple[str, ...]) -> None:
    task = stage.task()
    stage.cast(task, "ann")  # otherwise another warning says that nobody offers the task
    document = spec(f"told-{stage.count}", task, algorithm="fedavg", more=more)
    header = admin.RunHeader(spec=document, model=digest(MODEL), model_bytes=len(MODEL), paused=True)
    requests = [admin.SubmitRunRequest(header=header), admin.SubmitRunRequest(chunk=MODEL)]
    response = stage._admin.SubmitRun(iter(requests), timeout=SECONDS)
    assert len(response.warnings) == len(words)
    for word, warning in zip(words, response.warnings, strict=True):
        assert word in warning
        assert "limits.samples = 10000000" in warning


def test_an_accuracy_that_is_no_share_neither_ends_a_run_nor_chooses_its_best_model(
    stage: Stage, tmp_path: Path
) -> None:
    more = 'selection.minimum = 3\nstop = { metric = "accuracy", split = "test", target = 0.95, patience = 2 }'
    run, players = stage.begin("ann", "ben", "cleo", rounds=2, more=more)
    answer(*players)
    for player in players:
        claim = {"test/accuracy": 100.0, "test/accuracy/loss": -7.0} if player.name == "ann" else {}
        player.reply(player.order(), metrics=claim)
    stage.play(run, *players)
    first, last = stage.rounds(run)
    assert first.metrics["stop/value"] == first.metrics["accuracy/mean"] <= 1
    assert last.metrics["stop/best"] <= 1
    assert stage.evaluations(run)["ann", "test"].accuracy is None
    assert stage.evaluations(run)["ann", "test"].others == {}
    verified(stage, run, tmp_path)


def test_the_default_box_leaves_no_client_more_than_its_share_and_one_over_m() -> None:
    rng = np.random.default_rng(0)
    for m in range(2, 12):
        U = rng.standard_normal((m, 30)) + 1
        U[0] = -U[1:].mean(axis=0)
        assert aggregate("fedmgda+", U).weights.max() <= 2 / m + 1e-12
        claims = np.arange(1.0, m + 1)
        shares = claims / claims.sum()
        assert (aggregate("fedmgda+", U, prior=claims).weights <= shares + 1 / m + 1e-12).all()


def test_one_client_of_seven_cannot_stop_the_others_where_they_do_not_conflict() -> None:
    U = np.vstack([np.eye(6), -np.ones(6)])  # the hardest case: the others have nothing in common
    assert aggregate("fedmgda+", U, epsilon=1.0).diagnostics["stationary"] == 1
    assert aggregate("fedmgda+", U).diagnostics["stationary"] == 0
