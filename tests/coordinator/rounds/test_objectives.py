"""Rounds over several objectives: who serves what, phases that clients miss, and restarts between phases.

A real coordinator on each database; the clients are played by hand, and what they send is of nothing but their names.
"""

import numpy as np
import pytest

from storage.states import RoundState, RunState
from tests.coordinator.rounds import scene
from tests.coordinator.rounds.scene import EXACT, NAMES, SERVES, answer, begin, kinds, moved, sent, weights_of
from tests.few import few_of
from tests.running import refused, wait_for
from tests.stage import Stage
from tests.works import work_of

# --- who serves what


@pytest.mark.parametrize("prior", few_of(["uniform", "samples"], "samples"))
def test_fsmgda_averages_each_objective_over_those_that_serve_it(stage: Stage, prior: str) -> None:
    run, players = begin(stage, "fsmgda", f'algorithm.prior = "{prior}"')
    stage.play(run, *players.values())
    rows = sent(stage, run, 0)
    assert {name: tuple(own) for name, own in rows.items()} == SERVES
    p = scene.shares(prior)
    means = np.array([sum(p[key][name] * rows[name][key] for name in p[key]) for key in NAMES])
    weights = np.array([weights_of(stage, run)[key] for key in NAMES])
    assert scene.is_min_norm(means @ means.T, weights)
    np.testing.assert_allclose(moved(stage, run), weights @ means, rtol=1e-5, atol=1e-6)
    coefficients = [weights[NAMES.index(key)] * p[key][name] for name, own in SERVES.items() for key in own]
    assert list(stage.step(run).coefficients) == pytest.approx(coefficients)
    record = stage.rounds(run)[0].objectives
    assert (record["clients"], record["left_out"]) == ({"left": 2, "mid": 1, "right": 2}, {})
    assert {name: tuple(a.objectives) for name, a in stage.assignments(run).items()} == SERVES


@pytest.mark.parametrize(("prior", "scope"), [("uniform", "all"), ("samples", "encoder")])
def test_fedcmoo_weighs_the_means_and_asks_each_client_for_its_part(stage: Stage, prior: str, scope: str) -> None:
    run, players = begin(stage, "fedcmoo", f'{EXACT}\nalgorithm.scope = "{scope}"\nalgorithm.prior = "{prior}"')
    stage.play(run, *players.values())
    assert kinds(stage, run) == ["jacobian", "train", "evaluate"]
    columns = 40 if scope == "encoder" else scene.LAYOUT.size
    gradients = {
        name: dict(zip(SERVES[name], own["jacobian"].reshape(-1, columns), strict=True))
        for name, own in sent(stage, run, 0).items()
    }
    p = scene.shares(prior)
    means = np.array([sum(p[key][name] * gradients[name][key] for name in p[key]) for key in NAMES])
    G = means @ means.T
    told = weights_of(stage, run)
    weights = np.array([told[key] for key in NAMES])
    assert scene.is_min_norm(G, weights)
    lengths = np.sqrt(np.diag(G))
    np.testing.assert_allclose(stage.rounds(run)[0].objectives["cosines"], G / np.outer(lengths, lengths), atol=1e-9)
    metrics = stage.rounds(run)[0].metrics
    assert metrics["objective/stationarity"] == pytest.approx(np.sqrt(weights @ G @ weights))
    assert {key: metrics[f"weight/{key}"] for key in NAMES} == told
    # What a client descends is lambda_k / P_k, so that the mean of the updates descends sum_k lambda_k F_k.
    size = {name: 1.0 if prior == "uniform" else float(count) for name, count in scene.SAMPLES.items()}
    average = {name: value / sum(size.values()) for name, value in size.items()}
    for name, own in SERVES.items():
        (target,) = work_of(stage.orders(run, 0, 1)[name]).targets
        factors = {item.objective: item.weight for item in target.weights}
        wanted = {key: told[key] * p[key][name] / average[name] for key in own if told[key] > 0}
        assert target.row == "loss"
        assert factors == pytest.approx(wanted)
    updates = sent(stage, run, 1)
    mean = sum(average[name] * updates[name]["loss"] for name in SERVES)
    np.testing.assert_allclose(moved(stage, run), mean, rtol=1e-5, atol=1e-6)


