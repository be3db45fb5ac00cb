"""A coordinator that wants a sum to show one member: it tells members different things, asks again or out of order."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.aggregation.interface import TooFewUpdatesError
from federation.aggregation.phases import Setting, Voided
from federation.aggregation.secure.phases import ReadyPhase
from federation.digests import digest
from federation.secure import hashing
from federation.secure.payloads import join_envelopes
from federation.secure.thresholds import Mode
from federation.spec.objective_names import joint_target
from federation.spec.run_spec import RunSpec
from federation.spec.sharing import Unshared
from federation.v1.common_pb2 import AssignmentManifest, SignedEnvelope
from federation.v1.secure_pb2 import SecureReadyWork, SecureTerms
from federation.work.base import Origin, Result, Work, WorkError, WorkingClient
from federation.work.evaluate.work import Evaluate
from federation.work.registry import encode
from federation.work.secure import limits
from federation.work.secure.deal import Deal
from federation.work.secure.masking import Confirm, Unmask
from federation.work.secure.ready import SPECIFICATION, Ready
from federation.work.secure.terms import SessionStage
from federation.work.secure.wire import terms_bytes
from federation.work.site import SecurePolicy
from federation.work.train.work import Train
from tests.federation.work.scene import (
    ORIGIN,
    TRAIN,
    VICTIM,
    Cast,
    Inputs,
    Liar,
    Member,
    Question,
    cast,
    names,
    play,
    setting,
    tried,
)
from tests.few import few
from worker.site.assignment_checks import CheckedAssignment
from worker.work.memory import WorkerMemory

M = 9
FIRST = frozenset(names(range(5)))
UNSHARED = Unshared(frozen=("w",))


def ready(made: Setting) -> Ready:
    return Ready(agreed=made.agreed, terms_bytes=made.terms_bytes)


def told(scene: Cast, lines: str = "", **changed: Any) -> Setting:
    """What a member is told, from a specification with these lines; `changed` are fields of the terms."""
    document = b"\n".join([setting(scene, Mode.SUM).specification, lines.encode()])
    spec = RunSpec.parse(document)
    fields: dict[str, Any] = {
        "spec": digest(document),
        "work": Train.of(spec, 0, joint_target(("loss",))),
        "seed": spec.seed,
    }
    agreed = replace(setting(scene, Mode.SUM).agreed, **fields | changed)
    return replace(setting(scene, Mode.SUM), agreed=agreed, terms_bytes=terms_bytes(agreed), specification=document)


def replied(scene: Cast, member: Member, made: Setting) -> bytes:
    """A member's signed reply to READY."""
    agreed, document = made.agreed, made.specification
    phase = ReadyPhase(agreed=agreed, terms_bytes=made.terms_bytes, specification=document, clients=agreed.ids)
    member.origin = Origin(**{item.name: getattr(agreed, item.name) for item in fields(Origin)})
    return scene.reply(member, phase, member.do(ready(made), {SPECIFICATION: document})).signed


@pytest.mark.parametrize(
    ("lines", "changed"),
    [
        ("train.learning_rate = 0.5", {}),
        ("algorithm.prior = 'samples'", {}),
        ("", {"work": replace(TRAIN, measure=False)}),
        ("seed = 1", {}),
        ("parameters.frozen = ['w']", {"unshared": UNSHARED}),
        ("", {"base_model": digest(b"model-1")}),
    ],
    ids=["training", "algorithm", "work", "seed", "unshared", "base_model"],
)
def test_a_member_that_is_told_something_else_of_its_work_is_in_another_session(
    lines: str, changed: Mapping[str, Any]
) -> None:
    scene = cast(5, assumed=1)
    mine, theirs = told(scene), told(scene, lines, **changed)
    others = [member for who, member in scene.members.items() if who != VICTIM]
    victim = scene.members[VICTIM]
    envelopes = [replied(scene, victim, mine), *(replied(scene, member, theirs) for member in others)]
    deal = Deal(session=ready(mine).session, mode=Mode.SUM, members=tuple(scene.members))
    with pytest.raises(WorkError, match="is of another session or phase"):
        victim.do(deal, {"replies": join_envelopes(envelopes)})


