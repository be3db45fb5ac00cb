"""`fedpareto coordinator copy-keys`: the directory of a further coordinator."""

import json
import stat
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509

from coordinator.audit.checkpoints import NEWEST_FILE
from coordinator.backups.home_keys import rotate_signing_key
from coordinator.home import CoordinatorHome
from federation.transport.addresses import in_own_order
from federation.trust.admin_files import Account, AdminFiles
from federation.trust.certificates import load_certificate
from federation.trust.join_string import JoinStringFields
from federation.v1.admin_pb2 import ListAdministratorsRequest
from federation.v1.admin_pb2_grpc import AdminStub
from fedpareto.cli.failure import USAGE, CommandFailure
from tests.coordinator.backups.scene import NOWHERE, source
from tests.running import SECONDS, Clock, Running, command, made_home, running
from worker.connection.enroll import enroll
from worker.home import WorkerHome

KEYS = ("ca.key", "ca.pem", "signing.key", "log.key")


def copied(*arguments: object) -> str:
    return command("coordinator", "copy-keys", *arguments).stdout


def refusal(*arguments: object, code: int = 1) -> str:
    """The message of a command that is refused with this exit code."""
    failure = command("coordinator", *arguments, code=1).exception
    assert isinstance(failure, CommandFailure)
    assert failure.code == code
    return failure.message


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
@pytest.mark.full
def test_a_further_coordinator_has_the_same_keys_and_serves_under_names_of_its_own(
    tmp_path: Path, database_url: str
) -> None:
    (tmp_path / "blobs").mkdir(mode=0o700)
    first, further = tmp_path / "first", tmp_path / "further"
    with running(first, database=database_url, blobs=str(tmp_path / "blobs")) as served:
        pass
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    named = ["--host", "second.example.org", "--host", "127.0.0.1", "--bind", "127.0.0.1"]
    document = json.loads(copied(first, "--home", further, *named, "--json"))
    assert document["hosts"] == ["second.example.org", "127.0.0.1"]
    assert before == {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    for name in (*KEYS, NEWEST_FILE):
        assert (further / name).read_bytes() == (first / name).read_bytes(), name
    assert not (further / "admin").exists()
    assert {stat.S_IMODE(path.stat().st_mode) for path in further.iterdir()} == {0o600}

    home = CoordinatorHome.load(further)
    names = home.server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["second.example.org"]
    assert home.server_key != served.home.server_key
    found = json.loads(command("coordinator", "check", "--home", further, "--json").stdout)
    assert {item["outcome"] for item in found} == {"ok"}, found

    other = Running(home, Clock())
    try:
        account = replace(Account.load(first / "admin"), addresses=(f"127.0.0.1:{other.coordinator.federation_port}",))
        files = AdminFiles.load(first / "admin")
        with account.files(files.tls_key, load_certificate(files.certificate)).channel() as channel:
            AdminStub(channel).ListAdministrators(ListAdministratorsRequest(), timeout=SECONDS)
    finally:
        other.stop()


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_two_coordinators_serve_one_federation_and_know_each_other(tmp_path: Path, database_url: str) -> None:
    (tmp_path / "blobs").mkdir(mode=0o700)
    with running(tmp_path / "first", database=database_url, blobs=str(tmp_path / "blobs")) as first:
        copied(tmp_path / "first", "--home", tmp_path / "further", "--host", "127.0.0.1", "--bind", "127.0.0.1")
        second = Running(CoordinatorHome.load(tmp_path / "further"), Clock())
        try:
            listed = first.document("coordinators")["coordinators"]
            join = JoinStringFields.decode(first.command("join-string", "ann").strip())
            member = enroll(WorkerHome(tmp_path / "ann"), replace(join, addresses=join.addresses[::-1])).member
        finally:
            second.stop()
    ports = second.coordinator.federation_port, second.coordinator.enrollment_port
    assert [(process["address"], process["alive"]) for process in listed] == [
        (first.address, True),
        (f"127.0.0.1:{ports[0]}", True),
    ]
    assert join.addresses == (first.enrollment_address, f"127.0.0.1:{ports[1]}")
    assert member.addresses == in_own_order("ann", (f"127.0.0.1:{ports[0]}", first.address))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "SQLite, which takes one coordinator only"),
        ({"database": NOWHERE}, "blobs = 'blobs' is a directory of this coordinator alone"),
        ({"database": NOWHERE, "blobs": "/nowhere/blobs"}, "blobs = '/nowhere/blobs' is missing on this machine"),
    ],
)
def test_coordinators_that_share_no_database_or_no_blobs_are_refused(
    tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    first = source(tmp_path / "first", **settings)
    assert message in refusal("copy-keys", first, "--home", tmp_path / "further")
    assert not (tmp_path / "further").exists()


def test_blobs_in_a_bucket_are_shared_and_each_coordinator_has_a_cache(tmp_path: Path) -> None:
    first = source(tmp_path / "first", database=NOWHERE, blobs="s3://bucket/prefix")
    copied(first, "--home", tmp_path / "further", "--port", "8443", "--database", "postgresql://other/none")
    further = CoordinatorHome.load(tmp_path / "further")
    assert (further.settings.blobs, further.settings.federation_port) == ("s3://bucket/prefix", 8443)
    assert further.settings.database == "postgresql://other/none"
    assert further.blobs_dir == tmp_path / "further" / "cache"
    assert stat.S_IMODE(further.blobs_dir.stat().st_mode) == 0o700


def test_the_rotations_of_the_signing_key_and_a_passphrase_are_those_of_the_source(tmp_path: Path) -> None:
    first, secret = tmp_path / "first", tmp_path / "passphrase"
    secret.write_text("correct horse\n")
    home = made_home(first, now=datetime.now(UTC), passphrase=b"correct horse")
    rotated = rotate_signing_key(home, now=datetime.now(UTC), passphrase=b"correct horse")
    text = (first / "coordinator.toml").read_text().replace('"sqlite:///coordinator.db"', f'"{NOWHERE}"')
    (first / "coordinator.toml").write_text(text.replace('blobs = "blobs"', 'blobs = "s3://bucket"'))
    further = tmp_path / "further"
    assert "needs its passphrase" in refusal("copy-keys", first, "--home", further)
    copied(first, "--home", further, "--passphrase-file", secret)
    assert all(b"ENCRYPTED" in (further / name).read_bytes() for name in (*KEYS, "server.key") if name != "ca.pem")
    assert CoordinatorHome.load(further, b"correct horse").rotations == rotated.rotations


def test_a_second_name_for_newcomers_is_each_coordinators_own(tmp_path: Path) -> None:
    changes = {"database": NOWHERE, "blobs": "s3://bucket", "enrollment_host": "join.example.org", "enrollment_port": 0}
    first = source(tmp_path / "first", **changes)
    message = refusal("copy-keys", first, "--home", tmp_path / "further", code=USAGE)
    assert "give --enrollment-host" in message
    copied(first, "--home", tmp_path / "further", "--enrollment-host", "join2.example.org")
    assert CoordinatorHome.load(tmp_path / "further").settings.enrollment_host == "join2.example.org"


def _interrupted(further: Path, first: Path) -> None:
    copied(first, "--home", further)
    (further / "coordinator.toml").unlink()  # it is written last


def _complete(further: Path, first: Path) -> None:
    copied(first, "--home", further)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (_complete, "holds a federation already (fed): nothing was changed"),
        (_interrupted, "holds a federation that was not made to the end"),
    ],
)
def test_nothing_is_overwritten_and_half_a_copy_does_not_serve(
    tmp_path: Path, prepare: Callable[[Path, Path], None], message: str
) -> None:
    first, further = source(tmp_path / "first", database=NOWHERE, blobs="s3://bucket"), tmp_path / "further"
    prepare(further, first)
    before = {path: path.read_bytes() for path in further.rglob("*") if path.is_file()}
    assert message in refusal("copy-keys", first, "--home", further)
    assert before == {path: path.read_bytes() for path in further.rglob("*") if path.is_file()}
    if prepare is _interrupted:
        assert "holds no federation (no coordinator.toml)" in refusal("serve", "--home", further)
