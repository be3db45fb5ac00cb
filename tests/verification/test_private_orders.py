"""What members of private rounds should have refused is found on record, in voided attempts too."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from federation.aggregation.phases import Asked, Voided
from federation.record.bound_fields import repeated
from federation.record.bundle import BundleReader
from federation.record.exchange import Opened, OpenedAnswer, OpenedExchange
from federation.record.rounds import OpenedPhase, OpenedRound
from federation.secure.thresholds import ONE, Mode
from federation.spec.run_spec import RunSpec
from federation.v1.common_pb2 import AssignmentManifest, ReceiptManifest, ReplyManifest, SignedEnvelope
from federation.v1.secure_pb2 import SecureConfirmWork, SecureDealWork, SecureMaskWork, SecureReadyWork
from federation.work.registry import encode
from federation.work.secure.orders import Owner, asked_coefficients, order_problems, session_of
from federation.work.secure.terms import SessionStage
from tests.federation.work.scene import Cast, cast, document, play
from tests.verification.record_vectors import vector
from verification.assignments import check_answered
from verification.errors import VerificationError
from verification.run import OpenedRun

VICTIM = "silo-03"
Message = SecureMaskWork | SecureConfirmWork | SecureDealWork
ORIGIN = ("federation_id", "run_id", "task", "spec", "base_model", "seed")
OnRecord = tuple[RunSpec, list[AssignmentManifest], list[ReplyManifest]]
MESSAGES: dict[SessionStage, Any] = {
    SessionStage.MASK: SecureMaskWork,
    SessionStage.CONFIRM: SecureConfirmWork,
    SessionStage.DEAL: SecureDealWork,
}


def recorded(scene: Cast) -> tuple[list[AssignmentManifest], list[ReplyManifest]]:
    """The assignments and the replies of a session."""
    orders = [
        AssignmentManifest(
            **repeated(scene.origin, ORIGIN),
            objectives=["loss"],
            client_id=name,
            phase=number,
            kind=phase.kind.name,
            work=encode(phase.work(Asked(name, ("loss",), scene.spec, 0))),
        )
        for number, phase in enumerate(scene.phases)
        for name in phase.clients or ()
    ]
    envelopes = (reply.signed for replies in scene.sent.values() for reply in replies)
    replies = [ReplyManifest.FromString(SignedEnvelope.FromString(data).manifest) for data in envelopes]
    return orders, replies


@pytest.fixture(scope="module")
def record() -> OnRecord:
    scene = cast(10, assumed=1)
    play(scene, Mode.SUM)
    return scene.spec, *recorded(scene)


def edited(
    orders: list[AssignmentManifest], stage: SessionStage, edit: Callable[[Message], None], only: str = ""
) -> list[AssignmentManifest]:
    """The assignments with the work of one stage edited, for all members or for one."""
    made = []
    for order in orders:
        copy = AssignmentManifest.FromString(order.SerializeToString())
        if order.kind == stage and only in ("", order.client_id):
            message = MESSAGES[stage].FromString(order.work)
            edit(message)
            copy.work = message.SerializeToString(deterministic=True)
        made.append(copy)
    return made


def alone(message: Message) -> None:
    """One member's coefficient is 2^11, and all others are 0."""
    assert isinstance(message, SecureMaskWork)
    message.coefficients[:] = [2**11 if name == VICTIM else 0 for name in message.members]