def test_every_field_of_the_terms_names_another_session() -> None:
    """READY carries no other work than that in the terms."""
    assert [field.name for field in SecureReadyWork.DESCRIPTOR.fields] == ["terms"]
    made = setting(cast(5, assumed=1), Mode.SUM).agreed
    changed: dict[str, Any] = {
        "nonce": b"1" * 16,
        "federation_id": "other",
        "run_id": "other",
        "round": 1,
        "mode": Mode.VERIFIED,
        "base_model": "other",
        "spec": "other",
        "task": "other",
        "length": 2,
        "clip": 1.0,
        "blur": 0.5,
        "disclose": ("loss",),
        "invited": made.invited[1:],
        "work": Evaluate(splits=("train",)),
        "seed": 1,
        "unshared": UNSHARED,
    }
    kinds = {"train", "jacobian", "evaluate", "statistics"}
    assert set(changed) == {field.name for field in SecureTerms.DESCRIPTOR.fields} - kinds | {"work"}
    terms = [made, *(replace(made, **{name: value}) for name, value in changed.items())]
    assert len({hashing.session(terms_bytes(one)) for one in terms}) == len(changed) + 1


def test_every_field_of_an_assignment_is_in_the_terms_or_shapes_no_vector() -> None:
    in_terms = {"federation_id", "run_id", "round", "base_model", "spec", "task", "seed", "unshared", "work"}
    of_one_member = {"assignment_id", "client_id"}
    follow = {"base_model_bytes", "kind", "rows", "inputs"}  # from the kind, the work and the model
    unread = {"phase", "attempt", "previous_step", "objectives", "members", "submitted_by", "max_payload_bytes"}
    times = {"deadline", "created"}
    fields = {field.name for field in AssignmentManifest.DESCRIPTOR.fields}
    assert fields == in_terms | of_one_member | follow | unread | times


OTHER_ORIGIN: dict[str, Any] = {
    "base_model": digest(b"another model"),
    "task": "two-digits",
    "run_id": "another",
    "seed": 1,
    "spec": digest(b"another specification"),
    "unshared": UNSHARED,
}


@pytest.mark.parametrize("name", OTHER_ORIGIN)
def test_a_later_stage_is_of_the_model_the_task_and_the_run_of_ready(name: str) -> None:
    """Limits and policies go by the names in the assignment of each stage."""

    def change(stage: str, member: Member, work: Work, inputs: Inputs) -> None:
        if stage != SessionStage.READY and member.name == VICTIM:
            member.origin = replace(member.origin, **{name: OTHER_ORIGIN[name]})

    scene = cast(8, assumed=1, change=change)
    total = play(scene, Mode.SUM)
    assert scene.declined == {(SessionStage.DEAL.value, VICTIM): "terms"}
    assert VICTIM not in total.record.members


# --- members that are told different things of one session


def unmasking(mode: Mode, tell: Callable[[Member, Confirm], Confirm]) -> dict[str, str]:
    """What each member says to UNMASK after it was told its own version of CONFIRM, with everybody's confirmation."""
    agreed: dict[str, Confirm] = {}

    def change(stage: str, member: Member, work: Work, inputs: Inputs) -> Question:
        if isinstance(work, Confirm):
            work = agreed[member.name] = tell(member, work)
        return work, inputs

    scene = cast(M, assumed=2, change=change, unasked=SessionStage.UNMASK)
    with pytest.raises((TooFewUpdatesError, Voided)):
        play(scene, mode)
    confirmed = scene.sent[SessionStage.CONFIRM.value, 0]
    assert {reply.client_id for reply in confirmed} == set(scene.members)
    replies = join_envelopes([reply.signed for reply in confirmed])
    inputs = {"replies": replies, **({"ciphertexts": b""} if mode is Mode.VERIFIED else {})}
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
    answers = unmasking(mode, lambda member, work: lists[member.name in FIRST](work) if member.name != VICTIM else work)
    assert set(answers.values()) == {"quorum"}


