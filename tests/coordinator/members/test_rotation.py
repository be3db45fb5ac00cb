"""A member's next signing key: registered once, by its holder alone; what the old key signed in time counts."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import func, select

from coordinator.backups.home_keys import rotate_signing_key
from coordinator.members.rotation import OVERLAP
from federation.record.bundle import BundleReader
from federation.trust.envelope import envelope_digest, key_id, sign, verify
from federation.trust.identity import parse_peer
from federation.trust.key_chain import moment, rotate
from federation.trust.proofs import prove_renewal
from federation.v1 import common_pb2 as common
from federation.v1.record_pb2 import LogRecord
from storage.models import Client, Rotation
from storage.states import RunState
from tests.coordinator.members.scene import Change, problems
from tests.few import few
from tests.harness import Member
from tests.running import refused
from tests.stage import Player, Stage, spec
from tests.verification.scene import Edited, checked, exported, log_signed_again, refusal, signed_again, verified
from verification.errors import VerificationError
from verification.run import verify as verify_bundle

LONG_DEADLINE = b"train.deadline_seconds = 1000000"
Pair = tuple[Player, Player]


def registered(stage: Stage, name: str) -> tuple[bytes, int]:
    """The present key of a member, and how many came before it."""
    count = select(func.count()).where(Rotation.client_id == name)
    return stage.look(lambda session: (session.get_one(Client, name).signing_key, session.scalar(count) or 0))


def raw(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def signers(stage: Stage, run: str, number: int = 0) -> dict[str, bytes]:
    """The id of the key that signed each accepted reply to the first phase of a round."""
    rows = stage.replies(run, number)
    return {name: common.SignedEnvelope.FromString(row.envelope).key_id for name, row in rows.items()}


@pytest.fixture
def pair(stage: Stage, request: pytest.FixtureRequest) -> Iterator[Pair]:
    number = stage.count + 1
    ann, ben = stage.cast(stage.task(), f"ann-{number}", f"ben-{number}")
    yield ann, ben
    ann.leave()
    ben.leave()


def test_members_of_a_private_run_have_pinned_the_key_so_it_stays_until_the_run_ends(stage: Stage) -> None:
    number = stage.count
    players = stage.cast(stage.task(), *(f"private-{number}-{one}" for one in range(5)))
    [task] = players[0].tasks
    run = stage.submit(spec(f"private-{number}", task, 1, algorithm="fedavg-n", more='privacy.secure = "sum"'))
    players[0].order()
    change = Change(players[0].member)
    with refused("FAILED_PRECONDITION", "run-state") as messages:
        change.ask()
    assert f"the run private-{number} has private rounds" in messages[0]
    stage.stop_run(run)
    stage.wait_state(run, RunState.STOPPED)
    change.ask()
    assert registered(stage, players[0].name) == (raw(change.key), 1)


def test_what_was_asked_before_is_answered_with_either_key_and_what_comes_later_with_the_new_one(
    stage: Stage, pair: Pair, tmp_path: Path
) -> None:
    ann, ben = pair
    [task] = ann.tasks
    run = stage.submit(spec(f"rotated-{stage.count}", task, 2, algorithm="fedmgda+"))
    asked, other = ann.order(), ben.order()
    old, change = ann.member, Change(ann.member)
    answer = change.ask()
    assert parse_peer(answer.certificate).signing_key == raw(change.key)
    files = replace(old.files, signing_key=change.key, tls_key=change.tls_key, certificate=answer.certificate)
    said = verify(answer.receipt, common.RotationReceiptManifest, old.files.coordinator.chain.present)
    assert moment(said.until) - moment(said.ended) == OVERLAP
    assert registered(stage, ann.name) == (raw(change.key), 1)
    ann.reply(asked)  # with the old key: it was asked before
    new = Member(files)
    ann.member = new
    ann.attend(**ann.tasks)
    ben.reply(other)
    stage.wait_outcome(run, ann.name, "OPEN", number=0, phase=1)
    evaluation = ann.order()
    ann.member = Member(replace(files, signing_key=old.files.signing_key))
    with refused("UNAUTHENTICATED", "key-ended") as messages:  # it was asked after
        ann.submit(evaluation)
    assert "was replaced at" in messages[0]
    assert "before this was asked or made" in messages[0]
    assert stage.served.refusals("Submit")[-1].outcome == "key-ended"
    ann.decline(evaluation, "no-data")
    stage.wait_outcome(run, ann.name, "OPEN", number=0, phase=1)  # neither does its decline count
    ann.member = new
    ann.attend(**ann.tasks)
    ann.reply(evaluation)
    stage.play(run, ann, ben)
    assert signers(stage, run)[ann.name] == key_id(old.files.signing_key.public_key())
    assert signers(stage, run, 1)[ann.name] == key_id(change.key.public_key())
    assert len(verified(stage, run, tmp_path)) == 2
    stage.served.coordinator.record.sequencer.sequence(show=True)
    assert problems(stage) == []


def test_a_former_key_of_the_coordinator_signs_no_step_whatever_time_it_states(
    stage: Stage, pair: Pair, tmp_path: Path
) -> None:
    ann, ben = pair
    [task] = ann.tasks
    run = stage.submit(spec(f"stolen-{stage.count}", task, 2))
    stage.play(run, ann, ben, until=lambda: any(one.step for one in stage.rounds(run)))
    old = stage.served.home.signing_key

    def change() -> None:
        stage.served.home = rotate_signing_key(stage.served.home, now=stage.clock())

    stage.restart(between=change)
    for player in stage.players.values():
        player.member.files.coordinator.learn(stage.served.home.rotations)
    stage.play(run, ann, ben)
    good = Edited.of(exported(stage, run, tmp_path / "run.fedpareto"))

    assert good.round(1).step.key_id == key_id(stage.served.home.signing_key.public_key())

    def forged(created: datetime) -> str:
        def early(found: Any) -> None:
            found.created.FromDatetime(created)

        record = good.with_round(1, lambda found: signed_again(found.step, common.StepManifest, old, early))
        name = envelope_digest(record.round(1).step)

        def told(log: LogRecord) -> None:
            entry = [entry for entry in log.entries if entry.subject == f"{run}/1" and entry.digest][-1]
            entry.digest = name
            log_signed_again(log, stage.served.home.log_key.key)

        return refusal(record.with_log(told), tmp_path)

    assert len(checked(good, tmp_path)) == 2
    assert "was replaced at" in forged(stage.clock())
    early = stage.clock() - timedelta(hours=1)
    assert "tells of the step; a key that was replaced by entry" in forged(early)


def test_an_answer_that_was_lost_is_given_again(stage: Stage, pair: Pair) -> None:
    change = Change(pair[0].member)
    first, again = change.ask(), change.ask()
    assert first.receipt == again.receipt
    assert first.certificate != again.certificate
    assert registered(stage, pair[0].name) == (raw(change.key), 1)
    assert len(stage.served.entries(action="key.rotated", subject=pair[0].name)) == 1
    with refused("INVALID_ARGUMENT", "proof"):  # only its holder gets a certificate for it
        change.ask(proof=prove_renewal(pair[0].member.files.signing_key, change.csr))


def with_a_forged_signature(stage: Stage, ann: Player, ben: Player) -> object:
    change = Change(ann.member)
    change.rotation.statement.signature = bytes(64)
    return change.ask()


def replayed(stage: Stage, ann: Player, ben: Player) -> object:
    old = Change(ann.member)
    ann.member = old.done()
    ann.member = Change(ann.member, number=2).done()
    old.member = ann.member
    return old.ask()


def to_a_key_of_its_own_from_before(stage: Stage, ann: Player, ben: Player) -> object:
    first = ann.member.files.signing_key
    ann.member = Change(ann.member).done()
    return Change(ann.member, number=2, key=first).ask()


def without_possession(stage: Stage, ann: Player, ben: Player) -> object:
    change = Change(ann.member)
    change.rotation.possession = bytes(64)
    return change.ask()


def to_a_point_of_small_order(stage: Stage, ann: Player, ben: Player) -> object:
    change = Change(ann.member)
    manifest = common.RotationManifest.FromString(change.rotation.statement.manifest)
    manifest.new_key = bytes(32)
    change.rotation.statement.CopyFrom(sign(manifest, ann.member.files.signing_key))
    return change.ask()


def by_a_revoked_member(stage: Stage, ann: Player, ben: Player) -> object:
    stage.revoke(ann.name)
    return Change(ann.member).ask()


Attack = Callable[[Stage, Player, Player], object]
ATTACKS: dict[str, tuple[Attack, str, str]] = {
    "by another key": (
        lambda _, ann, ben: Change(ann.member).ask(old=Ed25519PrivateKey.generate()), "UNAUTHENTICATED", "key-unknown"
    ),
    "with a forged signature": (with_a_forged_signature, "UNAUTHENTICATED", "signature"),
    "replayed": (replayed, "UNAUTHENTICATED", "key-ended"),
    "to the stolen key of another member": (
        lambda _, ann, ben: Change(ann.member, key=ben.member.files.signing_key).ask(),
        *("INVALID_ARGUMENT", "signing-key"),
    ),
    "to a key of its own from before": (to_a_key_of_its_own_from_before, "INVALID_ARGUMENT", "signing-key"),
    "without possession": (without_possession, "INVALID_ARGUMENT", "proof"),
    "without a proof": (lambda _, ann, ben: Change(ann.member).ask(proof=bytes(64)), "INVALID_ARGUMENT", "proof"),
    "of another federation": (
        lambda _, ann, ben: Change(ann.member).ask(federation_id="another"), "INVALID_ARGUMENT", "rotation"
    ),
    "of another member": (
        lambda _, ann, ben: Change(ann.member).ask(client_id=ben.name), "INVALID_ARGUMENT", "rotation"
    ),
    "with another number": (lambda _, ann, ben: Change(ann.member, number=2).ask(), "INVALID_ARGUMENT", "rotation"),
    "to a point of small order": (to_a_point_of_small_order, "INVALID_ARGUMENT", "signing-key"),
    "with another request": (
        lambda _, ann, ben: Change(ann.member, csr=b"no request").ask(), "INVALID_ARGUMENT", "csr"
    ),
    "by a revoked member": (by_a_revoked_member, "UNAUTHENTICATED", "certificate-revoked"),
}  # fmt: skip


@few("replayed", "by a revoked member", "without possession", "with a forged signature", "to a point of small order")
@pytest.mark.parametrize(("attack", "status", "reason"), ATTACKS.values(), ids=ATTACKS)
def test_an_attack_on_a_rotation_is_refused_recorded_and_changes_nothing(
    stage: Stage, pair: Pair, attack: Attack, status: str, reason: str
) -> None:
    ann, ben = pair
    with refused(status, reason):
        attack(stage, ann, ben)
    assert stage.served.refusals("RotateKey")[-1].outcome == reason
    assert registered(stage, ann.name)[0] == raw(ann.member.files.signing_key)
    assert registered(stage, ben.name) == (raw(ben.member.files.signing_key), 0)


@pytest.mark.full
def test_a_rotation_that_somebody_wrote_into_the_record_is_found(stage: Stage, pair: Pair, tmp_path: Path) -> None:
    """A key of the attacker's in the place of a former one, and a reply that it signed."""
    ann, ben = pair
    [task] = ann.tasks
    run = stage.submit(spec(f"forged-{stage.count}", task, 1))
    stage.play(run, ann, ben)
    ann.member = Change(ann.member).done()
    stage.served.coordinator.record.sequencer.sequence(show=True)
    assert problems(stage) == []
    thief = Ed25519PrivateKey.generate()
    home = stage.served.home
    with stage.served.database.begin() as session:
        row = session.scalars(select(Rotation).where(Rotation.client_id == ann.name)).one()
        good = row.rotation
        facts: dict[str, Any] = {"federation_id": home.federation_id, "client_id": ann.name, "number": 1}
        forged = rotate(thief, ann.member.files.signing_key, **facts, now=stage.clock())  # as if it had agreed
        forged.receipt.CopyFrom(common.KeyRotation.FromString(good).receipt)
        row.rotation = forged.SerializeToString()
    try:
        assert any(f"client {ann.name}: its signing keys:" in one for one in problems(stage))
        file, wrong = exported(stage, run, tmp_path / "run.fedpareto"), f"the rotations of {ann.name}"
        with BundleReader(file) as bundle, pytest.raises(VerificationError, match=wrong):
            list(verify_bundle(bundle))
    finally:
        with stage.served.database.begin() as session:
            session.scalars(select(Rotation).where(Rotation.client_id == ann.name)).one().rotation = good


def test_after_the_stated_time_the_old_key_is_refused_and_the_new_one_is_not(stage: Stage, pair: Pair) -> None:
    ann, _ = pair
    [task] = ann.tasks
    document = spec(f"late-{stage.count}", task, 1).replace(b"train.deadline_seconds = 900", LONG_DEADLINE)
    assert LONG_DEADLINE in document
    stage.come_back()  # after a restart the coordinator waits half a minute for those of before
    stage.submit(document)
    asked = ann.order()
    new = Change(ann.member).done()
    with stage.clock.moved(OVERLAP + timedelta(minutes=1)):
        with refused("UNAUTHENTICATED", "key-ended") as messages:
            ann.submit(asked)
        assert "and counted until" in messages[0]
        ann.member = new
        ann.reply(asked)
