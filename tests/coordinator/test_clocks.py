"""Clocks that are wrong, or are set while the coordinator runs."""

import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import pytest

from coordinator.condition import Condition
from coordinator.members.access import control
from coordinator.rounds.fleets import remote
from coordinator.rounds.fleets.presence import Presence
from coordinator.rounds.housekeeping import COLLECTION_INTERVAL, Housekeeper
from coordinator.rounds.replies.uploads import Uploads
from federation.digests import digest
from federation.line.channels import refusal_from_rpc_error
from federation.v1.admin_pb2 import WatchRunRequest
from federation.v1.federation_pb2 import FetchBlobRequest, SubmitRequest
from storage.blob_directory import DirectoryStore
from storage.database import Database
from tests.coordinator.scene import begun
from tests.harness import Handing
from tests.running import refused
from tests.stage import MODEL, Stage


def test_certificates_that_a_set_clock_ends_end_their_calls_with_the_reason_and_no_incident(
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


def test_a_deadline_that_a_set_clock_has_passed_ends_the_phase(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LOOK_SECONDS", 0.05)
    run, (ann, ben) = stage.begin("ann", "ben", more="selection.minimum = 2\nselection.quorum = 0.5")
    ben.order()
    ann.answer()
    stage.clock.ahead += timedelta(days=1)  # nobody wakes the conductor
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
    keeper = Housekeeper(database, blobs, Presence(), uploads, Condition(), **given)
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
