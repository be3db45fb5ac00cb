"""A disk that is full: runs pause with the reason, members are turned away, and all goes on when there is space."""

import errno
import logging
import os
import resource
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy.exc import OperationalError, ProgrammingError

from coordinator import monitor
from coordinator.cluster.leases import OneConductor
from coordinator.fault_state import FaultState
from coordinator.monitor import Looks, Monitor
from coordinator.rounds import conductor, conductors
from coordinator.rounds.conductors import Conductors
from coordinator.rounds.run_commands import RunCommands
from coordinator.rounds.runs.run_states import RunStates
from coordinator.rounds.step import make_step
from federation.v1.common_pb2 import AssignmentManifest
from fedpareto.processes.forked import completed
from storage.faults import StorageFault, fault_of
from storage.reserve import MARGIN_BYTES, RESERVE_BYTES, Reserve
from storage.states import RunState
from tests.coordinator.scene import NOT_SERVING, SERVING, begun, health, replied
from tests.running import refused, wait_for
from tests.soak.faults import fill
from tests.stage import Player, Stage, spec, stage

MEBI = 1 << 20


@contextmanager
def mounted_disk(directory: Path) -> Iterator[Path]:
    """A small file system of its own, in an empty directory."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(directory)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small file system of its own."""
    with mounted_disk(tmp_path_factory.mktemp("disk")) as directory:
        yield directory


@pytest.fixture(scope="module")
def _small(disk: Path) -> Iterator[Stage]:
    with stage(disk / "coordinator", "sqlite:///coordinator.db") as made:
        yield made


@pytest.fixture
def small(_small: Stage, disk: Path) -> Iterator[Stage]:
    """A coordinator whose database and blobs are on the small file system."""
    monitor = _small.served.coordinator.monitor
    monitor._looks[StorageFault.DISK] = Looks()  # as if no disk had been full before
    yield _small
    (disk / "ballast").unlink(missing_ok=True)
    wait_for(lambda: health(_small) == SERVING, "the coordinator to serve")
    _small.clear()


def paused(small: Stage, disk: Path) -> tuple[str, dict[Player, AssignmentManifest], str]:
    """A run whose members hand in until the disk is so full that one is turned away; with the reason of its pause."""
    run, orders = begun(small)
    fill(disk)
    assert not all(replied(player, order, unless="disk") for player, order in orders.items()), "it took everything"
    return run, orders, small.wait_state(run, RunState.PAUSED).reason


def test_a_full_disk_pauses_the_run_with_the_reason_and_it_goes_on_when_there_is_space(
    small: Stage, disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert (disk / "coordinator" / "reserve").stat().st_size == RESERVE_BYTES
        run, orders, reason = paused(small, disk)
        assert reason.startswith("disk: "), reason
        assert "free some space" in reason
        assert not (disk / "coordinator" / "reserve").exists()
        wait_for(lambda: health(small) == NOT_SERVING, "the health to tell")
        assert health(small, "federation.v1.Federation") == NOT_SERVING
        assert health(small, "federation.v1.Admin") == SERVING
        for player, order in orders.items():
            with refused("UNAVAILABLE", "disk"):
                player.reply(order)
        with refused("UNAVAILABLE", "disk"):
            small.submit(spec("another", "task"))
        (disk / "ballast").unlink()
        small.wait_state(run, RunState.RUNNING)
        wait_for(lambda: health(small) == SERVING, "the health to tell")
        small.play(run, *replayed(small, run, orders))
    assert (disk / "coordinator" / "reserve").stat().st_size == RESERVE_BYTES
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.message for record in told if record.exc_info] == []
    full = [record.message for record in told if "disk is full or fails" in record.message]
    assert len(full) == 1, full
    recorded = small.served.entries(subject=run, actor="coordinator")
    assert [entry.action for entry in recorded[:2]] == ["run.paused", "run.resumed"]


def test_resume_makes_the_coordinator_look_at_the_disk_at_once(small: Stage, disk: Path) -> None:
    monitor = small.served.coordinator.monitor
    monitor._looks[StorageFault.DISK].pause = 3600.0  # as after disks that were full again and again
    run, orders, _ = paused(small, disk)
    small.resume(run)
    small.wait_state(run, RunState.PAUSED)  # it is as full as before
    (disk / "ballast").unlink()
    small.resume(run)
    wait_for(lambda: health(small) == SERVING, "the health to tell")
    small.play(run, *replayed(small, run, orders))


@contextmanager
def read_only(disk: Path) -> Iterator[None]:
    """The file system takes no writes."""
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)


