"""What the monitor survives."""

import threading
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from storage import database
from storage.faults import StorageFault
from tests.running import running, wait_for


def test_a_database_whose_writers_are_busy_does_not_end_the_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.05)
    with running(tmp_path / "home") as served:
        coordinator = served.coordinator
        faults, looks = coordinator.record.faults, threading.Event()
        monitor, monitoring = coordinator.monitor, coordinator.monitoring
        look = monitor.look

        def counted() -> None:
            look()
            looks.set()

        monkeypatch.setattr(monitor, "look", counted)
        with coordinator.record.database.begin():  # somebody else's transaction, which lasts
            faults.note(OperationalError("", None, RuntimeError("it was away")), lasts=True)
            faults.look_again()
            wait_for(lambda: looks.is_set() or monitoring.done(), "a look")
            assert not monitoring.done()
            assert StorageFault.DATABASE in faults.present
        wait_for(lambda: not faults.present, "the fault to be over")
