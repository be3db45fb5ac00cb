"""A site leaves: its begun work ends first, its withdrawal is signed, kept, and sent until it is recorded."""

import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from federation.refusals import Refusal
from federation.trust.envelope import sign, verify
from federation.trust.identity import parse_peer
from federation.v1.common_pb2 import AssignmentManifest, SignedEnvelope, WithdrawalManifest
from federation.work.base import Shape
from federation.work.evaluate.work import Evaluate
from tests.few import few
from tests.harness import wait_for
from tests.worker.scene import Running, Scene, command
from worker.connection.attendance import AttendanceError
from worker.connection.enroll import join_again
from worker.home import LOCK_FILE
from worker.site.assignment_checks import CheckedAssignment
from worker.site.leaving import Leave, read_withdrawal, write_leave
from worker.site.withdrawing import LeavingError, withdraw
from worker.work.memory import WorkerMemory


def owner(scene: Scene, *arguments: str, code: int = 0) -> str:
    """Runs a command in the home, beside the worker if there is one."""
    return command(arguments[0], "--home", scene.joined(), *arguments[1:], code=code)


def wish(scene: Scene, *, now: bool = False, forget: bool = False) -> None:
    """What the command writes beside a worker that runs."""
    write_leave(scene.home.leave, Leave(datetime.now(UTC), now=now, forget=forget))


def later(*_: float) -> float:
    """The pause before a worker tries again."""
    return 0.3


def withdrawn(scene: Scene, number: int = 0) -> WithdrawalManifest:
    """What the member has signed, verified with its key."""
    key = scene.member.signing_key.public_key()
    return verify(scene.coordinator.withdrawals[number], WithdrawalManifest, key)


def has_left(running: Running) -> None:
    """The worker has left, and ended without an error."""
    running.wait_for("left")
    running.thread.join(60)
    assert (running.thread.is_alive(), running.failure) == (False, None)
    assert running.events("disconnected") == running.events("refused") == []


class Held:
    """Downloads of models, which wait until they are released."""

    def __init__(self, scene: Scene) -> None:
        self.release = threading.Event()
        scene.coordinator.serve_blob = self._serve

    def _serve(self, blob: bytes, offset: int) -> Iterator[bytes]:
        self.release.wait(60)
        yield blob[offset:]


def test_a_site_that_leaves_ends_what_it_has_begun_and_then_signs_its_withdrawal(scene: Scene) -> None:
    held, running = Held(scene), scene.attending()
    scene.assign(0)
    wait_for(lambda: scene.coordinator.fetches, "the first assignment to begin")
    scene.assign(1)
    wait_for(lambda: len(running.worker._runner._jobs()) == 2, "the second one to wait")
    wish(scene)
    assert scene.declined()[:2] == ("assignment-1", "paused")
    running.wait_for("leaving")
    assert "it leaves the federation once what it has begun has ended" in owner(scene, "status")
    assert scene.coordinator.withdrawals == []
    held.release.set()
    has_left(running)
    assert [one.manifest.assignment_id for one in scene.coordinator.submissions] == ["assignment-0"]
    said, member = withdrawn(scene), scene.member
    assert (said.federation_id, said.client_id, said.forget) == (member.federation_id, member.client_id, False)
    assert said.certificate == parse_peer(member.certificate).serial
    assert owner(scene, "status").startswith("This site has left the federation on ")
    document = json.loads(owner(scene, "status", "--json"))
    assert (document["leaving"], document["left"] is not None) == (True, True)


def in_private_round(scene: Scene, running: Running, ends: timedelta) -> WorkerMemory:
    """A worker that has answered in a private round, whose last question has this deadline from now on.

    Returns its memory, in which it keeps the secret of the session.
    """
    memory = running.worker._runner.execution.memory
    asked, shape = AssignmentManifest(run_id="private"), Shape(scene.model[0], ("loss",), ("loss",))
    deadline = datetime.now(UTC) + ends
    order = CheckedAssignment(SignedEnvelope(), asked, Evaluate(splits=()), shape, (), deadline)
    memory.begin(order).put("session/secret", b"secret", durable=True)
    return memory


