"""Callers who mean harm, or act like it: each is one mistake that the coordinator must not make."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from coordinator.members.access import rpc_messages
from coordinator.members.access.control import MAX_CONCURRENT_CALLS
from coordinator.rounds.replies.uploads import Uploads
from federation.spec.run_spec import MAX_PROBLEMS, RunSpec, SpecError
from federation.transport.channels import refusal_from_rpc_error
from federation.trust.identity import Role
from federation.v1 import admin_pb2 as admin
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.enrollment_pb2 import EnrollRequest
from federation.v1.enrollment_pb2_grpc import EnrollmentStub
from federation.v1.federation_pb2 import FetchBlobRequest, SubmitRequest
from federation.vectors import Layout, Tensor, to_bytes
from storage.blob_directory import DirectoryStore
from storage.states import RoundState, RunState
from tests.coordinator.members.scene import rated, silent
from tests.harness import Handing
from tests.running import SECONDS, Running, refused, running, wait_for
from tests.stage import LAYOUT, LONG, Stage, answer, spec

# --- specifications

HEAD = 'name = "n"\ntask = "t"\nrounds = 1\n'


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[\n" * 20_000,
        HEAD + "a = " + "{ a = " * 150 + "1" + " }" * 150,
        "name" + ".a" * 30_000 + " = 1",
        "\n".join(f"a{'.a' * 400} = {i}" for i in range(2)),
        "name" + ".a" * 490 + " = 1",
        HEAD + "seed = " + "9" * 10_000,
        HEAD + "seed = " + "9" * 500,
        HEAD + "seed = 0x" + "f" * 900,
        HEAD + "[algorithm]\nepsilon = " + "9" * 400,
        HEAD + "[algorithm]\nepsilon = nan",
        HEAD + "[train]\ndeadline_seconds = 1e300",
        HEAD + "[train]\nepochs = 4294967296",
        HEAD + "[limits]\nskipped_rounds = 9223372036854775807",
        HEAD + "[limits]\nsamples = 9223372036854775807",
        "\0",
    ],
    ids=range(15),
)
def test_a_hostile_specification_is_refused_as_such(stage: Stage, text: str) -> None:
    with refused("INVALID_ARGUMENT", "spec"):
        stage.submit(text.encode())


def test_a_specification_with_very_many_mistakes_gets_a_short_answer() -> None:
    with pytest.raises(SpecError) as caught:
        RunSpec.parse(HEAD + "".join(f"key{i} = 1\n" for i in range(5000)))
    assert len(str(caught.value).splitlines()) == MAX_PROBLEMS + 1
    assert str(caught.value).endswith("and 4980 more")


def test_a_specification_is_no_place_for_a_book(stage: Stage) -> None:
    with refused("RESOURCE_EXHAUSTED", "limit:spec"):
        stage.submit((HEAD + "# chapter\n" * 10_000).encode())


def test_a_model_whose_tensors_have_no_name_that_can_be_written_is_refused(stage: Stage) -> None:
    header = b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    with refused("INVALID_ARGUMENT", "layout"):
        stage.submit(spec("unwritable", "nobody"), model=len(header).to_bytes(8, "little") + header + bytes(4))


# --- calls


def test_a_call_without_its_request_is_answered(stage: Stage) -> None:
    served = stage.served
    with served.newcomer() as newcomer, served.administrator(Role.VIEWER) as viewer:
        for channel, method in (
            (newcomer, "Enrollment/Enroll"),
            (viewer, "Admin/ListRuns"),
            (viewer, "Admin/WatchRun"),
        ):
            with refused("INVALID_ARGUMENT", "argument"):
                list(channel.stream_stream(f"/federation.v1.{method}")(iter(()), timeout=SECONDS))


@pytest.mark.parametrize("number", [2**31, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_number_beyond_every_round_and_entry_is_answered(stage: Stage, number: int) -> None:
    run = stage.submit(spec(f"short-{stage.count}", stage.task()), paused=True)
    assert list(stage._admin.ExportRounds(admin.ExportRoundsRequest(run=run, first=number), timeout=SECONDS)) == []
    (page,) = stage._admin.ListAudit(admin.ListAuditRequest(newest=1, before=number), timeout=SECONDS)
    assert len(page.entries) == 1


def test_whoever_opens_calls_and_says_nothing_is_counted_and_shown_out(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_messages, "REQUEST_SECONDS", 2.0)
    under_way = stage.served.coordinator.access._calls
    over = threading.Event()
    with stage.served.administrator(Role.VIEWER) as viewer:
        listing: Any = viewer.stream_unary("/federation.v1.Admin/ListRuns")
        calls = [listing.future(silent(over)) for _ in range(MAX_CONCURRENT_CALLS)]
        wait_for(lambda: any(len(found) == MAX_CONCURRENT_CALLS for found in under_way.values()), "the calls to count")
        with refused("RESOURCE_EXHAUSTED", "limit:calls"):
            AdminStub(viewer).ListRuns(admin.ListRunsRequest(), timeout=SECONDS)
        for call in calls:
            with refused("INVALID_ARGUMENT", "argument"):
                call.result(SECONDS)
        over.set()
        AdminStub(viewer).ListRuns(admin.ListRunsRequest(), timeout=SECONDS)


@pytest.mark.full
def test_a_flood_of_refusals_is_counted_to_the_last_one_and_written_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path / "home") as served, served.newcomer() as newcomer:
        rated(served, monkeypatch)
        ended: Counter[str] = Counter()
        for _ in range(10):
            calls = [EnrollmentStub(newcomer).Enroll.future(EnrollRequest()) for _ in range(50)]
            for call in calls:
                error = call.exception(SECONDS)
                assert isinstance(error, grpc.RpcError)
                ended[refusal_from_rpc_error(error).reason] += 1
        entries = served.refusals("Enroll")
        assert ended == {"join-string-invalid": 500}
        assert sum(entry.times for entry in entries) == 500
        assert len(entries) <= 2  # one a minute
        assert len(served.coordinator.access._record._tallies) == 1


def test_whoever_stops_watching_leaves_nothing_behind(stage: Stage) -> None:
    run = stage.submit(spec("watched", "nobody-offers-this"))
    watchers = stage.parts.changes.watchers
    before = len(watchers)
    with stage.served.administrator(Role.VIEWER) as viewer:
        calls = [AdminStub(viewer).WatchRun(admin.WatchRunRequest(run=run)) for _ in range(20)]
        for call in calls:
            next(call)
        wait_for(lambda: len(watchers) == before + 20, "the watchers")
        for call in calls:
            call.cancel()
        wait_for(lambda: len(watchers) == before, "the watchers to be forgotten")
    stage.stop_run(run)


def test_a_client_that_is_revoked_while_it_reads_slowly_gets_nothing_more(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    layout = Layout((Tensor("large", (1 << 24,)),))  # 64 MiB: more than lies about between two ends of a connection
    model = to_bytes(layout, np.ones(layout.size, np.float32))
    _, (deaf,) = stage.begin("deaf", model=model)
    call = deaf.member.stub.FetchBlob(FetchBlobRequest(digest=deaf.order().base_model))
    assert next(call).chunk
    stage.revoke("deaf")
    received = 0
    with refused("UNAUTHENTICATED", "certificate-revoked"):
        for piece in call:
            received += len(piece.chunk)
    assert received < len(model) // 2  # what was under way, and nothing more
    assert "Traceback" not in caplog.text
    assert "never retrieved" not in caplog.text


def test_strangers_may_watch_the_health_and_go(stage: Stage) -> None:
    with stage.served.newcomer() as newcomer:
        watch = HealthStub(newcomer).Watch(HealthCheckRequest(service=""), timeout=SECONDS)
        assert next(watch).status == HealthCheckResponse.SERVING
        watch.cancel()
    under_way = stage.served.coordinator.access._calls
    wait_for(lambda: not any(actor.startswith("peer") for actor in under_way), "the call to be forgotten")


# --- replies


def temporary(served: Running) -> list[Path]:
    """What is left of uploads whose assignments are open, and of models."""
    Uploads(served.database, DirectoryStore(served.home.blobs_dir), quota=0).collect()
    return [path for name in ("tmp", "partial") for path in (served.home.blobs_dir / name).iterdir()]


def test_a_newer_upload_ends_the_older_ones_of_its_assignment_which_leave_nothing_behind(stage: Stage) -> None:
    run, (honest, slow) = stage.begin("honest", "slow", more="selection.minimum = 2")
    order, theirs = slow.order(), honest.order()
    envelope, payload = slow.member.signed(order)
    first = [SubmitRequest(reply=envelope)]
    others = range(MAX_CONCURRENT_CALLS - 1)  # and its attendance
    calls = [Handing(slow.member.stub, first, goes_on=True) for _ in others]
    wait_for(lambda: sum(call.done() for call in calls) == len(calls) - 1, "all uploads but one to end")
    assert not temporary(stage.served)  # nothing has come
    honest.reply(theirs)
    assert slow.member.submit(envelope, payload).accepted
    for call in calls:
        with refused("ABORTED", "superseded"):
            call.result(SECONDS)
    wait_for(lambda: not temporary(stage.served), "the uploads to be swept")
    under_way = stage.served.coordinator.access._calls
    wait_for(lambda: all(len(found) <= 1 for found in list(under_way.values())), "the calls to be forgotten")
    assert not stage.served.coordinator.access._strangers
    stage.play(run, honest, slow)


def test_an_upload_ends_when_its_deadline_has_passed_whatever_is_still_to_come(stage: Stage) -> None:
    run, (late,) = stage.begin("late")
    envelope, payload = late.member.signed(late.order())
    begun = [SubmitRequest(reply=envelope), SubmitRequest(chunk=payload[:1])]
    call = Handing(late.member.stub, begun, goes_on=True)
    wait_for(lambda: temporary(stage.served), "the upload to begin")
    stage.clock.ahead += LONG
    call.say(SubmitRequest(chunk=payload[1:2], offset=1))
    with refused("FAILED_PRECONDITION", "deadline"):
        call.result(SECONDS)
    stage.stop_run(run)
    wait_for(lambda: not temporary(stage.served), "the upload to be swept")


def test_uploads_that_are_given_up_at_once_leave_nothing_behind(stage: Stage) -> None:
    run, (fickle,) = stage.begin("fickle")
    order = fickle.order()
    requests = [SubmitRequest(reply=fickle.member.signed(order)[0])]
    under_way = stage.served.coordinator.access._calls
    for _ in range(100):
        call = Handing(fickle.member.stub, requests)
        wait_for(lambda: any(len(calls) > 1 for calls in under_way.values()) or call.done(), "the call")  # noqa: B023
        call.call.cancel()
    wait_for(lambda: not temporary(stage.served), "the uploads to be swept")
    fickle.reply(order)
    stage.play(run, fickle)


def test_of_many_replies_at_once_one_counts_and_its_own_repetitions_get_its_receipt(stage: Stage) -> None:
    run, (twin, other) = stage.begin("twin", "other", more="selection.minimum = 2")
    order = twin.order()
    replies = [twin.member.signed(order, seed) for seed in range(3)]

    def submit(i: int) -> tuple[int, object]:
        try:
            return i % 3, twin.member.submit(*replies[i % 3]).SerializeToString()
        except grpc.RpcError as error:
            return i % 3, refusal_from_rpc_error(error).reason

    with ThreadPoolExecutor(12) as pool:
        ended = list(pool.map(submit, range(24)))
    accepted = {i for i, end in ended if isinstance(end, bytes)}
    assert len(accepted) == 1
    assert len({end for _, end in ended if isinstance(end, bytes)}) == 1
    assert {end for i, end in ended if i in accepted and not isinstance(end, bytes)} <= {"superseded"}
    assert {end for i, end in ended if i not in accepted} <= {"assignment-fulfilled", "superseded"}
    assert list(stage.replies(run)) == ["twin"]
    stage.play(run, other, twin)


def test_a_client_that_is_revoked_while_it_uploads_is_cut_off(stage: Stage) -> None:
    run, (loyal, traitor) = stage.begin("loyal", "traitor", more="selection.minimum = 2")
    envelope, payload = traitor.member.signed(traitor.order())
    begun = [SubmitRequest(reply=envelope), SubmitRequest(chunk=payload[:-1])]
    call = Handing(traitor.member.stub, begun, goes_on=True)
    wait_for(lambda: temporary(stage.served), "the upload to begin")
    stage.revoke("traitor")
    with refused("UNAUTHENTICATED", "certificate-revoked"):
        call.result(SECONDS)
    assert stage.outcomes(run)["traitor"] == ("CANCELLED", "client-revoked")
    wait_for(lambda: not temporary(stage.served), "the upload to be swept")
    stage.play(run, loyal)
    assert list(stage.replies(run)) == ["loyal"]


def test_absurd_claims_about_an_evaluation_do_not_end_the_run(stage: Stage) -> None:
    run, (sane, boaster) = stage.begin("sane", "boaster", more="selection.minimum = 2")
    answer(sane, boaster)
    absurd = {"test/samples": 1e300, "train/samples": -1e300, "test/loss": 1e308, "test/accuracy": -1e308}
    boaster.reply(boaster.order(), metrics=absurd)
    sane.answer()
    stage.wait_state(run, RunState.COMPLETED)
    assert stage.evaluations(run)["boaster", "test"].samples == 2**53
    assert stage.evaluations(run)["boaster", "train"].samples == 0


def test_a_long_name_of_a_number_makes_no_long_answer(stage: Stage) -> None:
    run, (talker,) = stage.begin("talker")
    order = talker.order()
    with refused("RESOURCE_EXHAUSTED", "limit:metrics") as words:
        talker.submit(order, metrics={"x" * 50_000: float("nan")})
    assert len(words[0]) < 300
    assert stage.outcomes(run)["talker"] == ("REFUSED", "limit:metrics")


def test_one_model_may_be_submitted_many_times_at_once(stage: Stage) -> None:
    for attempt in range(2):  # the window is small
        model = to_bytes(LAYOUT, np.full(LAYOUT.size, attempt, np.float32))
        names = [f"same-model-{attempt}-{i}" for i in range(8)]
        with ThreadPoolExecutor(8) as pool:
            runs = list(pool.map(lambda name: stage.submit(spec(name, "nobody"), model=model, paused=True), names))  # noqa: B023
        assert len(set(runs)) == 8


@pytest.mark.full
def test_runs_that_are_alike_may_make_the_same_model_at_the_same_time(stage: Stage) -> None:
    task, (busy,) = stage.crew("busy")
    runs = [stage.submit(spec(f"alike-{i}", task, rounds=2)) for i in range(2)]
    for run in runs:
        stage.play(run, busy)
    assert len({stage.run(run).model for run in runs}) == 1


# Last: for half a minute after a restart, rounds wait for everybody who attended before.
def test_a_receipt_outlives_the_coordinator_and_so_does_a_refusal(stage: Stage) -> None:
    run, (first, second) = stage.begin("first", "second", more="selection.minimum = 2")
    order, theirs = first.order(), second.order()
    envelope, payload = first.member.signed(order)
    receipt = first.member.submit(envelope, payload)
    second.submit_zeros(theirs)
    wait_for(lambda: stage.rounds(run)[0].state is not RoundState.OPEN, "the step")
    stage.restart()
    stage.clock.ahead += timedelta(seconds=31)  # nobody is waited for any more
    assert first.member.submit(envelope, payload) == receipt
    second.submit_zeros(theirs)
    with refused("ALREADY_EXISTS", "assignment-fulfilled"):
        first.member.submit(*first.member.signed(order, seed=1))
    stage.play(run, first, second)
