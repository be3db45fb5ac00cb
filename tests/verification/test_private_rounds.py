"""An outsider verifies the step of a private round, and finds each thing that was edited."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from federation.aggregation.base import Rule, conclude
from federation.aggregation.interface import Combination, Rows, TooFewUpdatesError
from federation.aggregation.phases import PhaseReply, RoundContext, Selected, Step, Waiting
from federation.aggregation.registry import algorithm
from federation.aggregation.rules.fedmgda import FedMGDAPlus
from federation.aggregation.secure import repetition
from federation.aggregation.secure.evaluation import Means, evaluation
from federation.aggregation.secure.private_rule import invited
from federation.secure.thresholds import Mode
from federation.spec.sharing import Unshared
from federation.v1.common_pb2 import SignedEnvelope, StepManifest
from federation.work.evaluate.work import Evaluate
from federation.work.secure.terms import SessionStage
from fedpareto.simulation.simulate import Simulation
from storage.models import Round
from tests.federation.work.scene import TRAIN, Cast, cast, context, document, held, round_of
from tests.few import few


def evidence(scene: Cast, step: Step) -> repetition.SecureEvidence:
    """What is on record of a step."""
    assert step.combined is not None
    return repetition.SecureEvidence(
        sessions=step.sessions,
        replies=(*step.consulted, *step.replies),
        asked=scene.asked,
        combined=step.combined,
        weights=step.combination.weights,
    )


RULES = [
    (Mode.SUM, "fedavg-n"),
    (Mode.PRIVATE, "fedmgda+"),
    (Mode.PRIVATE, "fedmgda"),
    (Mode.PRIVATE, "fedmgda+auto"),
    (Mode.PRIVATE, "dual-cone"),
    (Mode.PRIVATE, "geometric-median"),
    (Mode.PRIVATE, "centred-clipping"),
    (Mode.VERIFIED, "fedmgda+"),
]


@pytest.mark.parametrize(
    ("mode", "name"), [*RULES[:2], *(pytest.param(*rule, marks=pytest.mark.full) for rule in RULES[2:])]
)
def test_the_step_of_a_rule_is_near_the_open_one_and_is_verified(mode: Mode, name: str) -> None:
    scene = cast(9, d=300, assumed=1, lost={(SessionStage.MASK.value, 0): ["silo-04"]} if mode is Mode.PRIVATE else {})
    step = round_of(scene, mode, name)
    assert step.combined is not None
    again = repetition.verify_secure_step(algorithm(name), scene.spec, context(scene, mode), evidence(scene, step))
    assert again.combination.weights.tolist() == step.combination.weights.tolist()
    mean = scene.units.mean(axis=0)
    assert float(step.combined @ mean / np.linalg.norm(step.combined) / np.linalg.norm(mean)) > 0.9
    assert abs(step.combination.weights.sum() - 1) < 1e-9
    assert len(step.replies) == len(step.combination.weights)


Edit = Callable[[repetition.SecureEvidence], repetition.SecureEvidence]
READY, DEAL, OPEN, MASK, CONFIRM, UNMASK = SessionStage


def reply_of(stage: SessionStage, opening: int = 0, session: int = 0, **fields: Any) -> Edit:
    """Another first reply to a stage of a session."""

    def edited(found: repetition.SecureEvidence) -> repetition.SecureEvidence:
        replies = list(found.replies)
        place = next(i for i, one in enumerate(replies) if _is(one, found, stage, opening, session))
        one: PhaseReply = replies[place]
        if "rows" in fields:
            row = one.rows[0].copy()  # type: ignore[union-attr]
            row[3] ^= 1
            replies[place] = replace(one, rows=(row,))
        elif "losses" in fields:
            replies[place] = replace(one, losses=fields["losses"])
        else:
            replies[place] = replace(one, statement=replace(one.statement, **fields))
        return replace(found, replies=replies)

    return edited


def _is(reply: PhaseReply, found: repetition.SecureEvidence, stage: SessionStage, opening: int, session: int) -> bool:
    said = reply.statement
    return (said.session, said.stage, said.opening) == (found.sessions[session].session, stage, opening)


def of_record(function: Callable[[Any], dict[str, Any]], place: int = 0) -> Edit:
    """Other fields of what the step says of a session."""

    def edited(found: repetition.SecureEvidence) -> repetition.SecureEvidence:
        sessions = list(found.sessions)
        sessions[place] = replace(sessions[place], **function(sessions[place]))
        return replace(found, sessions=sessions)

    return edited


def record(place: int = 0, **fields: Any) -> Edit:
    return of_record(lambda _: fields, place)


def terms(**fields: Any) -> Edit:
    return of_record(lambda one: {"agreed": replace(one.agreed, **fields)})


def without(stage: SessionStage, session: int = 0) -> Edit:
    """Without the first reply to a stage."""

    def edited(found: repetition.SecureEvidence) -> repetition.SecureEvidence:
        gone = next(one for one in found.replies if _is(one, found, stage, one.statement.opening, session))
        return replace(found, replies=[one for one in found.replies if one is not gone])

    return edited


def foreign(found: repetition.SecureEvidence) -> repetition.SecureEvidence:
    """With a reply of another session."""
    one = found.replies[0]
    stranger = replace(one, envelope="other", statement=replace(one.statement, session=bytes(32)))
    return replace(found, replies=[*found.replies, stranger])


def serving_others(found: repetition.SecureEvidence) -> repetition.SecureEvidence:
    """With clients that were told of other objectives than those of the work."""
    return replace(found, replies=[replace(one, objectives=("other",)) for one in found.replies])


LISTS: list[tuple[Edit, str]] = [
    (of_record(lambda one: {"members": one.members[1:]}), "the members"),
    (of_record(lambda one: {"ready": one.ready[1:]}), "the ready"),
    (record(session=bytes(32)), "the session"),
    (record(purpose="other"), "the record has 0 sessions for 'train'"),
    (record(terms=b"other terms"), "nothing follows"),
    (terms(base_model="another"), "for 'train' have another base_model"),
    (terms(clip=2.0), "for 'train' have another clip"),
    (terms(blur=0.5), "for 'train' have another blur"),
    (terms(seed=1), "for 'train' have another seed"),
    (terms(unshared=Unshared(frozen=("w",))), "for 'train' have another unshared"),
    (terms(work=replace(TRAIN, measure=not TRAIN.measure)), "for 'train' have another work"),
    (lambda found: replace(found, sessions=[]), "names no session"),
    (lambda found: replace(found, sessions=[*found.sessions] * 2), "the record has 2 sessions for 'train'"),
    (foreign, "a reply of silo-00 at secure-(ready|deal) entered no session"),
    (lambda found: replace(found, combined=found.combined + np.float32(1e-3)), "the sum"),
    (lambda found: replace(found, weights=found.weights[::-1] * np.arange(len(found.weights))), "the weights"),  # type: ignore[index,arg-type]
]
SUMMED: list[tuple[Edit, str]] = [
    (serving_others, "nothing follows"),
    *LISTS,
    (reply_of(UNMASK, rows=True), "payload of silo-00 at secure-unmask has another digest"),
    (reply_of(MASK, rows=True), "payload of silo-00 at secure-mask has another digest"),
    (reply_of(READY, keys=bytes(64)), "was not asked|nothing follows"),
    (reply_of(DEAL, commitment=bytes(32)), "nothing follows"),
    (reply_of(CONFIRM, view=bytes(32)), "nothing follows|entered no session"),
    (of_record(lambda one: {"coefficients": (one.coefficients[0] - 1, *one.coefficients[1:])}), "nothing follows"),
    (of_record(lambda one: {"coefficients": one.coefficients[::-1]}), "another direction"),
    (of_record(lambda one: {"survivors": one.survivors[1:]}), "the survivors"),
    (without(MASK), "silo-00 replied to secure-confirm, and was not asked|nothing follows .* members that were lost"),
    (without(OPEN), "silo-00 replied to secure-(open|mask), and was not asked"),
]
OPENED: list[tuple[Edit, str]] = [
    (reply_of(OPEN, 1, rows=True), "payload of silo-00 at secure-open has another digest"),
    (reply_of(OPEN, view=bytes(32)), "was not asked|nothing follows"),
]


@cache
def verified_round() -> tuple[RoundContext, repetition.SecureEvidence]:
    scene = cast(9, assumed=1)
    found = evidence(scene, round_of(scene, Mode.VERIFIED, "fedmgda+"))
    return context(scene, Mode.VERIFIED), found


@pytest.mark.parametrize(("edit", "named"), [*SUMMED, *OPENED, (record(tau2=bytes(32)), "nothing follows")])
def test_what_was_edited_is_named(edit: Edit, named: str) -> None:
    around, found = verified_round()
    assert around.private is not None
    with pytest.raises(repetition.UnverifiedSession, match=named):
        repetition.verify_secure_step(algorithm("fedmgda+"), around.private.spec, around, edit(found))


def test_a_member_that_was_invited_with_another_key_is_named() -> None:
    scene = cast(9, assumed=1)
    found, around = evidence(scene, round_of(scene, Mode.SUM, "fedavg-n")), context(scene, Mode.SUM)
    assert around.private is not None
    strange = replace(around.private, keys={**around.private.keys, "silo-03": bytes(32)})
    with pytest.raises(repetition.UnverifiedSession, match="silo-03 was invited with a key that is not its own"):
        repetition.verify_secure_step(algorithm("fedavg-n"), scene.spec, replace(around, private=strange), found)


@dataclass(frozen=True, kw_only=True)
class Standstill(Rule):
    """A rule over the Gram matrix that takes no step."""

    private = "gram"

    def combine(self, rows: Rows) -> Combination:
        return conclude(rows.gram, np.zeros(len(rows.prior)), rows.prior)


def test_a_stationary_round_signs_a_session_without_a_sum_and_each_edit_is_named() -> None:
    rule, scene = Standstill(), cast(8, assumed=1, specification=document(Mode.PRIVATE))
    step: Step = held(scene, rule.round(context(scene, Mode.PRIVATE)))
    (session,) = step.sessions
    assert step.combination.diagnostics["stationary"] == 1.0
    assert (session.survivors, session.coefficients, session.members) == ((), (), tuple(scene.members))
    assert not any(phase.kind.name == MASK for phase in scene.phases)
    repetition.verify_secure_step(rule, scene.spec, context(scene, Mode.PRIVATE), evidence(scene, step))
    edits: list[tuple[Edit, str]] = [
        *LISTS,
        *OPENED,
        (record(coefficients=(1,) * 8), "the coefficients"),
        (record(survivors=session.members), "the survivors"),
        (without(DEAL), "silo-00 replied to secure-open, and was not asked"),
    ]
    for edit, named in edits:
        with pytest.raises(repetition.UnverifiedSession, match=named):
            repetition.verify_secure_step(rule, scene.spec, context(scene, Mode.PRIVATE), edit(evidence(scene, step)))


STILL = """
from dataclasses import dataclass