@few("over")
@pytest.mark.parametrize(
    ("ends", "now"), [(-timedelta(hours=1), False), (timedelta(hours=1), True)], ids=["over", "at-once"]
)
def test_no_site_waits_for_a_private_round_that_is_over_and_its_secrets_are_erased(
    scene: Scene, ends: timedelta, now: bool
) -> None:
    """A coordinator whose administrator has stopped the run, or that has given the attempt up, tells nobody so."""
    running = scene.attending()
    in_private_round(scene, running, ends)
    wish(scene, now=now)
    has_left(running)
    assert len(scene.coordinator.withdrawals) == 1
    with closing(sqlite3.connect(running.home.memory)) as database:
        assert database.execute("SELECT * FROM kept").fetchall() == []


@pytest.mark.full
def test_a_site_waits_for_a_private_round_and_leaves_once_another_attempt_is_asked_for(scene: Scene) -> None:
    running = scene.attending()
    memory = in_private_round(scene, running, timedelta(hours=1))
    wish(scene)
    assert "once the work that it has begun has ended" in running.wait_for("leaving")[0]["message"]
    assert scene.coordinator.withdrawals == []
    # A later attempt at the round is not begun, and shows that the earlier one is over.
    scene.assign(0, run_id="private", attempt=1)
    assert scene.declined()[1] == "paused"
    assert not memory.awaits_question(datetime.now(UTC))
    has_left(running)


@few("downloading")
@pytest.mark.parametrize("stage", ["downloading", "spooled"])
def test_at_once_begun_work_and_replies_without_a_receipt_are_dropped(scene: Scene, stage: str) -> None:
    held = Held(scene)
    if stage == "spooled":
        held.release.set()
        scene.coordinator.hold_submissions = threading.Event()
    running = scene.attending()
    scene.assign()
    if stage == "spooled":
        wait_for(running.spooled, "the reply to be in the spool")
    else:
        wait_for(lambda: scene.coordinator.fetches, "the download to begin")
    wish(scene, now=True, forget=True)
    has_left(running)
    held.release.set()
    if scene.coordinator.hold_submissions is not None:
        scene.coordinator.hold_submissions.set()
    assert withdrawn(scene).forget
    assert running.spooled() == []
    assert running.events("cancelled")[0]["reason"] == "client-left"


def test_while_no_coordinator_answers_the_wish_stays_over_restarts_and_no_work_is_done(scene: Scene) -> None:
    running = scene.attending(uniform=later)
    scene.coordinator.stop()
    running.wait_for("disconnected")
    owner(scene, "pause")  # it leaves all the same
    wish(scene)
    assert "has not left" in running.wait_for("leaving")[0]["message"]
    running.stop()
    assert not json.loads(owner(scene, "status", "--json"))["left"]
    first = read_withdrawal(scene.home.withdrawal)
    assert first is not None
    scene.assign()
    scene.coordinator.start()
    running = scene.start(uniform=later)
    running.wait_for("left")
    running.thread.join(60)
    assert running.failure is None
    assert scene.models() == []
    assert scene.coordinator.withdrawals == [first.envelope]


def test_after_an_outage_a_site_tries_again_within_half_a_minute_and_after_refusals_less_often(scene: Scene) -> None:
    def failed() -> LeavingError:
        with pytest.raises(LeavingError) as raised:
            withdraw(scene.home, scene.member, Leave(datetime.now(UTC)))
        return raised.value

    leaver = scene.attending(uniform=max).worker._leaver
    scene.coordinator.knows_leaving = False
    refused = failed()
    scene.coordinator.stop()
    outage = failed()
    for error, longest in ((outage, 30.0), (refused, 600.0), (OSError("disk full"), 600.0)):
        assert max(leaver._delay(error) for _ in range(15)) == longest
    assert leaver._delay(LeavingError("busy", 700.0)) == 700.0


