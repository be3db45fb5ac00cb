"""What a worker believes of its coordinator: signed times, signed revocations, signed restores."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from federation.refusals import Refusal
from federation.trust.envelope import CONTEXTS, key_id, seal
from federation.trust.identity import parse_peer
from federation.trust.key_chain import CoordinatorKeys
from federation.trust.member_files import MemberFiles
from federation.v1.common_pb2 import (
    KeptRun,
    ReceiptManifest,
    RestoreManifest,
    RevocationManifest,
    SignedEnvelope,
    TimeManifest,
)
from fedpareto.cli.main import app
from tests.harness import federation, wait_for
from tests.scripted import CLIENT, FEDERATION, ScriptedCoordinator, scripted
from tests.worker.working import Running
from worker.events import Events
from worker.home import WorkerHome, WorkerHomeError
from worker.line.attendance import AttendanceError
from worker.line.clock import CoordinatorClock, TimeRefused
from worker.progress import Progress, StatementError, accept_restore, pending_restore
from worker.site.policy import Policy


@pytest.fixture(scope="module")
def coordinator() -> Iterator[ScriptedCoordinator]:
    """One for all tests of this module; each leaves it as it was."""
    with scripted() as made:
        yield made


@pytest.fixture(autouse=True)
def _as_before(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "coordinator" in request.fixturenames:
        coordinator: ScriptedCoordinator = request.getfixturevalue("coordinator")
        coordinator.ahead, coordinator.change_time, coordinator.restored = timedelta(), None, None
        for kept in (coordinator.attend_refusals, coordinator.open, coordinator.hellos, coordinator.declines):
            kept.clear()  # type: ignore[attr-defined]


@pytest.fixture
def member(coordinator: ScriptedCoordinator) -> MemberFiles:
    return coordinator.member()


Start = Callable[..., Running]


@pytest.fixture
def start(member: MemberFiles, tmp_path: Path) -> Iterator[Start]:
    """Starts workers that offer nothing, all with one membership and one home."""
    started: list[Running] = []

    def run() -> Running:
        started.append(Running(WorkerHome(tmp_path / "home"), member, {}, uniform=lambda *_: 0.01))
        return started[-1]

    yield run
    for running in started:
        running.stop()


# --- time


def unsigned(manifest: TimeManifest) -> SignedEnvelope:
    return SignedEnvelope(manifest=manifest.SerializeToString())


def foreign(manifest: TimeManifest) -> SignedEnvelope:
    return seal(manifest, Ed25519PrivateKey.generate())


def of_year_9999(manifest: TimeManifest) -> None:
    manifest.now.seconds = 253402300799


def beyond_every_year(manifest: TimeManifest) -> None:
    manifest.now.seconds = 2**62


def with_negative_nanoseconds(manifest: TimeManifest) -> None:
    manifest.now.nanos = -1


def of_last_year(manifest: TimeManifest) -> None:
    manifest.now.seconds -= 365 * 86400


def for_another_client(manifest: TimeManifest) -> None:
    manifest.client_id = "hospital-b"


def for_another_federation(manifest: TimeManifest) -> None:
    manifest.federation_id = "another"


def for_another_question(manifest: TimeManifest) -> None:
    manifest.nonce = bytes(32)


BAD_TIMES = {
    "not signed": unsigned,
    "not signed ": foreign,
    "clock shows 9999": of_year_9999,
    "does not exist": beyond_every_year,
    "does not exist ": with_negative_nanoseconds,
    "outside the validity": of_last_year,
    "no answer to this worker": for_another_client,
    "no answer to this worker ": for_another_federation,
    "it is an old one": for_another_question,
}


def test_a_worker_takes_no_time_but_a_sane_one_that_was_signed_in_answer_to_it_and_keeps_asking(
    coordinator: ScriptedCoordinator, start: Start
) -> None:
    left = dict(BAD_TIMES)

    def change(manifest: TimeManifest) -> SignedEnvelope | None:
        return left.pop(next(iter(left)))(manifest) if left else None

    coordinator.change_time = change
    running = start()
    running.wait_for("attending")
    messages = [event["message"] for event in running.events("refused")]
    assert len(messages) == len(BAD_TIMES)
    for words, message in zip(BAD_TIMES, messages, strict=True):
        assert words.strip() in message
    assert len({hello.nonce for hello in coordinator.hellos}) == len(BAD_TIMES) + 1, "a fresh nonce for each stream"


def test_a_signature_made_for_another_type_of_message_is_no_signed_time(member: MemberFiles, tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    clock, _ = clock_of(member, tmp_path, key)
    manifest = time_manifest(datetime.now(UTC)).SerializeToString()
    signature = key.sign(CONTEXTS[ReceiptManifest] + b"\0" + manifest)
    with pytest.raises(TimeRefused, match="not signed"):
        clock.set(SignedEnvelope(manifest=manifest, key_id=key_id(key.public_key()), signature=signature), b"nonce")


def time_manifest(now: datetime) -> TimeManifest:
    manifest = TimeManifest(federation_id=FEDERATION, client_id=CLIENT, nonce=b"nonce")
    manifest.now.FromDatetime(now)
    return manifest


def progress_of(member: MemberFiles, directory: Path, *, ask: bool = False) -> Progress:
    home = WorkerHome(directory)
    return Progress(home.progress, home.accepted_restore, member=member, ask=ask, events=Events())


def clock_of(member: MemberFiles, directory: Path, key: Ed25519PrivateKey) -> tuple[CoordinatorClock, list[float]]:
    """A clock, and the seconds that this machine's monotonic clock shows."""
    seconds = [0.0]
    member = replace(member, coordinator=CoordinatorKeys(FEDERATION, key.public_key()))
    return CoordinatorClock(member, progress_of(member, directory), monotonic=lambda: seconds[0]), seconds


