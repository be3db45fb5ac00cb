"""Attacks compared with their formulas, and a backdoor that opens."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from federation.attacks import Attack, AttackError, attack_seed, claimed, distorted, parse_attack, poisoned
from federation.attacks.catalogue import ATTACKS, entries
from federation.attacks.colluding import alie_z
from federation.attacks.probe import Probe
from federation.spec.train_section import LocalSgd
from federation.tasks import Dataset, DataSource, Splits, initial_model, task
from federation.training.torch_trainer import TorchTrainer
from tests.trained import train

D = 70_000  # more than one block of columns
RANDOM = np.random.default_rng(5)
OWN: NDArray[np.float32] = RANDOM.standard_normal(D, dtype=np.float32)
PEERS: NDArray[np.float32] = RANDOM.standard_normal((5, D), dtype=np.float32) + np.float32(0.1)
MEAN, STD = PEERS.mean(axis=0, dtype=np.float64), PEERS.astype(np.float64).std(axis=0)


def sent(text: str, *, own: NDArray[np.float32] = OWN, m: int = 8, seed: int = 1) -> NDArray[np.float32]:
    update = parse_attack(text).on_update(own, peers=PEERS, m=m, seed=seed)
    assert update.dtype == np.float32
    assert update.shape == own.shape
    return update


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("scale=100,bias=1000", 100 * OWN),
        ("sign-flip", -OWN),
        ("sign-flip:scale=3", -3 * OWN),
        ("model-replacement", 8 * OWN),
        ("model-replacement:boost=2.5", 2.5 * OWN),
        ("backdoor", OWN),
        ("backdoor:boost=5", 5 * OWN),
        ("backdoor:boost=0", 8 * OWN),
        ("label-flip", OWN),
        ("alie:z=1.5", MEAN - 1.5 * STD),
        ("alie", MEAN - alie_z(8, 3) * STD),
        ("ipm", -0.1 * MEAN),
        ("ipm:epsilon=10", -10 * MEAN),
        ("stand-still", -MEAN),
        ("mimic", PEERS[0]),
        ("mimic:client=2", PEERS[2]),
        ("mimic:client=99", PEERS[4]),
    ],
)
def test_an_update_is_what_its_formula_says(text: str, expected: NDArray[np.float64]) -> None:
    np.testing.assert_allclose(sent(text), expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(("text", "value"), [("nan", np.nan), ("inf", np.inf)])
def test_poison_of_sums_is_poison_in_every_entry(text: str, value: float) -> None:
    np.testing.assert_array_equal(sent(text), np.full(D, value))


@pytest.mark.parametrize(
    ("n", "f", "z"),
    [
        # The paper: 24 of 50, two more make a majority, Phi(z) = 24 / 26.
        (50, 24, 1.4260768722),
        (10, 4, 0.4307272993),  # s = 2, Phi(z) = 4 / 6
        (10, 2, 0.0),  # s = 4, Phi(z) = 4 / 8
        (10, 1, 0.0),  # Phi(z) < 1 / 2: nothing may be gained
        (10, 8, 0.0),  # a majority already; Phi(z) = 1 / 2 with s = 1
        (20, 12, 1.1503493804),  # the same, Phi(z) = 7 / 8
        (2, 1, 0.0),
    ],
)
def test_alie_goes_as_far_as_its_paper_allows(n: int, f: int, z: float) -> None:
    assert alie_z(n, f) == pytest.approx(z, abs=1e-9)


@pytest.mark.parametrize("direction", ["unit", "std", "sign"])
def test_min_max_goes_as_far_from_the_farthest_as_the_honest_are_from_each_other_and_no_farther(
    direction: str,
) -> None:
    update = sent(f"min-max:direction={direction}").astype(np.float64)
    honest = PEERS.astype(np.float64)
    farthest = max(float(np.linalg.norm(one - other)) for one in honest for other in honest)
    assert max(float(np.linalg.norm(update - one)) for one in honest) == pytest.approx(farthest, rel=1e-6)
    away = {"unit": -MEAN, "std": -STD, "sign": -np.sign(MEAN)}[direction]
    moved = update - MEAN
    assert moved @ away == pytest.approx(np.linalg.norm(moved) * np.linalg.norm(away), rel=1e-5)


@pytest.mark.parametrize("text", ["alie:z=1.5", "min-max", "mimic"])
@pytest.mark.parametrize("peers", [PEERS[:0], OWN[None]])
def test_whoever_knows_only_itself_sends_what_it_has(text: str, peers: NDArray[np.float32]) -> None:
    np.testing.assert_allclose(parse_attack(text).on_update(OWN, peers=peers, m=1, seed=0), OWN, rtol=1e-6)


@pytest.mark.parametrize(("text", "size"), [("gaussian:deviation=3", 3.0), ("gaussian", 200.0), ("free-rider", 0.5)])
def test_noise_has_the_size_that_was_asked_for_and_comes_from_the_seed(text: str, size: float) -> None:
    change = np.full(D, -0.5, dtype=np.float32)
    update = sent(text, own=change)
    assert float(update.std()) == pytest.approx(size, rel=0.02)
    np.testing.assert_array_equal(update, sent(text, own=change))
    assert not np.array_equal(update, sent(text, own=change, seed=2))


def test_a_free_rider_that_has_seen_no_change_is_still_not_zero() -> None:
    nothing = np.zeros(D, dtype=np.float32)
    assert float(sent("free-rider:deviation=0.25", own=nothing).std()) == pytest.approx(0.25, rel=0.02)


def test_seeds_are_of_run_round_and_client() -> None:
    seeds = {attack_seed(*key) for key in [(1, 2, "a"), (1, 2, "a"), (2, 1, "a"), (1, 2, "b"), (1, 3, "a")]}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_bias_is_on_the_reported_losses_alone() -> None:
    assert parse_attack("bias=1000").on_losses({"loss": 2.0}) == {"loss": 1002.0}
    assert parse_attack("sign-flip").on_losses({"loss": 2.0}) == {"loss": 2.0}
    np.testing.assert_array_equal(sent("bias=1000"), OWN)


# What own code gives


def made(**methods: Any) -> Attack:
    """An attack with these methods."""
    own = {name: staticmethod(method) for name, method in methods.items()}
    attack: Attack = type("Own", (Attack,), {"name": "own", **own})()
    return attack


def test_an_attack_of_ones_own_may_give_tensors_and_lists_and_write_into_its_update() -> None:
    own, peers = OWN[:4].copy(), PEERS[:, :4]
    for method in (
        lambda own, **given: torch.tensor(own, requires_grad=True) * 2,
        lambda own, **given: (own * 2).tolist(),
        lambda own, **given: np.multiply(own, 2, out=own),
    ):
        update = distorted(made(on_update=method), own, of_update=True, peers=peers, m=2, seed=0)
        np.testing.assert_array_equal(update, own * 2)
        assert update.dtype == np.float32
    assert claimed(made(on_losses=lambda losses: {"loss": torch.tensor(3.0)}), {"loss": 1.0}) == {"loss": 3.0}


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (lambda own, **given: None, "on_update failed: ValueError: got None, not numbers"),
        (lambda own, **given: own[:-1], r"the answer of on_update has shape \(3,\); \(4,\) is needed"),
        (lambda own, **given: own[None], r"the answer of on_update has shape \(1, 4\)"),
        (lambda own, peers, **given: np.negative(peers, out=peers), "on_update failed: ValueError: .* read-only"),
    ],
)
def test_an_update_of_an_attack_that_cannot_be_sent_is_refused(method: Any, says: str) -> None:
    with pytest.raises(AttackError, match=f"^attack own: {says}"):
        distorted(made(on_update=method), OWN[:4], of_update=True, peers=PEERS[:, :4], m=2, seed=0)


def test_losses_and_data_of_an_attack_that_cannot_be_used_are_refused(digits: Splits) -> None:
    for losses, says in (
        (None, "on_losses failed: TypeError"),
        ({"los": 1.0}, r"on_losses gives \['los'\]; the losses are"),
    ):
        with pytest.raises(AttackError, match=f"^attack own: {says}"):
            claimed(made(on_losses=lambda given: losses), {"loss": 1.0})  # noqa: B023
    with pytest.raises(AttackError, match=r"^attack own: poison gives NoneType; Splits is needed$"):
        poisoned(made(poison=lambda splits, task, seed: None), digits, task("digits"), seed=0)


# What people write


@pytest.mark.parametrize(
    ("text", "again"),
    [
        ("scale=100, bias=1000", "scale=100,bias=1000"),
        ("bias=-1e6", "bias=-1000000"),
        ("scale=1", "scale=1"),
        ("sign-flip", "sign-flip"),
        (" alie : z = 1.5 ", "alie:z=1.5"),
        ("backdoor:target=3,share=0.25,boost=5,size=4", "backdoor:target=3,share=0.25,boost=5,size=4"),
        ("backdoor:target=0,share=0.5", "backdoor"),
        ("min-max:direction=std", "min-max:direction=std"),
    ],
)
def test_an_attack_is_read_as_people_write_it_and_written_as_it_is_read(text: str, again: str) -> None:
    attack = parse_attack(text)
    assert str(attack) == again
    assert parse_attack(again) == attack


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "scale=100,bias=1000"),
        ("scale", "scale=100,bias=1000"),
        ("scale=", "scale=100,bias=1000"),
        ("speed=3", "scale=100,bias=1000"),
        ("scale=1,scale=2", "is said twice"),
        ("scale=x", "scale is a number"),
        ("scale=nan", r"scale must lie in \(-inf, inf\); got nan"),
        ("signflip", "there are loss-scaling, sign-flip, gaussian"),
        ("alie:", "write alie:z="),
        ("alie:x=1", "alie takes z"),
        ("alie:z=-1", r"z must lie in \[0, inf\)"),
        ("alie:z=1,z=2", "is said twice"),
        ("nan:z=1", "nan takes nothing"),
        ("mimic:client=1.5", "client is a whole number"),
        ("backdoor:share=1.5", r"share must lie in \[1e-6, 1\]"),
        ("min-max:direction=up", "unit, std, sign"),
        ("sign-flip,bias=3", "no attack"),
    ],
)
def test_an_attack_that_says_nothing_is_refused_with_what_would_say_something(text: str, words: str) -> None:
    with pytest.raises(AttackError, match=words):
        parse_attack(text)


def test_the_catalogue_is_written_as_it_is_read_and_explains_everything() -> None:
    for entry in entries():
        attack = parse_attack(entry.spelling)
        assert attack == type(attack)()
        assert entry.summary.endswith(".")
        assert all(entry.options.values())
    assert len(entries()) == len(ATTACKS) + 1
    for name, kind in ATTACKS.items():
        assert bool(kind.alone) == kind.needs_peers, name


# Data


@pytest.fixture(scope="module")
def digits() -> Splits:
    return task("digits").load(DataSource())


@pytest.mark.parametrize(
    ("text", "flip"), [("label-flip", lambda y: 9 - y), ("label-flip:shift=3", lambda y: (y + 3) % 10)]
)
def test_labels_are_flipped_among_the_classes_of_the_task_and_only_for_training(
    digits: Splits, text: str, flip: object
) -> None:
    assert callable(flip)
    few = digits.train.y < 3  # a client that holds three of the ten classes
    splits = Splits(Dataset(digits.train.x[few], digits.train.y[few]), digits.validation, digits.test)
    poisoned = parse_attack(text).poison(splits, task("digits"), seed=0)
    assert torch.equal(poisoned.train.y, flip(splits.train.y))
    assert poisoned.train.x is splits.train.x
    assert poisoned.test is splits.test


def test_a_backdoor_marks_and_relabels_a_share_of_the_training_images(digits: Splits) -> None:
    before = digits.train.x.clone()
    attack = parse_attack("backdoor:target=7,share=0.25")
    poisoned = attack.poison(digits, task("digits"), seed=3)
    changed = (poisoned.train.x != digits.train.x).any(dim=1)
    marked = (poisoned.train.x.reshape(-1, 8, 8)[:, 6:, 6:] == 1).all(dim=(1, 2))
    assert int(marked.sum()) == -(-len(digits.train) // 4)
    assert bool((poisoned.train.y[marked] == 7).all())
    assert not bool((changed & ~marked).any())
    assert torch.equal(digits.train.x, before)
    again = attack.poison(digits, task("digits"), seed=3)
    assert torch.equal(again.train.x, poisoned.train.x)
    assert not torch.equal(attack.poison(digits, task("digits"), seed=4).train.x, poisoned.train.x)


def test_a_trigger_is_white_in_bytes_and_floats_of_every_shape() -> None:
    y = torch.ones(2, dtype=torch.int64)
    for x, white in ((torch.zeros(2, 3, 32, 32, dtype=torch.uint8), 255), (torch.zeros(2, 28, 28), 1)):
        data = parse_attack("backdoor").triggered(Dataset(x, y))
        assert data is not None
        side = 4 if x.shape[-1] == 32 else 3
        assert bool((data.x[..., -side:, -side:] == white).all())
        assert int((data.x != 0).sum()) == 2 * side * side * (x.shape[1] if x.ndim == 4 else 1)


@pytest.mark.full
def test_a_backdoor_opens_and_its_success_is_measured_on_other_classes(digits: Splits) -> None:
    attack, learned = parse_attack("backdoor:target=7"), task("digits")
    _, base = initial_model(learned, 1)
    work = LocalSgd(epochs=10, batch_size=20, learning_rate=0.3)
    honest = TorchTrainer(learned, digits, "cpu", 1)
    probe = Probe(attack, honest, digits.test)
    rates = []
    for trainer in (honest, honest.on(attack.poison(digits, learned, seed=1))):
        model = base - train(trainer, base, work, seed=1, round=0, client_id="a").rows["loss"]
        assert trainer.measure(model, ("test",))["test/accuracy"] > 0.9
        rates.append(probe.rate(model))
    assert rates[0] < 0.2
    assert rates[1] > 0.9


def test_what_cannot_be_attacked_is_said(digits: Splits) -> None:
    learned = task("digits")
    with pytest.raises(AttackError, match="target = 10: digits has classes 0 to 9"):
        parse_attack("backdoor:target=10").poison(digits, learned, seed=0)
    real = Splits(Dataset(digits.train.x, digits.train.y.float()), digits.validation, digits.test)
    with pytest.raises(AttackError, match="no task of classification"):
        parse_attack("label-flip").poison(real, learned, seed=0)
    words = Dataset(torch.zeros(3, 80, dtype=torch.int64), torch.ones(3, dtype=torch.int64))
    with pytest.raises(AttackError, match="into images"):
        parse_attack("backdoor").triggered(words)
    trainer = TorchTrainer(learned, digits, "cpu", 1)
    with pytest.raises(AttackError, match="no trigger"):
        Probe(parse_attack("sign-flip"), trainer, digits.test)
    ones = Dataset(digits.test.x[:3], torch.zeros(3, dtype=torch.int64))
    with pytest.raises(AttackError, match="none of 3"):
        Probe(parse_attack("backdoor"), trainer, ones)


def test_to_idle_is_to_measure_what_training_measures_and_to_make_no_step(digits: Splits) -> None:
    trainer = TorchTrainer(task("digits"), digits, "cpu", 1)
    _, base = initial_model(task("digits"), 1)
    idle = train(trainer, base, LocalSgd(steps=1, batch_size=0, learning_rate=0.1), idle=True)
    trained = train(trainer, base, LocalSgd(steps=1, batch_size=0, learning_rate=0.1), seed=0, round=0, client_id="a")
    assert (idle.losses, idle.metrics, idle.samples) == (trained.losses, trained.metrics, trained.samples)
    assert not idle.rows["loss"].any()
