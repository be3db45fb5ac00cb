"""The two-person rule: one officer's signed request, another one's signed consent, and nothing by one alone."""

import json
import re
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import text, update

from coordinator.check import check_home
from coordinator.home import TWO_OFFICERS, CoordinatorHome
from coordinator.members.requests import TOLERANCE
from coordinator.ownership import CoordinatorHomeError
from coordinator.services.checks.officers_check import request_problems
from coordinator.settings import Settings
from federation.findings import CheckOutcome
from federation.transport.channels import refusal_from_rpc_error
from federation.trust.admin_files import AdminFiles
from federation.trust.envelope import envelope_digest, key_id, sign
from federation.trust.identity import Action
from federation.trust.join_string import JoinStringFields
from federation.v1 import admin_pb2 as messages
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.common_pb2 import DecisionManifest
from federation.v1.federation_pb2 import RenewRequest
from federation.v1.federation_pb2_grpc import FederationStub
from storage import audit
from storage.models import ActionRequest
from storage.states import ClientState
from tests.command_lines import completed, failure
from tests.coordinator.members.scene import Change, Officer, client, key_of
from tests.harness import Member
from tests.running import SECONDS, Clock, Running, made_home, refused, running, wait_for

RULE: dict[str, Any] = {"approval": True, "two_officers": ["approve", "revoke", "forget", "revoke-admin"]}
SETTINGS = RULE
BOTH_DATABASES = False


Cast = tuple[Officer, Officer, Officer]


@pytest.fixture(scope="module")
def cast(served: Running) -> Cast:
    return Officer(served, "ada"), Officer(served, "bea"), Officer(served, "cyd")


@pytest.fixture
def member(served: Running) -> str:
    """A client that waits for approval."""
    name = f"m-{secrets.token_hex(4)}"
    served.enroll(name)
    return name


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path / "home", **RULE) as made:
        yield made


def state(served: Running, name: str) -> ClientState:
    return client(served, name).state


def problems(served: Running) -> list[str]:
    return served.look(lambda session: list(request_problems(session)))


def entries(served: Running, subject: str) -> list[tuple[str, str, str]]:
    rows = served.entries(subject=subject, outcome="")
    return [(row.action, row.actor.rpartition("/")[2], row.digest) for row in rows]


def test_by_commands_one_officer_asks_and_another_consents(served: Running, cast: Cast, member: str) -> None:
    ada, bea, _ = cast
    name = ada.command("approve", member, "--yes").partition("this is request ")[2].partition(" ")[0]
    assert state(served, member) is ClientState.PENDING
    assert name in bea.command("requests")
    done = bea.document("consent", name, "--yes")["results"][0]["request"]
    assert (done["state"], done["request"]["decoded"]["subject"]) == ("DONE", member)
    assert done["decision"]["decoded"]["officer"] == "bea"
    assert state(served, member) is ClientState.ACTIVE
    request_id = done["request_id"]
    consent = envelope_digest(ada.requests()[0].decision)
    assert entries(served, request_id) == [("request.made", "ada", request_id), ("request.consented", "bea", consent)]
    assert entries(served, member)[-1] == ("client.approved", "bea", consent)
    assert problems(served) == []
    assert name not in bea.command("requests")
    assert "DONE" in bea.command("requests", "--all")


def test_what_was_asked_for_already_is_named_and_gets_no_second_request(
    served: Running, cast: Cast, member: str
) -> None:
    ada, bea, cyd = cast
    made = ada.document("revoke", member, "--reason", "left", "--yes")["request"]["request_id"]
    digits = made.rpartition(":")[2][:12]
    of_other = bea.command("revoke", member, "--yes")
    assert f"ada has asked for this already.\nrequest {digits}: revoke {member} (left)\n" in of_other
    assert f"to consent: fedpareto admin consent {digits}\n" in of_other
    assert "you have asked for this already" in ada.command("revoke", member, "--reason", "another one", "--yes")
    assert bea.document("revoke", member, "--yes")["request"]["request_id"] == made
    with refused("ALREADY_EXISTS", "request-exists"):
        cyd.ask(Action.REVOKE, member)
    about = [item for item in ada.requests() if member.encode() in item.request.manifest]
    assert [item.request_id for item in about] == [made]
    assert "DONE" not in ada.command("requests")
    bea.ask(Action.APPROVE, member)  # another action is another request
    ada.command("withdraw", made, "--yes")  # the whole id is a name, too
    assert bea.document("revoke", member, "--yes")["request"]["request_id"] != made


