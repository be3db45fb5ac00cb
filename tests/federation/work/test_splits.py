"""A coordinator that tells members different things, or asks out of order: no mask is opened, nothing shown twice."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from coordinator.aggregation.phases import AlgorithmPhase, Replies
from federation.secure.payloads import join_envelopes
from federation.secure.thresholds import Mode
from federation.work.base import Work
from federation.work.secure.ready import Ready
from federation.work.secure.sum import Confirm, Unmask
from federation.work.secure.terms import SessionStage
from federation.work.secure.wire import terms_bytes
from tests.federation.work.scene import Cast, Member, cast, names, play
from tests.federation.work.test_refusals import VICTIM, Inputs, Liar, Question, tried
from tests.few import few

M = 9
FIRST = frozenset(names(range(5)))


class Confirmed(Exception):
    """All members have confirmed."""


@dataclass(eq=False)
class Cut(Cast):
    """A session that ends when all members have confirmed what they were told."""

    def ask(self, phase: AlgorithmPhase) -> Replies:
        replies = super().ask(phase)
        if phase.kind.name == SessionStage.CONFIRM:
            assert {reply.client_id for reply in replies} == set(self.members)
            raise Confirmed
        return replies


def told(mode: Mode, tell: Callable[[Member, Confirm], Confirm]) -> dict[str, str]:
    """What each member says to UNMASK after it was told its own version of CONFIRM, with everybody's confirmation."""
    agreed: dict[str, Confirm] = {}

    def change(stage: str, member: Member, work: Work, inputs: Inputs) -> Question:
        if isinstance(work, Confirm):
            work = agreed[member.name] = tell(member, work)
        return work, inputs

    whole = cast(M, assumed=2)
    scene = Cut(whole.members, change=change)
    with pytest.raises(Confirmed):
        play(scene, mode)
    replies = join_envelopes([reply.signed for reply in scene.sent[SessionStage.CONFIRM.value, 0]])
    inputs: Mapping[str, bytes] = {"replies": replies, **({"ciphertexts": b""} if mode is Mode.VERIFIED else {})}
    answers = {}
    for name, member in scene.members.items():
        V = agreed[name].members
        lost = tuple(sorted(set(scene.members) - set(V)))
        tau2 = bytes(32) if mode is Mode.VERIFIED else b""
        work = Unmask(session=agreed[name].session, members=V, lost=lost, tau2=tau2)
        answers[name] = tried(member, (work, inputs))
    return answers


def without(place: int) -> Callable[[Confirm], Confirm]:
    return lambda work: replace(
        work,
        members=work.members[:place] + work.members[place + 1 :],
        masked=work.masked[:place] + work.masked[place + 1 :],
    )


@pytest.mark.parametrize("mode", [Mode.SUM, Mode.PRIVATE])
def test_of_two_lists_of_survivors_nobody_opens_a_mask(mode: Mode) -> None:
    """Some are told that the last member was lost, the others that the first was: both masks of one would be opened."""
    lists = {True: without(M - 1), False: without(0)}
    answers = told(mode, lambda member, work: lists[member.name in FIRST](work) if member.name != VICTIM else work)
    assert set(answers.values()) == {"quorum"}


def test_of_two_challenges_nobody_opens_a_mask() -> None:
    """A second tau1 would give the coordinator a second sketch of the same vectors."""
    other = bytes(range(32))
    answers = told(Mode.VERIFIED, lambda member, work: replace(work, tau1=other) if member.name in FIRST else work)
    assert set(answers.values()) == {"quorum"}


def test_of_one_list_the_same_question_is_answered() -> None:
    assert set(told(Mode.PRIVATE, lambda member, work: work).values()) == {"answers"}


def test_openings_come_in_order_and_there_are_two() -> None:
    liar = Liar(Mode.PRIVATE)

    def opening(opening: int, of_members: Callable[[tuple[str, ...]], tuple[str, ...]]) -> Any:
        def changed(work: Any, inputs: Inputs) -> Question:
            first = liar.questions["secure-open/1"][0]
            members = of_members(first.members)  # type: ignore[attr-defined]
            return replace(first, opening=opening, members=members), {}  # type: ignore[call-arg]

        return changed

    def of_all(members: tuple[str, ...]) -> tuple[str, ...]:
        return members

    fewer = opening(2, lambda members: members[:-1])
    more = opening(2, lambda members: (*members, "silo-99"))
    liar.hears(
        secure_mask__0={
            "a third": ("", opening(3, lambda members: members[:-1])),
            "the second, of all": ("members", opening(2, of_all)),
            "the second, with one more": ("members", more),
            "the second, of fewer": ("answers", fewer),
        },
        secure_confirm__0={
            "a third": ("", opening(3, lambda members: members[:-1])),
            "the second, of all": ("stage", opening(2, of_all)),
            "the second, with one more": ("stage", more),
            "the second, of fewer": ("stage", fewer),
        },
    )


def changed(value: Any) -> Any:
    """Another value of the same type."""
    match value:
        case bytes():
            return value[:-1] + bytes([value[-1] ^ 1]) if value else bytes(32)
        case tuple():
            return (*value[:-1], changed(value[-1])) if value else (VICTIM,)
        case Mode():
            return Mode.PRIVATE if value is Mode.SUM else Mode.SUM
        case str():
            return value + "x"
        case int():
            return value + 1
        case _:
            raise TypeError(value)


@few(Mode.PRIVATE)
@pytest.mark.parametrize("mode", list(Mode))
def test_after_an_answer_every_other_question_of_the_stage_is_refused(mode: Mode) -> None:
    scene = cast(8, assumed=1)
    asked: list[str] = []

    def change(stage: str, member: Member, work: Work, inputs: Inputs) -> Question:
        if member.name != VICTIM:
            return work, inputs
        kept = dict(member.memory.values), dict(member.asked)
        member.do(work, inputs)
        for field in fields(work):
            if isinstance(work, Ready) and field.name in {"agreed", "terms_bytes"}:
                continue
            other = replace(work, **{field.name: changed(getattr(work, field.name))})
            assert tried(member, (other, inputs)) != "answers", (stage, field.name)
            asked.append(f"{stage}: {field.name}")
        if isinstance(work, Ready):
            agreed = replace(work.agreed, nonce=b"another session!")
            other = replace(work, agreed=agreed, terms_bytes=terms_bytes(agreed))
            answer = tried(member, (other, inputs))
            assert answer == "answers"  # another session, which shows nothing of this one
        for name, content in inputs.items():
            middle = len(content) // 2
            damaged = {**inputs, name: content[:middle] + changed(content[middle : middle + 1]) + content[middle + 1 :]}
            assert tried(member, (work, damaged)) != "answers", (stage, name)
            asked.append(f"{stage}: {name}")
        member.memory.values, member.asked = kept
        return work, inputs

    scene.change = change
    play(scene, mode)
    assert len(asked) >= 12
    assert not scene.declined
