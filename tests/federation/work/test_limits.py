"""The owner's limits on private rounds and evaluations hold, even if a coordinator asks for more."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from federation.aggregation.interface import TooFewUpdatesError
from federation.aggregation.phases import Waiting
from federation.aggregation.secure.session import secure_sum
from federation.aggregation.secure.settled import Sum, invitation
from federation.digests import digest
from federation.secure.evaluation import clip
from federation.secure.thresholds import EVALUATION_NOISE, Mode
from federation.vectors import update_layout
from federation.work.base import Shape, Work, WorkError, WorkingClient
from federation.work.evaluate.work import Evaluate
from federation.work.jacobian.work import Jacobian
from federation.work.secure.limits import check_sessions
from federation.work.secure.terms import SessionStage
from federation.work.site import EVALUATE, MemoryLedger, SecurePolicy, SessionEntry, SessionLedger, Site
from tests.federation.work.scene import (
    ORIGIN,
    TRAIN,
    Cast,
    Inputs,
    Kept,
    Member,
    cast,
    equal,
    held,
    names,
    play,
    setting,
)
from worker.ledgers.round_ledger import RoundLedger
from worker.site.policy_file import Policy

VICTIM = "silo-02"
TEST = Evaluate(splits=("test",))


def limited(m: int = 6, **policy: object) -> Cast:
    """Members with the limits of real owners."""
    scene = cast(m, assumed=1)
    for member in scene.members.values():
        member.allow(SecurePolicy(assumed=1, **policy))  # type: ignore[arg-type]
        member.metrics = {"test/loss": 1.0, "test/accuracy": 0.5}
    return scene


def evaluate(scene: Cast, nonce: bytes, without: str = "", **terms: Any) -> Sum:
    """A session that sums the metrics of all members but one."""
    ids = next(iter(scene.members.values())).members.key_ids()
    invited = invitation({name: ids[name] for name in scene.members if name != without})
    bound = clip(2, EVALUATION_NOISE)
    chosen = setting(scene, Mode.SUM, work=TEST, length=2, clip=bound, nonce=nonce * 16, invited=invited, **terms)
    total: Sum = held(scene, secure_sum(chosen, equal))
    return total


# --- evaluations


def test_two_evaluations_of_one_model_cannot_be_subtracted() -> None:
    scene = limited()
    play(scene, Mode.SUM)
    assert evaluate(scene, b"a").record.survivors == tuple(names(range(6)))
    with pytest.raises(TooFewUpdatesError, match="0 are ready"):
        evaluate(scene, b"b", without=VICTIM)
    declined = {(SessionStage.READY.value, name): "model-evaluated" for name in names(range(6)) if name != VICTIM}
    assert scene.declined == declined


def test_a_second_session_for_a_model_is_declined_at_mask_too() -> None:
    scene = limited()
    play(scene, Mode.SUM)

    def change(stage: str, member: Member, work: Work, inputs: Inputs) -> None:
        if stage == SessionStage.MASK and member.name == VICTIM:
            member.site.ledger.add(SessionEntry("00", ORIGIN.run_id, ORIGIN.task, ORIGIN.base_model, EVALUATE))
        elif stage == SessionStage.MASK:
            member.do(work, inputs)  # asked again, as after a crash of the coordinator, it answers

    scene.change = change
    assert VICTIM not in evaluate(scene, b"a").record.survivors
    assert scene.declined == {(SessionStage.MASK.value, VICTIM): "model-evaluated"}


def test_a_run_has_no_more_evaluations_than_private_rounds_of_training() -> None:
    scene = limited()
    with pytest.raises(TooFewUpdatesError):
        evaluate(scene, b"a")
    assert set(scene.declined.values()) == {"evaluations"}


def test_an_evaluation_shows_no_number_of_one_member() -> None:
    scene = limited(disclose=("accuracy",))
    play(scene, Mode.SUM)
    with pytest.raises(TooFewUpdatesError):
        evaluate(scene, b"a", disclose=("accuracy",))
    assert set(scene.declined.values()) == {"terms"}


@pytest.fixture(params=["worker", "simulation"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> SessionLedger:
    return RoundLedger(tmp_path / "private-rounds.db") if request.param == "worker" else MemoryLedger()


Ask = Callable[..., str]


@pytest.fixture
def asked(ledger: SessionLedger) -> Ask:
    """Has a session counted; gives the reason for which it is declined, empty where it is not."""

    def ask(session: str, model: str = "m0", *, run: str = "run", task: str = "digits", training: bool = False) -> str:
        together = frozenset({"digits", "digits-by-site"})
        client = WorkingClient(
            client_id="a",
            round=0,
            attempt=0,
            shape=Shape(update_layout([("w", 1)]), ("loss",), ("loss",)),
            memory=Kept(),
            origin=replace(ORIGIN, run_id=run, base_model=digest(model.encode()), task=task),
            site=Site(ledger=ledger, data_sets=dict.fromkeys(together, together)),
        )
        try:
            check_sessions(client, session, work="train" if training else EVALUATE, count=True)
        except WorkError as error:
            return error.reason
        return ""

    return ask


def test_a_model_is_evaluated_once_in_all_runs_and_a_member_that_missed_a_round_misses_one_evaluation(
    asked: Ask,
) -> None:
    assert asked("t0", "m0", training=True) == ""
    for _ in range(2):
        assert asked("e1", "m1") == "", "the same session comes again"
    assert asked("x", "m1") == "model-evaluated"
    assert asked("x", "m2") == "evaluations", "it was not in the round from m1"
    assert asked("t2", "m2", training=True) == ""
    assert asked("e3", "m3") == ""
    assert asked("x", "m4", run="another") == "evaluations"
    assert asked("t0 of another", "m0", run="another", training=True) == ""
    assert asked("x", "m3", run="another") == "model-evaluated"
    assert asked("e5", "m5", run="another") == ""


# --- data sets


def test_tasks_of_one_data_set_count_together(asked: Ask) -> None:
    for number in range(4):
        assert asked(f"t{number}", training=True, task=("digits", "digits-by-site")[number % 2]) == ""
    assert asked("t4", training=True) == asked("t4", training=True, task="digits-by-site") == "model-sessions"
    assert asked("t4", training=True, task="mnist") == ""
    assert asked("e0", "m1", task="digits-by-site") == ""
    assert asked("e1", "m1") == "model-evaluated"


def test_an_owner_says_which_tasks_train_on_one_data_set(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(
        '[secure.data_sets]\npatients = ["a", "b"]\nstaff = ["x", "y"]\n'
        '[privacy.cohort]\nnoise = 1.0\nepsilon = 8.0\ntasks = ["b", "c"]\n[privacy.alone]\nnoise = 1.0\nepsilon = 8.0'
    )
    patients, staff = frozenset("abc"), frozenset("xy")
    assert Policy.load(path).data_sets == {**dict.fromkeys("abc", patients), **dict.fromkeys("xy", staff)}


# --- numbers that are shown at READY


def test_a_session_that_shows_numbers_counts_at_ready() -> None:
    scene = limited(disclose=("loss",), sessions_per_model=1)
    scene.unasked = SessionStage.DEAL
    for number, error in enumerate((TooFewUpdatesError, Waiting)):
        chosen = setting(scene, Mode.SUM, disclose=("loss",), nonce=bytes([number]) * 16)
        with pytest.raises(error):
            play(scene, Mode.SUM, setting_=chosen)
    assert scene.declined == {(SessionStage.READY.value, name): "model-sessions" for name in scene.members}


# --- sums of one model


def summing(scene: Cast, nonce: bytes, *, until: SessionStage | None = None) -> Callable[[], Sum]:
    """Holds a session up to a stage; what is given holds the rest."""
    conversation = secure_sum(setting(scene, Mode.SUM, nonce=nonce * 16), equal)
    phase = next(conversation)

    def hold(until: SessionStage | None) -> Any:
        nonlocal phase
        try:
            while phase.kind.name != until:
                phase = conversation.send(scene.ask(phase))
        except StopIteration as end:
            return end.value
        return None

    total = hold(until)
    return lambda: total or hold(None)


def test_of_two_sessions_from_one_model_members_unmask_one_sum() -> None:
    scene = limited()
    first, second = (summing(scene, nonce, until=SessionStage.UNMASK) for nonce in (b"1", b"2"))
    assert not scene.declined
    assert second().record.survivors == tuple(names(range(6)))
    with pytest.raises(TooFewUpdatesError, match="0 of 6 members have sent their shares"):
        first()
    assert scene.declined == {(SessionStage.UNMASK.value, name): "model-sums" for name in scene.members}


def test_after_a_sum_a_session_from_the_same_model_waits_until_owners_raise_the_limit() -> None:
    scene = limited()
    summing(scene, b"1")
    with pytest.raises(Waiting, match=r"the owners may raise the limits in policy\.toml; then resume the run"):
        summing(scene, b"2")
    assert scene.declined == {(SessionStage.READY.value, name): "model-sums" for name in scene.members}
    for member in scene.members.values():
        member.allow(SecurePolicy(assumed=1, sums_per_model=2))
    summing(scene, b"2")
    with pytest.raises(Waiting):
        summing(scene, b"3")


def test_two_sessions_may_be_lost_between_mask_and_unmask_before_the_sum_of_a_model() -> None:
    scene = limited()
    for number in range(2):
        summing(scene, bytes([number]), until=SessionStage.UNMASK)
    assert summing(scene, b"2")().record.survivors == tuple(names(range(6)))
    assert not scene.declined


def test_after_three_sessions_lost_between_mask_and_unmask_the_run_waits_for_the_owners() -> None:
    scene = limited()
    for number in range(3):
        summing(scene, bytes([number]), until=SessionStage.CONFIRM)
    with pytest.raises(Waiting, match=r"the owners may raise the limits in policy\.toml; then resume the run"):
        summing(scene, b"3")
    assert scene.declined == {(SessionStage.READY.value, name): "model-sums" for name in scene.members}
    assert {entry.masked for entry in scene.members[VICTIM].site.counted(ORIGIN.task)} == {True}


def test_of_many_sessions_from_one_model_that_are_ready_members_mask_in_three() -> None:
    scene = limited(sessions_per_model=1000)
    begun = [summing(scene, bytes([number]), until=SessionStage.MASK) for number in range(4)]
    scene.unasked = SessionStage.CONFIRM
    for rest in begun[:3]:
        with pytest.raises(TooFewUpdatesError, match="0 members have confirmed"):
            rest()
    with pytest.raises(TooFewUpdatesError, match="0 of 6 members have sent their masked vectors"):
        begun[3]()
    assert scene.declined == {(SessionStage.MASK.value, name): "model-sums" for name in scene.members}


# --- one model has one name, and all runs count


OTHER_NAMES = (digest(b"model-0", "sha256"), ORIGIN.base_model.upper(), ORIGIN.base_model.replace("blake3:", "BLAKE3:"))


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_a_model_under_a_second_name_is_neither_summed_nor_evaluated_again(name: str) -> None:
    scene = limited()
    summing(scene, b"1")
    assert evaluate(scene, b"e").record.survivors == tuple(names(range(6)))
    scene.base_model = name
    for ask in (lambda: summing(scene, b"2"), lambda: evaluate(scene, b"f")):
        scene.declined.clear()
        with pytest.raises(TooFewUpdatesError, match="0 are ready"):
            ask()
        assert scene.declined == {(SessionStage.READY.value, name): "base-model" for name in scene.members}


FEDCMOO = {"bound": "none", "sketch": "exact", "budget": 1.0, "scope": "all"}
GRADIENTS = Jacobian(sketch="exact", budget=1.0, batch_size=TRAIN.sgd.batch_size, objectives=("loss",))


def gradients_of(scene: Cast, nonce: bytes, without: str = "", work: Work = GRADIENTS) -> Sum:
    """A session of a run of FedCMOO with all members but one: of its gradients, or of its training."""
    ids = next(iter(scene.members.values())).members.key_ids()
    for member in scene.members.values():
        member.gradients = {"loss": member.vector}
    chosen = setting(
        scene,
        Mode.SUM,
        "fedcmoo",
        FEDCMOO,
        clip=1.0,
        work=work,
        nonce=nonce * 16,
        invited=invitation({name: ids[name] for name in scene.members if name != without}),
    )
    total: Sum = held(scene, secure_sum(chosen, equal))
    return total


def test_a_sum_of_all_in_one_run_and_gradients_of_all_but_one_in_another_are_not_both_shown() -> None:
    scene = limited()
    summing(scene, b"1")
    scene.run_id = "another"
    with pytest.raises(Waiting):
        gradients_of(scene, b"2", without=VICTIM)
    declined = {(SessionStage.READY.value, name): "model-sums" for name in scene.members if name != VICTIM}
    assert scene.declined == declined


def test_a_run_whose_algorithm_has_two_phases_gets_a_sum_of_each() -> None:
    scene = limited()
    assert gradients_of(scene, b"1").record.survivors == tuple(names(range(6)))
    assert gradients_of(scene, b"2", work=TRAIN).record.survivors == tuple(names(range(6)))
    with pytest.raises(Waiting):
        gradients_of(scene, b"3")
    with pytest.raises(Waiting):
        gradients_of(scene, b"4", work=TRAIN)


def test_a_member_that_unmasks_again_after_a_crash_counts_one_sum() -> None:
    scene = limited()

    def twice(stage: str, member: Member, work: Work, inputs: Inputs) -> None:
        if stage == SessionStage.UNMASK:
            member.do(work, inputs)

    scene.change = twice
    assert summing(scene, b"1")().record.survivors == tuple(names(range(6)))
    assert [entry.unmasked for entry in scene.members[VICTIM].site.counted(ORIGIN.task)] == [True]


def test_an_evaluation_is_another_kind_of_work_than_the_training_from_its_model() -> None:
    scene = limited()
    summing(scene, b"1")
    assert evaluate(scene, b"e").record.survivors == tuple(names(range(6)))


def test_a_sum_that_was_unmasked_is_known_after_a_restart(tmp_path: Path) -> None:
    scene, victim = limited(), names([2])[0]

    def restarted() -> RoundLedger:
        ledger = RoundLedger(tmp_path / "private-rounds.db")
        scene.members[victim].change_site(ledger=ledger)
        return ledger

    ledger = restarted()
    first, second = (summing(scene, nonce, until=SessionStage.UNMASK) for nonce in (b"1", b"2"))
    first()
    ledger.close()
    ledger = restarted()
    reached = [(entry.masked, entry.unmasked) for entry in ledger.entries({ORIGIN.task})]
    assert sorted(reached) == [(True, False), (True, True)]
    with pytest.raises(TooFewUpdatesError):
        second()
    assert scene.declined[SessionStage.UNMASK.value, victim] == "model-sums"
    with pytest.raises(Waiting):
        summing(scene, b"3")
    assert scene.declined[SessionStage.READY.value, victim] == "model-sums"
    ledger.close()
