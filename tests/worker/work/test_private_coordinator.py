"""A worker over TLS with a pinned roster, and a coordinator that signs what it likes.

The owner requires private rounds. The worker declines each lie with its reason, and takes part in the next session.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.digests import digest
from federation.secure import hashing
from federation.secure.dealing import deal_bytes
from federation.secure.member_keys import member_keys
from federation.secure.payloads import join_envelopes
from federation.secure.thresholds import BLUR, Thresholds
from federation.training.trainer import Trainer
from federation.trust.envelope import sign
from federation.v1.common_pb2 import AssignmentManifest, EvaluateWork, Input, JacobianWork, ReplyManifest, Row
from federation.v1.secure_pb2 import SecureDealWork, SecureStatement
from federation.vectors import Layout
from federation.work.secure.ready import Ready
from federation.work.secure.terms import SessionTerms
from federation.work.secure.wire import terms_bytes
from tests.harness import wait_for
from tests.scripted import CLIENT, FEDERATION, ScriptedCoordinator, Submission
from tests.worker.scene import Scene, serving
from tests.worker.work.scene import DOCUMENT, OTHERS, invited, keys_of_five, pin, session_terms, to_be_ready
from tests.works import set_work
from worker.site.leaving import Leave, write_leave
from worker.site.pause import Pause, write_pause


class Liar(Scene):
    """A coordinator, the worker that it lies to, and the signing keys of the other members, with whom it works."""

    asked = 0

    def __init__(self, *scene: Any) -> None:
        super().__init__(*scene)
        self.keys = keys_of_five(self.member)
        pin(self.home, self.member, self.keys)
        self.home.policy.write_text("[secure]\nrequired = true\n")

    def assignment(self, **changes: Any) -> AssignmentManifest:
        """To train in the clear; `changes` are fields of the assignment."""
        self.asked += 1
        fields = {"run_id": "run", "round": 0, "assignment_id": f"assignment-{self.asked}"}
        return self.order(**{**fields, "spec": digest(DOCUMENT), **changes})

    def terms(self, nonce: bytes = bytes(16), **changes: Any) -> SessionTerms:
        """What the five members of the roster agree on."""
        return session_terms(self.order(), self.keys, **{"nonce": nonce, **changes})

    def ready(self, terms: SessionTerms, **changes: Any) -> AssignmentManifest:
        """To become ready for a session."""
        self.coordinator.blobs[digest(DOCUMENT)] = DOCUMENT
        return to_be_ready(self.assignment(**changes), terms)

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

    def told(self, asked: AssignmentManifest) -> str | Submission:
        """The reason with which the worker declines, or its reply."""
        self.coordinator.assign(asked)

        def found() -> Any:
            declines = {one.assignment_id: one.reason for one in self.coordinator.declines}
            replies = {one.manifest.assignment_id: one for one in self.coordinator.submissions}
            return declines.get(asked.assignment_id) or replies.get(asked.assignment_id)

        answer: str | Submission = wait_for(found, "an answer", 60)
        return answer

    def declines(self, asked: AssignmentManifest) -> str:
        """The reason with which the worker declines."""
        reason = self.told(asked)
        assert isinstance(reason, str), "the worker did it"
        self.coordinator.open.clear()
        return reason

    def answered(self, asked: AssignmentManifest) -> tuple[bytes, SecureStatement, bytes]:
        """The worker's reply: its envelope, what it says, and its payload."""
        reply = self.told(asked)
        assert isinstance(reply, Submission), reply
        said = SecureStatement.FromString(reply.manifest.statement)
        return reply.envelope.SerializeToString(), said, reply.payload


def colluder(name: str, terms: SessionTerms, key: Ed25519PrivateKey, secret: bytes = b"one") -> bytes:
    """The envelope that another member signs at READY."""
    session = hashing.session(terms_bytes(terms))
    public = member_keys(secret + name.encode(), session).public
    said = SecureStatement(session=session, stage="secure-ready", keys=public.c + public.s, blur=BLUR)
    reply = ReplyManifest(
        federation_id=FEDERATION, run_id=terms.run_id, round=terms.round, spec=terms.spec, client_id=name,
        statement=said.SerializeToString(),
    )  # fmt: skip
    return sign(reply, key).SerializeToString()


@pytest.fixture
def liar(
    coordinator: ScriptedCoordinator, offers: dict[str, Trainer], model: tuple[Layout, bytes], tmp_path: Path
) -> Iterator[Liar]:
    with serving(Liar(coordinator, tmp_path / "home", offers, model)) as made:
        yield made