def test_a_disk_that_becomes_read_only_pauses_the_run_with_the_reason_and_it_goes_on_when_it_takes_writes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "disk").mkdir()
    with (
        mounted_disk(tmp_path / "disk") as disk,
        stage(tmp_path / "coordinator", "sqlite:///coordinator.db", blobs=str(disk / "blobs")) as made,
    ):
        run, orders = begun(made)
        with read_only(disk):
            assert not all(replied(player, order, unless="disk") for player, order in orders.items())
            reason = made.wait_state(run, RunState.PAUSED).reason
            assert reason.startswith("disk: "), reason
            assert "Read-only file system" in reason
            made.pause(run)
            made.resume(run)  # which the disk undoes
            made.wait_state(run, RunState.PAUSED)
        made.wait_state(run, RunState.RUNNING)
        made.play(run, *replayed(made, run, orders))
    assert [record.message for record in caplog.records if record.exc_info] == []


HANDLERS: list[tuple[type[object], str]] = [
    (Reserve, "release"),
    (Reserve, "hold"),
    (FaultState, "note"),
    (FaultState, "gone"),
    (Monitor, "_on_fault"),
    (Conductors, "_end_by"),
    (RunStates, "move"),
    (RunCommands, "pause_for_fault"),
    (RunCommands, "resume_after_fault"),
    (OneConductor, "take"),
    (OneConductor, "release"),
]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), ValueError("a bug")], ids=["disk", "bug"])
@pytest.mark.parametrize(("owner", "name"), HANDLERS, ids=[name for _, name in HANDLERS])
def test_a_run_goes_on_or_pauses_with_its_reason_whichever_call_fails_while_a_fault_is_handled(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, owner: type[object], name: str, error: Exception
) -> None:
    monkeypatch.setattr(conductors, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(monitor, "FAULT_CHECK_SECONDS", 0.05)
    looking = stage.served.coordinator.monitor
    looking._looks[StorageFault.DISK] = Looks(pause=0.01)
    run, players = stage.begin("ann", "ben", algorithm="fedavg")
    original: Callable[..., Any] = getattr(owner, name)
    faults = [OSError(errno.EROFS, "Read-only file system"), RuntimeError("another bug")]
    first = [error]

    def step(*arguments: Any) -> Any:
        monkeypatch.setattr(owner, name, fails)
        if isinstance(error, ValueError) or first:
            raise first.pop() if first else error
        return make_step(*arguments)

    def fails(*arguments: Any, **more: Any) -> Any:
        if faults:
            raise faults.pop()
        return original(*arguments, **more)

    monkeypatch.setattr(conductor, "make_step", step)
    for player in players:
        player.answer()
    if isinstance(error, ValueError):
        wait_for(lambda: "a bug" in stage.run(run).reason, "the pause for the bug")
        assert stage.run(run).state is RunState.PAUSED
    else:
        wait_for(lambda: stage.rounds(run)[0].step, "the step")
    monkeypatch.setattr(owner, name, original)
    wait_for(lambda: not stage.served.coordinator.record.faults.present, "the end of the fault")
    if isinstance(error, OSError):
        stage.play(run, *players)


def replayed(made: Stage, run: str, orders: dict[Player, AssignmentManifest]) -> list[Player]:
    """Members hand in what is still open."""
    for player, order in orders.items():
        if made.outcomes(run)[player.name][0] == "OPEN":
            player.reply(order)
    return list(orders)


@pytest.mark.full
def test_a_run_that_an_operator_pauses_while_the_disk_is_full_stays_paused(small: Stage, disk: Path) -> None:
    run, orders, _ = paused(small, disk)
    small.pause(run)
    (disk / "ballast").unlink()
    wait_for(lambda: health(small) == SERVING, "the health to tell")
    assert small.run(run).state is RunState.PAUSED
    assert small.run(run).reason.startswith("paused by ")
    small.resume(run, *replayed(small, run, orders))


def test_a_run_goes_on_after_a_fault_that_could_not_be_recorded_because_the_reserve_was_taken_too(
    small: Stage, disk: Path
) -> None:
    run, orders = begun(small)
    (disk / "coordinator" / "reserve").unlink()
    with closing(sqlite3.connect(disk / "coordinator" / "coordinator.db")) as record:
        # No space is left in the log of the database either. While somebody reads, it stays as long as it is.
        wait_for(lambda: record.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0, "the log to be short")
    fill(disk)
    assert not all(replied(player, order, unless="disk") for player, order in orders.items()), "it took everything"
    wait_for(lambda: health(small) == NOT_SERVING, "the health to tell")
    with refused("UNAVAILABLE", "disk"):
        small.pause(run)
    assert small.run(run).state is RunState.RUNNING
    (disk / "ballast").unlink()
    wait_for(lambda: health(small) == SERVING, "the health to tell")
    small.play(run, *replayed(small, run, orders))


@pytest.mark.full
def test_a_coordinator_that_starts_on_a_full_disk_pauses_and_one_that_starts_after_it_goes_on(
    small: Stage, disk: Path
) -> None:
    run, orders = begun(small)
    small.stop()
    fill(disk)
    with (disk / "ballast").open("r+b") as file:  # room to start in, but none for the reserve
        file.truncate((disk / "ballast").stat().st_size - 4 * MEBI)
    small.start()
    assert small.wait_state(run, RunState.PAUSED).reason.startswith("disk: ")
    small.stop()
    (disk / "ballast").unlink()
    small.start()
    small.come_back()
    small.wait_state(run, RunState.RUNNING)
    small.play(run, *replayed(small, run, orders))


# --- what counts as a full disk, and the reserve, without a file system of its own


def test_a_file_that_may_not_grow_is_a_full_disk(tmp_path: Path) -> None:
    """The limit of a file's size stands for a quota: SQLite and plain writes meet it in a process of their own."""
    script = """
import resource, sys
from pathlib import Path
from sqlalchemy import text
from storage.blob_directory import DirectoryStore
from storage.database import Database
from storage.faults import fault_of
directory = Path(sys.argv[1])
database = Database.open(f"sqlite:///{directory / 'test.db'}")
database.migrate()
with database.begin() as session:
    session.execute(text("CREATE TABLE filler (x BLOB)"))
blobs = DirectoryStore(directory / "blobs")
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    blobs.put(bytes(2 << 20))
except OSError as error:
    print(fault_of(error))
def fill(database):
    for _ in range(100):
        with database.begin() as session:
            session.execute(text("INSERT INTO filler VALUES (zeroblob(100000))"))
try:
    fill(database)
except Exception as error:
    print(fault_of(error))
print(len(list((directory / "blobs" / "tmp").iterdir())))
"""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    done = completed(["-c", script, str(tmp_path)])
    assert done.stdout.split() == ["disk", "disk", "0"], done.stdout


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO])
def test_quotas_limits_and_disks_that_fail_are_faults_of_the_disk(code: int) -> None:
    assert fault_of(OSError(code, os.strerror(code))) is StorageFault.DISK


