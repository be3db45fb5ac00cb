"""How often members may call, and how strangers' calls share their places."""

import asyncio
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from sqlalchemy import func, select

from coordinator.members.access import call_limits, control, refusal_record, strangers
from coordinator.members.access.call_limits import MESSAGE, RATES, REFUSED, STRANGER, STRANGERS, Buckets, Rate
from coordinator.members.renewal import MAX_ENDED, MAX_UNUSED
from federation.transport.channels import RpcRefusal, refusal_from_rpc_error
from federation.v1.enrollment_pb2_grpc import EnrollmentStub
from federation.v1.federation_pb2 import AttendRequest, Heartbeat, Hello
from federation.v1.federation_pb2_grpc import FederationStub
from storage.models import AuditEntry, Certificate
from tests.coordinator.members.scene import attends, end_of, fetches, knock, rated, renewed, silent
from tests.harness import Member
from tests.running import SECONDS, Applicant, Running, refused, wait_for
from tests.worker.scene import Running as Worker
from worker.connection.enroll import enroll
from worker.home import WorkerHome


@pytest.fixture(autouse=True)
def _answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "HOLD_SECONDS", 0.0)


def refusal_of(channel: grpc.Channel) -> RpcRefusal:
    with pytest.raises(grpc.RpcError) as caught:
        knock(channel)
    return refusal_from_rpc_error(caught.value)


def test_a_bucket_gives_a_burst_and_then_its_rate() -> None:
    buckets = Buckets({"a": Rate(2, 0.5), "others": Rate(1, 1)})
    for _ in range(2):
        assert buckets.wait("m", "a", 100.0) == 0
        buckets.charge("m", "a", 100.0)
    assert buckets.wait("m", "a", 100.0) == 2.0
    assert buckets.wait("m", "a", 101.0) == 1.0
    assert buckets.wait("n", "a", 100.0) == buckets.wait("m", "others", 100.0) == 0
    assert buckets.wait("m", "a", 102.0) == 0
    buckets.charge("m", "unnamed", 102.0)
    assert buckets.wait("m", "unnamed", 102.0) == 1.0
    assert buckets.wait("m", "also unnamed", 102.0) == 0


def test_a_member_that_works_in_fifty_rounds_a_second_meets_no_limit() -> None:
    buckets = Buckets(RATES)
    each_round = {"FetchBlob": 1, "Submit": 2, "message": 3, REFUSED: 1, call_limits.DECLINE: 1}
    for number in range(50 * 600):
        for kind, times in each_round.items():
            for _ in range(times):
                assert buckets.wait("m", kind, number / 50) == 0, (kind, number)
                buckets.charge("m", kind, number / 50)


