"""Members admitted many at once: join strings from a file of names, and approval with the keys that were listed."""

import json
import re
import stat
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from federation.trust.identity import Role
from federation.trust.join_string import JoinStringFields
from federation.v1.admin_pb2 import ApproveClientRequest
from federation.v1.admin_pb2_grpc import AdminStub
from fedpareto.cli.failure import USAGE
from storage.states import ClientState
from tests.command_lines import at_a_terminal, completed, failure
from tests.coordinator.members.scene import Change, client, key_of
from tests.harness import Member, here
from tests.running import SECONDS, Running, refused

SETTINGS: dict[str, Any] = {"approval": True}
BOTH_DATABASES = False


def admin(served: Running, *arguments: object) -> tuple[str, ...]:
    return ("admin", "--home", str(served.home.admin_dir), *map(str, arguments))


def names_file(directory: Path, content: bytes) -> Path:
    path = directory / "names.txt"
    path.write_bytes(content)
    return path


def state(served: Running, name: str) -> ClientState:
    return client(served, name).state


def test_each_name_of_a_file_gets_a_join_string_in_a_file_that_only_its_owner_reads(
    served: Running, tmp_path: Path
) -> None:
    names = names_file(tmp_path, b"\xef\xbb\xbf# the north\r\nann\r\n\r\n  ben # two\r\n")
    out = tmp_path / "out"
    document = served.document("join-string", "--names", names, "--out", out)
    assert [(item["client_id"], item["outcome"]) for item in document["results"]] == [("ann", "made"), ("ben", "made")]
    for name in ("ann", "ben"):
        file = out / f"{name}.join"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert JoinStringFields.decode(file.read_text()).client_id == name
        assert file.read_text().strip() not in json.dumps(document)
    assert stat.S_IMODE(out.stat().st_mode) == 0o700


def test_after_an_interruption_the_same_command_makes_the_rest_and_overwrites_nothing(
    served: Running, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    served.command("join-string", "--names", names_file(tmp_path, b"cleo\n"), "--out", out)
    before = (out / "cleo.join").read_text()
    Member.enroll(JoinStringFields.decode(before)).channel.close()
    (out / "dora.join").touch()  # the interruption came before the join string was written
    (out / "emil.join").symlink_to(tmp_path / "elsewhere")  # no file is written through a link
    names = names_file(tmp_path, b"cleo\ndora\nemil\ngil\n")
    done = here(*admin(served, "join-string", "--names", names, "--out", out), cwd=tmp_path)
    assert done.returncode == 1
    assert "dora.join is there, and has no whole join string of dora" in done.stderr
    assert "emil.join cannot be written: File exists" in done.stderr
    assert "gil: not tried, because emil has failed" in done.stderr
    assert done.stderr.endswith("3 of 4 failed: dora, emil, gil\n")
    assert not (tmp_path / "elsewhere").exists()
    (out / "dora.join").unlink()
    (out / "emil.join").unlink()
    again = served.document("join-string", "--names", names, "--out", out)["results"]
    assert [item["outcome"] for item in again] == ["exists", "made", "made", "made"]
    assert (out / "cleo.join").read_text() == before


def test_names_that_cannot_be_used_are_all_listed_and_nothing_is_made(served: Running, tmp_path: Path) -> None:
    served.enroll("fay")
    names = names_file(tmp_path, b"gus\nfay\nBad_Name\ngus\n-x\n")
    failed = failure(*admin(served, "join-string", "--names", names, "--out", tmp_path / "out"))
    assert failed.code == USAGE
    assert [line.strip()[:25] for line in failed.message.splitlines()[1:]] == [
        "line 2: fay is a member a",
        "line 3: name 'Bad_Name' w",
        "line 4: gus is on line 1 ",
        "line 5: name '-x' will no",
    ]
    assert not (tmp_path / "out").exists()
    assert "gus" not in served.command("join-strings", "--all")
    lost = failure(*admin(served, "join-string", "--again", "--names", names_file(tmp_path, b"fay\nhal\n")))
    assert "line 2: hal is no member, so that it cannot join again" in lost.message


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"# nobody\n\n", "has no name"),
        (b"a\xff\n", "it is not UTF-8"),
        ("ann\n".encode("utf-16"), "it is UTF-16"),
        (b"x" * (1 << 20) + b"\n\n", "has more than 1 MiB"),
        (b"".join(b"m-%d\n" % number for number in range(1001)), "has 1001 names; give at most 1000"),
    ],
    ids=["none", "not UTF-8", "UTF-16", "too large", "too many"],
)
def test_a_file_that_holds_no_names_is_refused_with_what_is_wrong(tmp_path: Path, content: bytes, problem: str) -> None:
    failed = failure("admin", "join-string", "--names", str(names_file(tmp_path, content)))
    assert (failed.code, problem in failed.message) == (USAGE, True), failed.message


def test_without_a_terminal_an_approval_needs_the_option_that_says_yes(served: Running) -> None:
    served.enroll("ida")
    failed = failure(*admin(served, "approve", "ida"))
    assert (failed.code, "give --yes" in failed.message) == (USAGE, True)
    assert state(served, "ida") is ClientState.PENDING
    assert f"ida is active and gets work; its key: {key_of(served, 'ida')}" in " ".join(
        served.command("approve", "ida", "--yes").split()
    )
    assert "give --all-pending" in failure(*admin(served, "approve")).message
    served.enroll("ivan")
    assert "ivan" in completed(served.home.admin_dir, "admin approve iv")
    served.command("approve", "--all-pending", "--yes")
    assert completed(served.home.admin_dir, "admin approve ") == []
    assert served.document("approve", "--all-pending") == {"results": []}


def test_each_name_has_its_own_result_and_one_failure_stops_no_other(served: Running) -> None:
    for name in ("kim", "leo", "mia"):
        served.enroll(name)
    served.command("revoke", "leo", "--yes")
    line = admin(served, "approve", "nobody", "kim", "leo", "mia", "kim", "--yes")
    assert failure(*line).message == "2 of 4 failed: nobody, leo"
    assert [state(served, name) for name in ("kim", "mia")] == [ClientState.ACTIVE] * 2
    assert failure(*admin(served, "approve", "miaa", "--yes")).message == (
        "miaa: there is no such member; did you mean 'mia'? `fedpareto admin clients` lists them [client-unknown]"
    )


@pytest.mark.full
def test_who_joins_or_changes_its_key_after_the_list_is_not_approved(served: Running, tmp_path: Path) -> None:
    member = Member(served.joined(tmp_path / "otto", "otto", ago=timedelta()))
    served.enroll("nina")
    listed = key_of(served, "otto")

    def meanwhile() -> None:
        Change(member).done().channel.close()
        served.enroll("paul")

    code, written, _ = at_a_terminal(*admin(served, "approve", "--all-pending"), answer="y", meanwhile=meanwhile)
    member.channel.close()
    assert code == 1
    assert re.search(rf"otto +key {listed}", written)
    assert re.search(rf"nina +key {key_of(served, 'nina')}", written)
    assert f"otto: otto has the signing key {key_of(served, 'otto')}, not the one that was to be approved" in written
    assert "nina is active and gets work" in written
    assert [state(served, name) for name in ("nina", "otto", "paul")] == [
        ClientState.ACTIVE, ClientState.PENDING, ClientState.PENDING
    ]  # fmt: skip
    with served.administrator(Role.SECURITY_OFFICER) as channel, refused("FAILED_PRECONDITION", "client-key"):
        AdminStub(channel).ApproveClient(ApproveClientRequest(client_id="paul"), timeout=SECONDS)
