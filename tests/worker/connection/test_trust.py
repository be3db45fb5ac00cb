"""What a worker believes of its coordinator: signed times, signed revocations, signed restores."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.monitoring.events import Events
from federation.refusals import Refusal
from federation.trust.envelope import CONTEXTS, key_id, sign
from federation.trust.identity import parse_peer
from federation.trust.key_chain import CoordinatorKeys
from federation.trust.member_files import MemberFiles
from federation.v1 import common_pb2 as common
from tests.harness import federation
from tests.scripted import CLIENT, FEDERATION, ScriptedCoordinator
from tests.worker.scene import LAYOUT, Scene, command, serving
from worker.connection.clock import CoordinatorClock, TimeRefused
from worker.home import WorkerHome, WorkerHomeError
from worker.progress import Progress, StatementError, accept_restore, pending_restore
from worker.site.policy_file import Policy


@pytest.fixture
def scene(coordinator: ScriptedCoordinator, tmp_path: Path) -> Iterator[Scene]:
    """Its workers offer nothing."""
    with serving(Scene(coordinator, tmp_path / "home", {}, (LAYOUT, b""))) as made:
        yield made


# --- time


BAD_TIMES: list[tuple[str, Callable[[common.TimeManifest], common.SignedEnvelope | None]]] = [
    ("not signed", lambda manifest: common.SignedEnvelope(manifest=manifest.SerializeToString())),
    ("not signed", lambda manifest: sign(manifest, Ed25519PrivateKey.generate())),
    ("clock shows 9999", lambda manifest: setattr(manifest.now, "seconds", 253402300799)),
    ("does not exist", lambda manifest: setattr(manifest.now, "seconds", 2**62)),
    ("does not exist", lambda manifest: setattr(manifest.now, "nanos", -1)),
    ("outside the validity", lambda manifest: setattr(manifest.now, "seconds", manifest.now.seconds - 365 * 86400)),
    ("no answer to this worker", lambda manifest: setattr(manifest, "client_id", "hospital-b")),
    ("no answer to this worker", lambda manifest: setattr(manifest, "federation_id", "another")),
    ("it is an old one", lambda manifest: setattr(manifest, "nonce", bytes(32))),
]


def test_a_worker_takes_no_time_but_a_sane_one_that_was_signed_in_answer_to_it_and_keeps_asking(scene: Scene) -> None:
    left = [change for _, change in BAD_TIMES]
    scene.coordinator.change_time = lambda manifest: left.pop(0)(manifest) if left else None
    running = scene.attending()
    messages = [event["message"] for event in running.events("refused")]
    assert len(messages) == len(BAD_TIMES)
    for (words, _), message in zip(BAD_TIMES, messages, strict=True):
        assert words in message
    nonces = {hello.nonce for hello in scene.coordinator.hellos}
    assert len(nonces) == len(BAD_TIMES) + 1, "a fresh nonce for each stream"


def test_a_signature_made_for_another_type_of_message_is_no_signed_time(scene: Scene, tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    clock, _ = clock_of(scene.member, tmp_path, key)
    manifest = time_manifest(datetime.now(UTC)).SerializeToString()
    signature = key.sign(CONTEXTS[common.ReceiptManifest] + b"\0" + manifest)
    with pytest.raises(TimeRefused, match="not signed"):
        clock.set(
            common.SignedEnvelope(manifest=manifest, key_id=key_id(key.public_key()), signature=signature), b"nonce"
        )


def time_manifest(now: datetime) -> common.TimeManifest:
    manifest = common.TimeManifest(federation_id=FEDERATION, client_id=CLIENT, nonce=b"nonce")
    manifest.now.FromDatetime(now)
    return manifest


def progress_of(member: MemberFiles, directory: Path, *, ask: bool = False, **rounds: int) -> Progress:
    """What the worker in a directory remembers, which has seen these rounds of runs."""
    home = WorkerHome(directory)
    progress = Progress(home.progress, home.accepted_restore, member=member, ask=ask, events=Events())
    for run, number in rounds.items():
        progress.saw_round(run, number)
    return progress


def clock_of(member: MemberFiles, directory: Path, key: Ed25519PrivateKey) -> tuple[CoordinatorClock, list[float]]:
    """A clock, and the seconds that this machine's monotonic clock shows."""
    seconds = [0.0]
    member = replace(member, coordinator=CoordinatorKeys(FEDERATION, key.public_key()))
    return CoordinatorClock(member, progress_of(member, directory), monotonic=lambda: seconds[0]), seconds