def test_the_step_names_the_replies_that_its_weights_were_found_from(stage: Stage) -> None:
    run, players = begin(stage, "fedcmoo", 'algorithm.sketch = "svd-two-way"\nalgorithm.budget = 0.9')
    stage.play(run, *players.values())
    assert kinds(stage, run)[:3] == ["jacobian", "residual", "train"]
    step = stage.step(run)
    replies = [stage.replies(run, 0, phase) for phase in range(3)]
    assert list(step.consulted) == [replies[phase][name].envelope_digest for phase in (0, 1) for name in SERVES]
    assert list(step.replies) == [replies[2][name].envelope_digest for name in SERVES]
    assert [item.objective for item in step.weights] == list(NAMES)
    assert sum(item.weight for item in step.weights) == pytest.approx(1.0)
    # What clients send of gradients has no part in the combination, and no share on record.
    assert all(replies[phase][name].weight is None for phase in (0, 1) for name in SERVES)
    assert all(replies[2][name].weight == pytest.approx(1 / 3) for name in SERVES)


@pytest.mark.parametrize("algorithm", few_of(["fedcmoo", "fsmgda", "scalarised"], "fedcmoo"))
def test_an_objective_that_nobody_serves_is_left_out_until_somebody_does(stage: Stage, algorithm: str) -> None:
    more = {"fedcmoo": EXACT, "fsmgda": "", "scalarised": "algorithm.weights = [1, 2, 1]"}[algorithm]
    run, players = begin(stage, algorithm, f"{more}\nselection.minimum = 2", rounds=3)
    train = 1 if algorithm == "fedcmoo" else 0

    def asked(number: int) -> bool:
        return len(stage.rounds(run)) > number and train < len(stage.phases(run, number))

    stage.play(run, *players.values(), until=lambda: asked(0), phases=train)
    answer(players, "cleo")
    stage.hang_up(players["cleo"])
    answer(players, "ann", "ben")
    stage.play(run, players["ann"], players["ben"], until=lambda: asked(1), phases=train)
    players["cleo"].attend(**players["cleo"].tasks)
    stage.play(run, *players.values())

    records = [round_.objectives for round_ in stage.rounds(run)]
    why = {"mid": "no client that takes part in this round serves it"}
    assert [record["left_out"] for record in records] == [{}, why, {}]
    assert [record["clients"]["mid"] for record in records] == [1, 0, 1]
    weights = [weights_of(stage, run, number) for number in range(3)]
    assert [tuple(one) for one in weights] == [NAMES, ("left", "right"), NAMES]
    assert "weight/mid" not in stage.rounds(run)[1].metrics
    if algorithm == "scalarised":
        assert [one["left"] for one in weights] == [0.25] * 3  # the same in every round
        (target,) = work_of(stage.orders(run, 1, 0)["ann"]).targets
        assert {item.objective: item.weight for item in target.weights} == {"left": 0.25, "right": 0.5}
    else:
        assert [sum(one.values()) for one in weights] == pytest.approx([1.0] * 3)
        assert stage.run(run).state_data["rule"]["weights"] == pytest.approx(weights[2])


def test_the_share_of_an_objective_that_is_left_out_is_kept_for_it(stage: Stage) -> None:
    more = 'algorithm.sketch = "exact"\nalgorithm.beta = 0.01\nalgorithm.steps = 3\nselection.minimum = 2'
    run, players = begin(stage, "fedcmoo", more, rounds=2)
    stage.play(run, *players.values(), until=lambda: len(stage.phases(run)) > 1, phases=1)
    answer(players, "cleo")
    stage.hang_up(players["cleo"])
    answer(players, "ann", "ben")
    stage.play(run, players["ann"], players["ben"])
    first, second = (weights_of(stage, run, number) for number in (0, 1))
    known = stage.run(run).state_data["rule"]["weights"]
    assert known["mid"] == pytest.approx(first["mid"])
    for key in ("left", "right"):
        assert known[key] == pytest.approx((1 - first["mid"]) * second[key])
    assert sum(known.values()) == pytest.approx(1.0)


