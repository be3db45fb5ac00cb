"""Noise that protects clients: its bound, the record of it, what is hidden, its budget, and a crash before the step."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.rounds.runs.client_noise import affordable, spent
from coordinator.rounds.runs.specification import cautions, parse_run
from federation.aggregation.registry import algorithm
from federation.spec.accounting import gaussian_epsilon
from federation.spec.run_sections import PrivacySpec
from federation.spec.run_spec import SpecError
from federation.v1 import admin_pb2 as messages
from federation.v1.common_pb2 import SignedEnvelope, StepManifest
from federation.vectors import model_row, read_vector, update_rows
from fedpareto.cli.show import round_tables, tables
from fedpareto.face.simulated import simulate
from fedpareto.offline_aggregation import aggregate
from fedpareto.web.report import page
from fedpareto.web.sections.shown_run import ShownRun
from storage.blob_directory import DirectoryStore
from storage.retention import is_retained
from storage.states import RunState
from tests.few import few
from tests.harness import Federation, federation, wait_for
from tests.stage import MODEL, Player, Stage, answer, reply, vector
from tests.works import work_of

NAMES = ("ann", "ben", "cleo", "dan")


# --- the bound


@few(0.1, "auto")
@pytest.mark.parametrize("epsilon", [0.0, 0.1, "auto", 1.0])
def test_no_client_moves_the_direction_further_than_the_bound(epsilon: Any) -> None:
    rng = np.random.default_rng(7)
    rule = algorithm("fedmgda+", {"epsilon": epsilon})
    largest = 0.0
    for _ in range(60):
        m, d = int(rng.integers(2, 9)), int(rng.integers(2, 12))
        U = rng.standard_normal((m, d)) + rng.uniform(0, 3) * rng.standard_normal(d)
        before = aggregate("fedmgda+", U, epsilon=epsilon).direction
        for other in (-U.mean(axis=0), -U[0], 0 * U[0], 1e6 * rng.standard_normal(d)):
            after = aggregate("fedmgda+", np.vstack([other, U[1:]]), epsilon=epsilon).direction
            bound = rule.sensitivity(m)
            assert bound is not None
            moved = float(np.linalg.norm(after - before))
            assert moved <= bound
            largest = max(largest, moved / bound)
    assert largest > 0.3  # the bound is not idle


def test_the_bound_of_the_mean_of_unit_vectors_is_reached() -> None:
    U = np.array([[3.0, 0.0], [0.0, 1.0], [0.0, 2.0]])
    moved = aggregate("fedavg-n", U * [[-1], [1], [1]]).direction - aggregate("fedavg-n", U).direction
    assert np.linalg.norm(moved) == pytest.approx(algorithm("fedavg-n").sensitivity(3))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ('name = "fedavg"', "fedavg as it is set up has no bound"),
        ('name = "median"', "median as it is set up has no bound"),
        ('name = "fedmgda+auto"', "no bound"),
        ('name = "fedmgda+"\npre = ["clip"]', "no bound"),
        ('name = "fedmgda+"\ndrop_zero = true', "no bound"),
        ('name = "fedavg-n"\nprior = "samples"', "weighs clients by their data"),
        ('name = "fedavg-n"\n[privacy]\nsecure = "sum"', "private rounds"),
    ],
)
def test_a_run_whose_noise_would_not_protect_is_refused(keys: str, words: str) -> None:
    text = f'name = "a"\ntask = "digits"\nrounds = 3\n[algorithm]\n{keys}\n'
    text += "" if "[privacy]" in keys else "[privacy]\n"
    with pytest.raises(SpecError, match=words):
        parse_run(f"{text}client_noise = 1.0\n")


def test_the_budget_allows_as_many_rounds_as_it_says() -> None:
    privacy = PrivacySpec(client_noise=5.0, client_epsilon=2.0)
    rounds = affordable(privacy, 1000)
    assert spent(privacy, rounds) <= 2.0 < spent(privacy, rounds + 1)
    assert affordable(privacy, 3) == 3
    assert affordable(PrivacySpec(client_noise=5.0), 1000) == 1000
    budget = 'name = "a"\ntask = "digits"\nrounds = 100\n[privacy]\nclient_noise = 5.0\nclient_epsilon = 2.0\n'
    assert f"is spent after {rounds} of 100 rounds" in " ".join(cautions(*parse_run(budget)))


# --- a run


def private(stage: Stage, rounds: int, epsilon: float = 0.0) -> tuple[str, list[Player], Any]:
    """A run with noise, and its clients with their first orders."""
    more = f"selection.minimum = 4\nprivacy.client_noise = 2.0\nprivacy.client_epsilon = {epsilon}\n"
    more += "algorithm.epsilon = 0.05"
    run, players = stage.begin(*NAMES, rounds=rounds, more=more)
    return run, players, [player.order() for player in players]


def recomputed(blobs: DirectoryStore, step: StepManifest, base: np.ndarray, U: np.ndarray) -> np.ndarray:
    """The model that a verifier computes from the record."""
    (noise,) = update_rows(blobs.local(step.noise)).values()
    direction = np.array(step.coefficients) @ U.astype(np.float64) + step.noise_scale * noise.read().astype(np.float64)
    model: np.ndarray = base - step.rate * direction
    return model


def test_the_step_names_its_noise_and_a_verifier_computes_the_model_from_it(stage: Stage) -> None:
    run, players, orders = private(stage, 2)
    U = np.array([vector(player.name, order) for player, order in zip(players, orders, strict=True)])
    for player, order in zip(players, orders, strict=True):
        assert work_of(order).unmeasured
        player.reply(order)
    stage.wait_round(run, 0)
    blobs, step = stage.blobs, stage.step(run)
    base, made = (model_row(blobs.local(one)).read() for one in (step.base_model, step.result_model))
    np.testing.assert_allclose(made, recomputed(blobs, step, base, U), rtol=0, atol=1e-5)
    assert step.noise_scale == pytest.approx(2.0 * 2 * (1 / 4 + 0.05), rel=1e-3)
    (noise,) = update_rows(blobs.local(step.noise)).values()
    assert 0.5 < float(noise.read().std()) < 1.6  # of 45 numbers
    assert stage.look(lambda session: is_retained(session, step.noise, 1))
    stage.play(run, *players)
    assert stage.step(run, 1).noise != step.noise


def test_a_step_is_taken_also_where_the_updates_cancel_which_would_show_something_of_them(stage: Stage) -> None:
    run, players, orders = private(stage, 1)
    update = vector("any", orders[0])
    for player, order, sign in zip(players, orders, (1, -1, 1, -1), strict=True):
        player.reply(order, update * np.float32(sign))
    stage.wait_state(run, RunState.COMPLETED)
    [made] = stage.rounds(run)
    assert (made.reason, stage.step(run).rate) == ("", 1.0)
    assert made.result_model != made.base_model


def test_what_clients_sent_is_in_no_answer(stage: Stage) -> None:
    run, players, orders = private(stage, 1)
    for player, order in zip(players, orders, strict=True):
        player.reply(order, losses={"loss": 0.625})
    stage.wait_state(run, RunState.COMPLETED)  # nobody is asked to evaluate
    assert not stage.evaluations(run)
    admin = stage._admin
    shown = admin.GetRound(messages.GetRoundRequest(run=run, round=0))
    [exported] = admin.ExportRounds(messages.ExportRoundsRequest(run=run))
    for parts in (shown.participations, exported.participations):
        assert [part.client_id for part in parts] == list(NAMES)
        for part in parts:
            hidden = (part.loss_before, part.update_norm, part.weight, part.coefficient, part.cosine)
            assert all(math.isnan(value) for value in hidden)
            assert (part.samples, dict(part.evaluation)) == (0, {})
    assert not shown.HasField("step")
    assert not [*shown.cosines, *shown.gram_clients, *exported.scores]
    assert shown.step_check.verified
    assert set(shown.summary.metrics) == {"step/rate", "epsilon/clients", "bytes/up", "bytes/down", "bytes/refused"}
    for listed in admin.ListReplies(messages.ListRepliesRequest(run=run)):
        for one in listed.replies:
            assert (one.HasField("envelope"), one.payload, one.envelopes[0].verified) == (False, "", True)
    item = admin.GetRun(messages.GetRunRequest(run=run)).run
    expected = gaussian_epsilon(2.0, 1, 1e-5)
    assert item.client_privacy.epsilon == shown.summary.metrics["epsilon/clients"] == pytest.approx(expected)
    console = tables.console()
    with console.capture() as capture:
        console.print(round_tables.round_(shown))
        console.print(tables.run(item))
    html = str(page(ShownRun.read(admin, run)))
    assert f"of members: epsilon = {expected:.4g}, without a budget" in capture.get()
    assert f"of members: epsilon = {expected:.4g}" in html
    assert "0.625" not in capture.get() + html


def test_the_run_stops_before_the_round_that_would_overspend(stage: Stage) -> None:
    budget = (gaussian_epsilon(2.0, 2, 1e-5) + gaussian_epsilon(2.0, 3, 1e-5)) / 2
    run, players, orders = private(stage, 5, budget)
    reply(dict(zip(players, orders, strict=True)))
    stage.wait_round(run, 0)
    answer(*players)
    ended = stage.wait_state(run, RunState.STOPPED)
    assert len(stage.rounds(run)) == 2
    assert f"2 steps have spent epsilon = {gaussian_epsilon(2.0, 2, 1e-5):.4g} of {budget:g}" in ended.reason


# --- a crash


def rounds_of(fed: Federation) -> list[tuple[Any, ...]]:
    return fed.query("SELECT noise, result_model, step FROM rounds")


@pytest.mark.full
def test_after_a_crash_the_same_noise_is_used_and_nothing_was_given_with_it_before(tmp_path: Path) -> None:
    with federation(tmp_path) as fed:
        fed.serve(crash="model-written")
        members = [fed.enroll(name) for name in NAMES[:2]]
        text = 'task = "toy"\nrounds = 1\nselection.minimum = 2\nprivacy.client_noise = 1.0\n'
        (tmp_path / "model").write_bytes(MODEL)
        streams = [member.attend(toy=10) for member in members]
        fed.submit("a", text, "--model", str(tmp_path / "model"))
        for seed, (member, stream) in enumerate(zip(members, streams, strict=True)):
            member.answer(stream.assignment(), seed)
        fed.serving.wait_killed()
        [(noise, result, _)] = rounds_of(fed)
        assert noise
        assert result is None
        fed.serve()
        streams = [member.attend(toy=10) for member in members]
        [(again, result, signed)] = wait_for(lambda: [row for row in rounds_of(fed) if row[1]], "the step")
        step = StepManifest.FromString(SignedEnvelope.FromString(signed).manifest)
        assert step.noise == noise == again
        blobs = DirectoryStore(fed.home / "blobs")
        base, made = (model_row(blobs.local(one)).read() for one in (step.base_model, result))
        payloads = fed.query("SELECT payload FROM replies ORDER BY client_id")
        U = np.array([read_vector(blobs.local(payload))[1] for (payload,) in payloads])
        np.testing.assert_allclose(made, recomputed(blobs, step, base, U), rtol=0, atol=1e-5)
        for stream in streams:
            stream.close()


# --- simulation


@pytest.mark.full
def test_a_simulation_with_noise_measures_and_cannot_be_repeated() -> None:
    text = 'name = "a"\ntask = "digits"\nrounds = 2\n[algorithm]\nname = "fedavg-n"\n[simulation]\nclients = 2\n'
    text += "[evaluate]\nevery = 0\n[privacy]\nclient_noise = 0.3\n"
    one, other = (simulate(text, threads=1, progress=lambda _: None) for _ in range(2))
    assert not np.allclose(one.model, other.model, atol=1e-2)
    assert "accuracy/mean" in one.round_records[-1]
    told = [record["epsilon/clients"] for record in one.round_records]
    assert told == pytest.approx([gaussian_epsilon(0.3, steps, 1e-5) for steps in (1, 2)])
    assert one.reply_records[0]["weight"] == 0.5