def test_time_goes_forward_only_also_after_a_restart_of_the_worker(scene: Scene, tmp_path: Path) -> None:
    key, noon = Ed25519PrivateKey.generate(), datetime.now(UTC)

    def signed(minutes: float) -> common.SignedEnvelope:
        return sign(time_manifest(noon + timedelta(minutes=minutes)), key)

    clock, seconds = clock_of(scene.member, tmp_path, key)
    clock.set(signed(60), b"nonce")
    seconds[0] = 30.0
    assert clock.now() == noon + timedelta(minutes=60, seconds=30), "between two signed times this machine's counts"
    clock.set(signed(58), b"nonce")
    assert clock.now() == noon + timedelta(minutes=60), "a clock that is set right by a little does not go back here"
    for attempt in (clock, clock_of(scene.member, tmp_path, key)[0]):
        with pytest.raises(TimeRefused, match="went back"):
            attempt.set(signed(50), b"nonce")
        attempt.set(signed(61), b"nonce")


def test_a_damaged_memory_of_the_coordinator_is_named(scene: Scene, tmp_path: Path) -> None:
    for text in ("{", "[]", '{"time": 3}', json.dumps({"time": "x", "rounds": {}, "restored": None, "pending": None})):
        WorkerHome(tmp_path).progress.write_text(text)
        with pytest.raises(WorkerHomeError, match=r"progress\.json is damaged"):
            progress_of(scene.member, tmp_path)


# --- revocation


@pytest.mark.parametrize("reason", ["certificate-unknown", "certificate-revoked", "role", "hello", "limit:tasks"])
def test_a_worker_that_is_refused_without_a_signed_revocation_keeps_trying_and_says_what_may_have_happened(
    scene: Scene, reason: str
) -> None:
    scene.coordinator.attend_refusals = [Refusal(reason, "no"), Refusal(reason, "no")]
    running = scene.attending()
    told = running.events("refused")
    assert [event["reason"] for event in told] == [reason, reason]
    if reason == "certificate-unknown":
        assert "may have lost its database" in told[0]["message"]


def revocation(**changes: Any) -> common.RevocationManifest:
    fields = {"federation_id": FEDERATION, "client_id": CLIENT, "reason": "left \x1b[2Jthe consortium", **changes}
    return common.RevocationManifest(**fields)


NOT_THIS_CLIENT = [{"client_id": "hospital-b"}, {"federation_id": "another"}, {"serial": "abcdef"}]


def shut_out(signed: common.SignedEnvelope) -> Refusal:
    return Refusal("certificate-revoked", "no", signed=signed.SerializeToString())


def test_only_a_revocation_that_the_coordinator_signed_for_this_client_ends_the_worker(scene: Scene) -> None:
    key = scene.coordinator.signing_key
    scene.coordinator.attend_refusals = [
        shut_out(sign(revocation(), Ed25519PrivateKey.generate())),
        *(shut_out(sign(revocation(**change), key)) for change in NOT_THIS_CLIENT),
        shut_out(sign(time_manifest(datetime.now(UTC)), key)),
        shut_out(sign(revocation(), key)),
    ]
    running = scene.start()
    assert r"left \x1b[2Jthe consortium" in running.ended()
    assert scene.coordinator.attend_refusals == []


def test_a_signed_end_of_the_own_certificate_ends_the_worker(scene: Scene) -> None:
    serial = parse_peer(scene.member.certificate).serial
    signed = sign(revocation(serial=serial), scene.coordinator.signing_key)
    scene.coordinator.attend_refusals = [shut_out(signed)]
    running = scene.start()
    assert "use the directory that was renewed" in running.ended()


def test_a_worker_whose_stream_ends_with_its_revocation_ends_too(scene: Scene) -> None:
    running = scene.attending()
    signed = sign(revocation(), scene.coordinator.signing_key)
    scene.coordinator.end_stream(shut_out(signed))
    running.ended()


# --- restored backups


def restore(key: Ed25519PrivateKey, made: datetime, **runs: int) -> common.SignedEnvelope:
    kept = [common.KeptRun(run_id=run, next_round=number) for run, number in runs.items()]
    manifest = common.RestoreManifest(federation_id=FEDERATION, runs=kept)
    manifest.restored.FromDatetime(made)
    return sign(manifest, key)


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def test_a_signed_restore_moves_rounds_and_time_back_once_and_an_older_one_does_nothing(
    scene: Scene, tmp_path: Path
) -> None:
    key = scene.coordinator.signing_key
    progress = progress_of(scene.member, tmp_path, a=7, b=2, gone=9)
    progress.saw_time(NOON + timedelta(hours=9))
    statement = restore(key, NOON, a=3, b=5, new=0)
    progress.restored(statement)
    assert [progress.newest_round(run) for run in ("a", "b", "gone", "new")] == [3, 2, 9, None]
    assert progress.time == NOON
    progress.saw_round("a", 6)
    for same_or_older in (statement, restore(key, NOON, a=0), restore(key, NOON - timedelta(hours=1), a=0)):
        progress.restored(same_or_older)
        assert progress_of(scene.member, tmp_path).newest_round("a") == 6
    progress.restored(restore(key, NOON + timedelta(hours=1), a=0))
    assert progress.newest_round("a") == 0


