"""Clocks that are wrong, or are set while the coordinator runs."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator import monitor, server
from coordinator.backups.statement import sign_restore
from coordinator.check import check_home
from coordinator.clock import ClockBehind, SteadyClock, check_follows
from coordinator.fault_state import FaultState
from coordinator.members.access import control
from coordinator.monitor import ClockWatch
from coordinator.rounds.fleets import remote
from coordinator.rounds.fleets.presence import Presence
from coordinator.rounds.fleets.returning import ReturningMembers
from coordinator.rounds.housekeeping import COLLECTION_INTERVAL, Housekeeper
from coordinator.rounds.replies.uploads import Uploads
from federation.digests import digest
from federation.findings import CheckOutcome
from federation.transport.channels import refusal_from_rpc_error
from federation.v1.admin_pb2 import GetRunRequest, WatchRunRequest
from federation.v1.federation_pb2 import FetchBlobRequest, SubmitRequest
from storage import audit
from storage.blob_directory import DirectoryStore
from storage.database import Database
from storage.faults import StorageFault
from storage.models import Client
from storage.states import ClientState, RunState
from tests import running
from tests.coordinator.scene import begun
from tests.harness import Handing
from tests.running import made_home, refused, wait_for
from tests.stage import MODEL, Stage
from tests.stage import stage as stage_of


def test_certificates_that_have_ended_end_their_calls_with_the_reason_and_no_incident(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "CLOCK_LOOK_SECONDS", 0.05)
    run, orders = begun(stage)
    ann, ben = orders
    with caplog.at_level(logging.INFO):
        # Calls of every kind are under way: a stream, a download, an upload that is half done, an operator's watch.
        envelope, payload = ann.member.signed(orders[ann])
        half = [SubmitRequest(reply=envelope), SubmitRequest(chunk=payload[:10])]
        upload = Handing(ann.member.stub, half, goes_on=True)
        download = ben.member.stub.FetchBlob(FetchBlobRequest(digest=digest(MODEL)), timeout=60)
        assert next(download).chunk == MODEL
        watch = stage._admin.WatchRun(WatchRunRequest(run=run), timeout=60)
        next(watch)
        stage.clock.ahead += timedelta(days=100)
        with pytest.raises(grpc.RpcError) as ended:
            upload.result(60)
        assert refusal_from_rpc_error(ended.value).reason in ("certificate-expired", "deadline")
        for player in (ann, ben):
            assert player.stream is not None
            assert player.stream.end().reason == "certificate-expired"
        with refused("UNAUTHENTICATED", "certificate-expired"):
            next(ann.member.stub.Submit(iter([]), timeout=60))
        stage.clock.ahead -= timedelta(days=200)  # and far back
        assert next(stage._admin.WatchRun(WatchRunRequest(run=run), timeout=60)).run.run_id == run
        stage.clock.ahead = timedelta()
        watch.cancel()
    assert [record.message for record in caplog.records if record.exc_info] == []
    assert [record.message for record in caplog.records if "incident" in record.message] == []


def test_a_deadline_that_has_passed_ends_the_phase(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LOOK_SECONDS", 0.05)
    run, (ann, ben) = stage.begin("ann", "ben", more="selection.minimum = 2\nselection.quorum = 0.5")
    ben.order()
    ann.answer()
    stage.clock.ahead += timedelta(days=1)  # the machine slept; nobody wakes the conductor
    stage.wait_outcome(run, "ben", "EXPIRED")
    assert stage.outcomes(run)["ben"] == ("EXPIRED", "deadline")


@pytest.mark.parametrize("set_by", [timedelta(days=100), timedelta(days=-100)])
def test_a_clock_that_is_set_makes_no_blob_old(
    database: Database, blobs: DirectoryStore, set_by: timedelta, caplog: pytest.LogCaptureFixture
) -> None:
    passed, ahead, began = [0.0], [timedelta(0)], datetime.now(UTC)
    uploads = Uploads(database, blobs, quota=1 << 30)
    given: dict[str, Any] = {"end_revoked": lambda: None, "keep_rounds": None, "monotonic": lambda: passed[0]}
    given["clock"] = lambda: began + timedelta(seconds=passed[0]) + ahead[0]
    keeper = Housekeeper(database, blobs, Presence(), uploads, FaultState(), **given)
    under_way = blobs.put(b"an upload whose row is not written yet")
    keeper.tidy()
    ahead[0] = set_by
    passed[0] += COLLECTION_INTERVAL.total_seconds()
    with caplog.at_level(logging.WARNING):
        keeper.tidy()
        keeper.tidy()
    assert blobs.exists(under_way)
    direction = "forward" if set_by > timedelta(0) else "back"
    assert len(caplog.messages) == 1
    assert f"was set {direction} by 100 days" in caplog.messages[0]
    for _ in range(26):  # a day later it is old by any clock
        passed[0] += COLLECTION_INTERVAL.total_seconds()
        keeper.tidy()
    assert blobs.exists(under_way) == (set_by < timedelta(0))


def test_a_time_that_was_noted_while_the_clock_was_ahead_does_not_hide_who_attended_just_now(
    database: Database,
) -> None:
    now = datetime(2026, 1, 5, 12, tzinfo=UTC)
    seen = {"ahead": now + timedelta(days=1), "now": now - timedelta(seconds=5), "long ago": now - timedelta(hours=1)}
    with database.begin() as session:
        for name, at in seen.items():
            client = Client(client_id=name, state=ClientState.ACTIVE, signing_key=b"", key_id=name, enrolled=now)
            client.last_seen = at
            session.add(client)
    returning = ReturningMembers(database, Presence(), lambda: now)
    returning.expect()
    assert returning._expected == {"now"}
    assert not returning.are_back()


class Machine:
    """The clock of a machine, which somebody sets, and the seconds since its start."""

    def __init__(self, elapsed: Callable[[], float] | None = None) -> None:
        self.ahead = timedelta()
        self.seconds = 0.0
        self.elapsed = elapsed or (lambda: self.seconds)

    def __call__(self) -> datetime:
        return datetime(2026, 1, 5, tzinfo=UTC) + timedelta(seconds=self.elapsed()) + self.ahead


@pytest.mark.parametrize("set_by", [timedelta(hours=-2), timedelta(days=1), timedelta(seconds=-1)])
def test_the_time_goes_on_evenly_when_the_machines_clock_is_set(set_by: timedelta) -> None:
    machine = Machine()
    clock, faults = SteadyClock(machine, machine.elapsed), FaultState()
    began, watch = clock(), ClockWatch(clock, faults, judged=False)
    machine.seconds, machine.ahead = 10.0, set_by
    watch.look()
    assert clock() == began + timedelta(seconds=10)
    assert faults.clock_back == (timedelta(hours=2) if set_by == timedelta(hours=-2) else timedelta())
    assert (StorageFault.CLOCK in faults.present) == (set_by > timedelta(minutes=1))
    machine.ahead = timedelta()
    watch.look()
    assert (faults.present, faults.clock_back) == ({}, timedelta())
    assert clock() == began + timedelta(seconds=10)


def test_the_time_follows_a_small_step_forward_and_an_administrator_who_vouches_for_a_larger_one() -> None:
    machine = Machine()
    clock, faults = SteadyClock(machine, machine.elapsed), FaultState()
    watch = ClockWatch(clock, faults, judged=False)
    machine.ahead = timedelta(seconds=50)
    watch.look()
    assert clock() == machine()
    assert faults.present == {}
    machine.ahead += timedelta(hours=8)
    for _ in range(2):
        watch.look()
        assert machine() - clock() == timedelta(hours=8)
        assert "set forward by 8:00:00, or the machine stood still" in faults.present[StorageFault.CLOCK]
    faults.clock_vouched = True
    watch.look()
    assert clock() == machine()
    assert faults.present == {}
    machine.ahead += timedelta(hours=8)
    watch.look()
    assert StorageFault.CLOCK in faults.present, "it was vouched for once"


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stage, Machine]]:
    """A coordinator whose own clock is steady, on a machine whose clock a test sets."""
    machine = Machine(time.monotonic)
    machine.ahead = datetime.now(UTC) - machine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitor, "CHECK_SECONDS", 0.05)
        patch.setattr(monitor, "FAULT_CHECK_SECONDS", 0.05)
        clock = SteadyClock(machine, machine.elapsed)
        patch.setattr(running, "serving", lambda home, grace, **_: server.serving(home, clock=clock, grace=grace))
        with stage_of(tmp_path_factory.mktemp("steady") / "coordinator", "sqlite:///coordinator.db") as made:
            yield made, machine


def test_a_clock_that_is_set_back_by_two_hours_ends_no_run_and_no_stream(steady: tuple[Stage, Machine]) -> None:
    stage, machine = steady
    run, orders = begun(stage, 2)
    machine.ahead -= timedelta(hours=2)
    faults = stage.served.coordinator.record.faults
    wait_for(lambda: faults.clock_back, "the watch to see it")
    newest = max(order.deadline.ToDatetime(UTC) for order in orders.values())
    for player, order in orders.items():
        player.reply(order)
    stage.play(run, *orders)
    issued = [row.created for number in range(2) for row in stage.assignments(run, number).values()]
    assert issued[-1] > issued[0]
    assert all(order.deadline.ToDatetime(UTC) >= newest for order in stage.orders(run, 1).values())
    machine.ahead += timedelta(hours=2)
    wait_for(lambda: not faults.clock_back, "the watch to see it")


def test_a_clock_that_is_set_forward_pauses_the_runs_until_it_is_right_or_an_administrator_resumes(
    steady: tuple[Stage, Machine],
) -> None:
    stage, machine = steady
    run, orders = begun(stage, 2)
    faults = stage.served.coordinator.record.faults
    before = stage.served.coordinator.record.clock()
    machine.ahead += timedelta(days=1)
    reason = stage.wait_state(run, RunState.PAUSED).reason
    assert reason.startswith("clock: it was set forward by 1 day, 0:00:00, or the machine stood still; set"), reason
    player, order = next(iter(orders.items()))
    with refused("UNAVAILABLE", "clock"):
        player.reply(order)
    assert stage._admin.GetRun(GetRunRequest(run=run), timeout=60).run.run_id == run
    machine.ahead -= timedelta(days=1)
    stage.wait_state(run, RunState.RUNNING)
    assert stage.served.coordinator.record.clock() - before < timedelta(hours=1), "nothing was judged by it"
    stage.pause(run)
    machine.ahead += timedelta(minutes=2)
    wait_for(lambda: faults.present, "the fault")
    stage.resume(run)  # the operator who paused it does not know of the clock
    wait_for(lambda: stage.run(run).reason.startswith("clock: "), "the pause")
    stage.resume(run)  # the machine slept
    wait_for(lambda: not faults.present, "the end of the fault")
    assert stage.served.coordinator.record.clock() - before > timedelta(minutes=2)
    stage.wait_state(run, RunState.RUNNING)
    for player, order in orders.items():
        player.reply(order)
    stage.play(run, *orders)


def test_a_coordinator_whose_clock_is_behind_the_record_serves_nobody_until_it_is_right(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home, now = made_home(tmp_path / "coordinator", now=datetime.now(UTC)), datetime.now(UTC)
    with closing(home.open_database()) as database:

        def logged(at: datetime) -> None:
            with database.begin() as session:
                audit.record(session, at=at, actor="test", action="test")

        logged(now + timedelta(minutes=4))
        check_follows(database, now)
        logged(now + timedelta(minutes=6))
        with pytest.raises(ClockBehind, match="nobody is served until the clock is right"):
            check_follows(database, now)
    (shown,) = [finding for finding in check_home(home, now=now) if finding.subject == "clock"]
    assert shown.outcome is CheckOutcome.FAILED
    waiting = threading.Event()

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "nobody is served until the clock is right" in record.getMessage():
                waiting.set()

    handler = Told()
    logging.getLogger("coordinator.server").addHandler(handler)

    async def served() -> server.Coordinator | None:
        signalled, scope = asyncio.Event(), AsyncExitStack()
        starting = asyncio.create_task(server._started(scope, home, False, signalled))
        await asyncio.to_thread(waiting.wait, 60)
        assert not starting.done()
        await asyncio.to_thread(sign_restore, home, now=now)  # the last entry is of a right clock
        coordinator = await starting
        assert coordinator is not None
        await scope.aclose()
        return coordinator

    try:
        assert asyncio.run(served()) is not None
    finally:
        logging.getLogger("coordinator.server").removeHandler(handler)