def gradients(asked: AssignmentManifest) -> AssignmentManifest:
    set_work(asked, JacobianWork(batch_size=8, objectives=("loss",), sketch="exact", budget=1))
    return asked


def evaluation(asked: AssignmentManifest) -> AssignmentManifest:
    del asked.rows[:]
    set_work(asked, EvaluateWork(splits=["train"]))
    return asked


def test_the_work_of_a_session_is_not_done_in_the_clear(liar: Liar) -> None:
    liar.start()
    for asked in (liar.assignment(), gradients(liar.assignment()), evaluation(liar.assignment())):
        assert liar.declines(asked) == "policy:required"
    liar.answered(liar.ready(liar.terms()))
    assert liar.declines(liar.assignment()) == "policy:required", "in the round of a session, too"
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
    liar.start()
    for change, reason in ROSTERS:
        keys = dict(liar.keys)
        change(keys)
        assert liar.declines(liar.ready(liar.terms(invited=invited(keys)))) == reason
    twice = tuple(sorted([*invited(liar.keys), invited(liar.keys)[0]], key=lambda one: one.client_id))
    assert liar.declines(liar.ready(liar.terms(invited=twice))) == "terms"
    liar.answered(liar.ready(liar.terms()))


OTHER_TERMS: dict[str, Any] = {
    "federation_id": "other", "run_id": "other", "round": 1, "base_model": digest(b"other"), "spec": digest(b"other"),
    "task": "mnist", "seed": 8, "length": 1, "clip": -1.0, "nonce": b"short",
}  # fmt: skip


def test_terms_that_differ_after_ready_are_declined_or_make_a_session_with_other_keys(liar: Liar) -> None:
    first = liar.terms()
    liar.start()
    _, said, _ = liar.answered(liar.ready(first))
    for name, value in OTHER_TERMS.items():
        assert liar.declines(liar.ready(replace(first, **{name: value}))) == "terms", name
    assert liar.declines(liar.ready(replace(first, disclose=("loss",)))) == "policy:disclose"
    assert liar.declines(liar.ready(first, run_id="other")) == "terms"
    assert liar.declines(liar.ready(first, seed=8)) == "terms"
    _, again, _ = liar.answered(liar.ready(first))
    assert again == said, "the same question has the same answer"
    _, other, _ = liar.answered(liar.ready(replace(first, nonce=b"another session!")))
    assert other.session != said.session
    assert other.keys[:32] != said.keys[:32]
    assert other.keys[32:] != said.keys[32:]


def test_a_session_at_another_attempt_is_over_also_after_a_restart(liar: Liar) -> None:
    terms = liar.terms()
    running = liar.start()
    _, said, _ = liar.answered(liar.ready(terms))
    for attempt in (1, 2):
        assert liar.declines(liar.ready(terms, attempt=attempt)) == "session-over"
    assert liar.declines(liar.ready(terms)) == "attempt", "a later one has begun"
    running.stop()
    liar.start()
    assert liar.declines(liar.ready(terms, attempt=3)) == "session-over"
    _, fresh, _ = liar.answered(liar.ready(liar.terms(b"the next attempt"), attempt=3))
    assert fresh.keys != said.keys


def test_a_pause_in_a_session_lets_it_go_on_and_begins_no_other_one(liar: Liar) -> None:
    members, terms = sorted(liar.keys), liar.terms()
    running = liar.start()
    own, _, _ = liar.answered(liar.ready(terms))
    write_pause(liar.home.pause, Pause(None))
    running.wait_for("paused")
    liar.answered(liar.deal([own, *(colluder(name, terms, liar.keys[name]) for name in OTHERS)], terms, members))
    assert liar.declines(liar.ready(liar.terms(b"of another round."))) == "paused"


def test_a_site_that_leaves_in_a_session_goes_on_with_it_until_another_attempt_is_asked_for(liar: Liar) -> None:
    members, terms = sorted(liar.keys), liar.terms()
    running = liar.start()
    own, _, _ = liar.answered(liar.ready(terms))
    write_leave(liar.home.leave, Leave(datetime.now(UTC)))
    running.wait_for("leaving")
    liar.answered(liar.deal([own, *(colluder(name, terms, liar.keys[name]) for name in OTHERS)], terms, members))
    assert liar.coordinator.withdrawals == []
    assert liar.declines(liar.ready(liar.terms(b"the next attempt"), attempt=1)) == "paused"
    running.wait_for("left")
    assert len(liar.coordinator.withdrawals) == 1


