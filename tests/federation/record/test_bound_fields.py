"""Each field by which signed messages belong together counts for all who make, record, show or verify them."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import Message
from sqlalchemy import select
from sqlalchemy.orm import Session, joinedload

from coordinator.rounds.replies.declines import verified_decline
from coordinator.rounds.replies.evidence import Evidence, RecordError, SignatureMemory
from coordinator.services.checks.envelope_checks import EnvelopeChecks
from coordinator.services.checks.record_check import record_problems
from federation.record import bound_fields
from federation.record.bound_fields import difference, repeated
from federation.record.bundle import BundleReader
from federation.refusals import Refusal
from federation.secure.thresholds import Mode
from federation.spec.sharing import Unshared
from federation.trust.envelope import envelope_digest, sign
from federation.trust.key_chain import KeyChain
from federation.v1.common_pb2 import (
    AssignmentManifest,
    DeclineManifest,
    ReceiptManifest,
    ReplyManifest,
    SamplePrivacy,
    SignedEnvelope,
)
from federation.v1.record_pb2 import Exchange, RoundRecord
from federation.v1.secure_pb2 import SecureTerms
from federation.work.base import Origin, WorkError
from federation.work.secure.member_checks import peers
from federation.work.secure.ready import SPECIFICATION, Ready
from federation.work.secure.terms import SessionStage
from federation.work.secure.wire import read_terms, terms_bytes
from federation.work.site import PeerReply
from storage import models
from tests.coordinator.rounds.replies.scene import edit
from tests.federation.work.scene import cast, setting
from tests.few import every
from tests.harness import refused
from tests.stage import LAYOUT, Player
from tests.stage import Stage as Coordinator
from tests.verification.every_value import other
from tests.verification.scene import Edited, exported, signed_again
from verification.errors import VerificationError
from verification.run import verify
from worker.receipts import ReceiptsError, read_receipts, receipt_line
from worker.work.submitter import ReceiptError, verify_receipt

CLIENTS = ("ann", "ben", "cleo", "dan")
DECLINES, REFUSED = "cleo", "dan"
EQUIVOCATES = "ben"


def shared(one: type[Message], another: type[Message]) -> set[str]:
    """The fields that two messages have under one name, except the time at which each was made."""
    return set(one.DESCRIPTOR.fields_by_name) & set(another.DESCRIPTOR.fields_by_name) - {"created"}


@pytest.mark.parametrize(
    ("listed", "answer", "original"),
    [
        (bound_fields.REPLY, ReplyManifest, AssignmentManifest),
        (bound_fields.RECEIPT, ReceiptManifest, ReplyManifest),
        (bound_fields.PLACE, ReceiptManifest, AssignmentManifest),
        (bound_fields.DECLINE, DeclineManifest, AssignmentManifest),
        ((*bound_fields.TERMS, "unshared"), SecureTerms, AssignmentManifest),
    ],
)
def test_a_message_repeats_each_field_that_it_has_in_common_with_the_one_that_it_answers(
    listed: tuple[str, ...], answer: type[Message], original: type[Message]
) -> None:
    assert len(listed) == len(set(listed))
    assert set(listed) == shared(answer, original)


def test_members_compare_each_field_of_the_work_with_the_terms_of_a_session() -> None:
    assert {*bound_fields.TERMS, "unshared"} == {field.name for field in fields(Origin)} | {"round"}
    assert set(bound_fields.SESSION) <= {field.name for field in fields(PeerReply)} & set(bound_fields.TERMS)


def test_the_first_field_in_which_two_messages_differ_is_named() -> None:
    order = AssignmentManifest(run_id="r", round=1, phase=2)
    answer = ReplyManifest(**repeated(order, bound_fields.REPLY))
    assert difference(order, answer, bound_fields.REPLY) == ""
    answer.phase, answer.attempt = 3, 4
    assert difference(order, answer, bound_fields.REPLY) == "phase"


# --- a coordinator's record of a round: ann and ben have replied, ben twice; cleo has declined, dan's reply is refused


@dataclass(frozen=True)
class Scene:
    """A run of one round that has ended, and its bundle."""

    stage: Coordinator
    run: str
    bundle: Edited

    @property
    def envelopes(self) -> EnvelopeChecks:
        home = self.stage.served.home
        return EnvelopeChecks(home.federation_id, home.signing.chain)

    @property
    def key(self) -> Ed25519PrivateKey:
        return self.stage.served.home.signing_key

    def client_key(self, name: str) -> Ed25519PrivateKey:
        return self.stage.players[name].member.files.signing_key

    def assignment(self, name: str) -> models.Assignment:
        return self.stage.assignments(self.run)[name]

    def replies(self, name: str) -> list[models.Reply]:
        """All replies of a client to its first assignment, in their order."""
        rows = select(models.Reply).where(models.Reply.assignment_id == self.assignment(name).assignment_id)
        return self.stage.look(lambda session: list(session.scalars(rows.order_by(models.Reply.reply_id))))

    @contextmanager
    def having(self, kind: type[models.Base], key: object, **values: object) -> Iterator[None]:
        """Changes a row inside."""
        before = self.stage.look(lambda session: session.get_one(kind, key))
        edit(self.stage, kind, key, values)
        try:
            yield
        finally:
            edit(self.stage, kind, key, {name: getattr(before, name) for name in values})

    def checks(self, name: str) -> dict[str, str]:
        """What `admin round` says of the envelopes of a client in the first phase: "" where they are verified."""
        with self.stage.served.database.read() as session:
            row = session.scalars(select(models.Round).filter_by(run_id=self.run)).one()
            found = [one.check for one in self.envelopes.of_round(session, row).envelopes if one.client_id == name]
        audited = self.audited()
        reasons = {check.kind: check.reason for check in found if check.phase == 0}
        for kind, reason in reasons.items():  # the auditor is told the same
            assert not reason or any(f"the {kind} of {name} in phase 0: {reason}" in one for one in audited), audited
        return reasons

    def audited(self) -> list[str]:
        """What `admin audit verify` says of the record."""
        key = self.stage.served.home.log_key.entry_key
        found = self.stage.look(lambda s: [*record_problems(s, self.envelopes, key, self.stage.blobs)])
        return [one for one in found if isinstance(one, str)]

    def evidence(self) -> str:
        """Why the replies of the first phase cannot enter a step; empty if they can."""
        row = self.assignment("ann")
        order = AssignmentManifest.FromString(SignedEnvelope.FromString(row.envelope).manifest)
        names = ("federation_id", "run_id", "round", "attempt", "phase", "base_model", "spec", "task", "kind")
        evidence = Evidence(self.stage.served.home.signing, SignatureMemory())
        try:
            evidence.replies(self.stage.served.database, self.stage.blobs, row.phase_id, repeated(order, names))
        except RecordError as error:
            return str(error)
        return ""

    def outsider(self, path: Path, change: Callable[[Exchange], object], name: str) -> str:
        """Why an outsider refuses the bundle with another exchange with a client; empty if it verifies."""

        def edited(record: RoundRecord) -> None:
            change(record.phases[0].exchanges[CLIENTS.index(name)])

        with BundleReader(self.bundle.with_round(0, edited).write(path / "edited")) as reader:
            try:
                list(verify(reader))
            except VerificationError as error:
                return str(error)
        return ""


def resigned(
    row: models.Reply, key: Ed25519PrivateKey, change: Callable[[Any], object]
) -> tuple[SignedEnvelope, dict[str, Any]]:
    """A reply of which its client has signed something else, and the columns that hold it."""
    envelope = SignedEnvelope.FromString(row.envelope)
    signed_again(envelope, ReplyManifest, key, change)
    return envelope, {"envelope": envelope.SerializeToString(), "envelope_digest": envelope_digest(envelope)}


_scenes: list[Scene] = []  # one for each coordinator


@pytest.fixture
def scene(stage: Coordinator, tmp_path: Path) -> Scene:
    if not _scenes or _scenes[-1].stage is not stage:
        more = "selection = { minimum = 4, quorum = 0.5 }"
        run, players = stage.begin(*CLIENTS, more=more)
        _, ben, cleo, dan = players
        cleo.decline(cleo.order(), "limit:steps", "too many")
        with refused("INVALID_ARGUMENT", "non-finite"):
            dan.submit(dan.order(), losses={"loss": math.nan})
        order = ben.order()
        ben.reply(order)
        with refused("ALREADY_EXISTS", "assignment-fulfilled"):
            ben.submit(order, np.ones(LAYOUT.size, np.float32))
        stage.complete(run, *players)
        _scenes.append(Scene(stage, run, Edited.of(exported(stage, run, tmp_path / "run.fedpareto"))))
    return _scenes[-1]


def test_a_record_that_nobody_edited_is_verified_by_all(scene: Scene, tmp_path: Path) -> None:
    for name in CLIENTS:
        answers = ("decline",) if name == DECLINES else ("reply", "receipt")
        assert scene.checks(name) == dict.fromkeys(("assignment", *answers), "")
    assert scene.evidence() == scene.outsider(tmp_path, lambda exchange: None, "ann") == ""
    assert scene.audited() == []


def test_a_reply_whose_row_names_another_client_is_not_shown_as_verified(scene: Scene) -> None:
    row = scene.stage.replies(scene.run)["ann"]

    def checked(session: Session) -> dict[str, str]:
        reply = session.get_one(models.Reply, row.reply_id, options=[joinedload(models.Reply.assignment)])
        session.expunge(reply)
        reply.client_id = "nobody"
        return {check.kind: check.reason for check in scene.envelopes.reply(session, reply)}

    assert scene.stage.look(checked) == {"reply": "mismatch:client_id", "receipt": ""}


@pytest.mark.parametrize("field", every(3, bound_fields.REPLY))
def test_each_field_of_its_assignment_that_a_reply_repeats_counts(scene: Scene, tmp_path: Path, field: str) -> None:
    """The client has signed another value, and the coordinator's receipt repeats it."""
    row = scene.stage.replies(scene.run)["ann"]
    reply, values = resigned(row, scene.client_key("ann"), lambda said: other(said, field))
    said, receipt = ReplyManifest.FromString(reply.manifest), SignedEnvelope.FromString(row.receipt)

    def repeats(made: Any) -> None:
        made.envelope = envelope_digest(reply)
        if field in bound_fields.RECEIPT:
            setattr(made, field, getattr(said, field))

    signed_again(receipt, ReceiptManifest, scene.key, repeats)
    with scene.having(models.Reply, row.reply_id, **values, receipt=receipt.SerializeToString()):
        assert scene.checks("ann")["reply"] == f"mismatch:{field}"
        assert scene.evidence().startswith(f"replies {row.reply_id}: envelope ({field}): ")

    def answered(exchange: Exchange) -> None:
        exchange.answers[0].reply.CopyFrom(reply)
        exchange.answers[0].receipt.CopyFrom(receipt)

    assert f"the reply of ann in phase 0 has the {field}" in scene.outsider(tmp_path, answered, "ann")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("envelope", {"statement": b"of another kind of work"}),
        ("samples", {"samples": 2**64 - 1}),
        ("losses", {"losses": {"another": math.nan}}),
        ("metrics", {"metrics": {"another": math.nan}}),
        ("privacy", {"privacy": SamplePrivacy(clip=math.inf)}),
    ],
)
def test_what_the_intake_refuses_enters_no_step(scene: Scene, field: str, values: dict[str, Any]) -> None:
    row = scene.stage.replies(scene.run)["ann"]
    receipt = SignedEnvelope.FromString(row.receipt)
    _, kept = resigned(row, scene.client_key("ann"), lambda said: said.MergeFrom(ReplyManifest(**values)))
    signed_again(receipt, ReceiptManifest, scene.key, lambda said: setattr(said, "envelope", kept["envelope_digest"]))
    kept["receipt"] = receipt.SerializeToString()
    with scene.having(models.Reply, row.reply_id, **kept, samples=min(values.get("samples", 10), 2**63 - 1)):
        assert f"replies {row.reply_id}: {field}: " in scene.evidence()


