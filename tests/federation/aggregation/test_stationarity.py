"""How far objectives are from Pareto stationarity, on all of the clients' samples; and the analysed form of FedCMOO."""

from typing import Any

import numpy as np
import pytest
import torch

from federation.aggregation.metrics.step_metrics import of_objectives
from federation.aggregation.phase_kinds import GradientsPhase
from federation.aggregation.registry import algorithm
from federation.aggregation.rules.afl import onto_simplex
from federation.sketches.base import clip_to_psd
from federation.tasks import DataSource, Part, initial_model, task
from federation.tasks.parameters import build
from federation.tasks.partition import deal_all
from fedpareto.face.simulated import simulate
from tests.federation.aggregation.objective_clients import ALL, SOME, TWO, Clients, context
from tests.federation.aggregation.scene import last, objectives_of

RULES: dict[str, dict[str, Any]] = {"fsmgda": {}, "fedcmoo": {"sketch": "count", "budget": 0.1}, "scalarised": {}}


@pytest.mark.parametrize("name", RULES)
def test_stationarity_is_measured_on_whole_training_splits_and_all_parameters_where_that_is_asked_for(
    name: str,
) -> None:
    clients = Clients(SOME)
    rule = algorithm(name, {**RULES[name], "exact_stationarity": True})
    conversation = rule.round(context(SOME))
    phase = next(conversation)
    assert phase == GradientsPhase(sketch="exact", budget=1.0, batch_size=0)
    exact = clients.answer(phase)
    # What follows is asked as it is without the measurement.
    plain = algorithm(name, RULES[name]).round(context(SOME))
    phase = conversation.send(exact)
    assert phase == next(plain)
    other = Clients(SOME)
    other.gradients = {key: 3 * value for key, value in other.gradients.items()}  # of one minibatch
    if isinstance(phase, GradientsPhase):
        phase = conversation.send(other.answer(phase))
    step = last(conversation, other.answer(phase))
    assert step.consulted[: len(exact)] == tuple(exact)
    numbers = of_objectives(step.combination.objectives)
    weights = np.array([numbers[f"weight/{side}"] for side in TWO])
    wanted = np.linalg.norm(weights @ np.array([clients.mean(side) for side in TWO]))
    assert numbers["objective/stationarity"] == pytest.approx(wanted, rel=1e-5)


def test_stationarity_is_not_measured_where_nobody_sent_the_exact_gradients_of_an_objective() -> None:
    clients = Clients(SOME)
    conversation = algorithm("fsmgda", {"exact_stationarity": True}).round(context(SOME))
    train = conversation.send(clients.answer(next(conversation), missing=("ann", "cleo")))  # who serve the right
    numbers = of_objectives(last(conversation, clients.answer(train)).combination.objectives)
    assert "objective/conflicts" in numbers
    assert "objective/stationarity" not in numbers


def test_what_is_measured_is_the_length_of_the_gradient_that_torch_computes() -> None:
    history = simulate(
        'name = "exact"\ntask = "two-digits"\nrounds = 1\nseed = 3\n'
        '[algorithm]\nname = "fsmgda"\nexact_stationarity = true\n'
        '[train]\nsteps = 1\nbatch_size = 8\nlearning_rate = 0.1\n[simulation]\nclients = 3\npartition = "shards:2"\n'
    )
    record = history.round_records[0]
    digits = task("two-digits")
    model = build(digits)

    _, vector = initial_model(digits, 3)
    torch.nn.utils.vector_to_parameters(torch.from_numpy(vector), model.parameters())
    total = torch.zeros(len(vector))
    for own in deal_all(digits.pool(DataSource()), Part(0, 3, "shards:2", seed=0)):
        losses = digits.losses(model(own.train.x), own.train.y)
        weighted = sum(record[f"weight/{side}"] * losses[side] for side in TWO)
        gradients = torch.autograd.grad(weighted, list(model.parameters()))
        total += torch.cat([part.reshape(-1) for part in gradients]) / 3
    assert record["objective/stationarity"] == pytest.approx(float(total.norm()), rel=1e-4)


def test_the_analysed_fedcmoo_makes_one_step_with_an_estimate_that_is_not_made_positive_semi_definite() -> None:
    clients = Clients(ALL)
    drawn = {"jacobian-1": ("ann",), "jacobian-2": ("cleo",)}
    opposed = -clients.gradients["ann", "left"]
    clients.gradients["cleo", "left"] = opposed  # so that the product of the two is negative
    given = context(ALL, draw=lambda purpose: drawn[purpose], state={"weights": {"left": 0.6, "right": 0.4}})
    values = {"unbiased": True, "sketch": "exact", "weights": "pgd-raw", "steps": 1, "beta": 1e-3}
    conversation = algorithm("fedcmoo", values).round(given)
    step = clients.play(conversation)
    one, two = (np.stack([clients.gradients[client, side][:50] for side in TWO]) for client in ("ann", "cleo"))
    cross = (one @ two.T + two @ one.T) / 2
    assert np.linalg.eigvalsh(cross)[0] < -1
    found = objectives_of(step)
    before = np.array([0.6, 0.4])
    np.testing.assert_allclose(found.weights, onto_simplex(before - 1e-3 * cross @ before), rtol=1e-4)
    assert np.abs(found.weights - onto_simplex(before - 1e-3 * clip_to_psd(cross) @ before)).max() > 1e-3
    assert found.weights[0] > 0.6  # the raw estimate says that more of this objective makes the direction shorter
    assert found.mode == "pgd-raw"