def test_a_restore_that_the_coordinator_did_not_sign_is_refused(scene: Scene, tmp_path: Path) -> None:
    progress = progress_of(scene.member, tmp_path, a=7)
    foreign = common.RestoreManifest(federation_id="another")
    for envelope in (restore(Ed25519PrivateKey.generate(), NOON, a=0), sign(foreign, scene.coordinator.signing_key)):
        with pytest.raises(StatementError):
            progress.restored(envelope)
    assert progress.newest_round("a") == 7
    scene.coordinator.restored = restore(Ed25519PrivateKey.generate(), NOON, a=0)
    running = scene.start()
    assert "did not sign" in running.wait_for("refused")[0]["message"]
    scene.coordinator.restored = None
    running.wait_for("attending")


def test_a_restore_waits_for_an_owner_who_wants_to_be_asked_also_across_a_restart(scene: Scene, tmp_path: Path) -> None:
    home = WorkerHome(tmp_path)
    progress = progress_of(scene.member, tmp_path, ask=True, a=7, b=1)
    progress.restored(restore(scene.coordinator.signing_key, NOON, a=3, b=1))
    for waiting in (progress, progress_of(scene.member, tmp_path, ask=True)):
        assert (waiting.waits("a"), waiting.waits("b"), waiting.newest_round("a")) == (True, False, 7)
        assert not waiting.accepted()
    pending = pending_restore(home.progress, scene.member)
    assert pending is not None
    assert pending.runs == {"a": (7, 3)}
    accept_restore(home.accepted_restore, "of another statement")
    assert not progress.accepted()
    accept_restore(home.accepted_restore, pending.digest)
    assert progress.accepted()
    assert (progress.waits("a"), progress.newest_round("a")) == (False, 3)
    assert pending_restore(home.progress, scene.member) is None
    assert not home.accepted_restore.exists()


def test_a_restore_is_accepted_also_when_the_time_that_went_back_keeps_the_worker_out(
    scene: Scene, tmp_path: Path
) -> None:
    home = WorkerHome(tmp_path)
    made = datetime.now(UTC) - timedelta(minutes=1)
    progress = progress_of(scene.member, tmp_path, ask=True, a=7)
    progress.saw_time(made + timedelta(hours=9))
    scene.coordinator.restored = restore(scene.coordinator.signing_key, made, a=3)
    running = scene.start(home=home, policy=Policy(restore="ask"))
    assert "went back" in running.wait_for("refused")[0]["message"]
    pending = pending_restore(home.progress, scene.member)
    assert pending is not None
    accept_restore(home.accepted_restore, pending.digest)
    running.wait_for("attending")


def test_an_owner_who_no_longer_wants_to_be_asked_accepts_what_waits(scene: Scene, tmp_path: Path) -> None:
    progress = progress_of(scene.member, tmp_path, ask=True, a=7)
    progress.restored(restore(scene.coordinator.signing_key, NOON, a=3))
    assert progress_of(scene.member, tmp_path).newest_round("a") == 3


# --- a real federation


def test_a_worker_process_ends_when_its_client_is_revoked_and_names_the_signed_reason(tmp_path: Path) -> None:
    with federation(tmp_path) as made:
        made.serve()
        made.join("hospital-a")
        worker = made.work("hospital-a", "--set", "part=1/8")
        worker.wait_for_text("attending federation")
        made.admin("revoke", "hospital-a", "--reason", "left the consortium", "--yes")
        assert worker.popen.wait(60) == 1
        assert "a security officer shut this client out (left the consortium)" in worker.text
        assert "Traceback" not in worker.text


def test_a_worker_does_not_start_with_a_policy_that_cannot_be_used(scene: Scene, tmp_path: Path) -> None:
    home = WorkerHome(tmp_path / "home")
    home.directory.mkdir()
    scene.member.save(home.directory)
    home.policy.write_text("[limits]\nsteps = -1\n")
    assert "limits.steps" in command("run", "--home", str(home.directory), "--task", "digits", code=1)
    assert scene.coordinator.hellos == []
