"""Administrators and join strings: who there is, and the end of one at once. On SQLite and PostgreSQL."""

import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from coordinator.members import administrators, membership
from coordinator.members.access import control
from federation.trust.admin_files import AdminFiles
from federation.trust.identity import Role
from federation.trust.join_string import JoinStringFields
from federation.v1 import admin_pb2 as messages
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.federation_pb2 import AttendResponse
from federation.vectors import Layout, Tensor, to_bytes
from fedpareto.admin_messages import whole
from tests.coordinator.members.scene import Officer, end_of
from tests.harness import Member, federation
from tests.running import SECONDS, Applicant, Running, command, refused, wait_for
from tests.stage import submission

LAYOUT = Layout((Tensor("weight", (4,)),))
BOTH_DATABASES = False


@pytest.fixture
def first(served: Running) -> Iterator[AdminStub]:
    """The administrator that `coordinator init` has made."""
    with AdminFiles.load(served.home.admin_dir).channel() as channel:
        yield AdminStub(channel)


def listed(stub: AdminStub) -> dict[str, messages.Administrator]:
    found = stub.ListAdministrators(messages.ListAdministratorsRequest(), timeout=SECONDS).administrators
    return {one.name: one for one in found}


def a_submission(model: bytes) -> list[messages.SubmitRunRequest]:
    text = f'name = "run-{secrets.token_hex(4)}"\ntask = "nobody-has-it"\nrounds = 1'
    return submission(text.encode(), model, paused=True)


def a_run(stub: AdminStub, layout: Layout = LAYOUT) -> str:
    requests = a_submission(to_bytes(layout, np.ones(layout.size, dtype=np.float32)))
    return str(stub.SubmitRun(iter(requests), timeout=SECONDS).run.run_id)


@contextmanager
def watching(stub: AdminStub, run: str) -> Iterator[Callable[[], str]]:
    """Watches a run; yields what waits for the end of the stream and says its reason."""
    call = stub.WatchRun(messages.WatchRunRequest(run=run), timeout=SECONDS)
    next(call)
    with ThreadPoolExecutor(1) as pool:
        reason = pool.submit(end_of, call)
        yield lambda: reason.result(SECONDS)
        call.cancel()


def test_administrators_are_listed_with_roles_and_with_their_last_call(served: Running, first: AdminStub) -> None:
    made = Officer(served, "alice", Role.OPERATOR)
    before = listed(first)["alice"]
    assert list(before.roles) == ["operator", "viewer"]
    assert before.certificate_expires.ToDatetime() == made.files.not_after.replace(tzinfo=None)
    assert not before.HasField("last_seen")
    assert not before.HasField("revoked")
    listed(made.stub)
    seen = wait_for(lambda: listed(first)["alice"].last_seen.seconds, "the call to be noted")
    now = Timestamp()
    now.FromDatetime(served.clock())
    assert abs(seen - now.seconds) < 120
    assert "operator, viewer" in served.command("admins")


def test_a_revoked_administrator_is_shut_out_at_once_and_its_streams_end(served: Running, first: AdminStub) -> None:
    mallory = Officer(served, "mallory", Role.OPERATOR)
    with watching(mallory.stub, a_run(mallory.stub)) as ended:
        arguments = ["revoke-admin", "mallory", "--reason", "left"]
        served.command(*arguments, code=1)  # no terminal, and no --yes
        assert not listed(first)["mallory"].HasField("revoked")
        served.command(*arguments, "--yes")
        assert ended() == "certificate-revoked"
    with refused("UNAUTHENTICATED", "certificate-revoked"):
        listed(mallory.stub)
    assert listed(first)["mallory"].HasField("revoked")
    assert [(one.subject, one.detail) for one in served.entries(action="admin.revoked")] == [("mallory", "left")]
    with refused("FAILED_PRECONDITION", "administrator-state"):
        first.RevokeAdministrator(messages.RevokeAdministratorRequest(name="mallory"))