def test_time_goes_forward_only_also_after_a_restart_of_the_worker(member: MemberFiles, tmp_path: Path) -> None:
    key, noon = Ed25519PrivateKey.generate(), datetime.now(UTC)

    def sign(minutes: float) -> SignedEnvelope:
        return seal(time_manifest(noon + timedelta(minutes=minutes)), key)

    clock, seconds = clock_of(member, tmp_path, key)
    clock.set(sign(60), b"nonce")
    seconds[0] = 30.0
    assert clock.now() == noon + timedelta(minutes=60, seconds=30), "between two signed times this machine's counts"
    clock.set(sign(58), b"nonce")
    assert clock.now() == noon + timedelta(minutes=60), "a clock that is set right by a little does not go back here"
    for attempt in (clock, clock_of(member, tmp_path, key)[0]):
        with pytest.raises(TimeRefused, match="went back"):
            attempt.set(sign(50), b"nonce")
        attempt.set(sign(61), b"nonce")


def test_a_damaged_memory_of_the_coordinator_is_named(member: MemberFiles, tmp_path: Path) -> None:
    for text in ("{", "[]", '{"time": 3}', json.dumps({"time": "x", "rounds": {}, "restored": None, "pending": None})):
        WorkerHome(tmp_path).progress.write_text(text)
        with pytest.raises(WorkerHomeError, match=r"progress\.json is damaged"):
            progress_of(member, tmp_path)


# --- revocation


@pytest.mark.parametrize("reason", ["certificate-unknown", "certificate-revoked", "role", "hello", "limit:tasks"])
def test_a_worker_that_is_refused_without_a_signed_revocation_keeps_trying_and_says_what_may_have_happened(
    coordinator: ScriptedCoordinator, start: Start, reason: str
) -> None:
    coordinator.attend_refusals = [Refusal(reason, "no"), Refusal(reason, "no")]
    running = start()
    running.wait_for("attending")
    told = running.events("refused")
    assert [event["reason"] for event in told] == [reason, reason]
    if reason == "certificate-unknown":
        assert "may have lost its database" in told[0]["message"]


def revocation(member: MemberFiles, **changes: Any) -> RevocationManifest:
    fields = {"federation_id": FEDERATION, "client_id": CLIENT, "reason": "left \x1b[2Jthe consortium", **changes}
    return RevocationManifest(**fields)


