"""The server's optimisers: as published, as torch has them, streamed; and how a run names them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from coordinator.rounds.runs.specification import parse_run
from coordinator.rounds.step import server_optimizer
from federation.aggregation import server_optimizers
from federation.aggregation.gram import Average, apply_step
from federation.aggregation.interface import HyperparameterError
from federation.aggregation.server_optimizers import FedAdagrad, FedAdam, FedFaMomentum, FedYogi, Momentum, Optimizer
from federation.aggregation.streaming import Row
from federation.spec.run_spec import RunSpec, SpecError
from federation.vectors import RowFile

Vector = NDArray[np.float64]
D = 150_001  # several panels
SPEC = 'name = "a"\ntask = "digits"\nrounds = 1\nalgorithm.name = "fedavg"\n'


def directions(rounds: int = 6, d: int = 40) -> list[Vector]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(d) * rng.choice([1e-3, 1.0, 30.0], d) for _ in range(rounds)]


def steps(optimizer: Optimizer, given: list[Vector]) -> list[Vector]:
    """The step of each round, state in float64."""
    slots = {slot: np.full(len(given[0]), optimizer.initial(slot)) for slot in optimizer.slots}
    found = []
    for direction in given:
        step, slots = optimizer.apply(direction, slots)
        assert slots.keys() == set(optimizer.slots)
        found.append(step)
    return found


def transcribed(kind: str, deltas: list[Vector], beta1: float, beta2: float, tau: float) -> list[Vector]:
    """Algorithm 2 of Reddi et al. with Delta = -direction; what is added to the model at a rate of 1."""
    m, v = np.zeros_like(deltas[0]), np.full_like(deltas[0], tau**2)
    added = []
    for delta in deltas:
        m = beta1 * m + (1 - beta1) * delta
        if kind == "adagrad":
            v = v + delta**2
        elif kind == "yogi":
            v = v - (1 - beta2) * delta**2 * np.sign(v - delta**2)
        else:
            v = beta2 * v + (1 - beta2) * delta**2
        added.append(m / (np.sqrt(v) + tau))
    return added


@pytest.mark.parametrize(("kind", "made"), [("adam", FedAdam), ("yogi", FedYogi), ("adagrad", FedAdagrad)])
def test_the_adaptive_ones_are_algorithm_2_with_the_sign_turned(kind: str, made: type[Optimizer]) -> None:
    settings = {"beta1": 0.8, "beta2": 0.95, "tau": 0.01}
    kept = {key: value for key, value in settings.items() if key in {field.name for field in dataclasses.fields(made)}}
    added = transcribed(kind, [-direction for direction in directions()], **settings)
    for step, expected in zip(steps(made(**kept), directions()), added, strict=True):
        np.testing.assert_allclose(step, -expected, rtol=1e-12)


def moved(torch_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer], given: list[Vector]) -> list[Vector]:
    """How far a torch optimiser goes against each gradient."""
    w = torch.zeros(len(given[0]), dtype=torch.float64, requires_grad=True)
    optimizer = torch_optimizer([w])
    found = []
    for direction in given:
        before = w.detach().numpy().copy()
        w.grad = torch.from_numpy(direction)
        optimizer.step()
        found.append(before - w.detach().numpy())
    return found


def test_momentum_is_torchs() -> None:
    expected = moved(lambda w: torch.optim.SGD(w, lr=1.0, momentum=0.7), directions())
    np.testing.assert_allclose(steps(Momentum(beta1=0.7), directions()), expected, rtol=1e-9, atol=1e-9)


def test_adagrad_without_momentum_is_torchs() -> None:
    expected = moved(lambda w: torch.optim.Adagrad(w, lr=1.0, initial_accumulator_value=1e-4, eps=1e-2), directions())
    np.testing.assert_allclose(steps(FedAdagrad(beta1=0.0, tau=1e-2), directions()), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sign", ["minus", "plus"])
def test_fedfas_momentum_is_what_the_public_code_does(sign: Literal["minus", "plus"]) -> None:
    w, v, gamma, eta = np.zeros(40), np.zeros(40), 0.5, 0.1
    braked = FedFaMomentum(gamma=gamma, eta=eta, sign=sign)
    for direction, step in zip(directions(), steps(braked, directions()), strict=True):
        mean = w - direction  # w', the weighted mean of the clients' models
        v = gamma * v + (1 - gamma) * (mean - w)
        after = mean - eta * v if sign == "minus" else mean + eta * v
        np.testing.assert_allclose(w - step, after, rtol=1e-9, atol=1e-12)
        w = after


def test_fedfas_momentum_brakes_or_accelerates_in_the_long_run() -> None:
    given = [np.ones(3)] * 60
    np.testing.assert_allclose(steps(FedFaMomentum(eta=0.1), given)[-1], 0.9)
    np.testing.assert_allclose(steps(FedFaMomentum(eta=0.1, sign="plus"), given)[-1], 1.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Momentum(beta1=1.0), r"beta1 must lie in \[0, 1\); got 1.0"),
        (lambda: FedAdam(beta2=-0.1), "beta2 must lie in"),
        (lambda: FedYogi(tau=0.0), r"tau must lie in \(0, inf\); got 0.0"),
    ],
)
def test_settings_that_make_no_sense_are_named(make: Callable[[], Optimizer], message: str) -> None:
    with pytest.raises(HyperparameterError, match=message):
        make()


# --- streamed


class Files:
    """The vectors of a run as files, from round to round."""

    def __init__(self, directory: Path, base: NDArray[np.float32]) -> None:
        self.directory = directory
        self.rows: dict[str, Row] = {"model": base}
        self.rounds = 0

    def step(self, optimizer: Optimizer, direction: Vector, *, cut: int, average: bool = False) -> float:
        names = ["model", *optimizer.slots, *(["average"] if average else [])]
        pieces: dict[str, list[bytes]] = {name: [] for name in names}

        def sink(name: str) -> Callable[[Any], object]:
            return lambda piece: pieces[name].append(bytes(piece))

        cuts = (direction[start : start + cut] for start in range(0, len(direction), cut))
        slots: dict[str, Any] = {
            "before": {slot: self.rows[slot] for slot in optimizer.slots if slot in self.rows},
            "after": {slot: sink(slot) for slot in optimizer.slots},
            "average": Average(self.rounds, self.rows.get("average"), sink("average")) if average else None,
        }
        norm = apply_step(self.rows["model"], 0.1, cuts, sink("model"), optimizer=optimizer, **slots)
        self.rounds += 1
        for name, parts in pieces.items():
            path = self.directory / f"{name}-{self.rounds}"
            path.write_bytes(b"".join(parts))
            self.rows[name] = RowFile(path, 0, len(direction))
        return norm

    def read(self, name: str) -> NDArray[np.float32]:
        row = self.rows[name]
        return row.read() if isinstance(row, RowFile) else row.astype(np.float32)


ALL = [server_optimizers.Sgd(), Momentum(), FedAdam(), FedYogi(), FedAdagrad(), FedFaMomentum()]


@pytest.mark.parametrize("optimizer", ALL)
def test_vectors_in_float32_files_give_what_float64_gives_however_the_direction_is_cut(
    tmp_path: Path, optimizer: Optimizer
) -> None:
    base = np.random.default_rng(1).standard_normal(D).astype(np.float32)
    given = directions(3, D)
    results = []
    for cut in (D, 65_536, 1000):
        directory = tmp_path / str(cut)
        directory.mkdir()
        files = Files(directory, base)
        for direction in given:
            assert files.step(optimizer, direction, cut=cut) == pytest.approx(np.linalg.norm(direction), rel=1e-12)
        results.append({name: files.read(name).tobytes() for name in ("model", *optimizer.slots)})
    assert results[0] == results[1] == results[2]
    exact = base - 0.1 * np.sum(steps(optimizer, given), axis=0)
    np.testing.assert_allclose(np.frombuffer(results[0]["model"], dtype="<f4"), exact, rtol=1e-5, atol=1e-5)


def test_the_average_is_that_of_the_models_after_each_step(tmp_path: Path) -> None:
    files = Files(tmp_path, np.zeros(5000, dtype=np.float32))
    seen = []
    for direction in directions(5, 5000):
        files.step(Momentum(), direction, cut=4096, average=True)
        seen.append(files.read("model").astype(np.float64))
        np.testing.assert_allclose(files.read("average"), np.mean(seen, axis=0), rtol=1e-5, atol=1e-6)


def test_a_vector_out_of_the_range_of_float32_is_an_error() -> None:
    huge = np.full(10, 1e25)
    sinks = {"first": len, "second": len}
    with pytest.raises(FloatingPointError, match="second leaves the range of float32 between elements 0 and 10"):
        apply_step(np.zeros(10, np.float32), 1.0, [huge], len, optimizer=FedAdam(), after=sinks)


# --- named


def test_a_run_names_its_optimiser_and_the_settings_that_it_has() -> None:
    kinds = get_args(RunSpec.model_fields["server"].annotation.model_fields["optimizer"].annotation)  # type: ignore[union-attr]
    assert set(kinds) == set(server_optimizers.OPTIMIZERS)
    values = {"beta1": 0.5, "beta2": 0.6, "tau": 0.25}
    for kind, made in server_optimizers.OPTIMIZERS.items():
        own = {field.name for field in dataclasses.fields(made)}
        text = SPEC + f'[server]\noptimizer = "{kind}"\n'
        assert server_optimizer(RunSpec.parse(text).server) == made()
        for key, value in values.items():
            if key in own:
                text += f"{key} = {value}\n"
            else:
                with pytest.raises(SpecError, match=rf'server: {key} is for optimizer = .*, not for "{kind}"'):
                    RunSpec.parse(f"{text}{key} = {value}\n")
        assert server_optimizer(RunSpec.parse(text).server) == made(**{key: values[key] for key in own})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ('optimizer = "rmsprop"', "server.optimizer"),
        ('optimizer = "adam"\nbeta1 = 1.0', "server.beta1"),
        ('optimizer = "adam"\ntau = 0', "server.tau"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_its_path(keys: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        RunSpec.parse(f"{SPEC}[server]\n{keys}\n")


def test_an_algorithm_with_an_optimiser_of_its_own_takes_no_other() -> None:
    text = SPEC.replace("fedavg", "fedfa") + '[server]\noptimizer = "adam"\n'
    with pytest.raises(SpecError, match=r"server.optimizer: fedfa brings its own; leave it out"):
        parse_run(text)
