"""An outsider verifies the step of a private round, and finds each thing that was edited."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from secure_cast import cast, context, round_of

from coordinator.aggregation.phases import Reply, Step, Waiting
from coordinator.aggregation.registry import algorithm
from coordinator.aggregation.rules import TooFewUpdatesError
from coordinator.aggregation.secure.verify import SecureEvidence, Unverified, verify_secure_step
from federation.secure.thresholds import Mode
from federation.work.secure.terms import Stage
from federation.work.secure.wire import read_terms


def evidence(step: Step) -> SecureEvidence:
    """What is on record of a step."""
    assert step.private is not None
    assert step.combined is not None
    return SecureEvidence(
        record=step.private,
        agreed=read_terms(step.private.terms),
        replies=(*step.consulted, *step.replies),
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


@pytest.mark.parametrize(("mode", "name"), RULES)
def test_the_step_of_a_rule_is_near_the_open_one_and_is_verified(mode: Mode, name: str) -> None:
    scene = cast(9, d=300, assumed=1, lost={(Stage.MASK.value, 0): ["silo-04"]} if mode is Mode.PRIVATE else {})
    step = round_of(scene, mode, name)
    assert step.combined is not None
    again = verify_secure_step(algorithm(name), context(scene, mode), evidence(step), scene.members["silo-00"].shape)
    assert again.combination.weights.tolist() == step.combination.weights.tolist()
    U = np.stack([member.vector / np.linalg.norm(member.vector) for member in scene.members.values()])
    mean = U.mean(axis=0)
    assert float(step.combined @ mean / np.linalg.norm(step.combined) / np.linalg.norm(mean)) > 0.9
    assert abs(step.combination.weights.sum() - 1) < 1e-9
    assert len(step.replies) == len(step.combination.weights)


Edit = Callable[[SecureEvidence], SecureEvidence]


def reply_of(stage: Stage, attempt: int = 0, **fields: Any) -> Edit:
    """Another first reply to a stage."""

    def edited(found: SecureEvidence) -> SecureEvidence:
        replies = list(found.replies)
        place = next(
            i for i, one in enumerate(replies) if (one.statement.stage, one.statement.attempt) == (stage, attempt)
        )
        one: Reply = replies[place]
        if "rows" in fields:
            row = one.rows[0].copy()  # type: ignore[union-attr]
            row[3] ^= 1  # type: ignore[index]
            replies[place] = replace(one, rows=(row,))
        else:
            replies[place] = replace(one, statement=replace(one.statement, **fields))
        return replace(found, replies=replies)

    return edited


def record(**fields: Any) -> Edit:
    return lambda found: replace(found, record=replace(found.record, **fields))


def of_record(function: Callable[[Any], dict[str, Any]]) -> Edit:
    return lambda found: replace(found, record=replace(found.record, **function(found.record)))


def without(stage: Stage) -> Edit:
    """Without the first reply to a stage."""

    def edited(found: SecureEvidence) -> SecureEvidence:
        gone = next(one for one in found.replies if one.statement.stage is stage)
        return replace(found, replies=[one for one in found.replies if one is not gone])

    return edited


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (reply_of(Stage.OPEN, 1, rows=True), "payload of silo-00 at secure-open has another digest"),
        (reply_of(Stage.UNMASK, rows=True), "payload of silo-00 at secure-unmask has another digest"),
        (reply_of(Stage.MASK, rows=True), "payload of silo-00 at secure-mask has another digest"),
        (reply_of(Stage.READY, keys=bytes(64)), "was not asked|make no step"),
        (reply_of(Stage.DEAL, commitment=bytes(32)), "make no step"),
        (reply_of(Stage.CONFIRM, view=bytes(32)), "make no step"),
        (of_record(lambda one: {"coefficients": (one.coefficients[0] + 1, *one.coefficients[1:])}), "the coefficients"),
        (of_record(lambda one: {"members": one.members[1:]}), "the members"),
        (of_record(lambda one: {"survivors": one.survivors[1:]}), "the survivors"),
        (of_record(lambda one: {"ready": one.ready[1:]}), "the ready"),
        (record(terms=b"other terms"), "make no step"),
        (record(tau2=bytes(32)), "make no step"),
        (without(Stage.MASK), "silo-00 replied to secure-confirm, and was not asked"),
        (without(Stage.OPEN), "silo-00 replied to secure-open, and was not asked"),
        (lambda found: replace(found, combined=found.combined * np.float32(1.001)), "the sum"),
        (lambda found: replace(found, weights=found.weights[::-1]), "the weights"),  # type: ignore[index]
    ],
)
def test_what_was_edited_is_named(edit: Edit, named: str) -> None:
    scene = cast(9, assumed=1)
    found = evidence(round_of(scene, Mode.VERIFIED, "fedmgda+"))
    with pytest.raises(Unverified, match=named):
        verify_secure_step(
            algorithm("fedmgda+"), context(scene, Mode.VERIFIED), edit(found), scene.members["silo-00"].shape
        )


def test_members_that_were_named_are_not_invited_and_groups_are_left_out_after_blind_failures() -> None:
    scene = cast(13, assumed=1)
    step = round_of(scene, Mode.SUM, "fedavg-n", named=frozenset({"silo-02"}))
    assert step.private is not None
    assert "silo-02" not in step.private.ready
    left_out: list[set[str]] = []
    for blind in range(1, 6):
        try:
            step = round_of(scene, Mode.SUM, "fedavg-n", blind=blind)
        except Waiting:
            break
        assert step.private is not None
        left_out.append(set(scene.members) - set(step.private.ready))
    assert set().union(*left_out) == set(scene.members)
    assert sum(map(len, left_out)) == len(scene.members)
    with pytest.raises(Waiting, match="revoke them, and resume the run"):
        round_of(scene, Mode.SUM, "fedavg-n", blind=len(left_out) + 1)


def test_too_few_members_skip_the_round() -> None:
    scene = cast(13)
    with pytest.raises(TooFewUpdatesError, match="needs 10"):
        round_of(scene, Mode.PRIVATE, "fedmgda+", named=frozenset(list(scene.members)[:4]))
