"""A worker over TLS with a pinned roster, and a coordinator that signs what it likes.

The owner requires private rounds. The worker declines each lie with its reason, and takes part in the next session.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.digests import digest
from federation.secure import hashing
from federation.secure.dealing import deal_bytes
from federation.secure.member_keys import member_keys
from federation.secure.payloads import join_envelopes
from federation.secure.thresholds import Mode, Thresholds
from federation.spec.objective_names import joint_target
from federation.spec.run_spec import RunSpec
from federation.tasks import DataSource, Part, initial_model, task
from federation.training.trainer import Trainer
from federation.trust.envelope import key_id, seal
from federation.trust.member_files import MemberFiles
from federation.v1.common_pb2 import AssignmentManifest, EvaluateWork, Input, JacobianWork, ReplyManifest, Row
from federation.v1.secure_pb2 import SecureDealWork, SecureReadyWork, SecureStatement
from federation.vectors import to_bytes
from federation.work.secure.ready import SPECIFICATION
from federation.work.secure.terms import Invited, SessionTerms
from federation.work.secure.wire import terms_bytes
from federation.work.train.work import Train
from tests.harness import wait_for
from tests.scripted import CLIENT, FEDERATION, ScriptedCoordinator, scripted
from tests.worker.working import Running
from tests.works import offer_input, set_work
from worker.home import WorkerHome
from worker.service import prepare_offers
from worker.site.roster import Card, Roster

OTHERS = [f"hospital-{name}" for name in "bcde"]
LAYOUT, VECTOR = initial_model(task("digits"), 3)
MODEL = to_bytes(LAYOUT, VECTOR)
DOCUMENT = b"""
name = "run"
task = "digits"
rounds = 1
seed = 7
algorithm.name = "fedavg-n"
privacy.secure = "sum"
train.steps = 1
"""
"""The specification of the run."""
SPEC = RunSpec.parse(DOCUMENT)


@pytest.fixture(scope="module")
def offers() -> dict[str, Trainer]:
    return prepare_offers(["digits"], DataSource(part=Part(0, 8)), device="cpu", threads=1)[0]


@dataclass(eq=False)
class Liar:
    """A coordinator, the member that it lies to, and the signing keys of the other members, with whom it works."""

    coordinator: ScriptedCoordinator
    home: WorkerHome
    offers: dict[str, Trainer]
    member: MemberFiles = field(init=False)
    keys: dict[str, Ed25519PrivateKey] = field(init=False)
    asked: int = 0

    def __post_init__(self) -> None:
        self.member = self.coordinator.member()
        self.coordinator.blobs[digest(DOCUMENT)] = DOCUMENT
        self.keys = {CLIENT: self.member.signing_key} | {name: Ed25519PrivateKey.generate() for name in OTHERS}
        cards = [Card(FEDERATION, name, key.public_key().public_bytes_raw()) for name, key in self.keys.items()]
        self.home.directory.mkdir()
        Roster.parse("".join(card.text() for card in cards), self.member).pin(self.home.roster)
        self.home.policy.write_text("[secure]\nrequired = true\n")

    @contextmanager
    def worker(self) -> Iterator[Running]:
        running = Running(self.home, self.member, self.offers)
        try:
            yield running
        finally:
            running.stop()

    def assignment(self, **changes: Any) -> AssignmentManifest:
        """To train in the clear; `changes` are fields of the assignment."""
        self.asked += 1
        fields = {"run_id": "run", "round": 0, "assignment_id": f"assignment-{self.asked}"}
        fields |= {"spec": digest(DOCUMENT), **changes}
        return self.coordinator.assignment(LAYOUT, MODEL, **fields)

    def terms(self, nonce: bytes = bytes(16), **changes: Any) -> SessionTerms:
        """What the five members of the roster agree on."""
        asked, work = self.coordinator.assignment(LAYOUT, MODEL), Train.of(SPEC, 0, joint_target(("loss",)))
        fields: dict[str, Any] = {
            "nonce": nonce, "federation_id": FEDERATION, "run_id": "run", "round": 0, "mode": Mode.SUM,
            "base_model": asked.base_model, "spec": digest(DOCUMENT), "task": "digits", "length": LAYOUT.size,
            "clip": 0.0, "disclose": (), "invited": invited(self.keys), "seed": asked.seed, "unshared": b"",
            "work": work,
        }  # fmt: skip
        return SessionTerms(**{**fields, **changes})

    def ready(self, terms: SessionTerms, document: bytes = DOCUMENT, **changes: Any) -> AssignmentManifest:
        """To become ready for a session of a run with this specification."""
        self.coordinator.blobs[digest(document)] = document
        asked = self.assignment(**changes)
        del asked.rows[:]
        asked.kind, asked.work = "secure-ready", SecureReadyWork(terms=terms_bytes(terms)).SerializeToString()
        offer_input(asked, SPECIFICATION, document)
        return asked

    def deal(self, replies: list[bytes], terms: SessionTerms, members: list[str], **changes: Any) -> AssignmentManifest:
        """To deal to the members that signed these replies to READY."""
        asked, inbox = self.assignment(**changes), join_envelopes(replies)
        self.coordinator.blobs[digest(inbox)] = inbox
        session = hashing.session(terms_bytes(terms))
        asked.kind = "secure-deal"
        asked.work = SecureDealWork(session=session, mode=terms.mode.value, members=members).SerializeToString()
        length = (len(members) - 1) * deal_bytes(Thresholds(len(members), terms.mode).k)
        del asked.rows[:]
        asked.rows.append(Row(name="ciphertexts", dtype="U8", length=length))
        asked.inputs.append(Input(name="replies", digest=digest(inbox), size=len(inbox)))
        return asked

    def declined(self, asked: AssignmentManifest) -> str:
        """The reason with which the worker declines."""
        self.coordinator.assign(asked)

        def reason() -> str | None:
            replied = [one.manifest.assignment_id for one in self.coordinator.submissions]
            assert asked.assignment_id not in replied, "the worker did it"
            return next((d.reason for d in self.coordinator.declines if d.assignment_id == asked.assignment_id), None)

        found: str = wait_for(reason, "a decline", 60)
        self.coordinator.open.clear()
        return found

    def answered(self, asked: AssignmentManifest) -> tuple[bytes, SecureStatement, bytes]:
        """The worker's reply: its envelope, what it says, and its payload."""
        self.coordinator.assign(asked)

        def reply() -> tuple[bytes, SecureStatement, bytes] | None:
            declines = [one.reason for one in self.coordinator.declines if one.assignment_id == asked.assignment_id]
            assert not declines
            for one in self.coordinator.submissions:
                if one.manifest.assignment_id == asked.assignment_id:
                    said = SecureStatement.FromString(one.manifest.statement)
                    return one.envelope.SerializeToString(), said, one.payload
            return None

        return wait_for(reply, "a reply", 60)  # type: ignore[no-any-return]