def test_a_coordinator_of_version_0_1_0_is_named_and_the_wish_stays(scene: Scene) -> None:
    scene.coordinator.knows_leaving = False
    running = scene.attending(uniform=later)
    wish(scene)
    (told,) = running.wait_for("leaving")
    assert "is of a version that does not know how members leave" in told["message"]
    assert "the wish stays in this directory" in told["message"]
    scene.coordinator.knows_leaving = True
    running.wait_for("left")
    running.thread.join(60)
    assert running.failure is None


@pytest.mark.full
def test_without_a_worker_the_command_itself_leaves_and_a_second_one_says_the_same_again(scene: Scene) -> None:
    scene.joined()
    with scene.home.lock():
        (scene.home.directory / LOCK_FILE).write_text("1")  # as if another process held it
        beside = owner(scene, "leave", "--now")
    assert beside.startswith("The worker that runs drops what it has begun, leaves the federation, and ends.")
    assert scene.coordinator.withdrawals == []
    assert "has left test-federation, since" in owner(scene, "leave")
    shown = json.loads(owner(scene, "leave", "--json"))
    assert shown["left"] is not None
    assert len({one.SerializeToString() for one in scene.coordinator.withdrawals}) == 1
    scene.coordinator.stop()
    assert "has not left" in owner(scene, "leave", "--forget", code=1)


@pytest.mark.full
def test_a_reply_in_the_spool_is_handed_in_by_a_worker_before_the_site_leaves(scene: Scene) -> None:
    scene.coordinator.hold_submissions = threading.Event()
    running = scene.attending()
    scene.assign()
    wait_for(running.spooled, "the reply to be in the spool")
    running.stop()
    assert "start it, and it ends this work, then leaves" in owner(scene, "leave")
    scene.coordinator.hold_submissions.set()
    running = scene.start()
    running.wait_for("receipt")
    running.wait_for("left")
    assert len(scene.coordinator.withdrawals) == 1


def left_signed(scene: Scene, **changes: Any) -> Refusal:
    values = {"federation_id": scene.member.federation_id, "client_id": scene.member.client_id, **changes}
    signed: SignedEnvelope = sign(WithdrawalManifest(**values), scene.member.signing_key)
    return Refusal("client-left", "it has left", signed=signed.SerializeToString())


def test_only_its_own_withdrawal_ends_a_worker_whose_home_knows_of_no_wish(scene: Scene) -> None:
    scene.coordinator.attend_refusals = [
        Refusal("client-left", "without a proof"),
        left_signed(scene, client_id="another"),
        left_signed(scene),
    ]
    running = scene.start()
    running.thread.join(60)
    assert isinstance(running.failure, AttendanceError)
    assert "by a withdrawal that was signed with its own key" in str(running.failure)
    assert len(scene.coordinator.hellos) == 3


@pytest.mark.full
def test_a_damaged_wish_begins_no_work_and_does_not_leave(scene: Scene) -> None:
    scene.home.directory.mkdir(exist_ok=True)
    scene.home.leave.write_text("x")
    running = scene.attending()
    assert "begins no work" in running.wait_for("leaving")[0]["message"]
    scene.assign()
    assert scene.declined()[1] == "paused"
    assert scene.coordinator.withdrawals == []


def test_a_member_that_joins_again_wishes_nothing_any_more(scene: Scene) -> None:
    scene.joined()
    owner(scene, "leave")
    join_again(scene.home, scene.coordinator.join())
    assert (scene.home.leave.exists(), scene.home.withdrawal.exists()) == (False, False)
    scene.receipts(1) if scene.started else scene.attending()


def test_a_start_in_a_home_that_has_left_says_so_once_more_and_ends(scene: Scene) -> None:
    owner(scene, "leave", "--forget")
    # As after a restore of the coordinator: whatever is on record there, it hears of the withdrawal again.
    owner(scene, "run", "--task", "digits")
    first, second = scene.coordinator.withdrawals
    assert first == second
    assert scene.coordinator.hellos == []
    scene.coordinator.leave_refusals = [Refusal("withdrawal", "it is of an earlier joining")]
    assert "it is of an earlier joining" in owner(scene, "run", "--task", "digits", code=1)
