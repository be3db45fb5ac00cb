"""Rules over several objectives: FSMGDA, FedCMOO, scalarised."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from federation.aggregation.interface import HyperparameterError, TooFewUpdatesError
from federation.aggregation.phase_kinds import GradientsPhase, ResidualsPhase, TrainingPhase
from federation.aggregation.phases import Replies, RoundContext, Step
from federation.aggregation.registry import algorithm
from federation.aggregation.rules.objectives import reweighted
from federation.sketches.base import clip_to_psd
from federation.spec.objective_names import encoder_columns, joint_target, separate_targets
from federation.vectors import Layout, Tensor
from tests.federation.aggregation.objective_clients import ALL, LAYOUT, SOME, TWO, Clients, context, recorded, reply
from tests.federation.aggregation.scene import direction, gram_of, last, objectives_of, reference

# --- FSMGDA


def test_fsmgda_is_the_papers_server_step() -> None:
    for case in reference("fmol_server"):
        names = tuple(f"objective-{k}" for k in range(case["num_objectives"]))
        # A worker tells one number of samples: who holds other numbers for other objectives stands for several here.
        weighted = case["sizes"] is not None
        rows: dict[str, dict[str, NDArray[np.float64]]] = {}
        samples: dict[str, int] = {}
        for update in case["updates"]:
            if update["client"] in case["participants"]:
                k, i = update["objective"], update["client"]
                client = f"client-{i:02d}" + (f"-{k}" if weighted else "")
                rows.setdefault(client, {})[names[k]] = np.array(update["delta"])
                samples[client] = case["sizes"][k][i] if weighted else 1
        d = len(case["x"])
        prior: Literal["samples", "uniform"] = "samples" if weighted else "uniform"
        sizes: dict[str, Any] = {"parameters": d, "encoder": (slice(0, d),), "local_rate": 1.0}
        given = RoundContext(number=0, total=1, prior=prior, objectives=names, **sizes)
        conversation = algorithm("fsmgda", {"sums": True, "bound": "none"}).round(given)
        assert next(conversation) == TrainingPhase(separate=True)
        replies = [reply(client, own, tuple(own), samples=samples[client]) for client, own in rows.items()]
        step = last(conversation, Replies(replies))
        expected = case["expected"]
        np.testing.assert_allclose(direction(step), expected["d"], atol=1e-8, err_msg=case["id"])
        found = objectives_of(step)
        assert found.names == tuple(names[k] for k in expected["active_objectives"])
        assert set(found.left_out) == set(names) - set(found.names)


def test_fsmgda_sums_divide_by_the_local_rate() -> None:
    clients = Clients(ALL)
    given = context(ALL, local_rate=0.1)
    steps = [clients.play(algorithm("fsmgda", {"sums": sums}).round(given)) for sums in (False, True)]
    np.testing.assert_allclose(direction(steps[1]), direction(steps[0]) / 0.1)


def test_the_scope_decides_the_weights_and_the_whole_vector_moves() -> None:
    clients = Clients(ALL)
    found = {}
    for scope in ("all", "encoder"):
        step = clients.play(algorithm("fsmgda", {"scope": scope}).round(context(ALL)))
        found[scope] = objectives_of(step).weights
        means = np.stack([clients.mean(name) for name in TWO])
        np.testing.assert_allclose(direction(step), found[scope] @ means, rtol=1e-6)
        seen = means if scope == "all" else means[:, :50]
        combined = found[scope] @ seen
        assert (seen @ combined >= combined @ combined - 1e-9).all()  # the min-norm point of what it saw
    assert abs(found["all"][0] - found["encoder"][0]) > 1e-3


# --- FedCMOO


@pytest.mark.parametrize("serves", [ALL, SOME], ids=["all", "some"])
@pytest.mark.parametrize("sketch", ["exact", "svd-two-way"])
def test_fedcmoo_steps_along_the_weighted_sum_whoever_serves_what(
    serves: dict[str, tuple[str, ...]], sketch: str
) -> None:
    clients = Clients(serves)
    conversation = algorithm("fedcmoo", {"weights": "exact", "sketch": sketch, "budget": 4.0}).round(context(serves))
    phase = next(conversation)
    assert phase == GradientsPhase(sketch=sketch, budget=4.0, encoder_only=True)
    first = clients.answer(phase)
    told = list(first)
    phase = conversation.send(first)
    if sketch == "svd-two-way":
        assert isinstance(phase, ResidualsPhase)
        told += (second := clients.answer(phase))
        phase = conversation.send(second)
    assert isinstance(phase, TrainingPhase)
    assert phase.from_jacobian
    step = last(conversation, clients.answer(phase))
    found = objectives_of(step)
    means = np.stack([clients.mean(name) for name in TWO])
    np.testing.assert_allclose(gram_of(found), means[:, :50] @ means[:, :50].T, rtol=1e-4)
    np.testing.assert_allclose(direction(step), found.weights @ means, rtol=1e-4, atol=1e-6)
    assert [one.client_id for one in step.consulted] == [one.client_id for one in told]
    assert step.combination.state == {"weights": dict(zip(TWO, found.weights.tolist(), strict=True))}


def test_the_average_of_the_updates_goes_through_the_stages() -> None:
    clients = Clients(ALL)
    clients.gradients["cleo", "left"] *= 1e3
    keys = ({"sketch": "exact", "pre": pre, "bound": "none"} for pre in ([], ["normalize"]))
    steps = [clients.play(algorithm("fedcmoo", own).round(context(ALL))) for own in keys]
    plain, normalized = (np.linalg.norm(direction(step)) for step in steps)
    assert plain > 100
    assert normalized <= 1 + 1e-6


# --- bounds

CROWD = {f"client-{i}": TWO for i in range(7)}
BOUNDED = [
    ("fsmgda", {}),
    ("fedcmoo", {"sketch": "exact"}),
    ("fedcmoo", {"sketch": "count", "budget": 1.0}),
    ("fedcmoo", {"sketch": "svd", "budget": 1.0}),
    ("fedcmoo", {"sketch": "svd-two-way", "budget": 1.0}),
]


def stepped(name: str, keys: Mapping[str, Any], clients: Clients) -> Step:
    keys = {**keys, **({} if name == "fsmgda" else {"weights": "exact"})}
    return clients.play(algorithm(name, keys).round(context(CROWD)))


@pytest.mark.parametrize("bound", ["clip", "normalize"])
@pytest.mark.parametrize(("name", "keys"), BOUNDED)
def test_a_client_that_scales_its_gradients_moves_the_step_by_no_more_than_its_bounded_part(
    name: str, keys: Mapping[str, Any], bound: str
) -> None:
    honest = direction(stepped(name, {**keys, "bound": bound}, Clients(CROWD)))
    moved = {}
    for size in (1e3, 1e9):
        clients = Clients(CROWD)
        for objective in TWO:
            clients.gradients["client-3", objective] *= size
        moved[size] = direction(stepped(name, {**keys, "bound": bound}, clients))
        assert np.linalg.norm(moved[size] - honest) <= 1.0 * np.linalg.norm(honest)
    np.testing.assert_allclose(moved[1e9], moved[1e3], rtol=1e-3, atol=1e-3 * float(np.linalg.norm(honest)))


@pytest.mark.parametrize(("name", "keys"), BOUNDED)
def test_without_a_bound_a_client_that_scales_its_gradients_decides_alone(name: str, keys: Mapping[str, Any]) -> None:
    clients = Clients(CROWD)
    for objective in TWO:
        clients.gradients["client-3", objective] *= 1e3
    own = clients.gradients["client-3", "left"] + clients.gradients["client-3", "right"]
    step = direction(stepped(name, {**keys, "bound": "none"}, clients))
    assert step @ own / np.linalg.norm(step) / np.linalg.norm(own) > 0.7


def test_a_second_leg_that_no_sketch_could_have_is_cut_to_what_one_could() -> None:
    def lying(scale: float) -> NDArray[np.float64]:
        clients = Clients(CROWD)
        keys = {"sketch": "svd-two-way", "budget": 0.5, "weights": "exact"}
        conversation = algorithm("fedcmoo", keys).round(context(CROWD))
        phase = conversation.send(clients.answer(next(conversation)))
        assert isinstance(phase, ResidualsPhase)
        answers = [
            replace(one, rows=tuple(np.float32(scale) * np.asarray(row) for row in one.rows))
            if one.client_id == "client-3"
            else one
            for one in clients.answer(phase)
        ]
        train = conversation.send(Replies(answers))
        assert isinstance(train, TrainingPhase)
        assert train.weights is not None
        return np.array([train.weights[name] for name in TWO])

    np.testing.assert_allclose(lying(1e12), lying(1e6), atol=1e-6)


def test_submitting_without_a_bound_is_warned_of() -> None:
    assert algorithm("fedcmoo", {}).cautions() == ()
    (caution, *_) = algorithm("fedcmoo", {"bound": "none"}).cautions()
    assert 'bound = "none" takes gradients as clients send them' in caution


def test_the_updates_that_are_left_after_a_dropout_make_up_for_it_where_they_can() -> None:
    serves = [("left",), ("left",), ("right",)]
    prior = np.full(3, 1 / 3)
    factors = {"left": 0.6 / 0.5, "right": 0.4 / 0.5}  # four were asked, two for each objective
    wanted = {"left": 0.6, "right": 0.4}
    np.testing.assert_allclose(reweighted(prior, serves, factors, wanted), [0.25, 0.25, 0.5], atol=1e-12)
    lost = reweighted(prior[:2] * 1.5, serves[:2], factors, wanted)
    np.testing.assert_allclose(lost, [0.25, 0.25], atol=1e-12)


def test_after_a_dropout_no_update_gets_a_negative_weight() -> None:
    # Asked were ann for both, ben for left, cleo and dan for right; the last two drop out. Exact weights would be 0.75
    # and -0.25. Ann alone: (w - 0.5)^2 + (2/3 w - 0.5)^2 is least at w = 15/26.
    factors, wanted = {"left": 0.5 / 0.5, "right": 0.5 / 0.75}, {"left": 0.5, "right": 0.5}
    weights = reweighted(np.array([0.5, 0.5]), [TWO, ("left",)], factors, wanted)
    np.testing.assert_allclose(weights, [15 / 26, 0.0], atol=1e-12)
    # Eve, who serves the right digit as well, stands beside ann: of equally good weights, the nearest to the prior.
    shared = reweighted(np.array([0.25, 0.5, 0.25]), [TWO, ("left",), TWO], factors, wanted)
    np.testing.assert_allclose(shared, [15 / 52, 0.0, 15 / 52], atol=1e-12)


# --- records


def test_an_objective_that_nobody_serves_keeps_its_share_and_the_record_says_so() -> None:
    serves = {"ann": ("left",), "ben": ("left",)}
    clients = Clients(serves)
    given = context(serves, state={"weights": {"left": 0.3, "right": 0.7}})
    conversation = algorithm("fedcmoo", {"sketch": "exact"}).round(given)
    phase = clients.begin(conversation)
    assert phase.weights == {"left": 1.0}
    step = last(conversation, clients.answer(phase))
    assert step.combination.state == {"weights": {"left": pytest.approx(0.3), "right": pytest.approx(0.7)}}
    known, numbers = recorded(step, TWO)
    assert known.left_out == {"right": "no client that takes part in this round serves it"}
    assert known.weights == {"left": 1.0}
    assert numbers["weight/left"] == 1.0


def test_who_missed_the_gradients_trains_only_where_latecomers_may() -> None:
    clients = Clients(ALL)
    for latecomers in (False, True):
        conversation = algorithm("fedcmoo", {"latecomers": latecomers}).round(context(ALL))
        phase = conversation.send(clients.answer(next(conversation), missing=("ben",)))
        assert set(phase.clients or ()) == ({"ann", "ben", "cleo"} if latecomers else {"ann", "cleo"})


def test_a_client_whose_objectives_weigh_nothing_is_not_asked_to_train() -> None:
    serves = {"ann": ("left",), "ben": ("right",)}
    clients = Clients(serves)
    clients.gradients["ann", "left"] = clients.gradients["ben", "right"] * 0.1  # the shortest point of the hull
    conversation = algorithm("fedcmoo", {"weights": "exact", "sketch": "exact"}).round(context(serves))
    phase = clients.begin(conversation)
    assert (phase.weights, phase.clients) == ({"left": 1.0}, ("ann",))


def test_the_unbiased_form_asks_two_further_choices() -> None:
    clients = Clients(ALL)
    drawn = {"jacobian-1": ("ann", "ben"), "jacobian-2": ("cleo",)}
    given = context(ALL, draw=lambda purpose: drawn[purpose])
    conversation = algorithm("fedcmoo", {"unbiased": True, "sketch": "exact", "steps": 1}).round(given)
    phase = conversation.send(clients.answer(next(conversation)))
    asked = []
    while isinstance(phase, GradientsPhase):
        asked.append(phase.clients)
        phase = conversation.send(clients.answer(phase))
    assert asked == list(drawn.values())
    step = last(conversation, clients.answer(phase))
    means = [
        np.stack([np.mean([clients.gradients[c, name][:50] for c in some], axis=0) for name in TWO])
        for some in drawn.values()
    ]
    cross = means[0] @ means[1].T
    np.testing.assert_allclose(gram_of(objectives_of(step)), clip_to_psd((cross + cross.T) / 2), rtol=1e-4)
    assert len(step.consulted) == 3 + 2 + 1


def test_a_preference_is_followed_and_reported() -> None:
    clients = Clients(ALL, losses={"left": 2.0, "right": 1.0})
    conversation = algorithm("fedcmoo-pref", {"sketch": "exact", "minimum": 0.0}).round(context(ALL))
    phase = next(conversation)
    assert isinstance(phase, GradientsPhase)
    assert phase.measure
    phase = conversation.send(clients.answer(phase))
    assert isinstance(phase, TrainingPhase)
    assert not phase.measure
    step = last(conversation, clients.answer(phase))
    found = objectives_of(step)
    assert found.mode == "balance"
    assert found.weights[0] > found.weights[1]  # the larger loss comes first
    known, numbers = recorded(step, TWO)
    assert known.losses == {"left": 2.0, "right": 1.0}
    assert numbers["preference/divergence"] == pytest.approx(np.log(2) - np.log(3) + 2 / 3 * np.log(2), abs=1e-9)


def test_without_losses_a_preference_cannot_be_followed() -> None:
    clients = Clients(ALL)
    conversation = algorithm("fedcmoo-pref", {"sketch": "exact"}).round(context(ALL))
    with pytest.raises(TooFewUpdatesError, match="reported a loss of left, right"):
        conversation.send(clients.answer(next(conversation)))


@pytest.mark.parametrize("weights", ["exact", "pgd", "torchjd:upgrad"])
@pytest.mark.parametrize("normalize", [False, True])
def test_weights_are_a_distribution_whatever_the_scale_of_the_losses(weights: str, normalize: bool) -> None:
    if weights.startswith("torchjd"):
        pytest.importorskip("torchjd", reason="TorchJD is not installed")
    found = []
    for scale in (1.0, 1e4):
        clients = Clients(ALL)
        for client in ALL:
            clients.gradients[client, "right"] *= scale
        rule = algorithm("fsmgda", {"weights": weights, "normalize": normalize})
        step = clients.play(rule.round(context(ALL)))
        lam = objectives_of(step).weights
        assert (lam >= 0).all()
        assert lam.sum() == pytest.approx(1.0)
        found.append(direction(step) / np.linalg.norm(direction(step)))
    if normalize:  # where the model moves is the same
        np.testing.assert_allclose(found[0], found[1], atol=1e-4)
    else:
        assert np.linalg.norm(found[0] - found[1]) > 0.1


def test_normalised_objectives_are_trained_for_equally_whatever_their_scale() -> None:
    clients = Clients(ALL)
    for client in ALL:
        clients.gradients[client, "right"] *= 1e-3
    conversation = algorithm("fedcmoo", {"sketch": "exact", "normalize": True}).round(context(ALL))
    phase = clients.begin(conversation)
    assert phase.weights is not None
    assert 300 < phase.weights["right"] / phase.weights["left"] < 3000
    assert objectives_of(last(conversation, clients.answer(phase))).weights.sum() == pytest.approx(1.0)
    terms = [np.linalg.norm(phase.weights[name] * clients.mean(name)) for name in TWO]
    assert terms[0] == pytest.approx(terms[1], rel=0.5)


# --- scalarised


def test_scalarised_weighs_each_objective_by_who_serves_it() -> None:
    clients = Clients(SOME)
    step = clients.play(algorithm("scalarised", {"weights": [3.0, 1.0]}).round(context(SOME)))
    means = np.stack([clients.mean(name) for name in TWO])
    np.testing.assert_allclose(direction(step), np.array([0.75, 0.25]) @ means, rtol=1e-5)


def test_an_objective_without_weight_is_not_trained_for() -> None:
    phase = Clients(SOME).begin(algorithm("scalarised", {"weights": [1, 0]}).round(context(SOME)))
    assert phase.clients == ("ann", "ben", "dan")
    assert phase.targets(TWO) == {"loss": {"left": pytest.approx(1.0)}}


# --- what cannot be


@pytest.mark.parametrize(("name", "key"), [("scalarised", "weights"), ("fedcmoo-pref", "preference")])
def test_numbers_for_other_objectives_are_refused(name: str, key: str) -> None:
    rule = algorithm(name, {key: [1.0, 2.0]})
    rule.fit(TWO)
    with pytest.raises(HyperparameterError, match=f"{key}: 2 .* for 3 objectives: a, b, c"):
        rule.fit(("a", "b", "c"))


# --- names and columns


def test_the_encoder_is_what_no_head_owns() -> None:
    assert encoder_columns(LAYOUT) == (slice(0, 50),)
    mixed = Layout(
        (Tensor("heads.a.w", (2,)), Tensor("x", (3,)), Tensor("y", (4,)), Tensor("heads.b.w", (5,)), Tensor("z", ()))
    )
    assert encoder_columns(mixed) == (slice(2, 9), slice(14, 15))
    assert encoder_columns(Layout((Tensor("heads.a.w", (2,)),))) == (slice(0, 2),)


def test_targets_of_clients_that_serve_some() -> None:
    assert joint_target(TWO) == {"loss": {"left": 0.5, "right": 0.5}}
    assert joint_target(("right",), {"left": 0.2, "right": 0.8}) == {"loss": {"right": 0.8}}
    assert separate_targets(TWO) == {"left": {"left": 1.0}, "right": {"right": 1.0}}
