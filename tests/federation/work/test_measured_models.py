"""Private runs that measure models: what a malicious coordinator asks of real members, and what it reads.

A member measures the models of a run that its owner approved, each once, however often and wherever it is asked.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from federation.aggregation.interface import TooFewUpdatesError
from federation.aggregation.phases import Waiting
from federation.aggregation.secure.session import secure_sum
from federation.aggregation.secure.settled import Sum, invitation
from federation.digests import digest
from federation.secure.evaluation import clip
from federation.secure.thresholds import EVALUATION_NOISE, Mode
from federation.spec.run_spec import RunSpec
from federation.work.base import Work
from federation.work.evaluate.work import Evaluate
from federation.work.secure.sessions import difference, phases
from federation.work.secure.terms import SessionStage
from federation.work.site import SecurePolicy
from tests.federation.work.scene import TRAIN, Cast, Inputs, Member, cast, equal, held, names, origin, play, setting

CLASSES = 10
CONSTANT = [digest(f"always {label}".encode()) for label in range(CLASSES)]
VICTIM = "silo-02"
TEST = Evaluate(splits=("test",))
Reals = NDArray[np.float64]


def changed(model: str, copy: int) -> str:
    """A model with another bit changed: it measures the same, under another digest."""
    return digest(f"{model} {copy}".encode()) if copy else model


@dataclass
class Coordinator:
    """A malicious coordinator of real members with the limits of real owners.

    Attributes:
        scene: the members.
        shares: of each class at each member.
        sums: what it has unmasked: the model that was measured, up to changed bits, the members, and the vector.
    """

    scene: Cast
    shares: Mapping[str, Reals]
    sums: list[tuple[str, tuple[str, ...], Reals]] = field(default_factory=list)
    asked: int = 0

    @classmethod
    def of(cls, m: int = 6, **policy: Any) -> "Coordinator":
        scene, rng = cast(m, assumed=1), np.random.default_rng(1)
        for member in scene.members.values():
            member.allow(SecurePolicy(assumed=1, **policy))
        return cls(scene, {name: rng.dirichlet([0.3] * CLASSES) for name in scene.members})

    def approve(self, run: str, models: Sequence[str]) -> None:
        for member in self.scene.members.values():
            member.approved = {**member.approved, run: frozenset(models)}

    def measure(self, model: str, run: str = "run", *, copy: int = 0, without: Sequence[str] = (), **terms: Any) -> str:
        """Asks for the measurements of a model; gives the reason for which the victim declines, empty if it measures.

        The members of `without` are called lost at MASK.
        """
        self.asked += 1
        scene, label = self.scene, CONSTANT.index(model) if model in CONSTANT else 0
        scene.run_id, scene.base_model, scene.declined = run, changed(model, copy), {}
        for name, member in scene.members.items():
            share = float(self.shares[name][label])
            member.metrics = {"test/loss": 10 * (1 - share), "test/accuracy": share}
        ids = next(iter(scene.members.values())).members.key_ids()
        invited = invitation({name: ids[name] for name in scene.members if name not in without})
        bound, nonce = clip(2, EVALUATION_NOISE), self.asked.to_bytes(16, "big")
        chosen = setting(scene, Mode.SUM, work=TEST, length=2, clip=bound, nonce=nonce, invited=invited, **terms)
        try:
            total: Sum = held(scene, secure_sum(chosen, equal))
        except (TooFewUpdatesError, Waiting):
            return next((why for (_, name), why in scene.declined.items() if name == VICTIM), "nobody")
        vector = total.vector(bound * len(total.record.survivors)).astype(float)
        self.sums.append((model, total.record.survivors, vector))
        return next((why for (_, name), why in scene.declined.items() if name == VICTIM), "")

    def difference(self) -> Reals:
        """The victim's shares of the classes, by the best pairs of sums that differ by it; NaN without a pair."""
        found = np.full(CLASSES, np.nan)
        for label, model in enumerate(CONSTANT):
            seen = [(frozenset(who), vector[1]) for name, who, vector in self.sums if name == model]
            pairs = [a - b for whole, a in seen for less, b in seen if whole - less == {VICTIM} and less < whole]
            if pairs:
                found[label] = np.mean(pairs)
        return found


def test_a_member_measures_no_model_of_a_run_that_its_owner_has_not_approved_with_it() -> None:
    made = Coordinator.of()
    assert made.measure(CONSTANT[0]) == "evaluations", "no owner has approved the run"
    made.approve("run", CONSTANT[:2])
    assert made.measure(CONSTANT[2]) == "evaluations", "the run was approved with other models"
    assert made.measure(CONSTANT[0], "another") == "evaluations", "another run was approved"
    assert made.measure(CONSTANT[0], copy=1) == "evaluations", "a changed bit is another model"
    assert made.sums == []
    assert made.measure(CONSTANT[0]) == ""
    assert [who for _, who, _ in made.sums] == [tuple(names(range(6)))]


def test_a_model_is_measured_once_under_every_name_of_a_run_and_in_every_order() -> None:
    made = Coordinator.of()
    for run in ("run", "copy"):
        made.approve(run, CONSTANT)
    for model in CONSTANT[:2]:
        assert made.measure(model) == ""
    for run, model in (("run", CONSTANT[1]), ("copy", CONSTANT[0]), ("copy", CONSTANT[1])):
        assert made.measure(model, run) == "model-evaluated"
        assert made.measure(model, run, without=["silo-00"]) == "model-evaluated"
    assert len(made.sums) == 2