def test_a_site_leaves_at_once_when_the_coordinator_says_that_its_session_is_over(liar: Liar) -> None:
    terms = liar.terms()
    running = liar.start()
    liar.answered(liar.ready(terms))
    write_leave(liar.home.leave, Leave(datetime.now(UTC)))
    running.wait_for("leaving")
    liar.coordinator.cancel("assignment-1", session=hashing.session(terms_bytes(terms)))
    running.wait_for("left")
    assert kept(liar) == []


def test_a_coordinator_that_calls_a_session_over_and_asks_again_gets_nothing_more_of_it(liar: Liar) -> None:
    members, terms = sorted(liar.keys), liar.terms()
    session = hashing.session(terms_bytes(terms))
    running = liar.start()
    own, _, _ = liar.answered(liar.ready(terms))
    honest = [own, *(colluder(name, terms, liar.keys[name]) for name in OTHERS)]
    # Nobody else can say so, and of another session it says nothing.
    liar.coordinator.cancel("assignment-1", session=session, key=STRANGER)
    liar.coordinator.cancel("assignment-1", session=session, client_id=OTHERS[0])
    running.wait_for("cancel-refused", 2)
    liar.coordinator.cancel("assignment-1", session=session[:-1])
    liar.answered(liar.deal(honest, terms, members))
    liar.coordinator.cancel("assignment-1", session=session)
    liar.coordinator.cancel("assignment-1", session=session)
    assert liar.declines(liar.deal(honest, terms, members)) == "session-over"
    for attempt in (0, 1):
        assert liar.declines(liar.ready(terms, attempt=attempt)) == "session-over"
    running.stop()
    assert kept(liar) == []
    liar.start()
    assert liar.declines(liar.deal(honest, terms, members, attempt=1)) == "session-over"
    _, fresh, _ = liar.answered(liar.ready(liar.terms(b"the next attempt"), attempt=1))
    assert fresh.session != session


def test_a_session_that_is_called_over_while_its_update_is_made_keeps_nothing(
    liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, goes_on, made = threading.Event(), threading.Event(), Ready._made

    def slow(*given: Any) -> Any:
        began.set()
        goes_on.wait(60)
        return made(*given)

    monkeypatch.setattr(Ready, "_made", slow)
    terms = liar.terms()
    running = liar.start()
    liar.coordinator.assign(liar.ready(terms))
    began.wait(60)
    liar.coordinator.cancel("another", session=hashing.session(terms_bytes(terms)))
    running.wait_for("cancelled")
    goes_on.set()
    wait_for(running.worker._runner.idle, "the work to end")
    assert kept(liar) == liar.coordinator.submissions == []


def kept(liar: Liar) -> list[Any]:
    """What the worker keeps of private rounds."""
    with closing(sqlite3.connect(liar.home.memory)) as database:
        return database.execute("SELECT name FROM kept").fetchall()


def test_forged_replies_end_a_session_and_secrets_are_dealt_once(liar: Liar) -> None:
    """The coordinator has the keys of four colluding members, or lacks one of them."""
    members = sorted(liar.keys)
    running = liar.start()
    for number, other in enumerate((None, liar.terms(b"of other members"))):
        terms = liar.terms(bytes([number + 1]) * 16)
        own, _, _ = liar.answered(liar.ready(terms))
        honest = [own, *(colluder(name, terms, liar.keys[name]) for name in OTHERS)]
        wrong = colluder(OTHERS[0], other or terms, liar.keys[OTHERS[0]] if other else STRANGER)
        assert liar.declines(liar.deal([own, wrong, *honest[2:]], terms, members)) == "envelope"
        assert liar.declines(liar.deal(honest, terms, members)) == "answered"
    terms = liar.terms()
    own, _, _ = liar.answered(liar.ready(terms))
    honest = [own, *(colluder(name, terms, liar.keys[name]) for name in OTHERS)]
    _, said, dealt = liar.answered(liar.deal(honest, terms, members))
    assert liar.answered(liar.deal(honest, terms, members))[1:] == (said, dealt)
    honest[1] = colluder(OTHERS[0], terms, liar.keys[OTHERS[0]], secret=b"another")
    assert liar.declines(liar.deal(honest, terms, members)) == "answered", "a colluder signs two keys"
    assert liar.declines(liar.ready(terms)) == "stage"
    liar.answered(liar.ready(liar.terms(b"after the others")))
    running.stop()