def colluder(name: str, terms: SessionTerms, key: Ed25519PrivateKey, secret: bytes = b"one") -> bytes:
    """The envelope that another member signs at READY."""
    session = hashing.session(terms_bytes(terms))
    public = member_keys(secret + name.encode(), session).public
    said = SecureStatement(session=session, stage="secure-ready", keys=public.c + public.s)
    reply = ReplyManifest(
        federation_id=FEDERATION, run_id=terms.run_id, round=terms.round, spec=terms.spec, client_id=name,
        statement=said.SerializeToString(),
    )  # fmt: skip
    return seal(reply, key).SerializeToString()


def invited(keys: dict[str, Ed25519PrivateKey]) -> tuple[Invited, ...]:
    """The members with the ids of their keys, sorted."""
    return tuple(Invited(name, key_id(key.public_key())) for name, key in sorted(keys.items()))


@pytest.fixture
def liar(offers: dict[str, Trainer], tmp_path: Path) -> Iterator[Liar]:
    with scripted() as coordinator:
        yield Liar(coordinator, WorkerHome(tmp_path / "home"), offers)


def gradients(asked: AssignmentManifest) -> AssignmentManifest:
    set_work(asked, JacobianWork(batch_size=8, objectives=("loss",), sketch="exact", budget=1))
    return asked


def evaluation(asked: AssignmentManifest) -> AssignmentManifest:
    del asked.rows[:]
    set_work(asked, EvaluateWork(splits=["train"]))
    return asked


def test_the_work_of_a_session_is_not_done_in_the_clear(liar: Liar) -> None:
    with liar.worker():
        for asked in (liar.assignment(), gradients(liar.assignment()), evaluation(liar.assignment())):
            assert liar.declined(asked) == "policy:required"
        liar.answered(liar.ready(liar.terms()))
        assert liar.declined(liar.assignment()) == "policy:required", "in the round of a session, too"
        liar.answered(liar.ready(liar.terms(b"after the others")))


