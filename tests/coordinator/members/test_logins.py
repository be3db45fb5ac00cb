"""Logins of administrators: a signed request becomes a certificate for some hours, and a command renews it in time."""

import json
import secrets
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import func, select

from coordinator.members.access.call_limits import RATES
from coordinator.members.administrators import MAX_VALID, certify_administrator
from coordinator.members.logins import MAX_MANIFEST_BYTES, TOLERANCE
from federation.trust.admin_files import LOGIN, Account, AdminFiles
from federation.trust.certificates import load_certificate, make_csr
from federation.trust.envelope import CONTEXTS, key_id, sign
from federation.trust.identity import parse_peer
from federation.trust.keys import new_tls_key
from federation.v1.admin_pb2 import ListAuditRequest, ListClientsRequest
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.common_pb2 import RevocationManifest, SignedEnvelope
from fedpareto.cli.admin.admin_session import AdminSession
from fedpareto.cli.admin.audit import listed
from fedpareto.cli.admin.client import connect, route_to
from fedpareto.cli.failure import CommandFailure
from fedpareto.escaping import escaping_stub
from storage.models import Administrator, Certificate
from tests.coordinator.members.scene import Officer, login
from tests.running import SECONDS, Running, command, made_home, refused

LIFETIME = timedelta(hours=12)


BOTH_DATABASES = False


def aged(officer: Officer, age: timedelta) -> None:
    """Makes the last login of an officer this old."""
    key, home, now = new_tls_key(), officer.served.home, datetime.now(UTC) - age
    given: dict[str, Any] = {"authority": home.authority, "lifetime": LIFETIME, "login": None, "by": "test", "now": now}
    with officer.served.database.begin() as session:
        row = session.get_one(Administrator, officer.row)
        certificate = certify_administrator(session, row, key.public_key(), **given)
    Account.load(officer.home).files(key, certificate).save(officer.home)


@pytest.fixture
def officer(served: Running) -> Officer:
    return Officer(served, f"o-{secrets.token_hex(4)}")


def works(home: Path) -> AdminFiles:
    """Makes a call as a command does; the certificate with which it was made."""
    with connect(home) as stub:
        stub.ListClients(ListClientsRequest(), timeout=SECONDS)
    return AdminFiles.load(home)


def test_a_login_gives_a_certificate_of_twelve_hours_with_the_roles_on_record(
    served: Running, officer: Officer
) -> None:
    key = new_tls_key()
    certificate = officer.login(officer.asks_login(csr=make_csr(key)))
    identity = parse_peer(certificate)
    assert (identity.name, identity.roles) == (officer.name, frozenset({"viewer", "security-officer"}))
    assert abs(identity.not_after - served.clock() - LIFETIME) < timedelta(minutes=1)
    files = Account.load(officer.home).files(key, load_certificate(certificate))
    with files.channel() as channel:
        AdminStub(channel).ListClients(ListClientsRequest(), timeout=SECONDS)
    entries = served.entries(action="admin.certified", subject=officer.name)
    assert entries[-1].actor == f"fedpareto://test/admin/{officer.name}"
    assert identity.serial in entries[-1].detail


def test_a_stranger_learns_nothing_about_administrators_and_gets_no_certificate(
    served: Running, officer: Officer
) -> None:
    stranger, said = Ed25519PrivateKey.generate(), set()
    good = sign(officer.asks_login(), officer.key)
    borrowed = SignedEnvelope(manifest=good.manifest, key_id=good.key_id, signature=stranger.sign(good.manifest))
    other = CONTEXTS[RevocationManifest] + b"\0" + good.manifest
    of_another_kind = SignedEnvelope(manifest=good.manifest, key_id=good.key_id, signature=officer.key.sign(other))
    for envelope in (
        sign(officer.asks_login(), stranger),
        borrowed,
        of_another_kind,
        SignedEnvelope(manifest=good.manifest, key_id=key_id(stranger.public_key()), signature=good.signature),
        SignedEnvelope(),
        SignedEnvelope(manifest=good.manifest, key_id=bytes(5000), signature=bytes(5000)),
    ):
        with refused("UNAUTHENTICATED", "login") as words:
            login(served, envelope)
        said.add(words[0])
    served.command("revoke-admin", officer.name, "--yes")
    with refused("UNAUTHENTICATED", "login") as words:
        officer.login()
    assert {*said, words[0]} == {words[0]}
    assert served.refusals("Login")[-1].outcome == "login"


def test_an_administrator_who_is_issued_again_logs_in_with_the_new_key_only(served: Running, officer: Officer) -> None:
    again = Officer(served, officer.name)
    with refused("UNAUTHENTICATED", "login"):
        officer.login()
    again.login()


def test_a_login_counts_once_and_within_five_minutes_of_its_time(served: Running, officer: Officer) -> None:
    envelope = sign(officer.asks_login(), officer.key)
    login(served, envelope)
    with refused("ALREADY_EXISTS", "login-replayed"):
        login(served, envelope)
    for seconds in (-1, 1):
        manifest = officer.asks_login()
        manifest.created.FromDatetime(served.clock() + seconds * (TOLERANCE + timedelta(seconds=30)))
        with refused("UNAUTHENTICATED", "signed-time") as words:
            officer.login(manifest)
        assert "set the clock" in words[0]
    manifest = officer.asks_login()
    manifest.created.seconds = 1 << 60
    with refused("UNAUTHENTICATED", "signed-time"):
        officer.login(manifest)
    with served.clock.moved(timedelta(days=2)):  # a login then removes the certificate, and with it the request
        officer.login()
        with refused("UNAUTHENTICATED", "signed-time"):
            login(served, envelope)


