"""A member leaves with a signed withdrawal, at any stage of a round; it comes back as who it was."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from sqlalchemy import select, text
from sqlalchemy.orm import Session

from coordinator.alerts.about_federation import asks_to_be_forgotten
from coordinator.members.membership import forget
from coordinator.rounds import conversation
from coordinator.services.checks.envelope_checks import EnvelopeChecks
from coordinator.services.checks.record_check import record_problems
from federation.record import bundle
from federation.record.bundle import BundleReader
from federation.transport.channels import refusal_from_rpc_error, signed_detail
from federation.trust.certificates import make_csr
from federation.trust.envelope import envelope_digest
from federation.trust.identity import parse_peer
from federation.trust.join_string import JoinStringFields
from federation.trust.keys import new_tls_key
from federation.trust.proofs import prove_possession
from federation.v1.common_pb2 import SignedEnvelope
from federation.v1.enrollment_pb2 import EnrollRequest
from federation.v1.federation_pb2 import RenewRequest
from federation.v1.record_pb2 import Withdrawals
from storage.models import Client, Withdrawal
from storage.states import ClientState, RoundState
from tests.coordinator.members.scene import Change, leave, withdrawal
from tests.few import few
from tests.harness import Member
from tests.running import SECONDS, refused
from tests.stage import Player, Stage, answer
from tests.verification.scene import Edited, checked, exported, refusal
from verification.log import RunLog
from verification.own_replies import OwnWithdrawals, compared_withdrawal
from verification.run import OpenedRun


def comes_back(stage: Stage, player: Player) -> None:
    """Joins again, with its signing key; the older certificates end when it attends."""
    join: JoinStringFields = stage.served.join_string(player.name)
    key, files = new_tls_key(), player.member.files
    csr = make_csr(key)
    proof = prove_possession(files.signing_key, join.secret, csr)
    signing_key = files.signing_key.public_key().public_bytes_raw()
    answered = stage.served.admit(
        EnrollRequest(secret=join.secret, csr=csr, signing_key=signing_key, proof=proof, software="test")
    )
    player.member = Member(replace(files, certificate=answered.certificate, tls_key=key))


def client(stage: Stage, player: Player) -> Client:
    return stage.look(lambda session: session.get_one(Client, player.name))


def begin(stage: Stage, *, least: int = 3, rounds: int = 1, more: str = "", **keys: Any) -> tuple[str, list[Player]]:
    """Ann, ben, and one who is about to leave, with a run that needs two replies."""
    more = f"selection = {{ minimum = {least}, quorum = 0.5 }}\n{more}"
    return stage.begin("ann", "ben", f"leaver-{stage.count}", rounds=rounds, more=more, **keys)


def away(stage: Stage, player: Player) -> None:
    """The player is no part of the stage any more: it would be refused."""
    stage.players.pop(player.name, None)
    player.leave()


def edited(stage: Stage, statement: str) -> list[str]:
    """The problems of a record that somebody has edited; the edit is taken back."""
    found: list[str] = []
    with stage.served.database.begin() as session:
        session.execute(text(statement))
        session.flush()
        found += problems_in(stage, session)
        session.rollback()
    return found


def problems(stage: Stage) -> list[str]:
    """What `admin audit verify` says of the record."""
    return stage.look(lambda session: problems_in(stage, session))


def problems_in(stage: Stage, session: Session) -> list[str]:
    home = stage.served.home
    checks = EnvelopeChecks(home.federation_id, home.signing.chain)
    found = record_problems(session, checks, home.log_key.entry_key, stage.blobs)
    return [one for one in found if isinstance(one, str)]


def both(stage: Stage, run: str, path: Path) -> Edited:
    """The bundle of a run; `verify` and `audit verify` find nothing."""
    found = Edited.of(exported(stage, run, path / "run"))
    assert checked(found, path)
    assert problems(stage) == []
    return found


@few("waiting")
@pytest.mark.parametrize("when", ["waiting", "replied", "evaluating"])
def test_a_round_ends_without_a_new_attempt_whenever_a_member_leaves(stage: Stage, when: str, tmp_path: Path) -> None:
    run, (ann, ben, gone) = begin(stage)
    if when == "waiting":
        answer(ann, ben)
        gone.order()
        leave(gone)
    else:
        answer(ann, ben, gone)
        if when == "evaluating":
            stage.wait_round(run, 0, RoundState.STEPPED)
            gone.order()
        leave(gone)
    away(stage, gone)
    stage.complete(run, ann, ben)
    (only,) = stage.rounds(run)
    assert (only.attempt, list(stage.step(run).revoked)) == (0, [])
    entered = {"ann", "ben"} if when == "waiting" else {"ann", "ben", gone.name}
    assert {name for name, reply in stage.replies(run).items() if reply.weight is not None} == entered
    if when == "waiting":
        assert stage.outcomes(run)[gone.name] == ("CANCELLED", "client-left")
    both(stage, run, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("counted", [False, True])
def test_a_member_that_leaves_between_selection_and_question_is_not_asked(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: bool
) -> None:
    facts, left = conversation._facts, list[str]()

    def leaving(*given: Any) -> Any:
        found = facts(*given) if counted else None
        if not left:
            left.append(gone.name)
            leave(gone)
        return found or facts(*given)

    monkeypatch.setattr(conversation, "_facts", leaving)
    run, (ann, ben, gone) = begin(stage, paused=True)
    stage.resume(run)
    stage.play(run, ann, ben, until=lambda: left)
    away(stage, gone)
    stage.complete(run, ann, ben)
    assert stage.outcomes(run).get(gone.name) == (("CANCELLED", "client-left") if counted else None)
    assert sorted(stage.rounds(run)[0].selected) == sorted(["ann", "ben", gone.name])
    found = both(stage, run, tmp_path)
    assert bundle.WITHDRAWALS in found.entries


def check_own_withdrawal(found: Edited, gone: Player, path: Path) -> None:
    """The member that has left finds a record that hides its withdrawal, and one with a withdrawal not its own."""
    with BundleReader(found.write(path / "own")) as reader:
        log = OpenedRun.of(reader).log
    (entry,) = (one for one in log.entries if one.action == "client.left")
    hiding = replace(log, entries=tuple(one for one in log.entries if one is not entry))
    certificate, at = parse_peer(gone.member.files.certificate).serial, log.newest.created.ToDatetime(UTC)
    left, day = at - timedelta(seconds=1), timedelta(days=1)
    own = OwnWithdrawals(certificate=certificate, signed=frozenset({entry.digest}), left=left)

    def told(record: RunLog, **changes: Any) -> tuple[str, str]:
        compared = compared_withdrawal(record, gone.name, replace(own, **changes))
        return compared.problem, compared.missing

    assert told(log) == told(log, left=None) == ("", "")
    problem, missing = told(log, signed=frozenset({"another"}))
    assert (entry.digest in problem, missing) == (True, "")
    assert told(log, signed=frozenset(), left=None, certificate="ab") == ("", ""), "it has joined again since"
    problem, missing = told(hiding)
    assert ("does not tell that this member has left" in problem, missing) == (True, "")
    problem, missing = told(hiding, left=left + day)
    assert (problem, "ask for a newer bundle" in missing) == ("", True)
    assert told(hiding, left=None, signed=frozenset()) == ("", "")
    others = tuple(one for one in log.entries if one.subject != gone.name)
    assert told(replace(log, entries=others)) == ("", ""), "a run without it"


def test_from_the_next_round_on_a_rule_forgets_who_has_left(stage: Stage, tmp_path: Path) -> None:
    run, (ann, ben, gone) = begin(stage, least=2, rounds=2, algorithm="afl")
    answer(ann, ben, gone)
    stage.wait_round(run, 0, RoundState.STEPPED)
    leave(gone)
    away(stage, gone)
    stage.complete(run, ann, ben)
    assert [list(stage.step(run, number).forgotten) for number in (0, 1)] == [[], [gone.name]]
    assert sorted(stage.rounds(run)[1].state_after["rule"]["lambda"]) == ["ann", "ben"]
    found = both(stage, run, tmp_path)
    check_own_withdrawal(found, gone, tmp_path)
    # Hidden, and invented.
    hidden = refusal(found.having({bundle.WITHDRAWALS: None}), tmp_path)
    assert f"the log tells that {gone.name} has left, and its withdrawal" in hidden
    forged = Withdrawals(withdrawals=[withdrawal(ann.member)])
    assert f"the log tells that {gone.name} has left" in refusal(
        found.having({bundle.WITHDRAWALS: forged.SerializeToString()}), tmp_path
    )
    signed = Withdrawals.FromString(found.entries[bundle.WITHDRAWALS])
    twice = Withdrawals(withdrawals=[*signed.withdrawals, *signed.withdrawals])
    assert "twice" in refusal(found.having({bundle.WITHDRAWALS: twice.SerializeToString()}), tmp_path)


@few("hidden")
@pytest.mark.parametrize(
    ("name", "statement", "words"),
    [
        ("hidden", "delete from withdrawals", "has left, and its withdrawal"),
        ("invented", "delete from audit_log where action = 'client.left'", "the log does not tell that it has left"),
        ("undone", "update clients set state = 'ACTIVE' where state = 'LEFT'", "the log tells that it has left"),
        ("another's", "update withdrawals set client_id = 'ann'", "key-unknown"),
        ("wish", "update withdrawals set forget = true", "mismatch:forget"),
        ("key", "update withdrawals set envelope = x'00'", "the recorded bytes are not a signed envelope"),
    ],
)
def test_a_record_in_which_a_withdrawal_is_hidden_or_invented_is_found(
    stage: Stage, name: str, statement: str, words: str
) -> None:
    if stage.served.database.engine.dialect.name != "sqlite":
        pytest.skip("the statements are SQLite's")
    _, [gone] = stage.crew(f"edited-{stage.count}")
    leave(gone)
    away(stage, gone)
    assert problems(stage) == []
    assert any(words in problem for problem in edited(stage, statement)), edited(stage, statement)


def test_a_member_that_has_left_may_only_say_so_again_until_it_joins_again(stage: Stage) -> None:
    _, [gone] = stage.crew(f"again-{stage.count}")
    first = withdrawal(gone.member)
    assert gone.stream is not None
    left = leave(gone, first)
    assert gone.stream.end().reason == "client-left"
    with pytest.raises(grpc.RpcError) as raised:
        gone.member.stub.Renew(RenewRequest(), timeout=SECONDS)
    assert refusal_from_rpc_error(raised.value).reason == "client-left"
    shown = signed_detail(raised.value)
    assert shown is not None
    assert envelope_digest(shown) == envelope_digest(first)
    # Again, and with another signature: the same answer, and one entry.
    assert leave(gone, first) == leave(gone, withdrawal(gone.member, forget=True)) == left
    entries = stage.served.entries(action="client.left", subject=gone.name)
    assert [(entry.digest, entry.detail) for entry in entries] == [
        (envelope_digest(first), f"certificate {parse_peer(gone.member.files.certificate).serial}, ACTIVE")
    ]
    assert client(stage, gone).state is ClientState.LEFT
    old = gone.member
    comes_back(stage, gone)
    gone.attend(**gone.tasks)
    assert (client(stage, gone).state, client(stage, gone).left) == (ClientState.ACTIVE, None)
    # What it signed before is of an earlier joining, also for those who have its keys.
    with refused("INVALID_ARGUMENT", "withdrawal") as messages:
        leave(gone, first)
    assert "withdraws from no later joining" in messages[0]
    assert client(stage, gone).state is ClientState.ACTIVE
    assert problems(stage) == []
    assert old.files.signing_key is gone.member.files.signing_key
    leave(gone)
    away(stage, gone)
    assert problems(stage) == []


def test_a_member_that_waits_for_its_approval_leaves_and_waits_again_when_it_is_back(stage: Stage) -> None:
    gone = stage.player(f"waits-{stage.count}")
    with stage.served.database.begin() as session:
        session.get_one(Client, gone.name).state = ClientState.PENDING
    leave(gone)
    with refused("FAILED_PRECONDITION", "client-state"):
        stage.approve(gone.name)
    comes_back(stage, gone)
    assert client(stage, gone).state is ClientState.PENDING
    with stage.served.database.begin() as session:
        session.get_one(Client, gone.name).state = ClientState.ACTIVE


BAD: dict[str, tuple[Callable[[Player, Player], SignedEnvelope], str, str]] = {
    "another federation": (lambda own, _: withdrawal(own.member, federation_id="x"), "INVALID_ARGUMENT", "withdrawal"),
    "another name": (
        lambda own, other: withdrawal(own.member, client_id=other.name), "INVALID_ARGUMENT", "withdrawal",
    ),
    "another's": (lambda _, other: withdrawal(other.member), "UNAUTHENTICATED", "key-unknown"),
    "no certificate": (lambda own, _: withdrawal(own.member, certificate=""), "INVALID_ARGUMENT", "withdrawal"),
    "another certificate": (
        lambda own, other: withdrawal(own.member, certificate=parse_peer(other.member.files.certificate).serial),
        "INVALID_ARGUMENT", "withdrawal",
    ),
    "another signature": (
        lambda own, _: SignedEnvelope(
            manifest=withdrawal(own.member).manifest, key_id=withdrawal(own.member).key_id, signature=bytes(64)
        ),
        "UNAUTHENTICATED", "signature",
    ),
    "nothing": (lambda own, _: SignedEnvelope(), "UNAUTHENTICATED", "key-unknown"),
    "too large": (lambda own, _: withdrawal(own.member, certificate="a" * 5000), "INVALID_ARGUMENT", "withdrawal"),
}  # fmt: skip


def test_a_withdrawal_that_is_not_this_members_own_is_refused_recorded_and_changes_nothing(stage: Stage) -> None:
    _, (own, other) = stage.crew(f"own-{stage.count}", f"other-{stage.count}")
    for name, (made, status, reason) in BAD.items():
        with refused(status, reason):
            leave(own, made(own, other))
        assert stage.served.refusals("Leave")[-1].outcome == reason, name
    assert {client(stage, player).state for player in (own, other)} == {ClientState.ACTIVE}
    own.leave()
    other.leave()


@pytest.mark.full
def test_after_a_rotation_the_new_key_withdraws_and_the_old_one_does_not(stage: Stage) -> None:
    _, [gone] = stage.crew(f"rotates-{stage.count}")
    old = withdrawal(gone.member)
    gone.member = Change(gone.member).done()
    with refused("UNAUTHENTICATED", "key-ended"):
        leave(gone, old)
    leave(gone)
    away(stage, gone)
    assert problems(stage) == []


def test_the_wish_to_be_forgotten_is_an_alert_until_an_officer_has_decided(stage: Stage) -> None:
    _, [gone] = stage.crew(f"forget-{stage.count}")
    leave(gone, withdrawal(gone.member, forget=True))
    away(stage, gone)

    def alerted() -> Sequence[str]:
        return [fact.client_id for fact in stage.look(asks_to_be_forgotten)]

    assert gone.name in alerted()
    with stage.served.database.begin() as session:
        forget(session, gone.name, "asked", by="test", now=stage.clock())
    assert gone.name not in alerted()
    assert stage.look(lambda session: session.scalar(select(Withdrawal.forget).filter_by(client_id=gone.name))) is True


@pytest.mark.full
def test_a_revoked_member_cannot_leave_and_one_that_has_left_can_be_revoked(stage: Stage) -> None:
    _, (revoked, gone) = stage.crew(f"revoked-{stage.count}", f"left-{stage.count}")
    stage.revoke(revoked.name)
    with refused("UNAUTHENTICATED", "certificate-revoked"):
        leave(revoked)
    leave(gone)
    stage.revoke(gone.name)
    away(stage, gone)
    assert client(stage, gone).state is ClientState.REVOKED
    assert problems(stage) == []