def test_a_member_that_calls_too_often_is_told_when_to_try_again_and_others_are_not_kept_waiting(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    rated(served, monkeypatch, FetchBlob=Rate(3, 0.01))
    with served.member("often") as often, served.member("seldom") as seldom:
        for _ in range(3):
            fetches(often)
        for _ in range(20):
            refusal = refusal_of(often)
            assert (refusal.status, refusal.reason) == ("RESOURCE_EXHAUSTED", "limit:rate")
            assert 50 < refusal.retry_seconds <= 100
        fetches(seldom)
        recorded: dict[str, Any] = {"actor": "fedpareto://test/client/often", "outcome": "limit:rate"}
        wait_for(lambda: served.entries(**recorded), "the first one to be on record")
        served.run(served.coordinator.access._record.finish())
        assert sum(entry.times for entry in served.entries(**recorded)) == 20


def test_a_member_that_is_refused_all_the_time_is_refused_without_a_look_into_the_database(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    rated(served, monkeypatch, **{REFUSED: Rate(2, 0.01)})
    with served.member("stubborn") as channel:
        for _ in range(2):
            fetches(channel)

        def looked(*arguments: object) -> None:
            raise AssertionError("a look into the database")

        monkeypatch.setattr(served.coordinator.access, "_check", looked)
        with refused("RESOURCE_EXHAUSTED", "limit:rate") as messages:
            knock(channel)
        assert "too many calls of yours were refused: try again in " in messages[0]


def test_calls_with_a_certificate_that_was_replaced_use_up_nothing_of_the_member_s(
    served: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rated(served, monkeypatch, FetchBlob=Rate(5, 0.01), **{REFUSED: Rate(3, 0.01)})
    old = Member(served.joined(tmp_path / "h", "renewed", ago=timedelta(hours=1)))
    present = renewed(old)
    attends(present.files)
    reasons = [refusal_of(old.channel).reason for _ in range(6)]
    assert reasons == ["certificate-revoked"] * 4 + ["limit:rate"] * 2
    fetches(present.channel)


def test_refusals_of_one_caller_or_of_many_strangers_write_a_bounded_number_of_entries_a_minute(
    served: Running,
) -> None:
    record = served.coordinator.access._record

    def written(*refusals: tuple[str, str, str]) -> list[AuditEntry]:
        served.run(record.finish())  # of other tests
        before = newest()
        for actor, action, outcome in refusals:
            served.run(record.write(actor, action, outcome, "detail"))
        served.run(record.finish())
        return served.entries(AuditEntry.entry_id > before)

    def newest() -> int:
        return served.look(lambda session: session.scalar(select(func.max(AuditEntry.entry_id)))) or 0

    member = "fedpareto://test/client/inventive"
    entries = written(*((member, "Submit", f"reason-{number}") for number in range(100)))
    assert len(entries) == refusal_record.PER_CALLER + 2
    assert sum(entry.times for entry in entries) == 100
    assert (entries[-1].actor, entries[-1].action, entries[-1].outcome) == (member, "several", "several")
    assert entries[-1].detail == "Submit: reason-99: detail"
    strangers = ((f"peer 2001:db8::{number:x}", f"Rpc{number % 7}", "x") for number in range(200))
    entries = written(*strangers)
    assert len(entries) <= refusal_record.OF_STRANGERS + 2
    assert sum(entry.times for entry in entries) == 200
    assert (entries[-1].actor, entries[-1].action) == (refusal_record.OTHERS, "several")
    other = "fedpareto://test/client/other"
    assert [entry.actor for entry in written((other, "Submit", "x"))] == [other]


def test_a_stream_ends_when_its_member_says_too_much(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    rated(served, monkeypatch, **{MESSAGE: Rate(5, 0.01)})
    requests = [AttendRequest(hello=Hello()), *[AttendRequest(heartbeat=Heartbeat())] * 50]
    with served.member("talker") as channel, refused("RESOURCE_EXHAUSTED", "limit:rate"):
        list(FederationStub(channel).Attend(iter(requests), timeout=SECONDS))


def test_renewals_are_a_handful_a_day_and_few_certificates_stay_on_record(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = Member.enroll(served.join_string("eager"))
    for _ in range(5):
        renewed(member)
    with refused("RESOURCE_EXHAUSTED", "limit:rate"):
        renewed(member)
    rated(served, monkeypatch)
    for _ in range(MAX_UNUSED + MAX_ENDED):
        renewed(member)
    fetches(member.channel)  # the certificate in use has not ended
    mine = select(func.count()).select_from(Certificate).where(Certificate.client_id == "eager")
    with served.database.read() as session:
        good = session.scalar(mine.where(Certificate.revoked.is_(None)))
        assert good == MAX_UNUSED + 2
        assert session.scalar(mine) == good + MAX_ENDED
    assert RATES["Renew"].per_second * call_limits.DAY == pytest.approx(5)


def test_a_worker_waits_as_long_as_the_coordinator_asks(
    served: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rated(served, monkeypatch, Attend=Rate(1, 1 / 3600))
    member = enroll(WorkerHome(tmp_path / "h"), served.join_string("hasty")).member
    attends(member)
    worker = Worker(WorkerHome(tmp_path / "h"), member, {})
    told = worker.wait_for("disconnected")[0]
    worker.stop()
    assert told["reason"] == "limit:rate"
    assert 3500 < told["retry_seconds"] <= 3600


def test_strangers_have_a_rate_for_each_address_and_in_all_and_members_are_not_kept_waiting(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served.newcomer() as newcomer, served.member("settled") as member:
        rated(served, monkeypatch, **{STRANGER: Rate(3, 0.01)})
        stub = EnrollmentStub(newcomer)
        for _ in range(3):
            with refused("UNAUTHENTICATED", "join-string-invalid"):
                stub.Enroll(Applicant().request(b"x"), timeout=SECONDS)

        def wrote(*arguments: object, **more: object) -> None:
            raise AssertionError("a transaction")

        access = served.coordinator.access
        monkeypatch.setattr("coordinator.services.enrollment.enroll", wrote)
        with refused("RESOURCE_EXHAUSTED", "limit:rate") as messages:
            stub.Enroll(Applicant().request(b"x"), timeout=SECONDS)
        assert "too many calls without a certificate from your address: try again in " in messages[0]
        fetches(member)
        rated(served, monkeypatch, **{STRANGERS: Rate(1, 0.01)})
        with pytest.raises(grpc.RpcError):  # it is served
            stub.Enroll(Applicant().request(b"x"), timeout=SECONDS)
        with refused("RESOURCE_EXHAUSTED", "limit:rate") as messages:
            stub.Enroll(Applicant().request(b"x"), timeout=SECONDS)
        assert "from all addresses" in messages[0]
        assert not len(access._strangers)


def test_idle_watches_of_strangers_end_soon_and_keep_no_newcomer_out(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strangers, "STREAM_SECONDS", 0.5)
    with served.newcomer() as newcomer, served.newcomer() as other:
        watch = health_pb2_grpc.HealthStub(newcomer).Watch
        calls = [watch(health_pb2.HealthCheckRequest(), timeout=SECONDS) for _ in range(64)]
        with refused("UNAUTHENTICATED", "join-string-invalid"):
            EnrollmentStub(other).Enroll(Applicant().request(b"x"), timeout=SECONDS)
        ends = [end_of(call) for call in calls]
    assert sorted(set(ends)) == ["limit:calls", "limit:stream"]
    assert ends.count("limit:stream") >= strangers.STREAMS_PER_ADDRESS


def test_strangers_that_send_no_request_keep_nobody_out(served: Running) -> None:
    over = threading.Event()
    with served.newcomer() as newcomer, served.member("late-comer") as member:
        enroll: Any = newcomer.stream_unary("/federation.v1.Enrollment/Enroll")
        calls = [enroll.future(silent(over)) for _ in range(strangers.PER_ADDRESS)]
        wait_for(lambda: len(served.coordinator.access._strangers) == len(calls), "the calls to count")
        with refused("UNAUTHENTICATED", "join-string-invalid"):
            EnrollmentStub(newcomer).Enroll(Applicant().request(b"x"), timeout=SECONDS)
        fetches(member)
        with refused("RESOURCE_EXHAUSTED", "limit:calls"):
            next(call for call in calls if call.done()).result(SECONDS)  # the oldest made room
        for call in calls:
            call.cancel()
        over.set()
        wait_for(lambda: not len(served.coordinator.access._strangers), "the calls to be forgotten")


def test_a_call_that_is_being_refused_gets_its_answer_however_many_newer_ones_come(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, writes = threading.Event(), threading.Event()
    control = served.coordinator.access
    record = control._record.write

    async def slow(*arguments: Any) -> None:
        await asyncio.to_thread(writes.wait, SECONDS)
        await record(*arguments)

    monkeypatch.setattr(control._record, "write", slow)
    with served.newcomer() as newcomer:
        enroll: Any = newcomer.stream_unary("/federation.v1.Enrollment/Enroll")
        refusal = enroll.future(iter([b"\xff no message"]))
        calls = [enroll.future(silent(over)) for _ in range(2 * strangers.PER_ADDRESS)]
        wait_for(lambda: len(control._strangers) >= strangers.PER_ADDRESS, "the calls to take every place")
        writes.set()
        with refused("INVALID_ARGUMENT", "argument"):
            refusal.result(SECONDS)
        for call in calls:
            call.cancel()
        over.set()
        wait_for(lambda: not len(control._strangers), "the calls to be forgotten")