def test_only_a_revocation_that_the_coordinator_signed_for_this_client_ends_the_worker(
    coordinator: ScriptedCoordinator, start: Start, member: MemberFiles
) -> None:
    def refusal(signed: SignedEnvelope) -> Refusal:
        return Refusal("certificate-revoked", "no", signed=signed.SerializeToString())

    coordinator.attend_refusals = [
        refusal(seal(revocation(member), Ed25519PrivateKey.generate())),
        refusal(seal(revocation(member, client_id="hospital-b"), coordinator.signing_key)),
        refusal(seal(revocation(member, federation_id="another"), coordinator.signing_key)),
        refusal(seal(revocation(member, serial="abcdef"), coordinator.signing_key)),
        refusal(seal(time_manifest(datetime.now(UTC)), coordinator.signing_key)),
        refusal(seal(revocation(member), coordinator.signing_key)),
    ]
    running = start()
    running.thread.join(60)
    assert isinstance(running.failure, AttendanceError)
    assert r"left \x1b[2Jthe consortium" in str(running.failure)
    assert coordinator.attend_refusals == []


def test_a_signed_end_of_the_own_certificate_ends_the_worker(
    coordinator: ScriptedCoordinator, start: Start, member: MemberFiles
) -> None:
    serial = parse_peer(member.certificate).serial
    signed = seal(revocation(member, serial=serial), coordinator.signing_key)
    coordinator.attend_refusals = [Refusal("certificate-revoked", "no", signed=signed.SerializeToString())]
    running = start()
    running.thread.join(60)
    assert isinstance(running.failure, AttendanceError)
    assert "use the directory that was renewed" in str(running.failure)


def test_a_worker_whose_stream_ends_with_its_revocation_ends_too(
    coordinator: ScriptedCoordinator, start: Start, member: MemberFiles
) -> None:
    running = start()
    running.wait_for("attending")
    signed = seal(revocation(member), coordinator.signing_key)
    coordinator.end_stream(Refusal("certificate-revoked", "no", signed=signed.SerializeToString()))
    wait_for(lambda: running.failure, "the worker to end")
    assert isinstance(running.failure, AttendanceError)


# --- restored backups


def restore(key: Ed25519PrivateKey, made: datetime, **runs: int) -> SignedEnvelope:
    kept = [KeptRun(run_id=run, next_round=number) for run, number in runs.items()]
    manifest = RestoreManifest(federation_id=FEDERATION, runs=kept)
    manifest.restored.FromDatetime(made)
    return seal(manifest, key)


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def test_a_signed_restore_moves_rounds_and_time_back_once_and_an_older_one_does_nothing(
    coordinator: ScriptedCoordinator, member: MemberFiles, tmp_path: Path
) -> None:
    key = coordinator.signing_key
    progress = progress_of(member, tmp_path)
    for run, number in (("a", 7), ("b", 2), ("gone", 9)):
        progress.saw_round(run, number)
    progress.saw_time(NOON + timedelta(hours=9))
    statement = restore(key, NOON, a=3, b=5, new=0)
    progress.restored(statement)
    assert [progress.newest_round(run) for run in ("a", "b", "gone", "new")] == [3, 2, 9, None]
    assert progress.time == NOON
    progress.saw_round("a", 6)
    for same_or_older in (statement, restore(key, NOON, a=0), restore(key, NOON - timedelta(hours=1), a=0)):
        progress.restored(same_or_older)
        assert progress_of(member, tmp_path).newest_round("a") == 6
    progress.restored(restore(key, NOON + timedelta(hours=1), a=0))
    assert progress.newest_round("a") == 0