def test_of_two_challenges_nobody_opens_a_mask() -> None:
    """A second tau1 would give the coordinator a second sketch of the same vectors."""
    other = bytes(range(32))
    answers = unmasking(Mode.VERIFIED, lambda member, work: replace(work, tau1=other) if member.name in FIRST else work)
    assert set(answers.values()) == {"quorum"}


def test_of_one_list_the_same_question_is_answered() -> None:
    assert set(unmasking(Mode.PRIVATE, lambda member, work: work).values()) == {"answers"}


def test_openings_come_in_order_and_there_are_two() -> None:
    liar = Liar(Mode.PRIVATE)

    def opening(opening: int, of_members: Callable[[tuple[str, ...]], tuple[str, ...]]) -> Any:
        def changed(work: Any, inputs: Inputs) -> Question:
            first: Any = liar.questions["secure-open/1"][0]
            return replace(first, opening=opening, members=of_members(first.members)), {}

        return changed

    third, of_all = opening(3, lambda members: members[:-1]), opening(2, lambda members: members)
    fewer, more = opening(2, lambda members: members[:-1]), opening(2, lambda members: (*members, "silo-99"))
    liar.hears(
        secure_mask__0={
            "a third": ("", third),
            "the second, of all": ("members", of_all),
            "the second, with one more": ("members", more),
            "the second, of fewer": ("answers", fewer),
        },
        secure_confirm__0={
            "a third": ("", third),
            "the second, of all": ("stage", of_all),
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
    asked: list[str] = []

    def change(stage: str, member: Member, work: Work, inputs: Inputs) -> None:
        if member.name != VICTIM:
            return
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
            # another session, which shows nothing of this one
            assert tried(member, (other, inputs)) == "answers"
        for name, content in inputs.items():
            middle = len(content) // 2
            damaged = {**inputs, name: content[:middle] + changed(content[middle : middle + 1]) + content[middle + 1 :]}
            assert tried(member, (work, damaged)) != "answers", (stage, name)
            asked.append(f"{stage}: {name}")
        member.memory.values, member.asked = kept

    scene = cast(8, assumed=1, change=change)
    play(scene, mode)
    assert len(asked) >= 12
    assert not scene.declined


# --- a session that is asked again


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[WorkerMemory]:
    made = WorkerMemory(tmp_path / "memory.db", Ed25519PrivateKey.generate())
    yield made
    made.close()


def test_a_session_that_is_asked_again_in_another_attempt_is_over(memory: WorkerMemory) -> None:
    scene = cast(5, assumed=1)
    victim = scene.members[VICTIM]
    policy = SecurePolicy(assumed=1, sessions=1, sessions_per_model=1)
    site = replace(victim.site, new_secret=None, policies={ORIGIN.task: policy})
    work, keys, reasons = ready(setting(scene, Mode.SUM)), [], []
    for attempt in range(3):
        manifest = AssignmentManifest(
            run_id="run", attempt=attempt, kind=work.name, base_model=ORIGIN.base_model, work=encode(work)
        )
        deadline = datetime.now(UTC) + timedelta(hours=1)
        order = CheckedAssignment(SignedEnvelope(), manifest, work, victim.shape, (), deadline)
        client = WorkingClient(
            client_id=VICTIM,
            round=0,
            attempt=attempt,
            shape=victim.shape,
            memory=memory.begin(order),
            origin=scene.origin,
            site=site,
            inputs={SPECIFICATION: scene.specification},
            again=memory.answered(order),
        )
        try:
            work.computation(client)
        except WorkError as error:
            reasons.append(error.reason)
            continue
        memory.answer(order)
        keys.append(work.answer(client, Result({"loss": victim.vector}, {}, {}, 100)).statement.keys)
        limits.check_sessions(client, work.session.hex(), work="train", count=True)  # as MASK does
    assert (len(keys), reasons) == (1, ["session-over"] * 2)