@pytest.mark.parametrize("field", every(3, bound_fields.REPLY))
@pytest.mark.parametrize(("name", "place"), [(REFUSED, 0), (EQUIVOCATES, 1)])
def test_each_field_counts_in_replies_that_were_not_accepted(
    scene: Scene, tmp_path: Path, name: str, place: int, field: str
) -> None:
    row = scene.replies(name)[place]
    reply, values = resigned(row, scene.client_key(name), lambda said: other(said, field))
    with scene.having(models.Reply, row.reply_id, **values):
        assert scene.checks(name)["reply"] == f"mismatch:{field}"
    found = scene.outsider(tmp_path, lambda exchange: exchange.answers[place].reply.CopyFrom(reply), name)
    assert f"the reply of {name} in phase 0 has the {field}" in found


@pytest.mark.parametrize(
    ("name", "place", "what", "says"),
    [
        (REFUSED, 0, "refused reply to assignment", "the record says bytes/up"),
        (EQUIVOCATES, 1, "further reply to assignment", "which is not in the record"),
    ],
)
def test_a_reply_that_was_not_accepted_and_is_removed_is_told_of_by_the_log(
    scene: Scene, tmp_path: Path, name: str, place: int, what: str, says: str
) -> None:
    row, another = scene.replies(name)[place], scene.assignment("ann")
    gone = f"{what} {row.assignment_id}: the log tells of it, and it is not in the record"
    with scene.having(models.Reply, row.reply_id, assignment_id=another.assignment_id):
        assert gone in scene.audited()

    def removed(exchange: Exchange) -> None:
        del exchange.answers[place]

    assert says in scene.outsider(tmp_path, removed, name)