@pytest.mark.full
def test_eight_members_are_admitted_by_three_commands_of_two_officers(apart: Running, tmp_path: Path) -> None:
    served, dan, eve = apart, Officer(apart, "dan"), Officer(apart, "eve")
    names = [f"many-{number}" for number in range(8)]
    (tmp_path / "names").write_text("\n".join(names))
    dan.command("join-string", "--names", str(tmp_path / "names"), "--out", str(tmp_path))
    for name in names:
        Member.enroll(JoinStringFields.decode((tmp_path / f"{name}.join").read_text())).channel.close()
    assert [need["command"] for need in dan.document("status")["needs"]] == ["approve --all-pending"]
    asked = dan.document("approve", *names, "--yes")["results"]
    assert [(item["client_id"], item["outcome"]) for item in asked] == [(name, "requested") for name in names]
    assert {item["request"]["request"]["decoded"]["key_id"] for item in asked} == {key_of(served, n) for n in names}
    assert {item["outcome"] for item in dan.document("approve", *names, "--yes")["results"]} == {"open"}
    assert dan.command("approve", "--all-pending").startswith("8 members left out, with an open request.")
    assert {state(served, name) for name in names} == {ClientState.PENDING}
    assert completed(eve.home, "admin consent ") == [item["request"]["request_id"][7:19] for item in asked][::-1]
    assert dan.document("consent", "--all") == {"results": []}, "nobody consents to a request of its own"
    [needed], [own] = eve.document("status")["needs"], dan.document("status")["own_requests"]
    assert needed["sentence"].startswith("8 requests wait for another security officer: dan asks to approve many-")
    assert (needed["command"], own["command"]) == ("consent --all", "requests")
    eve.command("consent", "--all", "--yes")
    assert {state(served, name) for name in names} == {ClientState.ACTIVE}
    assert eve.document("consent", "--all") == {"results": []}
    assert problems(served) == []


def test_a_key_that_changes_after_the_request_or_after_the_list_is_not_approved(
    served: Running, cast: Cast, tmp_path: Path
) -> None:
    ada, bea, _ = cast
    changed, same = Member(served.joined(tmp_path / "a", "changed", ago=timedelta())), "same"
    served.enroll(same)
    before = key_of(served, "changed")
    with refused("FAILED_PRECONDITION", "client-key"):
        ada.ask(Action.APPROVE, "changed", key_id=key_of(served, same))
    asked = ada.document("approve", "changed", same, "--yes")["results"]
    Change(changed).done().channel.close()
    changed.channel.close()
    ids = [item["request"]["request_id"] for item in asked]
    failed = failure("admin", "--home", str(bea.home), "consent", *ids, "--yes")
    assert failed.message == f"1 of 2 failed: {ids[0]}"
    assert [state(served, name) for name in ("changed", same)] == [ClientState.PENDING, ClientState.ACTIVE]
    told = failure("admin", "--home", str(ada.home), "approve", "changed", "--yes").message
    assert f"its key is {key_of(served, 'changed')} now, and request {ids[0][7:19]} of ada names another one" in told
    assert before != key_of(served, "changed")
    ada.command("withdraw", ids[0], "--yes")
    assert ada.document("approve", "changed", "--yes")["results"][0]["outcome"] == "requested"


def test_consent_to_several_requests_names_each_wrong_id_and_does_the_others(
    served: Running, cast: Cast, member: str
) -> None:
    ada, bea, _ = cast
    own, of_ada = bea.ask(Action.FORGET, member), ada.ask(Action.APPROVE, member)
    line = ("admin", "--home", str(bea.home), "consent", "--yes")
    wrong = failure(*line, of_ada.request_id, "xyz", "uvw")
    assert wrong.message.startswith("no request has an id that begins with 'xyz'; no request has an id that begins wi")
    assert state(served, member) is ClientState.PENDING
    assert failure(*line, own.request_id, of_ada.request_id).message == f"1 of 2 failed: {own.request_id}"
    assert state(served, member) is ClientState.ACTIVE
    assert "give --all" in failure(*line).message


def test_a_call_of_one_officer_alone_does_nothing(served: Running, cast: Cast, member: str) -> None:
    stub = cast[0].stub
    calls: Any = (
        (stub.ApproveClient, messages.ApproveClientRequest(client_id=member)),
        (stub.RevokeClient, messages.RevokeClientRequest(client_id=member)),
        (stub.ForgetClient, messages.ForgetClientRequest(client_id=member)),
        (stub.RevokeAdministrator, messages.RevokeAdministratorRequest(name="bea")),
    )
    for call, request in calls:
        with refused("FAILED_PRECONDITION", "two-officers"):
            call(request)
    assert state(served, member) is ClientState.PENDING