def test_a_restore_that_the_coordinator_did_not_sign_is_refused(
    coordinator: ScriptedCoordinator, start: Start, member: MemberFiles, tmp_path: Path
) -> None:
    progress = progress_of(member, tmp_path)
    progress.saw_round("a", 7)
    foreign = RestoreManifest(federation_id="another")
    for envelope in (restore(Ed25519PrivateKey.generate(), NOON, a=0), seal(foreign, coordinator.signing_key)):
        with pytest.raises(StatementError):
            progress.restored(envelope)
    assert progress.newest_round("a") == 7
    coordinator.restored = restore(Ed25519PrivateKey.generate(), NOON, a=0)
    running = start()
    assert "did not sign" in running.wait_for("refused")[0]["message"]
    coordinator.restored = None
    running.wait_for("attending")


def test_a_restore_waits_for_an_owner_who_wants_to_be_asked_also_across_a_restart(
    coordinator: ScriptedCoordinator, member: MemberFiles, tmp_path: Path
) -> None:
    home = WorkerHome(tmp_path)
    progress = progress_of(member, tmp_path, ask=True)
    progress.saw_round("a", 7)
    progress.saw_round("b", 1)
    progress.restored(restore(coordinator.signing_key, NOON, a=3, b=1))
    for waiting in (progress, progress_of(member, tmp_path, ask=True)):
        assert (waiting.waits("a"), waiting.waits("b"), waiting.newest_round("a")) == (True, False, 7)
        assert not waiting.accepted()
    pending = pending_restore(home.progress, member)
    assert pending is not None
    assert pending.runs == {"a": (7, 3)}
    accept_restore(home.accepted_restore, "of another statement")
    assert not progress.accepted()
    accept_restore(home.accepted_restore, pending.digest)
    assert progress.accepted()
    assert (progress.waits("a"), progress.newest_round("a")) == (False, 3)
    assert pending_restore(home.progress, member) is None
    assert not home.accepted_restore.exists()


def test_a_restore_is_accepted_also_when_the_time_that_went_back_keeps_the_worker_out(
    coordinator: ScriptedCoordinator, member: MemberFiles, tmp_path: Path
) -> None:
    home = WorkerHome(tmp_path)
    made = datetime.now(UTC) - timedelta(minutes=1)
    progress = progress_of(member, tmp_path, ask=True)
    progress.saw_round("a", 7)
    progress.saw_time(made + timedelta(hours=9))
    coordinator.restored = restore(coordinator.signing_key, made, a=3)
    running = Running(home, member, {}, policy=Policy(restore="ask"), uniform=lambda *_: 0.01)
    try:
        assert "went back" in running.wait_for("refused")[0]["message"]
        pending = pending_restore(home.progress, member)
        assert pending is not None
        accept_restore(home.accepted_restore, pending.digest)
        running.wait_for("attending")
    finally:
        running.stop()


def test_an_owner_who_no_longer_wants_to_be_asked_accepts_what_waits(
    coordinator: ScriptedCoordinator, member: MemberFiles, tmp_path: Path
) -> None:
    progress = progress_of(member, tmp_path, ask=True)
    progress.saw_round("a", 7)
    progress.restored(restore(coordinator.signing_key, NOON, a=3))
    assert progress_of(member, tmp_path).newest_round("a") == 3


# --- a real federation


def test_a_worker_process_ends_when_its_client_is_revoked_and_names_the_signed_reason(tmp_path: Path) -> None:
    with federation(tmp_path) as made:
        made.serve()
        made.join("hospital-a")
        worker = made.work("hospital-a", "--part", "1/8")
        worker.wait_for_text("attending federation")
        made.admin("revoke", "hospital-a", "--reason", "left the consortium", "--yes")
        assert worker.popen.wait(60) == 1
        assert "a security officer shut this client out (left the consortium)" in worker.text
        assert "Traceback" not in worker.text


def test_a_worker_does_not_start_with_a_policy_that_cannot_be_used(
    coordinator: ScriptedCoordinator, member: MemberFiles, tmp_path: Path
) -> None:
    home = WorkerHome(tmp_path / "home")
    home.directory.mkdir()
    member.save(home.directory)
    home.policy.write_text("[limits]\nsteps = -1\n")
    result = CliRunner().invoke(app, ["worker", "run", "--home", str(home.directory), "--task", "digits"])
    assert result.exit_code == 1
    assert "limits.steps" in str(result.exception)
    assert coordinator.hellos == []