def heavy(message: Message) -> None:
    assert isinstance(message, SecureMaskWork)
    rest = ONE // 2 // (len(message.members) - 1)
    message.coefficients[:] = [ONE // 2 if name == VICTIM else rest for name in message.members]


def without(count: int) -> Callable[[Message], None]:
    def left(message: Message) -> None:
        assert isinstance(message, SecureConfirmWork)
        del message.members[:count]

    return left


def shorter(message: Message) -> None:
    assert isinstance(message, SecureDealWork)
    del message.members[:1]


def test_an_honest_session_gives_no_problem(record: OnRecord) -> None:
    assert not list(order_problems(*record))
    assert not list(order_problems(*record, Owner("silo-00", 7.0)))
    assert list(order_problems(*record, Owner("silo-00", 7.5))), "ten equal coefficients without three colluders"


@pytest.mark.parametrize(
    ("stage", "edit", "only", "words"),
    [
        (SessionStage.MASK, alone, "", "add up to"),
        (SessionStage.MASK, heavy, "", "too large a part"),
        (SessionStage.MASK, heavy, VICTIM, "2 different lists of coefficients"),
        (SessionStage.CONFIRM, without(6), "", "too large a part"),
        (SessionStage.CONFIRM, without(1), VICTIM, "2 different lists of members whose vectors arrived"),
        (SessionStage.DEAL, shorter, VICTIM, "2 different cohorts"),
    ],
)
def test_what_members_should_have_refused_is_named(
    record: OnRecord,
    stage: SessionStage,
    edit: Callable[[Message], None],
    only: str,
    words: str,
) -> None:
    spec, orders, replies = record
    assert words in "\n".join(order_problems(spec, edited(orders, stage, edit, only), replies))


def test_coefficients_that_the_algorithm_cannot_give_are_named(record: OnRecord) -> None:
    _, orders, replies = record
    spec = RunSpec.parse(document(Mode.SUM, "fedavg-n"))
    assert not list(order_problems(spec, orders, replies))
    for key in ("blur", "clip"):
        keys: dict[str, Any] = {key: 2.0}
        other = RunSpec.parse(document(Mode.SUM, "fedavg-n", **keys))
        assert f"another {key}" in "\n".join(order_problems(other, orders, replies))
    longer = RunSpec.parse(document(Mode.SUM, "fedavg-n").replace(b"train.steps = 1", b"train.steps = 2"))
    assert "another work.sgd" in "\n".join(order_problems(longer, orders, replies))

    def shifted(message: Message) -> None:
        assert isinstance(message, SecureMaskWork)
        message.coefficients[0] += 2
        message.coefficients[1] -= 2

    assert "silo-00" in "\n".join(order_problems(spec, edited(orders, SessionStage.MASK, shifted), replies))


def test_a_session_without_what_comes_before_its_masks_is_named(record: OnRecord) -> None:
    spec, orders, replies = record
    for stage in (SessionStage.READY, SessionStage.DEAL):
        rest = [order for order in orders if order.kind != stage]
        assert "not for what comes before" in "\n".join(order_problems(spec, rest, replies))
    silent = [reply for reply in replies if reply.client_id != VICTIM]
    assert f"{VICTIM} has a coefficient, and no accepted reply" in "\n".join(order_problems(spec, orders, silent))


def test_work_that_is_no_message_is_named_and_harms_nothing_else(record: OnRecord) -> None:
    spec, orders, replies = record
    bad = AssignmentManifest(client_id="silo-00", phase=9, kind=SessionStage.MASK.value, work=b"\xff\xff")
    (problem,) = order_problems(spec, [*orders, bad], replies)
    assert "an assignment of silo-00 in phase 9 is malformed" in problem


def test_a_voided_attempt_is_checked_like_any_other() -> None:
    scene = cast(10, assumed=1, lost={(SessionStage.MASK.value, 0): ["silo-07", "silo-08", "silo-09"]})

    def uneven(cohort: object) -> np.ndarray:
        return np.array([3.0, 3, 3, 3, 1, 1, 1, 3, 3, 3])

    with pytest.raises(Voided, match="without the members that were lost"):
        play(scene, Mode.SUM, uneven)
    orders, replies = recorded(scene)
    assert not list(order_problems(scene.spec, orders, replies)), "the coordinator was honest"
    assert list(order_problems(scene.spec, edited(orders, SessionStage.MASK, alone), replies))


def test_the_coefficients_of_assignments_are_read_by_session(record: OnRecord) -> None:
    _, orders, _ = record
    masks = [order for order in orders if order.kind == SessionStage.MASK]
    envelopes = [SignedEnvelope(manifest=order.SerializeToString()).SerializeToString() for order in masks]
    (session,) = {session_of(order) for order in masks}
    assert asked_coefficients(envelopes) == {bytes.fromhex(session): (ONE // 10,) * 10}
    assert {session_of(order) for order in orders if order.kind == SessionStage.READY} == {""}


UNKNOWN = b"\xf8\x7f\x01"  # the field 2047, a number


def test_a_field_that_nobody_knows_is_found_in_what_signed_messages_hold_as_bytes(record: OnRecord) -> None:
    spec, orders, replies = record
    ready = next(reply for reply in replies if b"secure-ready" in reply.statement and reply.client_id == VICTIM)
    order = next(one for one in orders if one.client_id == VICTIM and one.kind == SessionStage.READY)

    def answered(work: bytes = order.work, statement: bytes = ready.statement) -> None:
        asked = AssignmentManifest(client_id=VICTIM, kind=order.kind, work=work)
        said = ReplyManifest(client_id=VICTIM, samples=ready.samples, statement=statement)
        none = SignedEnvelope()
        answer = OpenedAnswer(
            reply=Opened(kind="reply", name="the reply", envelope=none, manifest=said, is_signed=True),
            receipt=Opened(
                kind="receipt", name="", envelope=none, manifest=ReceiptManifest(accepted=True), is_signed=True
            ),
        )
        assignment = Opened(kind="assignment", name="", envelope=none, manifest=asked, is_signed=True)
        exchange = OpenedExchange(assignment=assignment, decline=None, answers=(answer,))
        phase = OpenedPhase(number=0, decides=True, evaluates=False, exchanges=(exchange,))
        with BundleReader(vector("open")) as bundle:
            run = replace(OpenedRun.of(bundle).facts, spec=spec)
            check_answered(run, OpenedRound(phases=(phase,), step=None, ended=None))

    answered()
    terms = SecureReadyWork.FromString(order.work).terms
    for changed in (
        {"statement": ready.statement + UNKNOWN},
        {"work": order.work + UNKNOWN},
        {"work": SecureReadyWork(terms=terms + UNKNOWN).SerializeToString()},
    ):
        with pytest.raises(VerificationError, match="has a field that this release does not know"):
            answered(**changed)