def test_a_database_that_cannot_be_written_any_more_is_a_fault_of_the_disk(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "test.db")) as made:
        made.execute("CREATE TABLE filler (x BLOB)")
    with (
        closing(sqlite3.connect(f"file:{tmp_path / 'test.db'}?mode=ro", uri=True)) as record,
        pytest.raises(sqlite3.OperationalError) as refused_write,
    ):
        record.execute("INSERT INTO filler VALUES (1)")
    assert fault_of(OperationalError("INSERT", {}, refused_write.value)) is StorageFault.DISK
    damaged = psycopg.errors.IoError("could not write to file: Read-only file system")
    assert fault_of(OperationalError("INSERT", {}, damaged)) is StorageFault.DISK


def test_a_full_disk_of_postgresql_is_a_full_disk_and_other_errors_of_it_are_not() -> None:
    full = psycopg.errors.DiskFull("could not extend file: No space left on device")
    assert fault_of(OperationalError("INSERT", {}, full)) is StorageFault.DISK
    away = psycopg.OperationalError("connection refused")
    assert fault_of(OperationalError("INSERT", {}, away)) is StorageFault.DATABASE
    wrong = psycopg.errors.UndefinedTable("no such table")
    assert fault_of(ProgrammingError("SELECT", {}, wrong)) is None


def test_a_reserve_is_held_once_for_each_file_system_and_released(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    reserve = Reserve([tmp_path, tmp_path / "blobs"])
    reserve.hold()
    reserve.hold()
    assert [path.stat().st_size for path in tmp_path.rglob("reserve")] == [RESERVE_BYTES]
    assert (tmp_path / "reserve").stat().st_blocks * 512 >= RESERVE_BYTES
    reserve.release()
    reserve.release()
    assert list(tmp_path.rglob("reserve")) == []


def test_a_reserve_is_not_held_where_there_is_no_space_beside_it(disk: Path) -> None:
    directory = disk / "reserve-test"
    directory.mkdir()
    reserve = Reserve([directory])
    free = os.statvfs(disk)
    left = RESERVE_BYTES + MARGIN_BYTES - MEBI
    with (disk / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - left)
    try:
        with pytest.raises(OSError, match="No space left"):
            reserve.hold()
        assert list(directory.iterdir()) == []
    finally:
        (disk / "ballast").unlink()
    reserve.hold()
    reserve.release()


def test_a_fault_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    faults = FaultState(clock=lambda: now[0])
    with caplog.at_level(logging.INFO):
        for _ in range(300):
            faults.note(OSError(errno.ENOSPC, "No space left on device"))
            now[0] += 0.5
    assert len(caplog.messages) == 3
    assert caplog.messages[1].endswith("(119 more times since the last line)")