# What the run, the round and the row say of an assignment.
OF_ASSIGNMENT = {
    *("federation_id", "run_id", "spec", "task", "seed", "unshared", "submitted_by", "round", "phase", "attempt"),
    *("kind", "base_model", "previous_step", "members", "assignment_id", "client_id"),
}


@pytest.mark.parametrize("field", every(3, sorted(OF_ASSIGNMENT)))
def test_an_answer_is_verified_only_with_an_assignment_that_belongs_to_the_round(scene: Scene, field: str) -> None:
    row = scene.assignment("ann")
    envelope = SignedEnvelope.FromString(row.envelope)
    signed_again(envelope, AssignmentManifest, scene.key, lambda order: other(order, field))
    with scene.having(models.Assignment, row.assignment_id, envelope=envelope.SerializeToString()):
        assert scene.checks("ann") == {
            "assignment": f"mismatch:{field}",
            "reply": f"mismatch:{field if field in bound_fields.REPLY else 'assignment'}",
            "receipt": f"mismatch:{field if field in bound_fields.PLACE else 'assignment'}",
        }


@pytest.mark.parametrize("field", every(3, bound_fields.RECEIPT))
def test_each_field_of_a_reply_that_its_receipt_repeats_counts(scene: Scene, tmp_path: Path, field: str) -> None:
    row = scene.stage.replies(scene.run)["ann"]
    receipt = SignedEnvelope.FromString(row.receipt)
    signed_again(receipt, ReceiptManifest, scene.key, lambda said: other(said, field))
    with scene.having(models.Reply, row.reply_id, receipt=receipt.SerializeToString()):
        assert scene.checks("ann") == {"assignment": "", "reply": "", "receipt": f"mismatch:{field}"}
        assert scene.evidence().startswith(f"replies {row.reply_id}: receipt ({field}): ")
    found = scene.outsider(tmp_path, lambda exchange: exchange.answers[0].receipt.CopyFrom(receipt), "ann")
    assert f"the receipt for the reply of ann in phase 0 has the {field}" in found


