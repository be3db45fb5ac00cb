"""A new member of a federation with `approval = true` waits: its log, `doctor`, `join` and the alerts say so."""

import json
from pathlib import Path

from typer.testing import CliRunner

from coordinator.alerts import about_federation
from federation.trust.envelope import key_id
from federation.trust.identity import Role
from federation.trust.member_files import MemberFiles
from federation.v1.admin_pb2 import ApproveClientRequest, CreateJoinStringRequest
from federation.v1.admin_pb2_grpc import AdminStub
from fedpareto.cli.main import app
from storage.states import AlertKind
from tests.running import SECONDS, Running, running
from tests.worker.scene import Running as RunningWorker
from worker.home import WorkerHome

TOLD = "ann has waited since 2"
FOR_WHOM = " UTC for a security officer of the federation to approve it, and gets no work until then"


def doctor(home: Path) -> dict[str, tuple[str, str]]:
    result = CliRunner().invoke(app, ["worker", "doctor", "--home", str(home), "--json"])
    return {found["subject"]: (found["outcome"], found["message"]) for found in json.loads(result.output)}


def alerts(served: Running) -> list[str]:
    with served.database.read() as session:
        found = about_federation.pending(session)
    assert {fact.kind for fact in found} <= {AlertKind.MEMBER_PENDING}
    return [f"{fact.message}: {fact.remedy}" for fact in found]


def test_a_member_that_waits_for_its_approval_is_told_so_until_it_is_approved_and_so_is_the_operator(
    tmp_path: Path,
) -> None:
    home = tmp_path / "ann"
    place = WorkerHome(home)
    with (
        running(tmp_path / "coordinator", approval=True, hosts=["localhost"]) as served,
        served.administrator(Role.SECURITY_OFFICER) as channel,
    ):
        officer = AdminStub(channel)
        asked = officer.CreateJoinString(CreateJoinStringRequest(client_id="ann"), timeout=SECONDS).join_string
        joined = CliRunner().invoke(app, ["worker", "join", "--home", str(home)], input=asked)
        assert "a security officer of the federation (role security-officer) must approve it" in joined.output
        key = key_id(MemberFiles.load(home).signing_key.public_key()).hex()
        assert f"the fingerprint of its key, by telephone or in person: {key}" in joined.output
        outcome, message = doctor(home)["approval"]
        assert outcome == "warning"
        assert message.startswith(TOLD)
        assert FOR_WHOM in message
        (alert,) = alerts(served)
        assert alert.startswith("ann has waited for its approval since 2")
        assert "`fedpareto admin approve ann`" in alert
        with place.lock():
            worker = RunningWorker(home=place, member=MemberFiles.load(home), offers={})
            try:
                (waits,) = worker.wait_for("pending")
                assert FOR_WHOM in waits["message"]
                assert doctor(home)["approval"] == ("warning", message)  # beside a worker, which was told
                officer.ApproveClient(ApproveClientRequest(client_id="ann", key_id=key), timeout=SECONDS)
                worker.wait_for("approved")
                assert "approval" not in doctor(home)
            finally:
                worker.stop()
        assert "approval" not in doctor(home)
        assert alerts(served) == []
