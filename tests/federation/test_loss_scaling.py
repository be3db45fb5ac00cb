"""An attacker that trains on a multiple of its loss, and clients that take part in every round."""

from datetime import UTC, datetime

import numpy as np
import pytest

from coordinator.rounds import selection
from federation.attacks import AttackError, parse_attack
from federation.spec.client_sections import SelectionSpec
from federation.spec.objective_names import joint_target
from federation.spec.train_section import LocalSgd
from federation.tasks import DataSource, initial_model, task
from federation.training.torch_trainer import TorchTrainer
from federation.v1.common_pb2 import AssignmentManifest
from federation.work.base import Result
from fedpareto.experiments.loading import load
from fedpareto.face.simulated import simulate
from fedpareto.simulation import SimulationError
from fedpareto.simulation.history import History
from tests.fedpareto.experiments import scene as experiment_cases
from tests.fedpareto.experiments.scene import simulated
from tests.trained import train
from worker.work.attacker import Attacker

SPEC = """
name = "scaled"
task = "{task}"
rounds = {rounds}
seed = 3

[algorithm]
{algorithm}

[train]
batch_size = {batch_size}
learning_rate = 0.05

[evaluate]
every = 0

[selection]
{selection}

[simulation]
clients = 6
attackers = 1
attack = "{attack}"
"""
ATTACKER = "client-005"
one_thread = experiment_cases.one_thread  # a fixture


def run(attack: str, backend: str = "stacked", **changes: object) -> History:
    values = {"task": "digits", "rounds": 2, "algorithm": 'name = "fedavg"', "batch_size": 0, "selection": ""}
    return simulate(SPEC.format(**(values | changes), attack=attack), backend=backend)


def norms(history: History) -> list[float]:
    return [record["norm"] for record in history.reply_records if record["client"] == ATTACKER]


def test_the_loss_is_scaled_in_training_in_gradients_and_in_the_report() -> None:
    attack, row = parse_attack("loss-scaling:factor=4"), np.arange(3, dtype=np.float32)
    assert attack.on_targets({"loss": {"left": 0.5, "right": 1.0}}) == {"loss": {"left": 2.0, "right": 4.0}}
    assert attack.on_losses({"left": 0.5}) == {"left": 2.0}
    np.testing.assert_array_equal(attack.on_update(row, peers=row[None], m=1, seed=0), row)
    np.testing.assert_array_equal(attack.on_gradient(row, peers=row[None], m=1, seed=0), 4 * row)
    assert str(parse_attack("loss-scaling")) == "loss-scaling"
    with pytest.raises(AttackError, match=r"factor must lie in \[1e-9, inf\)"):
        parse_attack("loss-scaling:factor=-1")
    honest = parse_attack("sign-flip")
    assert honest.on_targets(joint_target(("loss",))) == joint_target(("loss",))
    np.testing.assert_array_equal(honest.on_gradient(row, peers=row[None], m=1, seed=0), -row)


def test_training_on_c_times_the_loss_is_training_at_c_times_the_rate() -> None:
    digits = task("digits")
    trainer, (_, base) = TorchTrainer(digits, digits.load(DataSource()), "cpu", 1), initial_model(digits, 1)

    def update(rate: float, factor: float, **work: float) -> np.ndarray:
        targets = parse_attack(f"loss-scaling:factor={factor}").on_targets(joint_target(trainer.objectives))
        settings = LocalSgd(steps=5, batch_size=20, learning_rate=rate, **work)  # type: ignore[arg-type]
        return train(trainer, base, settings, seed=1, round=0, client_id="a", targets=targets).rows["loss"]

    np.testing.assert_allclose(update(0.1, 4), update(0.4, 1), atol=1e-6)
    assert np.linalg.norm(update(0.1, 4) - 4 * update(0.1, 1)) > 0.05 * np.linalg.norm(update(0.1, 4))
    decayed = update(0.1, 4, weight_decay=1.0)  # which is not scaled
    assert np.linalg.norm(decayed - update(0.4, 1, weight_decay=1.0)) > 0.05 * np.linalg.norm(decayed)


@pytest.mark.full
def test_the_two_scaling_attacks_are_the_same_in_one_step_and_not_in_several() -> None:
    one, other = run("scale=8"), run("loss-scaling:factor=8")
    np.testing.assert_allclose(other.model, one.model, atol=1e-5)
    assert [record["loss"] for record in other.reply_records if record["client"] == ATTACKER] == pytest.approx(
        [record["loss"] for record in one.reply_records if record["client"] == ATTACKER], rel=1e-4
    )
    assert norms(other)[0] == pytest.approx(8 * norms(run("scale=1"))[0], rel=1e-4)
    one, other = run("scale=8", batch_size=10), run("loss-scaling:factor=8", batch_size=10)
    assert norms(other)[0] != pytest.approx(norms(one)[0], rel=0.01)