def test_nobody_consents_to_a_request_of_its_own_also_not_with_another_certificate(
    served: Running, cast: Cast, member: str
) -> None:
    ada, bea, _ = cast
    request = ada.ask(Action.APPROVE, member)
    with refused("PERMISSION_DENIED", "request-own"):
        ada.decide(request)
    ada.command("login")
    files = AdminFiles.load(ada.home)
    assert files.certificate != ada.files.certificate
    with files.channel() as channel, refused("PERMISSION_DENIED", "request-own"):
        decision = messages.DecideRequestRequest(decision=ada.decision(request))
        AdminStub(channel).DecideRequest(decision, timeout=SECONDS)
    # Nor in the name, by the line or with the key of another officer.
    with refused("UNAUTHENTICATED", "key-unknown"):
        bea.say(ada.decision(request))
    with refused("UNAUTHENTICATED", "key-unknown"):
        ada.say(bea.decision(request))
    with refused("INVALID_ARGUMENT", "mismatch:officer"):
        ada.decide(request, officer="bea")
    forged = ada.decision(request, officer="bea")
    forged.key_id = key_id(bea.key.public_key())
    with refused("UNAUTHENTICATED", "signature"):
        bea.say(forged)
    stranger = Ed25519PrivateKey.generate()
    with refused("UNAUTHENTICATED", "key-unknown"):
        bea.say(sign(DecisionManifest.FromString(bea.decision(request).manifest), stranger))
    assert state(served, member) is ClientState.PENDING


def test_a_request_that_was_changed_on_record_is_not_done(served: Running, cast: Cast, member: str) -> None:
    ada, bea, _ = cast
    request, other = ada.ask(Action.APPROVE, member), sign(ada.request(Action.REVOKE, member), ada.key)
    with served.database.begin() as session:
        mine = update(ActionRequest).where(ActionRequest.request_id == request.request_id)
        session.execute(mine.values(envelope=other.SerializeToString()))
    with refused("UNAUTHENTICATED", "signature"):
        bea.decide(request)
    assert [problem for problem in problems(served) if request.request_id[7:19] in problem]
    with served.database.begin() as session:
        session.execute(mine.values(envelope=request.request.SerializeToString(deterministic=True)))
    with refused("NOT_FOUND", "request-unknown"):
        bea.decide(request, request=envelope_digest(other))
    bea.decide(request)
    assert state(served, member) is ClientState.ACTIVE


def test_a_request_and_a_consent_count_once_and_in_time(served: Running, cast: Cast, member: str) -> None:
    ada, bea, cyd = cast
    request = ada.ask(Action.APPROVE, member)
    with refused("ALREADY_EXISTS", "request-exists"):
        ada.hand_in(request.request)
    with refused("UNAUTHENTICATED", "signed-time"):
        bea.decide(request, age=2 * TOLERANCE)
    with refused("UNAUTHENTICATED", "signed-time"):
        ada.ask(Action.APPROVE, member, age=2 * TOLERANCE)
    for lifetime in (timedelta(days=2), timedelta(seconds=-1)):
        with refused("INVALID_ARGUMENT", "argument"):
            ada.ask(Action.APPROVE, member, lifetime=lifetime)
    consent = bea.decision(request)
    bea.say(consent)
    for again in (partial(bea.say, consent), partial(bea.decide, request), partial(cyd.decide, request)):
        with refused("FAILED_PRECONDITION", "request-state"):
            again()
    late = ada.ask(Action.REVOKE, member)
    with served.clock.moved(timedelta(hours=2)):
        with refused("FAILED_PRECONDITION", "request-expired"):
            bea.decide(late)
        shown = {one.request_id: one.state for one in ada.requests()}
        assert shown[late.request_id] == messages.REQUEST_STATE_EXPIRED
        assert late.request_id not in {one.request_id for one in ada.requests(every=False)}
    with served.database.begin() as session:  # a longer life on record than was signed
        mine = update(ActionRequest).where(ActionRequest.request_id == late.request_id)
        session.execute(mine.values(expires=served.clock() + timedelta(days=9)))
    with served.clock.moved(timedelta(hours=2)), refused("UNAUTHENTICATED", "signature"):
        bea.decide(late)
    assert state(served, member) is ClientState.ACTIVE