def test_the_specification_bounds_what_clients_serve(stage: Stage) -> None:
    more = f'{EXACT}\nobjectives.serve.ann = ["left"]\nobjectives.serve.ben = ["left", "right"]'
    run, players = begin(stage, "fedcmoo", more, serves={"ann": NAMES, "ben": ("mid", "right")})
    stage.play(run, *players.values(), until=lambda: len(stage.phases(run)) > 2, phases=2)
    for value, player in enumerate(players.values()):  # each measures whatever it likes
        told = {f"test/{kind}/{key}": value / 4 for kind in ("loss", "accuracy") for key in (*NAMES, "nonsense")}
        player.reply(player.order(), metrics=told)
    stage.wait_round(run, 0)
    served = {name: tuple(work_of(stage.orders(run, 0, 0)[name]).objectives) for name in SERVES}
    assert served == {"ann": ("left",), "ben": ("right",), "cleo": NAMES}
    assert [list(row) for row in sent(stage, run, 0).values()] == [["jacobian"]] * 3
    assert stage.rounds(run)[0].objectives["clients"] == {"left": 2, "mid": 1, "right": 2}
    metrics = stage.rounds(run)[0].metrics
    for kind in ("loss/test", "accuracy/objective"):  # ann and cleo, cleo alone, ben and cleo
        assert [metrics[f"{kind}/{key}"] for key in NAMES] == [0.25, 0.5, 0.375]
    assert "loss/test/nonsense" not in metrics
    kept = {name: set(own.others) for (name, split), own in stage.evaluations(run).items() if split == "test"}
    assert kept == {name: {f"{kind}/{key}" for kind in ("loss", "accuracy") for key in served[name]} for name in served}


def test_a_client_that_serves_none_of_the_objectives_is_not_asked(stage: Stage) -> None:
    more = "objectives.serve.ann = []\nselection.minimum = 1"
    run, players = begin(stage, "fsmgda", more, serves={"ben": ("somewhere-else",)})
    stage.play(run, *players.values())
    assert set(stage.outcomes(run)) == set(stage.outcomes(run, 0, 1)) == {"cleo"}


def test_whoever_serves_nothing_that_weighs_something_has_nothing_to_do(stage: Stage) -> None:
    run, players = begin(stage, "scalarised", "algorithm.weights = [1, 0, 0]")
    stage.play(run, *players.values())
    assert set(stage.outcomes(run)) == {"ann", "ben"}
    assert stage.phases(run)[0].wanted == 2


def test_a_round_in_which_nobody_has_anything_to_train_is_skipped_and_the_end_of_the_run_is_on_record(
    stage: Stage,
) -> None:
    more = "algorithm.weights = [0, 1, 0]\nselection.minimum = 2\nlimits.skipped_rounds = 2"
    run, players = begin(stage, "scalarised", more, rounds=3, names=("ann", "ben"))  # nobody serves mid
    wait_for(lambda: stage.run(run).state is RunState.FAILED, "the run to fail")
    why = "aggregation: no client serves an objective that weighs anything"
    assert [(round_.state, round_.reason) for round_ in stage.rounds(run)] == [(RoundState.SKIPPED, why)] * 2
    assert not players["ann"].orders()
    _, end = stage.served.entries(subject=run)
    detail = f"2 rounds in a row were skipped; the last one: {why}"
    assert (end.actor, end.action, end.detail) == ("coordinator", "run.failed", detail)


# --- phases that clients miss


def test_each_phase_has_its_own_deadline(stage: Stage) -> None:
    run, players = begin(stage, "fedcmoo", EXACT)
    stage.play(run, *players.values())
    lengths = [(phase.deadline - phase.started).total_seconds() for phase in stage.phases(run)]
    assert lengths == [800, 900, 900]


def test_a_client_that_dies_between_the_phases_counts_in_the_weights_alone(stage: Stage) -> None:
    run, players = begin(stage, "fedcmoo", EXACT)
    answer(players, *players)
    players["ben"].order()
    stage.hang_up(players["ben"])
    answer(players, "ann", "cleo")
    stage.pass_deadline()
    stage.wait_round(run, 0, RoundState.STEPPED)
    stage.play(run, players["ann"], players["cleo"])
    assert stage.outcomes(run, 0, 1)["ben"] == ("EXPIRED", "absent")
    step, replies = stage.step(run), [stage.replies(run, 0, phase) for phase in (0, 1)]
    assert list(step.consulted) == [replies[0][name].envelope_digest for name in SERVES]
    assert list(step.replies) == [replies[1][name].envelope_digest for name in ("ann", "cleo")]
    # The others' updates count such that the objectives come nearer to the weights that were found than by their mean.
    told, coefficients = weights_of(stage, run), np.array(step.coefficients)
    share = {"left": 2 / 3, "mid": 1 / 3, "right": 2 / 3}
    wanted = np.array([told[key] for key in NAMES])
    A = np.array([[told[key] / share[key] * (key in SERVES[name]) for name in ("ann", "cleo")] for key in NAMES])
    assert np.linalg.norm(A @ coefficients - wanted) < 0.9 * np.linalg.norm(A @ [0.5, 0.5] - wanted)
    rows = sent(stage, run, 1)
    expected = coefficients @ [rows[name]["loss"] for name in ("ann", "cleo")]
    np.testing.assert_allclose(moved(stage, run), expected, rtol=1e-5)


