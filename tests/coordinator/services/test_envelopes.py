"""Envelopes are verified again when they are shown, and say why where they do not hold."""

from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select
from sqlalchemy.orm import Session

from federation.trust.envelope import sign
from federation.v1.common_pb2 import AssignmentManifest, ReplyManifest, SignedEnvelope, StepManifest
from storage.models import Assignment, Phase, Reply, Round
from tests.stage import Stage

DEAD = b"\xff\xff\xff"  # no message of any type


class Recorded:
    """A round of two clients, one of whom also had a reply refused, and ways to edit its record."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        more = "selection.minimum = 3\nselection.quorum = 0.1"
        self.run, (ann, ben, cleo) = stage.begin("ann", "ben", "cleo", more=more)
        cleo.submit_zeros(cleo.order())
        stage.play(self.run, ann, ben, cleo)

    def command(self, *arguments: str) -> str:
        return " ".join(self.stage.served.command(*arguments).split())

    def document(self, *arguments: str) -> Any:
        return self.stage.served.document(*arguments)

    def round(self) -> Any:
        return self.document("round", self.run, "0")

    def checks(self, client: str) -> dict[tuple[str, int], Any]:
        (part,) = [part for part in self.round()["participations"] if part["client_id"] == client]
        return {(check["kind"], check["phase"]): check for check in part["envelopes"]}

    def edit(self, change: Callable[[Session], None]) -> None:
        with self.stage.served.database.begin() as session:
            change(session)

    def reply(self, session: Session, client: str, kind: str = "train") -> Reply:
        found = select(Reply).join(Assignment).join(Phase).join(Round)
        found = found.where(Round.run_id == self.run, Phase.kind == kind, Reply.client_id == client)
        return session.scalars(found).one()

    def step(self, session: Session) -> Round:
        return session.scalars(select(Round).where(Round.run_id == self.run)).one()


@pytest.fixture
def recorded(stage: Stage) -> Recorded:
    return Recorded(stage)


def test_what_was_signed_is_shown_as_verified(recorded: Recorded) -> None:
    found = recorded.round()
    assert found["step_check"]["verified"]
    assert found["step_check"]["key_id"] == found["step"]["key_id"]
    checks = [check for part in found["participations"] for check in part["envelopes"]]
    kinds = sorted((check["kind"], check["phase"], check["verified"]) for check in checks)
    # Three were asked to train and to evaluate; the reply that was refused has a receipt, too.
    each = [(kind, phase, True) for kind in ("assignment", "reply", "receipt") for phase in (0, 1)]
    assert kinds == sorted(each * 3)
    assert all(len(part["key_id"]) == 64 for part in found["participations"])
    text = recorded.command("round", recorded.run, "0")
    assert "step verified, signed by the coordinator's key" in text
    assert "envelopes 18 of 18 verified" in text
    assert "not verified" not in text
    listed = recorded.document("replies", recorded.run)["replies"]
    assert [[check["verified"] for check in reply["envelopes"]] for reply in listed] == [[True, True]] * 6
    assert "✗" not in recorded.command("replies", recorded.run)


def test_a_step_that_somebody_else_signed_or_that_was_edited_is_not_verified(recorded: Recorded) -> None:
    def forge(session: Session) -> None:
        row = recorded.step(session)
        manifest = StepManifest.FromString(SignedEnvelope.FromString(row.step or b"").manifest)
        row.step = sign(manifest, Ed25519PrivateKey.generate()).SerializeToString()

    def turn(session: Session) -> None:
        row = recorded.step(session)
        envelope = SignedEnvelope.FromString(row.step or b"")
        envelope.key_id = recorded_key
        row.step = envelope.SerializeToString()

    def cut(session: Session) -> None:
        recorded.step(session).step = DEAD

    recorded_key = bytes.fromhex(recorded.round()["step"]["key_id"])
    for change, reason in ((forge, "key-unknown"), (turn, "signature"), (cut, "manifest")):
        recorded.edit(change)
        found = recorded.round()
        assert (found["step_check"]["verified"], found["step_check"]["reason"]) == (False, reason)
        assert found["cosines"] == []  # which the step alone can name
        assert f"step not verified because {reason}: " in recorded.command("round", recorded.run, "0")


def test_a_row_that_says_something_else_than_its_envelope_is_named(recorded: Recorded) -> None:
    def edit(session: Session) -> None:
        recorded.reply(session, "ann").samples = 1_000_000
        recorded.reply(session, "ben").losses = {"loss": 0.25}
        recorded.step(session).gram = "blake3:" + 64 * "0"

    recorded.edit(edit)
    check = recorded.checks("ann")["reply", 0]
    assert (check["verified"], check["reason"]) == (False, "mismatch:samples")
    assert check["message"] == "the record says 1000000, signed is 10"
    assert recorded.checks("ann")["receipt", 0]["verified"]
    assert recorded.checks("ben")["reply", 0]["reason"] == "mismatch:losses"
    assert recorded.round()["step_check"]["reason"] == "mismatch:gram"
    text = recorded.command("round", recorded.run, "0")
    assert "ann: reply of phase 0 not verified because mismatch:samples: the record says 1000000, signed is 10" in text
    assert "envelopes 16 of 18 verified" in text
    assert "mismatch:samples" in recorded.command("replies", recorded.run)


def test_bytes_that_are_no_envelope_are_shown_as_such_and_end_no_command(recorded: Recorded) -> None:
    def edit(session: Session) -> None:
        ann, ben, cleo = (recorded.reply(session, name) for name in ("ann", "ben", "cleo"))
        ann.envelope, ann.receipt = DEAD, DEAD
        ben.assignment.envelope = b""
        cleo.envelope = SignedEnvelope(manifest=DEAD, key_id=DEAD, signature=DEAD).SerializeToString()

    recorded.edit(edit)
    reasons = {place: check["reason"] for place, check in recorded.checks("ann").items() if check["reason"]}
    assert reasons == {("reply", 0): "manifest", ("receipt", 0): "manifest"}
    assert len(recorded.checks("ann")) == 6
    assert recorded.checks("ben")["assignment", 0]["reason"] == "key-unknown"
    assert recorded.checks("cleo")["reply", 0]["reason"] == "key-unknown"
    text = recorded.command("round", recorded.run, "0")
    assert "ann: reply of phase 0 not verified because manifest: the recorded bytes are not a signed envelope" in text
    assert recorded.document("replies", recorded.run, "--client", "ann")["replies"][0]["envelope"] is None
    assert "not verified because manifest" in recorded.command("replies", recorded.run)


def test_an_envelope_of_another_place_does_not_pass_for_this_one(recorded: Recorded) -> None:
    def swap(session: Session) -> None:
        ann, ben = (recorded.reply(session, name) for name in ("ann", "ben"))
        ann.assignment.envelope, ben.assignment.envelope = ben.assignment.envelope, ann.assignment.envelope
        evaluation = recorded.reply(session, "ann", "evaluate")
        ann.envelope, ann.envelope_digest = evaluation.envelope, evaluation.envelope_digest

    recorded.edit(swap)
    assert recorded.checks("ann")["assignment", 0]["reason"] == "mismatch:assignment_id"
    assert recorded.checks("ann")["reply", 0]["reason"] == "mismatch:phase"
    assert recorded.checks("ann")["receipt", 0]["reason"] == "mismatch:envelope"


def test_a_signature_for_another_kind_of_manifest_is_none(recorded: Recorded) -> None:
    def relabel(session: Session) -> None:
        row = recorded.reply(session, "ann")
        order = AssignmentManifest.FromString(SignedEnvelope.FromString(row.assignment.envelope).manifest)
        row.receipt = sign(order, recorded.stage.served.home.signing_key).SerializeToString()

    recorded.edit(relabel)
    assert recorded.checks("ann")["receipt", 0]["reason"] == "signature"
    envelope = recorded.stage.served.look(lambda session: recorded.reply(session, "ann").envelope)
    assert ReplyManifest.FromString(SignedEnvelope.FromString(envelope).manifest)