STRANGER = Ed25519PrivateKey.generate()
ROSTERS: list[tuple[Callable[[dict[str, Ed25519PrivateKey]], object], str]] = [
    (lambda keys: keys.update({OTHERS[0]: STRANGER}), "roster"),  # a swapped key
    (lambda keys: keys.update({CLIENT: STRANGER}), "roster"),  # the member's own
    (lambda keys: keys.update(stranger=STRANGER), "roster"),
    (lambda keys: keys.update({OTHERS[0]: keys[OTHERS[1]]}), "roster"),  # the key of another member
    (lambda keys: keys.update(stranger=keys.pop(CLIENT)), "terms"),  # the member is not invited
    (lambda keys: keys.pop(OTHERS[0]), "cohort"),
]


def test_a_roster_that_differs_from_the_one_pinned_is_declined(liar: Liar) -> None:
    with liar.worker():
        for change, reason in ROSTERS:
            keys = dict(liar.keys)
            change(keys)
            assert liar.declined(liar.ready(liar.terms(invited=invited(keys)))) == reason
        twice = tuple(sorted([*invited(liar.keys), invited(liar.keys)[0]], key=lambda one: one.client_id))
        assert liar.declined(liar.ready(liar.terms(invited=twice))) == "terms"
        liar.answered(liar.ready(liar.terms()))


OTHER_TERMS: dict[str, Any] = {
    "federation_id": "other", "run_id": "other", "round": 1, "base_model": digest(b"other"), "spec": digest(b"other"),
    "task": "mnist", "seed": 8, "length": 1, "clip": -1.0, "nonce": b"short",
}  # fmt: skip


def test_terms_that_differ_after_ready_are_declined_or_make_a_session_with_other_keys(liar: Liar) -> None:
    first = liar.terms()
    with liar.worker():
        _, said, _ = liar.answered(liar.ready(first))
        for name, value in OTHER_TERMS.items():
            assert liar.declined(liar.ready(replace(first, **{name: value}))) == "terms", name
        assert liar.declined(liar.ready(replace(first, disclose=("loss",)))) == "policy:disclose"
        assert liar.declined(liar.ready(first, run_id="other")) == "terms"
        assert liar.declined(liar.ready(first, seed=8)) == "terms"
        _, again, _ = liar.answered(liar.ready(first))
        assert again == said, "the same question has the same answer"
        _, other, _ = liar.answered(liar.ready(replace(first, nonce=b"another session!")))
        assert other.session != said.session
        assert other.keys[:32] != said.keys[:32]
        assert other.keys[32:] != said.keys[32:]


def test_a_session_at_another_attempt_is_over_also_after_a_restart(liar: Liar) -> None:
    terms = liar.terms()
    with liar.worker():
        _, said, _ = liar.answered(liar.ready(terms))
        for attempt in (1, 2):
            assert liar.declined(liar.ready(terms, attempt=attempt)) == "session-over"
        assert liar.declined(liar.ready(terms)) == "attempt", "a later one has begun"
    with liar.worker():
        assert liar.declined(liar.ready(terms, attempt=3)) == "session-over"
        _, fresh, _ = liar.answered(liar.ready(liar.terms(b"the next attempt"), attempt=3))
        assert fresh.keys != said.keys


def test_forged_replies_end_a_session_and_secrets_are_dealt_once(liar: Liar) -> None:
    """The coordinator has the keys of four colluding members, or lacks one of them."""
    members = sorted(liar.keys)
    with liar.worker():
        for number, other in enumerate((None, liar.terms(b"of other members"))):
            terms = liar.terms(bytes([number + 1]) * 16)
            own, _, _ = liar.answered(liar.ready(terms))
            honest = [own, *(colluder(name, terms, liar.keys[name]) for name in OTHERS)]
            wrong = colluder(OTHERS[0], other or terms, liar.keys[OTHERS[0]] if other else STRANGER)
            assert liar.declined(liar.deal([own, wrong, *honest[2:]], terms, members)) == "envelope"
            assert liar.declined(liar.deal(honest, terms, members)) == "answered"
        terms = liar.terms()
        own, _, _ = liar.answered(liar.ready(terms))
        honest = [own, *(colluder(name, terms, liar.keys[name]) for name in OTHERS)]
        _, said, dealt = liar.answered(liar.deal(honest, terms, members))
        assert liar.answered(liar.deal(honest, terms, members))[1:] == (said, dealt)
        honest[1] = colluder(OTHERS[0], terms, liar.keys[OTHERS[0]], secret=b"another")
        assert liar.declined(liar.deal(honest, terms, members)) == "answered", "a colluder signs two keys"
        assert liar.declined(liar.ready(terms)) == "stage"
        liar.answered(liar.ready(liar.terms(b"after the others")))