@pytest.mark.parametrize("field", [*bound_fields.DECLINE, "assignment"])
def test_each_field_of_its_assignment_that_a_decline_repeats_counts(scene: Scene, tmp_path: Path, field: str) -> None:
    row = scene.assignment(DECLINES)
    decline = SignedEnvelope.FromString(row.decline or b"")
    signed_again(decline, DeclineManifest, scene.client_key(DECLINES), lambda said: other(said, field))
    with scene.having(models.Assignment, row.assignment_id, decline=decline.SerializeToString()):
        assert scene.checks(DECLINES) == {"assignment": "", "decline": f"mismatch:{field}"}
    found = scene.outsider(tmp_path, lambda exchange: exchange.decline.CopyFrom(decline), DECLINES)
    assert f"the decline of cleo in phase 0 has the {field}" in found


# --- the intake


@pytest.fixture
def asked(stage: Coordinator) -> tuple[Player, AssignmentManifest]:
    """A client with an assignment that is open."""
    _, (ann,) = stage.begin("ann", algorithm="fedavg")
    return ann, ann.order()


def test_the_intake_refuses_a_reply_that_repeats_another_value_of_any_field(
    asked: tuple[Player, AssignmentManifest],
) -> None:
    ann, order = asked
    payload = ann.member.payload(order)
    for field in bound_fields.REPLY:
        said = ann.member.manifest(order, payload)
        other(said, field)
        missing = ("NOT_FOUND", "assignment-unknown")
        with refused(*missing if field == "assignment_id" else ("INVALID_ARGUMENT", f"mismatch:{field}")):
            ann.member.submit(ann.member.sign(said), payload)
    said = ann.member.manifest(order, payload)
    receipt = ann.member.submit(ann.member.sign(said), payload)
    assert difference(said, receipt, bound_fields.RECEIPT) == ""


def test_the_intake_refuses_a_decline_that_repeats_another_value(asked: tuple[Player, AssignmentManifest]) -> None:
    ann, order = asked
    envelope, key = sign(order, ann.member.files.signing_key), ann.member.files.signing_key
    said = DeclineManifest(**repeated(order, bound_fields.DECLINE), assignment=envelope_digest(envelope), reason="busy")
    assert verified_decline(sign(said, key), envelope, KeyChain(key.public_key())) == said
    for field in (*bound_fields.DECLINE, "assignment"):
        changed = DeclineManifest.FromString(said.SerializeToString())
        other(changed, field)
        with pytest.raises(Refusal, match=f"^mismatch:{field}: "):
            verified_decline(sign(changed, key), envelope, KeyChain(key.public_key()))


