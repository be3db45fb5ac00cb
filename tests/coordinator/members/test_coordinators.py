"""The addresses of coordinators that members and administrators are told, and the use of those they know."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from coordinator.members.coordinators import CoordinatorAddresses
from federation.trust.admin_files import Account
from federation.trust.join_string import JoinStringFields
from federation.trust.member_files import note_addresses
from storage.database import Database
from storage.models import CoordinatorProcess
from tests.command_lines import failure
from tests.coordinator.members.scene import Officer
from tests.running import Running

NOBODY = "127.0.0.1:1"


def others(session: Session, *, minutes: float = 0.0) -> None:
    """A second coordinator with a sign of life some time ago, and one that has no addresses yet."""
    now = session.scalar(select(func.now()))
    assert now is not None
    for name, host in {"b" * 32: "second.example", "c" * 32: ""}.items():
        row = CoordinatorProcess(coordinator=name, started=now, last_seen=now - timedelta(minutes=minutes))
        row.address, row.enrollment_address = (f"{host}:7443", f"{host}:7444") if host else ("", "")
        session.add(row)


@contextmanager
def beside(served: Running, *, minutes: float = 0.0) -> Iterator[bool]:
    """With the others, where coordinators can share the database: then it yields True."""
    shared = served.database.engine.dialect.name != "sqlite"
    if shared:
        with served.database.begin() as session:
            others(session, minutes=minutes)
    try:
        yield shared
    finally:
        with served.database.begin() as session:
            session.execute(delete(CoordinatorProcess).where(CoordinatorProcess.coordinator.in_(["b" * 32, "c" * 32])))


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize(("minutes", "told"), [(0.0, True), (2.0, False)])
def test_a_coordinator_tells_of_others_that_have_given_a_sign_of_life(
    database: Database, minutes: float, told: bool
) -> None:
    with database.begin() as session:
        others(session, minutes=minutes)
    with database.read() as session:
        found = CoordinatorAddresses.serving(session, "first.example:1", "first.example:2")
    assert found.federation == ("first.example:1", *(["second.example:7443"] if told else []))
    assert found.enrollment == ("first.example:2", *(["second.example:7444"] if told else []))


def test_join_strings_memberships_and_logins_have_the_addresses_of_all_coordinators_that_serve(served: Running) -> None:
    with beside(served) as shared:
        join = JoinStringFields.decode(served.command("join-string", "ann").strip())
        _, answer = served.enroll("ben")
        served.command("login")
        account = Account.load(served.home.admin_dir)
    second = ("second.example:7443",) if shared else ()
    assert tuple(answer.addresses) == account.addresses == (served.address, *second)
    assert account.enrollment_addresses[0] == join.address == served.enrollment_address
    assert join.addresses[1:] == account.enrollment_addresses[1:] == tuple(each[:-1] + "4" for each in second)


def test_a_command_of_an_administrator_goes_to_the_first_coordinator_that_serves(served: Running) -> None:
    eve = Officer(served, "eve")
    note_addresses(eve.home, "admin", addresses=(NOBODY, eve.files.address))
    eve.command("clients")
    assert Account.load(eve.home).addresses == (eve.files.address, NOBODY)
    note_addresses(eve.home, "admin", addresses=(NOBODY, "nowhere.invalid:2"))
    said = failure("admin", "--home", str(eve.home), "clients").message
    assert said.startswith(f"no coordinator answers: {NOBODY}: ")
    assert "; nowhere.invalid:2: " in said


def test_coordinators_are_listed_with_their_signs_of_life(served: Running) -> None:
    with beside(served, minutes=2.0) as shared:
        found = served.document("coordinators")["coordinators"]
        table = served.command("coordinators")
    own = found[0]
    assert (own["address"], own["enrollment_address"]) == (served.address, served.enrollment_address)
    assert (own["alive"], own["members"], own["runs"]) == (True, 0, [])
    assert own["software"]
    assert [process["alive"] for process in found[1:]] == ([False, False] if shared else [])
    assert "ALIVE" in table
    assert ("DEAD" in table) == shared