@pytest.mark.parametrize("latecomers", [False, True])
def test_a_client_that_missed_the_gradients_trains_if_latecomers_may(stage: Stage, latecomers: bool) -> None:
    run, players = begin(stage, "fedcmoo", f"{EXACT}\nalgorithm.latecomers = {str(latecomers).lower()}")
    late = players["ben"].order()
    answer(players, "ann", "cleo")
    stage.pass_deadline()
    stage.wait_outcome(run, "ben", "EXPIRED")
    with refused("FAILED_PRECONDITION", "deadline"):
        players["ben"].submit(late)
    stage.play(run, *players.values())
    assert set(stage.outcomes(run, 0, 1)) == ({*players} if latecomers else {"ann", "cleo"})
    assert set(stage.replies(run)) == {"ann", "cleo"}
    counts = stage.rounds(run)[0].objectives["clients"]
    assert counts == {"left": 2 if latecomers else 1, "mid": 1, "right": 2}
    if latecomers:  # its part of what weighs something: the mean over those who are asked is of lambda
        (target,) = work_of(stage.orders(run, 0, 1)["ben"]).targets
        told = weights_of(stage, run)
        assert {item.objective: item.weight for item in target.weights} == pytest.approx({"left": told["left"] * 3 / 2})


def test_too_few_gradients_skip_the_round_and_nobody_trains(stage: Stage) -> None:
    run, players = begin(stage, "fedcmoo", f"{EXACT}\njacobian.quorum = 0.6\nselection.quorum = 0.1", rounds=2)
    answer(players, "ann")
    players["ben"].decline(players["ben"].order(), "busy")
    stage.wait_outcome(run, "ben", "DECLINED")
    stage.pass_deadline()
    skipped = stage.wait_round(run, 0, RoundState.SKIPPED)
    assert skipped.reason == "quorum: 1 of 3 members replied (jacobian), 2 are needed"
    ended = {"ann": ("FULFILLED", ""), "ben": ("DECLINED", "busy"), "cleo": ("EXPIRED", "deadline")}
    assert stage.outcomes(run) == ended
    assert kinds(stage, run) == ["jacobian"]
    assert skipped.metrics["bytes/up"] == stage.replies(run)["ann"].payload_bytes
    for player in players.values():
        player.orders()  # what was for the round that is over
    assert stage.run(run).model == stage.run(run).initial_model


def test_too_few_answers_to_the_second_leg_skip_the_round(stage: Stage) -> None:
    run, players = begin(stage, "fedcmoo", 'algorithm.sketch = "svd-two-way"\njacobian.quorum = 1.0')
    answer(players, *players)
    answer(players, "ann", "ben")
    stage.pass_deadline()
    assert stage.wait_round(run, 0).reason == "quorum: 2 of 3 members replied (residual), 3 are needed"


def test_a_client_without_its_second_leg_counts_without_it(stage: Stage) -> None:
    run, players = begin(stage, "fedcmoo", 'algorithm.sketch = "svd-two-way"')
    answer(players, *players)
    players["cleo"].order()
    answer(players, "ann", "ben")
    stage.pass_deadline()
    stage.play(run, *players.values())
    assert stage.outcomes(run, 0, 1)["cleo"] == ("EXPIRED", "deadline")
    assert set(stage.replies(run, 0, 2)) == set(SERVES)  # her gradients are there, and she trains
    assert len(stage.step(run).consulted) == 5


@pytest.mark.parametrize("latecomers", [False, True])
def test_with_over_selection_the_first_to_send_gradients_train(stage: Stage, latecomers: bool) -> None:
    more = 'selection.method = "count"\nselection.count = 2\nselection.over_selection = 1.5'
    run, players = begin(stage, "fedcmoo", f"{EXACT}\n{more}\nalgorithm.latecomers = {str(latecomers).lower()}")
    answer(players, "cleo", "ann")
    stage.wait_outcome(run, "ben", "CANCELLED")
    assert stage.outcomes(run)["ben"] == ("CANCELLED", "not-needed")
    wait_for(lambda: len(stage.phases(run)) > 1, "the training")
    assert [phase.wanted for phase in stage.phases(run)] == [2, 2]
    assert set(stage.outcomes(run, 0, 1)) == ({*players} if latecomers else {"ann", "cleo"})
    if latecomers:
        players["ben"].orders()
    answer(players, "ann", "cleo")
    stage.wait_round(run, 0, RoundState.STEPPED)
    if latecomers:
        assert stage.outcomes(run, 0, 1)["ben"] == ("CANCELLED", "not-needed")