def test_the_request_of_an_officer_who_was_revoked_or_issued_again_is_not_done(
    served: Running, cast: Cast, member: str
) -> None:
    _, bea, cyd = cast
    gone = Officer(served, "gone")
    request = gone.ask(Action.APPROVE, member)
    bea.decide(cyd.ask(Action.REVOKE_ADMIN, "gone", reason="left"))
    with refused("UNAUTHENTICATED", "certificate-revoked"):
        gone.stub.ListClients(messages.ListClientsRequest(), timeout=SECONDS)
    with refused("FAILED_PRECONDITION", "request-officer"):
        bea.decide(request)
    again = Officer(served, "gone")
    with refused("FAILED_PRECONDITION", "request-officer"):
        bea.decide(request)
    assert again.decide(request, consent=False).state == messages.REQUEST_STATE_WITHDRAWN
    bea.decide(cyd.ask(Action.REVOKE_ADMIN, "gone"))
    assert state(served, member) is ClientState.PENDING


def test_of_two_consents_at_the_same_time_one_counts(served: Running, cast: Cast, member: str) -> None:
    ada, *others = cast
    request = ada.ask(Action.APPROVE, member)
    together = threading.Barrier(4)

    def consent(officer: Officer) -> str:
        envelope = officer.decision(request)
        together.wait(SECONDS)
        try:
            return messages.RequestState.Name(officer.say(envelope).state)
        except grpc.RpcError as error:
            return refusal_from_rpc_error(error).reason

    with ThreadPoolExecutor(4) as pool:
        answers = sorted(pool.map(consent, (*others, *others)))
    assert answers == ["REQUEST_STATE_DONE", *["request-state"] * 3]
    assert [entry[0] for entry in entries(served, member)].count("client.approved") == 1
    assert [entry[0] for entry in entries(served, request.request_id)] == ["request.made", "request.consented"]


def test_a_request_is_withdrawn_by_its_officer_and_refused_by_others(served: Running, cast: Cast, member: str) -> None:
    ada, bea, _ = cast
    assert ada.decide(ada.ask(Action.APPROVE, member), consent=False).state == messages.REQUEST_STATE_WITHDRAWN
    name = ada.document("approve", member, "--yes")["results"][0]["request"]["request_id"][7:]
    done = bea.command("withdraw", name[:8], "--reason", "not known", "--yes")
    assert done == f"approve {member}, asked by ada: refused\n"
    request = bea.requests()[0]
    with refused("FAILED_PRECONDITION", "request-state"):
        bea.decide(request)
    assert entries(served, request.request_id)[-1][:2] == ("request.refused", "bea")
    assert state(served, member) is ClientState.PENDING


def test_what_the_action_would_refuse_is_refused_at_the_request_and_leaves_nothing(
    served: Running, cast: Cast, member: str
) -> None:
    ada, bea, _ = cast
    before = len(ada.requests())
    with refused("NOT_FOUND", "client-unknown"):
        ada.ask(Action.APPROVE, "nobody")
    with refused("NOT_FOUND", "administrator-unknown"):
        ada.ask(Action.REVOKE_ADMIN, "nobody")
    for action in ("export", ""):
        with refused("INVALID_ARGUMENT", "argument"):
            ada.ask(action, member)
    with refused("INVALID_ARGUMENT", "mismatch:federation_id"):
        ada.ask(Action.APPROVE, member, federation_id="other")
    with refused("INVALID_ARGUMENT", "manifest"):
        ada.ask(Action.APPROVE, member, reason="x" * 9000)
    assert len(ada.requests()) == before
    # The same at the consent, if it has changed meanwhile; the request stays open.
    first, second = ada.ask(Action.REVOKE, member), ada.ask(Action.APPROVE, member)
    bea.decide(first)
    with refused("FAILED_PRECONDITION", "client-state"):
        bea.decide(second)
    assert bea.decide(second, consent=False).state == messages.REQUEST_STATE_REFUSED


def test_with_two_consents_a_members_calls_end_and_two_officers_have_to_remain(served: Running, cast: Cast) -> None:
    ada, bea, _ = cast
    name = f"leaving-{served.database.engine.dialect.name}"
    with served.member(name) as channel:
        bea.decide(ada.ask(Action.APPROVE, name))
        bea.decide(ada.ask(Action.FORGET, name))
        bea.decide(ada.ask(Action.REVOKE, name, reason="left"))
        assert state(served, name) is ClientState.REVOKED
        with refused("UNAUTHENTICATED", "certificate-revoked"):
            FederationStub(channel).Renew(RenewRequest(), timeout=SECONDS)
    bea.decide(ada.ask(Action.REVOKE_ADMIN, "admin"))
    with refused("FAILED_PRECONDITION", "administrator-state"):
        ada.ask(Action.REVOKE_ADMIN, "admin")
    bea.decide(ada.ask(Action.REVOKE_ADMIN, "cyd"))
    with refused("FAILED_PRECONDITION", "last-officer"):
        ada.ask(Action.REVOKE_ADMIN, "bea")
    assert problems(served) == []