def test_a_login_is_bound_to_the_federation_the_name_and_a_key_that_the_caller_has(
    served: Running, officer: Officer
) -> None:
    for field, value in (("federation_id", "other"), ("name", "admin")):
        with refused("INVALID_ARGUMENT", f"mismatch:{field}"):
            officer.login(officer.asks_login(**{field: value}))
    broken = bytearray(make_csr(new_tls_key()))
    broken[-1] ^= 1
    for csr in (b"", bytes(broken)):
        with refused("INVALID_ARGUMENT", "csr"):
            officer.login(officer.asks_login(csr=csr))
    with refused("INVALID_ARGUMENT", "manifest"):
        officer.login(officer.asks_login(csr=bytes(MAX_MANIFEST_BYTES)))


def test_logins_are_limited_for_each_administrator_and_old_certificates_go(served: Running, officer: Officer) -> None:
    count = int(RATES["Login"].burst)
    for _ in range(count):
        officer.login()
    with refused("RESOURCE_EXHAUSTED", "limit:rate"):
        officer.login()
    Officer(served, f"{officer.name}-2").login()  # has logins of its own
    mine = Certificate.subject == f"fedpareto://test/admin/{officer.name}"
    valid = select(func.count()).where(mine, Certificate.revoked.is_(None))
    assert served.look(lambda session: session.scalar(valid)) == count + 1 <= MAX_VALID


# Commands


def test_a_command_renews_in_the_last_third_and_after_the_end_and_not_before(officer: Officer) -> None:
    first = AdminFiles.load(officer.home).certificate
    assert works(officer.home).certificate == first
    for age in (LIFETIME * 0.7, LIFETIME * 3):
        aged(officer, age)
        old = AdminFiles.load(officer.home).certificate
        renewed = works(officer.home)
        assert renewed.certificate != old
        assert renewed.not_after > datetime.now(UTC) + LIFETIME * 0.99
    (officer.home / LOGIN).write_bytes(b"damaged")
    works(officer.home)
    (officer.home / LOGIN).unlink()
    works(officer.home)


def test_calls_go_on_across_the_end_of_a_certificate(served: Running, officer: Officer) -> None:
    now = [datetime.now(UTC)]
    with closing(AdminSession(route_to(officer.home), clock=lambda: now[0])) as session:
        first = session.open()
        assert session.open() is first
        now[0] += LIFETIME * 0.9
        with served.clock.moved(LIFETIME * 0.9):
            assert session.open() is not first


def test_the_log_is_followed_across_the_end_of_a_certificate(served: Running, officer: Officer) -> None:
    aged(officer, LIFETIME - timedelta(seconds=3))
    early = [datetime.now(UTC) - LIFETIME / 2]  # by this clock, the first call needs no login
    route = route_to(officer.home)
    with closing(AdminSession(route, clock=lambda: early.pop() if early else datetime.now(UTC))) as session:
        entries = listed(escaping_stub(session.call), ListAuditRequest(follow=True, actor=officer.name))
        numbers: list[int] = []
        certified = 0
        while not certified:  # the next login is told after the end of the certificate
            for entry in next(entries):
                numbers.append(entry.number)
                certified += entry.action == "admin.certified"
    assert sorted(set(numbers)) == numbers
    assert AdminFiles.load(officer.home).not_after > datetime.now(UTC) + LIFETIME * 0.99


def test_a_signing_key_with_a_passphrase_logs_in_by_command_only(served: Running, tmp_path: Path) -> None:
    officer = Officer(served, f"prue-{served.database.engine.dialect.name}", passphrase=b"word")
    home, file = officer.home, tmp_path / "passphrase"
    works(home)  # for twelve hours no command needs the passphrase
    aged(officer, LIFETIME * 2)
    plain = ("admin", "--home", home)
    with_file = (*plain, "--passphrase-file", file)
    failure = command(*plain, "clients", code=1).exception
    assert isinstance(failure, CommandFailure)
    assert f"run `fedpareto admin --home {home} login`" in failure.message
    assert "--passphrase-file" in str(command(*plain, "login", code=1).exception)
    file.write_text("wrong\n")
    assert "wrong passphrase" in str(command(*with_file, "login", code=1).exception)
    file.write_text("word\n")
    assert '"roles": ["security-officer", "viewer"]' in command(*with_file, "login", "--json").stdout
    aged(officer, LIFETIME * 0.8)  # a warning, while the certificate holds
    assert "login`, which asks for the passphrase" in command(*plain, "clients").stderr
    aged(officer, LIFETIME * 2)
    command(*with_file, "clients")


def test_a_wrong_clock_is_named(served: Running, officer: Officer) -> None:
    route = route_to(officer.home)
    with pytest.raises(CommandFailure, match=r"set the clock \[signed-time\]"):
        route.log_in(officer.key, datetime.now(UTC) + timedelta(hours=1))


def test_on_the_next_day_the_record_is_read_without_a_login_although_no_coordinator_serves_it(tmp_path: Path) -> None:
    """As the README does after the demo: the coordinator was stopped, and the last login has ended."""
    home = made_home(tmp_path / "home", now=datetime.now(UTC) - timedelta(days=1))
    before = (home.admin_dir / LOGIN).read_bytes()
    assert AdminFiles.load(home.admin_dir).not_after < datetime.now(UTC)
    shown = json.loads(command("admin", "--home", home.directory, "admins", "--json").stdout)
    assert [one["name"] for one in shown["administrators"]] == ["admin"]
    assert (home.admin_dir / LOGIN).read_bytes() == before
