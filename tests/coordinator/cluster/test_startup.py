"""The start of a coordinator beside others on one PostgreSQL: what it must have in common with them."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select, text

from coordinator.clock import SteadyClock, utc_now
from coordinator.cluster.leases import SharedLeases
from coordinator.fault_state import FaultState
from coordinator.home import CoordinatorHome
from coordinator.lease_keeper import LeaseKeeper
from coordinator.ownership import CoordinatorHomeError
from coordinator.startup import check_shares_blobs, lock_database, start_up
from federation.refusals import Refusal
from storage.blob_directory import DirectoryStore
from storage.database import DatabaseBusy
from storage.faults import StorageFault
from storage.models import CoordinatorProcess, Federation
from storage.retention import referenced
from tests.running import made_home


@pytest.fixture(scope="module")
def home(url: str, tmp_path_factory: pytest.TempPathFactory) -> CoordinatorHome:
    return made_home(tmp_path_factory.mktemp("federation") / "first", now=utc_now(), database=url)


class Started:
    """A coordinator that has started, without its services."""

    def __init__(self, home: CoordinatorHome, ends: ExitStack) -> None:
        self.database = home.open_database()
        ends.callback(self.database.close)
        self.process_lock = lock_database(home, self.database)
        ends.callback(self.process_lock.release)
        self.startup = start_up(home, self.database, self.process_lock, home.directory.name, clock=utc_now)
        ends.callback(self.startup.registry.leave)


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def second(home: CoordinatorHome, tmp_path: Path) -> CoordinatorHome:
    """The directory of a second coordinator, with the same keys."""
    return replace(home, directory=shutil.copytree(home.directory, tmp_path / "second"))


def test_two_coordinators_serve_and_each_needs_a_directory_of_its_own(
    home: CoordinatorHome, second: CoordinatorHome, ends: ExitStack
) -> None:
    one, other = Started(home, ends), Started(second, ends)
    assert (one.process_lock.alone, other.process_lock.alone) == (True, False)
    with one.database.read() as session:
        assert sorted(session.scalars(select(CoordinatorProcess.coordinator))) == ["first", "second"]
        assert one.startup.registry.others_alive(session)
    with pytest.raises(DatabaseBusy, match=r"another coordinator serves from .*copy-keys"):
        Started(second, ends)


def test_settings_of_the_machine_may_differ_and_others_may_not(
    home: CoordinatorHome, second: CoordinatorHome, ends: ExitStack
) -> None:
    Started(home, ends)
    own = home.settings.model_copy(update={"hosts": ("b.example",), "bind": "0.0.0.0", "device": "cuda"})
    with ExitStack() as now:
        Started(replace(second, settings=own), now)
    differs = home.settings.model_copy(update={"keep_rounds": 3})
    with pytest.raises(CoordinatorHomeError, match="with other settings"):
        Started(replace(second, settings=differs), ends)


def test_a_coordinator_whose_signing_key_was_replaced_does_not_start(
    home: CoordinatorHome, second: CoordinatorHome, ends: ExitStack
) -> None:
    new = replace(home, signing_key=Ed25519PrivateKey.generate())
    with ExitStack() as now:
        Started(new, now)  # its key is recorded as the newest
    with pytest.raises(CoordinatorHomeError, match=r"the signing key in .* was replaced: .*copy-keys"):
        Started(second, ends)
    with closing(new.open_database()) as database, database.begin() as session:
        session.execute(text("DELETE FROM audit_log WHERE action = 'key.set' AND subject = 'signing key'"))


def test_coordinators_must_have_the_same_blobs(
    home: CoordinatorHome, second: CoordinatorHome, ends: ExitStack, tmp_path: Path
) -> None:
    one, other = Started(home, ends), Started(second, ends)
    blobs, elsewhere = DirectoryStore(tmp_path / "shared"), DirectoryStore(tmp_path / "elsewhere")
    check_shares_blobs(one.database, blobs, one.startup.registry)
    check_shares_blobs(other.database, blobs, other.startup.registry)
    with one.database.read() as session:
        assert session.scalar(select(Federation.shared_blob)) in referenced(session, None)
    with pytest.raises(CoordinatorHomeError, match="not those of the others: give all the same bucket"):
        check_shares_blobs(other.database, elsewhere, other.startup.registry)
    one.startup.registry.leave()
    check_shares_blobs(other.database, elsewhere, other.startup.registry)  # it is alone, with a store that was replaced
    with one.database.read() as session:
        assert elsewhere.exists(session.scalar(select(Federation.shared_blob)) or "")


def test_a_coordinator_with_a_wrong_clock_conducts_nothing_and_serves_nobody(
    home: CoordinatorHome, ends: ExitStack
) -> None:
    started, faults, held = Started(home, ends), FaultState(), list[str]()
    ahead = timedelta(seconds=5)
    conductors: Any = SimpleNamespace(hold_back=partial(held.append, "held back"), conducted=dict)
    leases = started.startup.leases
    assert isinstance(leases, SharedLeases)
    started.startup.registry._clock = lambda: utc_now() + ahead
    keeper = LeaseKeeper(started.database, leases, started.startup.registry, conductors, faults)
    keeper.look()
    assert held == ["held back"]
    assert faults.present[StorageFault.CLOCK].endswith("s ahead of the database's")
    with pytest.raises(Refusal, match="clock"):
        faults.check_serving("Attend")
    faults.check_serving("Check")
    ahead = timedelta(0)
    keeper.look()
    assert faults.present == {}


@pytest.mark.parametrize("ahead", [timedelta(hours=2), timedelta(hours=-2)])
def test_the_time_follows_the_machines_clock_where_the_database_confirms_it(
    home: CoordinatorHome, ends: ExitStack, ahead: timedelta
) -> None:
    started, faults, held = Started(home, ends), FaultState(alone=False), list[str]()
    set_by = [ahead]
    clock = SteadyClock(lambda: utc_now() + set_by[0])  # it was wrong at the start
    conductors: Any = SimpleNamespace(hold_back=partial(held.append, "held back"), conducted=dict)
    leases = started.startup.leases
    assert isinstance(leases, SharedLeases)
    started.startup.registry._clock = clock
    keeper = LeaseKeeper(started.database, leases, started.startup.registry, conductors, faults, clock)
    keeper.look()
    assert StorageFault.CLOCK in faults.present
    set_by[0] = timedelta(0)  # an operator sets it right
    keeper.look()
    assert faults.present == {}
    assert abs(clock() - utc_now()) < timedelta(seconds=2)
    set_by[0] = ahead  # and wrong: the coordinator's time agrees with the database's
    keeper.look()
    assert faults.present == {}
    assert abs(clock() - utc_now()) < timedelta(seconds=2)
    assert held == ["held back"]
