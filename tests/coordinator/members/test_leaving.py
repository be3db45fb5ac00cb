"""A member leaves with a signed withdrawal, at any stage of a round; it comes back as who it was."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from sqlalchemy import select, text
from sqlalchemy.orm import Session

from coordinator.alerts.about_federation import asks_to_be_forgotten
from coordinator.members.membership import forget
from federation.record import bundle
from federation.transport.channels import refusal_from_rpc_error, signed_detail
from federation.trust.certificates import make_csr
from federation.trust.envelope import envelope_digest, sign
from federation.trust.identity import parse_peer
from federation.trust.join_string import JoinStringFields
from federation.trust.keys import new_tls_key
from federation.trust.proofs import prove_possession, prove_renewal
from federation.v1.common_pb2 import SignedEnvelope, WithdrawalManifest
from federation.v1.enrollment_pb2 import EnrollRequest
from federation.v1.federation_pb2 import LeaveRequest, RenewRequest
from federation.v1.record_pb2 import LogRecord, Withdrawals
from storage.models import Client, Withdrawal
from storage.states import ClientState, RoundState
from tests.coordinator.members.scene import Change
from tests.coordinator.members.test_rotation import problems
from tests.few import few
from tests.harness import Member
from tests.running import SECONDS, refused
from tests.stage import Player, Stage, answer
from tests.verification.scene import Edited, checked, exported, log_signed_again, refusal


def withdrawal(member: Member, *, forget: bool = False, **changes: Any) -> SignedEnvelope:
    """What a member signs that leaves; `changes` are of the manifest."""
    files = member.files
    values = {"federation_id": files.federation_id, "client_id": files.client_id, "forget": forget}
    values["certificate"] = parse_peer(files.certificate).serial
    return sign(WithdrawalManifest(**{**values, **changes}), files.signing_key)


def leave(player: Player, envelope: SignedEnvelope | None = None) -> float:
    """Leaves; the time that it is told."""
    request = LeaveRequest(withdrawal=envelope or withdrawal(player.member))
    return player.member.stub.Leave(request, timeout=SECONDS).left.ToDatetime().timestamp()


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


def begin(stage: Stage, *, rounds: int = 1, more: str = "", **keys: Any) -> tuple[str, list[Player]]:
    """Ann, ben, and one who is about to leave, with a run that needs two replies."""
    more = f"selection = {{ minimum = 3, quorum = 0.5 }}\n{more}"
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


def problems_in(stage: Stage, session: Session) -> list[str]:
    from coordinator.services.checks.envelope_checks import EnvelopeChecks
    from coordinator.services.checks.record_check import record_problems

    home = stage.served.home
    checks = EnvelopeChecks(home.federation_id, home.signing.chain)
    found = record_problems(session, checks, home.log_key.entry_key, stage.blobs)
    return [one for one in found if isinstance(one, str)]


@few("waiting", "replied")
@pytest.mark.parametrize("when", ["before", "waiting", "replied", "evaluating"])
def test_a_round_ends_without_a_new_attempt_whenever_a_member_leaves(stage: Stage, when: str, tmp_path: Path) -> None:
    run, (ann, ben, gone) = begin(stage, paused=when == "before")
    if when == "before":
        leave(gone)
        away(stage, gone)
        stage.resume(run)
    elif when == "waiting":
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
    entered = {"ann", "ben", gone.name} if when in ("replied", "evaluating") else {"ann", "ben"}
    assert {name for name, reply in stage.replies(run).items() if reply.weight is not None} == entered
    assert checked(Edited.of(exported(stage, run, tmp_path / "run")), tmp_path)
    assert problems(stage) == []