def test_of_two_coordinators_that_ask_for_one_model_at_a_time_one_gets_an_answer() -> None:
    made = Coordinator.of()
    for run in ("run", "copy"):
        made.approve(run, CONSTANT)
    first = made.scene
    asked: list[str] = []

    def other(stage: str, member: Member, work: Work, inputs: Inputs) -> None:
        if stage == SessionStage.MASK and not asked:  # all are ready here, and the other one gets there first
            asked.append(stage)
            there = replace(first, change=None, declined={}, phases=[])
            second = Coordinator(there, made.shares, made.sums, asked=100)
            assert second.measure(CONSTANT[0], "copy") == ""
            member.origin = first.origin

    first.change = other
    made.measure(CONSTANT[0])
    assert len(made.sums) == 1
    declined = {why for (stage, _), why in first.declined.items() if stage == SessionStage.MASK}
    assert declined == {"model-evaluated"}


def test_evaluations_of_a_run_that_trains_and_of_one_that_measures_count_together() -> None:
    made = Coordinator.of(evaluations=2)
    made.approve("measures", CONSTANT)
    play(made.scene, Mode.SUM)
    assert made.measure(CONSTANT[0]) == "", "after a training"
    assert made.measure(CONSTANT[1], "measures") == ""
    assert made.measure(CONSTANT[2], "measures") == "sessions", "the owner allows two in all"
    assert made.measure(CONSTANT[1]) == "sessions"


def test_a_run_that_measures_models_has_no_session_that_trains() -> None:
    text = 'name = "x"\ntask = "digits"\nkind = "evaluate"\nprivacy.secure = "sum"\nevaluate.splits = ["test"]'
    spec = RunSpec.parse(text)
    assert phases(spec) == ()
    scene = cast(6)
    agreed = setting(scene, Mode.SUM, work=TRAIN).agreed
    for by_name in (False, True):
        problem = difference(spec, agreed, origin(text.encode()), ("loss",), agreed.length, by_name=by_name)
        assert problem == "a run that only measures models has no session of the kind train"


def test_a_member_that_was_lost_with_its_answer_is_not_asked_again() -> None:
    made = Coordinator.of()
    made.approve("run", CONSTANT)
    made.scene.lost = {(SessionStage.MASK.value, 0): [VICTIM]}
    assert made.measure(CONSTANT[0]) == ""
    assert VICTIM not in made.sums[0][1]
    made.scene.lost = {}
    assert made.measure(CONSTANT[0]) == "model-evaluated", "what it has masked may have arrived"


def searched(made: Coordinator, moves: int, copies: int, seed: int) -> None:
    """Random questions: models, changed bits, runs, and members that are left out or lost."""
    rng = random.Random(seed)
    for _ in range(moves):
        left_out = rng.choice([(), (), (VICTIM,), (rng.choice(sorted(made.scene.members)),)])
        lost = rng.choice([(), (VICTIM,)])
        made.scene.lost = {(SessionStage.MASK.value, 0): lost}
        model, run = rng.choice(CONSTANT[:2]), rng.choice(["run", "copy"])
        made.measure(model, run, copy=rng.randrange(copies), without=left_out)


def test_no_search_finds_two_sums_of_one_model_that_share_a_member() -> None:
    made = Coordinator.of()
    for run in ("run", "copy"):
        made.approve(run, CONSTANT)
    searched(made, 14, 1, 3)
    for label in range(2):
        sets = [set(who) for model, who, _ in made.sums if model == CONSTANT[label]]
        assert sets
        assert sum(map(len, sets)) == len(set().union(*sets)), "the sets of members are disjoint"
    assert np.isnan(made.difference()).all()


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_no_longer_search_finds_two_sums_of_one_model_that_share_a_member(seed: int) -> None:
    made = Coordinator.of(7)
    for run in ("run", "copy"):
        made.approve(run, CONSTANT)
    searched(made, 100, 1, seed)
    for label in range(2):
        sets = [set(who) for model, who, _ in made.sums if model == CONSTANT[label]]
        assert sum(map(len, sets)) == len(set().union(*sets))
    assert np.isnan(made.difference()).all()


def test_models_that_differ_by_a_bit_show_the_member_left_out_with_the_noise_of_a_pair_each() -> None:
    made = Coordinator.of()
    made.approve("run", [changed(CONSTANT[0], copy) for copy in range(2)])
    assert made.measure(CONSTANT[0]) == ""
    assert made.measure(CONSTANT[0], copy=1, without=[VICTIM]) == "", "it is not asked"
    error = made.difference()[0] - made.shares[VICTIM][0]
    assert 1e-4 < abs(error) < 1.0, "the rule does not hold for a changed bit: the noise and the approval remain"
    assert len(made.sums) == 2


def test_a_loss_beyond_the_bound_adds_no_more_than_the_bound_and_shows_that_somebody_has_the_record() -> None:
    def loss_of(value: float) -> float:
        made = Coordinator.of()
        made.approve("run", CONSTANT)

        def huge(stage: str, member: Member, work: Work, inputs: Inputs) -> None:
            member.metrics = {"test/loss": value if member.name == VICTIM else 0.0, "test/accuracy": 0.5}

        made.scene.change = huge
        assert made.measure(CONSTANT[0]) == ""
        return float(made.sums[0][2][0])

    found = [loss_of(value) for value in (0.0, 1e30, float("inf"))]
    assert found[1] == pytest.approx(found[2], abs=1.0)
    assert abs(found[0]) < 0.5 < found[1] < 1.5, "one sum tells, with noise of 0.1, that somebody has the record"