OF_APPROVAL = "where action = 'client.approved'"
DONE = "where decision is not null"
EDITS = {
    f"update audit_log set digest = '' {OF_APPROVAL}": "one officer has done it, although it took two",
    f"update audit_log set digest = subject {OF_APPROVAL}": "two officers have signed no such thing",
    f"delete from action_requests {DONE}": "the log tells of it, and it is not in the record",
    f"update action_requests set decision = null {DONE}": "nobody has signed a decision",
    f"update action_requests set requested_by = decided_by {DONE}": "key-unknown",
    f"update action_requests set decided_by = requested_by {DONE}": "key-unknown",
    f"update action_requests set state = 'REFUSED' {DONE}": "it is REFUSED, and bea has signed DONE",
    f"delete from audit_log {OF_APPROVAL}": "the log does not tell that it was done",
    "delete from audit_log where action = 'request.consented'": "no entry of the log tells of this decision",
}


def test_what_was_edited_afterwards_is_found(apart: Running) -> None:
    ada, bea = Officer(apart, "ada"), Officer(apart, "bea")
    apart.enroll("hospital")
    answer = bea.decide(ada.ask(Action.APPROVE, "hospital"))
    done = answer.request_id
    ada.ask(Action.REVOKE, "hospital")
    assert problems(apart) == []
    for edit, expected in EDITS.items():
        with apart.database.begin() as session:
            session.execute(text(edit))
            found = list(request_problems(session))
            assert any(expected in problem for problem in found), (edit, found)
            session.rollback()
    with apart.database.begin() as session:
        own = {"decided_by": ActionRequest.requested_by, "decision": ada.decision(answer).SerializeToString()}
        session.execute(update(ActionRequest).where(ActionRequest.request_id == done).values(**own))
        assert any("ada has consented to a request of its own" in problem for problem in request_problems(session))
        session.rollback()
    assert ada.document("audit", "verify")["problems"] == []


def test_only_the_settings_and_a_restart_end_the_rule_which_the_log_tells(tmp_path: Path) -> None:
    home = made_home(tmp_path / "home", now=Clock()(), **RULE)
    path, rule = home.directory / "coordinator.toml", "two_officers = " + json.dumps(RULE["two_officers"])
    for text_of_rule, reason in ((rule, "two-officers"), ("two_officers = []", ""), (rule, "two-officers")):
        changed, count = re.subn(r"two_officers = \[[^]]*\]", text_of_rule, path.read_text())
        assert count == 1
        path.write_text(changed)
        served = Running(CoordinatorHome.load(home.directory), Clock())
        try:
            name = f"m-{secrets.token_hex(4)}"
            served.enroll(name)
            with AdminFiles.load(home.admin_dir).channel() as channel:
                approve = AdminStub(channel).ApproveClient
                request = messages.ApproveClientRequest(client_id=name, key_id=key_of(served, name))
                with refused("FAILED_PRECONDITION", reason) if reason else nullcontext():
                    approve(request, timeout=SECONDS)
            told = [entry.detail for entry in served.entries(action=audit.CONFIGURED, subject=TWO_OFFICERS)]
            assert problems(served) == []
        finally:
            served.stop()
    assert told == ["approve, revoke, forget, revoke-admin", "", "approve, revoke, forget, revoke-admin"]


def test_check_warns_when_fewer_than_two_officers_are_left(apart: Running) -> None:
    home, now = apart.home, apart.clock()
    [finding] = [one for one in check_home(home, now=now) if one.subject == "officers"]
    assert finding.outcome is CheckOutcome.WARNING
    assert "has 1 security officers (admin): none of this can be done" in finding.line
    Officer(apart, "ada")
    [finding] = [one for one in check_home(home, now=now) if one.subject == "officers"]
    assert finding.outcome is CheckOutcome.OK


def test_a_federation_of_one_officer_starts_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(tmp_path / "home", **RULE):
        assert wait_for(lambda: "none of this can be done" in caplog.text, "the warning")


def test_two_officers_for_approvals_need_approvals() -> None:
    with pytest.raises(CoordinatorHomeError, match="with approve, set approval = true"):
        Settings.check({"federation_id": "test", "two_officers": ["approve"]}, "test")
    with pytest.raises(CoordinatorHomeError, match="two_officers"):
        Settings.check({"federation_id": "test", "two_officers": ["export"]}, "test")
    settings = Settings.check({"federation_id": "test", **RULE}, "test")
    assert Settings.parse(settings.render(), "test") == settings