import numpy as np

import fedpareto
from federation.aggregation.base import conclude


@dataclass(frozen=True, kw_only=True)
class Still(fedpareto.Rule):
    private = "sum"

    def combine(self, rows):
        return conclude(rows.gram, np.zeros(len(rows.prior)), rows.prior)
"""


def test_the_step_of_a_stationary_round_names_its_session_on_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "still.py").write_text(STILL)
    monkeypatch.syspath_prepend(tmp_path)
    text = 'name = "still"\ntask = "digits"\nrounds = 1\nalgorithm.name = "still:Still"\nprivacy.secure = "sum"\n'
    text += "simulation.clients = 5\ntrain = { steps = 1, batch_size = 20 }\nevaluate.every = 0\n"
    with Simulation(text.encode(), tmp_path / "home") as simulation:
        simulation.run()
        with simulation._database.read() as session:
            row = session.scalars(select(Round)).one()
    assert row.reason == "stationary"
    step = StepManifest.FromString(SignedEnvelope.FromString(row.step or b"").manifest)
    assert step.result_model == step.base_model
    assert [(len(one.members), len(one.survivors), len(one.coefficients)) for one in step.secure] == [(5, 0, 0)]
    assert len(step.replies) == 5
    assert not set(step.replies) & set(step.consulted)


def test_a_round_that_could_move_is_not_verified_as_stationary() -> None:
    scene = cast(9, assumed=1)
    step = round_of(scene, Mode.PRIVATE, "fedmgda+")
    replies = [one for one in step.consulted if one.statement.stage in (READY, DEAL, OPEN)]
    still = replace(
        of_record(lambda _: {"coefficients": (), "survivors": ()})(evidence(scene, step)),
        replies=replies,
        combined=np.zeros_like(step.combined),
        weights=None,
    )
    with pytest.raises(repetition.UnverifiedSession, match="another direction than the rule"):
        repetition.verify_secure_step(FedMGDAPlus(), scene.spec, context(scene, Mode.PRIVATE), still)


def with_objectives() -> Cast:
    """Eight members with two objectives, whose losses they know."""
    scene = cast(8, assumed=1)
    rng = np.random.default_rng(7)
    for member in scene.members.values():
        noise = rng.standard_normal((2, len(member.vector))).astype(np.float32)
        member.gradients = {"a": member.vector + noise[0], "b": 2 * noise[1] - member.vector}
        member.losses = {"a": 1.0, "b": 0.9, "loss": 0.95}
    return scene


FEDCMOO = {"bound": "none", "scope": "all", "sketch": "count", "budget": 0.5}
OBJECTIVES: list[tuple[str, Mapping[str, Any], list[str], tuple[str, ...]]] = [
    ("fsmgda", {"bound": "none"}, ["train"], ()),
    ("fedcmoo", FEDCMOO, ["jacobian", "train"], ()),
    ("fedcmoo-pref", FEDCMOO | {"sketch": "exact", "budget": 1.0}, ["jacobian", "train"], ("loss",)),
]


@few("fsmgda", "fedcmoo")
@pytest.mark.parametrize(("name", "values", "purposes", "disclose"), OBJECTIVES)
def test_every_session_of_a_rule_over_objectives_is_signed_and_each_edit_is_named(
    name: str, values: Mapping[str, Any], purposes: list[str], disclose: tuple[str, ...]
) -> None:
    scene, rule = with_objectives(), algorithm(name, values)
    scene.specification = document(Mode.SUM, name, values, clip=100.0, disclose=disclose)

    def around(**changed: Any) -> RoundContext:
        return context(scene, Mode.SUM, **changed)

    step: Step = held(scene, rule.round(around()))
    assert [session.purpose for session in step.sessions] == purposes
    again = repetition.verify_secure_step(rule, scene.spec, around(), evidence(scene, step))
    objectives, expected = again.combination.objectives, step.combination.objectives
    assert objectives is not None
    assert expected is not None
    assert objectives.weights.tolist() == expected.weights.tolist()
    assert 0 < objectives.weights[0] < 1
    last = len(purposes) - 1
    edits = [
        (reply_of(MASK, session=0, rows=True), "payload of silo-00 at secure-mask has another digest"),
        (reply_of(UNMASK, session=0, rows=True), "payload of silo-00 at secure-unmask has another digest"),
        (reply_of(READY, session=0, keys=bytes(64)), "was not asked|nothing follows"),
        (record(0, purpose="other"), f"the record has 0 sessions for '{purposes[0]}'"),
        (terms(length=7), f"for '{purposes[0]}' have another length"),
        (record(0, coefficients=(1,) * 8), "another direction than the rule"),
        (of_record(lambda one: {"survivors": one.survivors[1:]}), f"the survivors of the session for '{purposes[0]}'"),
        (of_record(lambda one: {"members": one.members[1:]}, last), "the members of the session for 'train'"),
        (reply_of(MASK, session=last, rows=True), "payload of silo-00 at secure-mask has another digest"),
        (without(CONFIRM, last), "silo-00 replied to secure-unmask, and was not asked"),
        (lambda found: replace(found, combined=found.combined * np.float32(1.001)), "the sum"),
        (lambda found: replace(found, weights=found.weights * [1.1, *[1.0] * 7]), "the weights"),
    ]
    if last:
        edits += [
            (lambda found: replace(found, sessions=found.sessions[1:]), "the record has 0 sessions for 'jacobian'"),
            (lambda found: replace(found, sessions=found.sessions[::-1]), "the session of the session for 'jacobian'"),
        ]
    if disclose:
        edits.append(
            (reply_of(READY, session=0, losses={"a": 1.0, "b": 9.0}), "for .step. have another work than the round")
        )
    for edit, named in edits:
        with pytest.raises(repetition.UnverifiedSession, match=named):
            repetition.verify_secure_step(rule, scene.spec, around(), edit(evidence(scene, step)))


def test_an_evaluation_is_verified_from_its_replies() -> None:
    scene = cast(8, assumed=1)
    for place, member in enumerate(scene.members.values()):
        member.metrics = {"test/loss": 0.1 * place, "test/accuracy": 0.5, "test/samples": 10.0}
    around, spec = context(scene, Mode.SUM), scene.spec
    wanted = Evaluate(splits=spec.evaluated)
    means = held(scene, evaluation(around, wanted, tuple(scene.members)))
    replies = [reply for part in scene.sent.values() for reply in part]

    def verified(replies: Sequence[PhaseReply] = replies, **changed: Any) -> Means:
        given = {"spec": spec, "wanted": wanted, "context": around, "asked": scene.asked, **changed}
        return repetition.verify_evaluation(replies=replies, **given)

    assert verified() == means
    assert abs(means.metrics["test/loss"] - 0.35) < 5 * 10 * means.noise

    def other_metrics(reply: PhaseReply) -> PhaseReply:
        row = reply.rows[0].copy()  # type: ignore[union-attr]
        row[0] ^= 1
        return replace(reply, rows=(row,))

    with pytest.raises(repetition.UnverifiedSession, match="payload of silo-00 at secure-mask has another digest"):
        verified([other_metrics(one) if one.statement.stage is MASK else one for one in replies])
    with pytest.raises(repetition.UnverifiedSession, match="have sent their masked vectors"):
        verified([one for one in replies if one.statement.stage is not MASK])
    with pytest.raises(repetition.UnverifiedSession, match="another length than the round"):
        verified(wanted=Evaluate(splits=("train", "test")))
    assert around.private is not None
    of_other = replace(around.private, origin=replace(around.private.origin, base_model="other"))
    with pytest.raises(repetition.UnverifiedSession, match="another base_model than the round"):
        verified(context=replace(around, private=of_other))
    with pytest.raises(repetition.UnverifiedSession, match="not on record"):
        verified(asked={})


def test_members_that_were_named_are_not_invited_and_groups_are_left_out_after_blind_failures() -> None:
    scene = cast(13, assumed=1)
    step = round_of(scene, Mode.SUM, "fedavg-n", named=frozenset({"silo-02"}))
    assert "silo-02" not in step.sessions[0].ready
    left_out: list[set[str]] = []
    for blind in range(1, 6):
        try:
            step = round_of(scene, Mode.SUM, "fedavg-n", blind=blind)
        except Waiting:
            break
        left_out.append(set(scene.members) - set(step.sessions[0].ready))
    assert set().union(*left_out) == set(scene.members)
    assert sum(map(len, left_out)) == len(scene.members)
    with pytest.raises(Waiting, match="revoke them, and resume the run"):
        round_of(scene, Mode.SUM, "fedavg-n", blind=len(left_out) + 1)


def test_of_more_members_than_a_session_takes_each_round_draws_others() -> None:
    around = context(cast(5), Mode.SUM)
    assert around.private is not None
    everybody = [f"silo-{place:03}" for place in range(130)]
    private = replace(around.private, keys=dict.fromkeys(everybody, bytes(32)))
    selected = dict.fromkeys(everybody, Selected(10, around.objectives))
    rounds = [invited(replace(around, number=number, selected=selected), private) for number in range(9)]
    assert {len(one) for one in rounds} == {100}
    assert all(list(one) == sorted(set(one)) for one in rounds)
    assert set().union(*rounds) == set(everybody)
    assert rounds[0] == invited(replace(around, number=0, selected=selected), private)
    again = invited(replace(around, selected=selected), replace(private, blind=1))
    assert (len(again), set(again) < set(rounds[0])) == (97, True)
    few = replace(around, selected=selected | {"silo-000": Selected(10, ("another",))})
    assert "silo-000" not in {name for number in range(9) for name in invited(replace(few, number=number), private)}


def test_too_few_members_skip_the_round() -> None:
    scene = cast(13)
    with pytest.raises(TooFewUpdatesError, match="needs 10"):
        round_of(scene, Mode.PRIVATE, "fedmgda+", named=frozenset(list(scene.members)[:4]))