def test_every_long_call_of_a_revoked_administrator_ends(served: Running, first: AdminStub) -> None:
    mallory, over = Officer(served, "mallet", Role.OPERATOR), threading.Event()
    run = a_run(mallory.stub, Layout((Tensor("large", (1 << 23,)),)))  # 32 MiB: more than is under way on a connection

    def half() -> Iterator[messages.SubmitRunRequest]:
        yield a_submission(b"x" * 100)[0]
        over.wait(SECONDS)

    streams: list[Iterator[object]] = [
        mallory.stub.WatchRun(messages.WatchRunRequest(run=run)),
        mallory.stub.ExportModel(messages.ExportModelRequest(run=run)),
    ]
    upload = mallory.stub.SubmitRun.future(half())
    for stream in streams:
        next(stream)
    calls_of = served.coordinator.access._calls.values
    wait_for(lambda: any(len(under_way) == 3 for under_way in list(calls_of())), "the three calls")
    first.RevokeAdministrator(messages.RevokeAdministratorRequest(name="mallet"))
    for stream in streams:
        with refused("UNAUTHENTICATED", "certificate-revoked"):
            list(stream)
    with refused("UNAUTHENTICATED", "certificate-revoked"):
        upload.result(SECONDS)
    over.set()


def test_a_revocation_takes_effect_also_when_the_officer_is_gone_before_the_answer(
    served: Running, first: AdminStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    member, mallory = Member.enroll(served.join_string("gone")), Officer(served, "malice", Role.OPERATOR)
    stream = member.attend(digits=1)
    assert isinstance(stream.next(), AttendResponse)
    begun, go = threading.Event(), threading.Event()

    def late(function: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*arguments: Any, **more: Any) -> Any:
            begun.set()
            assert go.wait(SECONDS)
            return function(*arguments, **more)

        return wait

    monkeypatch.setattr(membership, "revoke", late(membership.revoke))
    monkeypatch.setattr(administrators, "revoke_administrator", late(administrators.revoke_administrator))
    monkeypatch.setattr(control, "WATCH_SECONDS", SECONDS)
    with watching(mallory.stub, a_run(mallory.stub)) as ended:
        for call in (
            lambda: first.RevokeClient.future(messages.RevokeClientRequest(client_id="gone")),
            lambda: first.RevokeAdministrator.future(messages.RevokeAdministratorRequest(name="malice")),
        ):
            begun.clear()
            go.clear()
            asked = call()
            assert begun.wait(SECONDS)
            asked.cancel()
            listed(first)  # on the same connection: the end of the call has arrived before it
            go.set()
        wait_for(lambda: listed(first)["malice"].HasField("revoked"), "the revocation")
        assert ended() == "certificate-revoked"
    assert stream.end().reason == "certificate-revoked"


def test_a_name_that_is_issued_again_ends_the_older_certificate_with_its_streams(
    served: Running, first: AdminStub
) -> None:
    older = Officer(served, "bob", Role.OPERATOR)
    with watching(older.stub, a_run(older.stub)) as ended:
        newer = Officer(served, "bob", Role.VIEWER)  # by another process, as far as the coordinator knows
        with refused("UNAUTHENTICATED", "certificate-revoked"):
            listed(older.stub)
        assert ended() == "certificate-revoked"
    assert list(listed(newer.stub)["bob"].roles) == ["viewer"]


def test_the_last_security_officer_is_not_revoked_and_hears_how_to_go_on(served: Running, first: AdminStub) -> None:
    with refused("FAILED_PRECONDITION", "last-officer") as words:
        first.RevokeAdministrator(messages.RevokeAdministratorRequest(name="admin"))
    assert "fedpareto coordinator admin NAME --role security-officer" in words[0]
    officer = Officer(served, "olga", Role.SECURITY_OFFICER)
    # With another one there it may go, and its own call gets its answer.
    answer = officer.stub.RevokeAdministrator(messages.RevokeAdministratorRequest(name="olga"), timeout=SECONDS)
    assert answer.administrator.HasField("revoked")
    with refused("UNAUTHENTICATED", "certificate-revoked"):
        listed(officer.stub)
    with refused("FAILED_PRECONDITION", "last-officer"):
        first.RevokeAdministrator(messages.RevokeAdministratorRequest(name="admin"))
    for name in ("nobody", "", "../admin", "\x00"):
        with refused("NOT_FOUND", "administrator-unknown"):
            first.RevokeAdministrator(messages.RevokeAdministratorRequest(name=name))


def test_join_strings_are_listed_without_their_secrets_and_can_be_cancelled(served: Running, first: AdminStub) -> None:
    made = first.CreateJoinString(messages.CreateJoinStringRequest(client_id="dan"))
    join = JoinStringFields.decode(made.join_string)
    again = first.CreateJoinString(messages.CreateJoinStringRequest(client_id="dan"))
    assert (join.client_id, again.replaced) == ("dan", 1)
    second = JoinStringFields.decode(again.join_string)
    assert not first.CreateJoinString(messages.CreateJoinStringRequest(client_id="erin")).replaced
    found = first.ListJoinStrings(messages.ListJoinStringsRequest())
    assert all(secret not in found.SerializeToString() for secret in (join.secret, second.secret))
    states = {name: [item.state for item in found.join_strings if item.client_id == name] for name in ("dan", "erin")}
    assert states == {name: [messages.JOIN_STRING_STATE_OPEN] for name in ("dan", "erin")}
    assert found.join_strings[0].created_by == "fedpareto://test/admin/admin"
    assert served.command("cancel-join-string", "dan") == "join strings of dan that were cancelled: 1\n"
    for ended_one in (join, second):  # replaced, and cancelled
        with refused("UNAUTHENTICATED", "join-string-cancelled"):
            served.admit(Applicant().request(ended_one.secret))
    still_open = first.ListJoinStrings(messages.ListJoinStringsRequest()).join_strings
    assert [item.client_id for item in still_open] == ["erin"]
    every = first.ListJoinStrings(messages.ListJoinStringsRequest(all=True)).join_strings
    ended = [item for item in every if item.client_id == "dan"]
    assert [item.state for item in ended] == [messages.JOIN_STRING_STATE_CANCELLED] * 2
    assert all(item.HasField("ended") for item in ended)
    with refused("NOT_FOUND", "join-string-unknown"):
        first.CancelJoinStrings(messages.CancelJoinStringsRequest(client_id="dan"))
    entries = served.entries(action="join-string.cancelled")
    assert [entry.subject for entry in entries] == ["dan"] * 2
    assert ["replaced by another" in entry.detail for entry in entries] == [True, False]
    assert "CANCELLED" in served.command("join-strings", "--all")


def test_a_list_comes_in_pages_and_is_whole_in_the_end(served: Running, first: AdminStub) -> None:
    for name in ("page-a", "page-b", "page-c"):
        served.enroll(name)
        a_run(first)
    lists: list[tuple[Callable[[Any], Any], Any, str]] = [
        (first.ListClients, messages.ListClientsRequest(page_size=2), "clients"),
        (first.ListRuns, messages.ListRunsRequest(page_size=2), "runs"),
        (first.ListJoinStrings, messages.ListJoinStringsRequest(page_size=1, all=True), "join_strings"),
    ]
    for call, request, name in lists:
        once = getattr(call(type(request)(all=True) if name == "join_strings" else type(request)()), name)
        one = call(request)
        assert len(getattr(one, name)) == request.page_size < len(once)
        assert one.next_page_token
        assert list(getattr(whole(call, request), name)) == list(once)
    with refused("INVALID_ARGUMENT", "argument"):
        first.ListRuns(messages.ListRunsRequest(page_token="the next one"))


def test_a_certificate_is_issued_again_although_the_older_directory_is_lost(served: Running, tmp_path: Path) -> None:
    Officer(served, "frank", Role.VIEWER)
    home, out = served.home.directory, tmp_path / "frank"
    command("coordinator", "admin", "frank", "--role", "viewer", "--home", home, "--out", out)
    with AdminFiles.load(out).channel() as channel:
        assert "frank" in listed(AdminStub(channel))


@pytest.mark.full
@pytest.mark.parametrize("way", ["revoked", "issued again"])
def test_a_command_that_watches_ends_with_a_sentence_when_its_administrator_is_revoked(
    tmp_path: Path, way: str
) -> None:
    with federation(tmp_path) as fed:
        coordinator = fed.serve()
        model = tmp_path / "initial.safetensors"
        model.write_bytes(to_bytes(LAYOUT, np.ones(LAYOUT.size, dtype=np.float32)))
        run = fed.submit("waits", 'task = "nobody-has-it"\nrounds = 1\n', "--model", str(model))
        issue = ("coordinator", "admin", "alice", "--role", "operator", "--home", str(fed.home), "--out")
        fed.fedpareto(*issue, str(tmp_path / "alice"))
        command = ["-m", "fedpareto", "admin", "watch", run, "--json", "--home", str(tmp_path / "alice")]
        watching = fed.process("watch", command)
        watching.wait_for_text(run)
        if way == "revoked":
            fed.admin("revoke-admin", "alice", "--yes")
        else:
            fed.fedpareto(*issue, str(tmp_path / "alice-again"))
        assert watching.popen.wait(SECONDS) == 1
        assert "your certificate has been revoked; ask an administrator why" in watching.text
        assert "Traceback" not in watching.text + coordinator.text