@pytest.mark.parametrize("name", [pytest.param("digits", marks=pytest.mark.full), "two-digits"])
def test_stacked_clients_scale_their_losses_as_single_ones_do(name: str) -> None:
    one, stacked = (run("loss-scaling:factor=3", backend, task=name, batch_size=40) for backend in ("loop", "stacked"))
    assert norms(stacked) == pytest.approx(norms(one), rel=1e-3)
    np.testing.assert_allclose(stacked.model, one.model, atol=1e-5)


@pytest.mark.full
def test_a_scaled_loss_scales_the_gradients_that_weights_of_objectives_are_made_of() -> None:
    algorithm = 'name = "fedcmoo"\nsketch = "exact"\nbound = "none"'

    def weight(attack: str) -> float:
        history = run(attack, task="two-digits", algorithm=algorithm, rounds=1, batch_size=20)
        return float(history.round_records[0]["weight/left"])

    assert weight("loss-scaling:factor=1000") == pytest.approx(weight("scale=1000"), rel=1e-6)
    assert weight("loss-scaling:factor=1000") != pytest.approx(weight("scale=1"), rel=1e-6)


def test_a_worker_scales_gradients_and_leaves_updates_to_its_training() -> None:
    attacker = Attacker(parse_attack("loss-scaling:factor=4"), "a")
    honest = Result({"loss": np.ones(3, dtype=np.float32)}, {"loss": 2.0}, {}, 1, 0.0)
    asked = AssignmentManifest()
    sent = {}
    for work in ("train", "jacobian", "residual"):
        asked.kind = work
        result = attacker.distort(asked, honest, now=datetime.now(UTC), pause=lambda seconds: None)
        sent[work] = float(result.rows["loss"][0])
        assert result.losses == {"loss": 8.0}
    assert sent == {"train": 1.0, "jacobian": 4.0, "residual": 4.0}


@pytest.mark.full
def test_fedmgda_plus_makes_the_same_bytes_whatever_power_of_two_an_update_is_scaled_by() -> None:
    algorithm = 'name = "fedmgda+"\nepsilon = 1.0'
    honest, scaled = (run(attack, algorithm=algorithm, rounds=5) for attack in ("scale=1", "scale=8"))
    assert scaled.model.tobytes() == honest.model.tobytes()


# Clients that take part in every round


def test_named_clients_are_asked_in_every_round_and_the_others_by_lot() -> None:
    pool = {f"client-{number}": 10 for number in range(10)}
    spec = SelectionSpec(method="count", count=3, always=("client-7", "absent"))
    drawn = [selection.select(spec, pool, seed=1, round_number=number) for number in range(200)]
    assert all("client-7" in chosen and len(set(chosen)) == 3 for chosen in drawn)
    assert {name for chosen in drawn for name in chosen} == set(pool)
    by_samples = spec.model_copy(update={"by": "samples"})
    sizes = pool | {"client-0": 10_000}
    often = [selection.select(by_samples, sizes, seed=1, round_number=number) for number in range(50)]
    assert all("client-7" in chosen and len(chosen) == 3 for chosen in often)
    assert sum("client-0" in chosen for chosen in often) > 45
    assert "client-7" not in selection.select(spec, pool | {"client-7": 0}, seed=1, round_number=0)


def test_more_named_clients_than_a_round_asks_are_all_asked() -> None:
    pool = {f"client-{number}": 10 for number in range(5)}
    spec = SelectionSpec(method="count", count=1, always=("client-1", "client-3"))
    assert selection.select(spec, pool, seed=1, round_number=0) == ["client-1", "client-3"]


def test_naming_nobody_changes_no_choice() -> None:
    pool = {f"client-{number}": 10 for number in range(20)}
    found = selection.select(SelectionSpec(method="count", count=3), pool, seed=1, round_number=0)
    generator = selection.generator(1, 0, "select")
    names = sorted(pool)
    assert found == sorted(names[place] for place in generator.choice(20, size=3, replace=False))


def test_an_attacker_that_is_named_attacks_in_every_round_of_a_simulation() -> None:
    history = run("scale=2", rounds=6, selection=f'method = "count"\ncount = 2\nalways = ["{ATTACKER}"]')
    asked = [{record["client"] for record in history.reply_records if record["round"] == t} for t in range(6)]
    assert all(ATTACKER in clients and len(clients) == 2 for clients in asked)
    with pytest.raises(
        SimulationError, match=r"always: no client 'nobody'; the 6 clients are client-000 to client-005"
    ):
        run("scale=2", selection='always = ["nobody"]')


@pytest.mark.parametrize("name", ["fedmgda-scaling", "fashion-mnist-scaling"])
def test_the_scaling_experiments_scale_losses_too_and_their_attacker_is_in_every_round(name: str) -> None:
    experiment = load(name)
    attacks = {cell.condition.name: simulated(cell).simulation.attack for cell in experiment.cells()}
    assert attacks["loss x 10"] == "loss-scaling:factor=10"
    assert attacks["update x 10"] == "scale=10"
    for cell in experiment.cells():
        spec = simulated(cell)
        attackers = [f"client-{number:03d}" for number in range(100)][100 - spec.simulation.attackers :]
        assert list(spec.selection.always) == attackers