# --- the worker


KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
PLACE = {"federation_id": "test", "run_id": "run-1", "round": 3, "attempt": 1, "phase": 2}
OF_WORK = {"base_model": "blake3:1", "spec": "blake3:2", "task": "digits"}
ORDER = AssignmentManifest(**PLACE, **OF_WORK, assignment_id="0" * 32, client_id="ann")  # type: ignore[arg-type]
REPLY = ReplyManifest(**repeated(ORDER, bound_fields.REPLY), payload="blake3:3", payload_bytes=9)
SIGNED = sign(REPLY, KEY)


def receipt_for_reply() -> ReceiptManifest:
    return ReceiptManifest(**repeated(REPLY, bound_fields.RECEIPT), envelope=envelope_digest(SIGNED), accepted=True)


@pytest.mark.parametrize("field", [*bound_fields.RECEIPT, "envelope"])
def test_a_worker_takes_a_receipt_for_this_very_reply_only(field: str) -> None:
    entry: Any = SimpleNamespace(manifest=REPLY, envelope=SIGNED)
    member: Any = SimpleNamespace(coordinator=KeyChain(KEY.public_key()))
    receipt = receipt_for_reply()
    assert verify_receipt(sign(receipt, KEY), entry, member) == receipt
    other(receipt, field)
    with pytest.raises(ReceiptError, match=f"its {field} is|envelope digest differs"):
        verify_receipt(sign(receipt, KEY), entry, member)


@pytest.mark.parametrize("field", bound_fields.PLACE)
def test_a_receipt_on_file_belongs_to_the_assignment_beside_it(tmp_path: Path, field: str) -> None:
    path, keys, receipt = tmp_path / "receipts.jsonl", KeyChain(KEY.public_key()), receipt_for_reply()
    path.write_text(receipt_line(SIGNED, sign(ORDER, KEY), sign(receipt, KEY), receipt))
    assert [one.reply for one in read_receipts(path, keys)] == [envelope_digest(SIGNED)]
    other(receipt, field)
    path.write_text(receipt_line(SIGNED, sign(ORDER, KEY), sign(receipt, KEY), receipt))
    with pytest.raises(ReceiptsError, match=f"its assignment and its receipt differ in {field}"):
        read_receipts(path, keys)


# --- the sessions of private rounds

VICTIM = "silo-02"
CHANGED: dict[str, Any] = {
    **dict.fromkeys(("federation_id", "run_id", "base_model", "spec", "task"), "other"),
    **dict.fromkeys(("round", "seed"), 7),
    "unshared": Unshared(frozen=("w",)),
}


@pytest.mark.parametrize("field", [*bound_fields.TERMS, "unshared"])
def test_a_member_declines_terms_that_repeat_another_value_of_its_assignment(field: str) -> None:
    scene = cast(5, assumed=1)
    made, member = setting(scene, Mode.SUM), scene.members[VICTIM]
    agreed = replace(made.agreed, **{field: CHANGED[field]})
    assert read_terms(terms_bytes(agreed), member.shape) == agreed
    with pytest.raises(WorkError, match=f"the terms are for (another )?{field}") as declined:
        member.do(Ready(agreed=agreed, terms_bytes=terms_bytes(agreed)), {SPECIFICATION: made.specification})
    assert declined.value.reason == "terms"


@pytest.mark.parametrize("field", bound_fields.SESSION)
def test_a_member_refuses_a_reply_of_another_member_that_repeats_another_value_of_the_terms(field: str) -> None:
    scene = cast(5, assumed=1)
    agreed = setting(scene, Mode.SUM).agreed
    said = SimpleNamespace(session=b"session", stage=SessionStage.READY)
    terms = repeated(agreed, set(bound_fields.TERMS) - {"seed"})
    reply = PeerReply(client_id=VICTIM, attempt=0, samples=1, statement=said, **terms)
    of_session = {**repeated(agreed, bound_fields.SESSION), "invited": [VICTIM]}
    journal: Any = SimpleNamespace(session=b"session", agreed=lambda stage: of_session)

    def found(reply: PeerReply) -> Any:
        client: Any = SimpleNamespace(site=SimpleNamespace(roster={}, open_reply=lambda envelope, roster: reply))
        return peers(client, journal, [b""], SessionStage.READY)

    assert found(reply) == {VICTIM: reply}
    with pytest.raises(WorkError, match="is of another session or phase"):
        found(replace(reply, **{field: CHANGED[field]}))
