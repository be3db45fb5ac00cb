"""What each call writes: the table in docs/operate/operations.md has every call, and what it says is so."""

import re
from typing import NamedTuple

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from sqlalchemy import func, select

from coordinator.members.access import control
from coordinator.members.access.call_limits import RATES, RECORDED, Rate
from federation.v1 import admin_pb2 as admin
from federation.v1 import enrollment_pb2, federation_pb2
from storage.models import AuditEntry
from tests.coordinator.members.scene import rated
from tests.coordinator.services.scene import OK, PROBES
from tests.paths import DOCS, ROOT
from tests.running import SECONDS, refused
from tests.stage import Stage, spec

CONTRACT = (enrollment_pb2, federation_pb2, admin, health_pb2, reflection_pb2)
REFUSED = "a refused call"


class Row(NamedTuple):
    """The other columns of the table."""

    writes: str
    limit: str
    test: str


def stated() -> dict[str, Row]:
    """The rows of the table, by call."""
    page = (DOCS / "operate/operations.md").read_text()
    found = {}
    for line in page.partition("#### What each call writes")[2].partition("\n#")[0].splitlines():
        if not line.startswith("| ") or line.startswith("| Call |"):
            continue
        calls, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for call in [calls] if calls.startswith("a ") or " with " in calls else calls.split(", "):
            assert call not in found, call
            found[call.replace("`", "")] = Row(*cells)
    return found


def test_the_table_has_every_call_of_the_contract_and_every_message_of_an_attendance() -> None:
    rpcs = {
        method.name for part in CONTRACT for service in part.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }  # fmt: skip
    messages = {f"Attend with {field.name}" for field in federation_pb2.AttendRequest.DESCRIPTOR.fields}
    assert stated().keys() == rpcs | messages | {REFUSED}


def test_calls_that_write_have_a_rate_of_their_own() -> None:
    for call, row in stated().items():
        if row.writes == "nothing":
            assert (row.limit, row.test) == ("", ""), call
            assert call not in RECORDED
            continue
        path, name = re.fullmatch(r"`(tests/[\w/]+\.py)::(\w+)`", row.test).groups()  # type: ignore[union-attr]
        assert f"def {name}(" in (ROOT / path).read_text(), row.test
        assert row.limit, call
        if call in admin.DESCRIPTOR.services_by_name["Admin"].methods_by_name:
            assert call in RECORDED
        if "its rate" in row.limit:
            assert RATES[call].per_second < 0.1


def test_calls_of_administrators_that_write_nothing_write_nothing(stage: Stage) -> None:
    run = stage.submit(spec("read", stage.task()), paused=True)
    about = {"GetRun": admin.GetRunRequest(run=run), "ListRounds": admin.ListRoundsRequest(run=run)}

    def entries() -> int:
        return stage.look(lambda session: session.scalar(select(func.count()).select_from(AuditEntry)) or 0)

    silent = [name for name, row in stated().items() if row.writes == "nothing" and f"Admin/{name}" in PROBES]
    before = entries()
    for name in silent:
        request = about.get(name, PROBES[f"Admin/{name}"].request)
        if name in about or PROBES[f"Admin/{name}"].answer == OK:
            answer = getattr(stage._admin, name)(request, timeout=SECONDS)
            list(answer) if isinstance(answer, grpc.Call) and hasattr(answer, "__iter__") else None
    assert entries() == before
    stage.stop_run(run)


def test_an_administrator_that_pauses_and_resumes_a_run_without_end_is_told_to_wait(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "HOLD_SECONDS", 0.0)
    run = stage.submit(spec("undecided", stage.task()))
    rated(stage.served, monkeypatch, **dict.fromkeys(RECORDED, Rate(2, 0.01)))
    for _ in range(2):
        stage.pause(run)
        stage.resume(run)
    for _ in range(3):
        with refused("RESOURCE_EXHAUSTED", "limit:rate"):
            stage.pause(run)
    for number in range(2):
        stage._admin.CreateJoinString(admin.CreateJoinStringRequest(client_id=f"new-{number}"), timeout=SECONDS)
    with refused("RESOURCE_EXHAUSTED", "limit:rate"):
        stage._admin.CreateJoinString(admin.CreateJoinStringRequest(client_id="new-3"), timeout=SECONDS)
    assert len(stage.served.entries(action="run.paused", subject=run)) == 2
    monkeypatch.undo()
    stage.stop_run(run)