def test_a_client_that_is_revoked_before_the_weights_are_found_counts_in_neither_phase(stage: Stage) -> None:
    name = f"leaver-{stage.count}"
    run, players = begin(stage, "fedcmoo", EXACT, serves={}, names=("ann", "ben", name))
    answer(players, "ann", name)
    stage.revoke(name)
    answer(players, "ben")
    stage.play(run, players["ann"], players["ben"])
    assert stage.outcomes(run)[name] == ("FULFILLED", "client-revoked")
    assert set(stage.outcomes(run, 0, 1)) == {"ann", "ben"}
    gradients, step = stage.replies(run), stage.step(run)
    assert list(step.consulted) == [gradients[one].envelope_digest for one in ("ann", "ben")]
    assert list(step.revoked) == [name]


def test_a_client_may_serve_other_objectives_from_one_phase_to_the_next(stage: Stage) -> None:
    run, players = begin(stage, "fedcmoo", EXACT)
    answer(players, "ann", "cleo")
    ben = players["ben"]
    order = ben.order()
    ben.serves = {order.task: ("right",)}
    ben.attend(**ben.tasks)
    ben.reply(order)  # of what it was asked
    wait_for(lambda: len(stage.phases(run)) > 1, "the training")
    (target,) = work_of(stage.orders(run, 0, 1)["ben"]).targets
    assert [item.objective for item in target.weights] == ["right"]
    stage.play(run, *players.values())


CONVERSATIONS = {
    "one-leg": (EXACT, 2),
    "two-legs": ('algorithm.sketch = "svd-two-way"\nalgorithm.exact_stationarity = true', 4),
    "unbiased": ("algorithm.unbiased = true\nselection.method = 'count'\nselection.count = 2", 4),
}


@pytest.mark.parametrize("conversation", few_of(CONVERSATIONS, "unbiased"))
@pytest.mark.full
def test_a_restart_between_any_two_phases_leads_to_the_same_bytes(stage: Stage, conversation: str) -> None:
    more, count = CONVERSATIONS[conversation]
    expected, players = begin(stage, "fedcmoo", more, rounds=2)
    stage.play(expected, *players.values())
    assert len(stage.phases(expected)) == count
    run, players = begin(stage, "fedcmoo", more, rounds=2)
    for phase in range(count):
        stage.play(run, *players.values(), until=lambda: len(stage.phases(run)) > phase, phases=phase)  # noqa: B023
        before = ids(stage, run)
        stage.restart()
        assert before.items() <= ids(stage, run).items()  # nobody was asked twice
    stage.play(run, *players.values())
    made = [[(one.result_model, one.objectives) for one in stage.rounds(each)] for each in (expected, run)]
    assert made[0] == made[1]
    for number, round_ in enumerate(stage.rounds(run)):
        assert round_.result_model != round_.base_model
        wanted = [[phase.wanted for phase in stage.phases(one, number)] for one in (expected, run)]
        assert wanted[0] == wanted[1]
    assert stage.run(run).state_data == stage.run(expected).state_data


def ids(stage: Stage, run: str) -> dict[tuple[int, int], set[str]]:
    """The assignments of each phase."""
    phases = [
        (round_.number, phase.number) for round_ in stage.rounds(run) for phase in stage.phases(run, round_.number)
    ]
    return {(number, phase): stage.assignment_ids(run, number, phase) for number, phase in phases}


def test_independent_choices_are_made_of_whoever_was_there_when_the_round_began(stage: Stage) -> None:
    """After a restart nobody attends for a while. The choice of the clients must not depend on who attends."""
    more = CONVERSATIONS["unbiased"][0]
    run, players = begin(stage, "fedcmoo", more)
    selected = wait_for(lambda: [*stage.outcomes(run)], "the first phase")
    orders = {name: players[name].order() for name in selected}
    players[selected[0]].reply(orders[selected[0]])
    stage.stop()
    stage.start()
    away = {player.name: player for player in players.values() if player.name != selected[1]}
    for player in away.values():
        player.leave()
    for player in stage.players.values():
        if player.name not in away:
            player.attend(**(player.tasks if player.stream is not None else {}))
    players[selected[1]].reply(orders[selected[1]])
    for player in away.values():
        player.attend(**player.tasks)
    stage.play(run, *players.values())
    assert [phase.wanted for phase in stage.phases(run)] == [2, 2, 2, 2, 3]
    assert all(len(stage.outcomes(run, 0, phase)) == 2 for phase in range(3))
