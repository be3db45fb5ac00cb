"""What a member finds in the record of a run with its own receipts."""

from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.record.bundle import BundleReader
from federation.trust.envelope import envelope_digest
from federation.v1.common_pb2 import AssignmentManifest, ReceiptManifest, StepManifest
from federation.v1.record_pb2 import Exchange, RoundRecord
from tests.stage import Stage
from tests.verification.scene import Edited, exported, played, signed_again
from verification.own_replies import MemberReceipt, ReplyOutcome, reply_outcomes
from worker.receipts import append, read_receipts, receipt_line

ANN = "ann"
Seen = tuple[Stage, Edited, list[MemberReceipt]]

_made: list[Seen] = []  # the run that all tests look at: one for each coordinator


@pytest.fixture
def run(stage: Stage, tmp_path: Path) -> Seen:
    if not _made or _made[-1][0] is not stage:
        name = played(stage, "fedmgda+", "algorithm.epsilon = 0.1", rounds=2)
        whole = Edited.of(exported(stage, name, tmp_path / "run.fedpareto"))
        file = tmp_path / "receipts.jsonl"
        for number in range(2):
            for phase in whole.round(number).phases:
                for told in (one for one in phase.exchanges if asked(one).client_id == ANN):
                    given = told.answers[0]
                    said = ReceiptManifest.FromString(given.receipt.manifest)
                    append(file, receipt_line(given.reply, told.assignment, given.receipt, said))
        kept = read_receipts(file, stage.players[ANN].member.files.coordinator.chain)
        held = [
            MemberReceipt(
                assignment_id=one.assignment_id, round=one.occasion[1], phase=one.occasion[2], accepted=one.accepted,
                assignment=one.assignment, reply=one.reply, receipt=one.receipt,
            )
            for one in kept
        ]  # fmt: skip
        assert [(one.kind, one.accepted) for one in kept] == [("train", True), ("evaluate", True)] * 2
        _made.append((stage, whole, held))
    return _made[-1]


def asked(told: Exchange) -> AssignmentManifest:
    return AssignmentManifest.FromString(told.assignment.manifest)


def of_ann(record: RoundRecord) -> Exchange:
    return next(told for told in record.phases[0].exchanges if asked(told).client_id == ANN)


def found(edited: Edited, held: list[MemberReceipt], path: Path) -> list[ReplyOutcome]:
    with BundleReader(edited.write(path / "edited")) as bundle:
        return list(reply_outcomes(bundle, ANN, held))


def test_a_member_finds_each_reply_and_the_coefficient_of_each_update(run: Seen, tmp_path: Path) -> None:
    _, whole, held = run
    told = found(whole, held, tmp_path)
    assert [(one.round, one.kind, one.wrong) for one in told] == [
        (0, "train", ""), (0, "evaluate", ""), (1, "train", ""), (1, "evaluate", ""),
    ]  # fmt: skip
    for number in range(2):
        step = StepManifest.FromString(whole.round(number).step.manifest)
        place = list(step.replies).index(held[2 * number].reply)
        assert told[2 * number].coefficients == (step.coefficients[place],)
        assert told[2 * number].words == "entered the step"


Edit = Callable[[RoundRecord, Exchange, Ed25519PrivateKey], object]  # of a record, its exchange with ann, and the key
LACKS = "the record lacks an accepted reply for which this member has a receipt"


def other_assignment(record: RoundRecord, told: Exchange, key: Ed25519PrivateKey) -> None:
    signed_again(told.assignment, AssignmentManifest, key, lambda made: made.ClearField("created"))


def other_receipt(record: RoundRecord, told: Exchange, key: Ed25519PrivateKey) -> None:
    signed_again(told.answers[0].receipt, ReceiptManifest, key, lambda made: setattr(made, "accepted", False))


def left_out(record: RoundRecord, told: Exchange, key: Ed25519PrivateKey) -> None:
    name = envelope_digest(told.answers[0].reply)
    signed_again(record.step, StepManifest, key, lambda made: made.replies.remove(name))


EDITS: dict[str, tuple[Edit, str]] = {
    "reply dropped": (lambda record, told, key: told.ClearField("answers"), LACKS),
    "reply replaced": (lambda record, told, key: setattr(told.answers[0].reply, "signature", bytes(64)), LACKS),
    "assignment dropped": (
        lambda record, told, key: record.phases[0].exchanges.remove(told), "the record does not know assignment"
    ),
    "another assignment": (other_assignment, "another assignment than the one that this member was sent"),
    "another receipt": (other_receipt, "another receipt than the one that this member was sent"),
    "left out of the step": (left_out, "the step leaves out this accepted reply"),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "words"), EDITS.values(), ids=EDITS)
def test_what_is_missing_or_different_in_an_edited_record_is_named(
    run: Seen, tmp_path: Path, edit: Edit, words: str
) -> None:
    stage, whole, held = run
    key = stage.served.home.signing_key
    edited = whole.with_round(1, lambda record: edit(record, of_ann(record), key))
    wrong = [one for one in found(edited, held, tmp_path) if one.wrong]
    assert [(one.round, one.phase) for one in wrong] == [(1, 0)]
    assert words in wrong[0].wrong


def test_a_reply_on_record_that_the_member_has_no_receipt_for_is_named(run: Seen, tmp_path: Path) -> None:
    _, whole, held = run
    wrong = [one for one in found(whole, held[1:], tmp_path) if one.wrong]
    assert [(one.round, one.kind, one.wrong) for one in wrong] == [(0, "train", "this member has no receipt for it")]


def test_receipts_of_rounds_after_those_of_the_bundle_are_no_problem_while_the_run_goes_on(
    run: Seen, tmp_path: Path
) -> None:
    _, whole, held = run
    later = [MemberReceipt(**{**vars(held[0]), "assignment_id": "f" * 32, "round": 2})]
    told = found(whole.telling(lambda about: setattr(about, "state", "RUNNING")), [*held, *later], tmp_path)
    assert (told[-1].words, told[-1].wrong) == ("of a later round than the bundle has", "")
    assert "does not know assignment" in found(whole, [*held, *later], tmp_path)[-1].wrong
