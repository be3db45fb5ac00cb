"""The directory of a coordinator: what it holds, and what happens if it is taken away: unmounted, moved, or removed."""

import logging
import shutil
import stat
import subprocess
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509

from coordinator.fault_state import FaultState
from coordinator.home import CoordinatorHome
from coordinator.ownership import CoordinatorHomeError
from coordinator.settings import Settings
from federation.directories import Directories, DirectoryGone
from federation.refusals import Refusal
from federation.trust.admin_files import AdminFiles
from federation.trust.certificates import fingerprint
from federation.trust.identity import Role, parse_peer
from federation.trust.keys import IdentityError
from storage.blob_directory import DirectoryStore
from storage.blobs import BlobMissing
from storage.database import Database
from storage.faults import StorageFault
from storage.models import Certificate
from tests.coordinator.scene import CLIENTS, attended, under_way
from tests.federation.trust.scene import NOW
from tests.few import few
from tests.harness import SECONDS, federation
from tests.running import made_home


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_init_makes_a_federation_whose_files_are_its_owners_alone(tmp_path: Path) -> None:
    directory = tmp_path / "home"
    home = made_home(directory, now=NOW, federation_id="fed")
    for path in directory.rglob("*"):
        assert mode(path) == (0o700 if path.is_dir() else 0o600), path
    loaded = CoordinatorHome.load(directory)
    assert loaded.settings == home.settings
    assert fingerprint(loaded.ca) == fingerprint(home.ca)
    admin = AdminFiles.load(home.admin_dir)
    assert parse_peer(admin.certificate).roles == set(Role)
    with closing(Database.open(home.database_url)) as database, database.read() as session:
        assert session.get(Certificate, parse_peer(admin.certificate).serial) is not None


def test_init_leaves_a_federation_that_is_there_alone(tmp_path: Path) -> None:
    made_home(tmp_path, now=NOW, federation_id="fed")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(CoordinatorHomeError, match=r"holds a federation already \(fed\): nothing was changed"):
        made_home(tmp_path, now=NOW, federation_id="fed")
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_init_refuses_a_database_of_another_federation(tmp_path: Path, database_url: str) -> None:
    made_home(tmp_path / "one", now=NOW, database=database_url)
    with pytest.raises(CoordinatorHomeError, match="holds a federation already"):
        made_home(tmp_path / "two", now=NOW, database=database_url)
    assert not (tmp_path / "two" / "ca.key").exists()


def test_every_private_key_of_a_federation_is_under_its_passphrase(tmp_path: Path) -> None:
    made_home(tmp_path, now=NOW, passphrase=b"pass", federation_id="fed")
    keys = list(tmp_path.rglob("*.key"))
    assert len(keys) == 5
    assert all(b"ENCRYPTED" in key.read_bytes() for key in keys)
    assert CoordinatorHome.load(tmp_path, b"pass").federation_id == "fed"
    with pytest.raises(IdentityError, match="passphrase"):
        CoordinatorHome.load(tmp_path)


def test_settings_that_are_written_are_read_as_they_were() -> None:
    directory = 'C:\\data "A"/\N{EARTH GLOBE EUROPE-AFRICA}/\x7f\tü'
    settings = Settings(federation_id="f", hosts=("a.example", "127.0.0.1"), blobs=directory, heartbeat_seconds=2.5e-1)
    assert Settings.parse(settings.render(), "coordinator.toml") == settings


@few("port = 3", 'hosts = ["a b"]', 'database = "mysql://u:secretword@h/d"', "federation_id = ")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("port = 3", "port: no such key; there are format, federation_id"),
        ("federation_port = 70000", "federation_port: .*70000"),
        ('hosts = ["a b"]', "'a b' is not a host name"),
        ('hosts = ["localhost:3"]', "a port does not belong here"),
        ('database = "mysql://u:secretword@h/d"', r"database: expected sqlite(?!.*secretword)"),
        ("heartbeat_seconds = nan", "heartbeat_seconds"),
        ('approval = "perhaps"', "approval: Input should be a valid boolean; got 'perhaps'"),
        ('federation_port = "7443"', "federation_port: Input should be a valid integer; got '7443'"),
        ("federation_port = 7443\nenrollment_port = 7443", "federation_port and enrollment_port are both 7443: give"),
        ("federation_id = ", "is not TOML.*line"),
    ],
)
def test_wrong_settings_are_refused_by_their_key(tmp_path: Path, line: str, message: str) -> None:
    made_home(tmp_path, now=NOW, federation_id="fed")
    (tmp_path / "coordinator.toml").write_text(f'federation_id = "fed"\n{line}\n')
    with pytest.raises(CoordinatorHomeError, match=message):
        CoordinatorHome.load(tmp_path)


def test_the_server_certificate_is_issued_anew_when_hosts_change_or_its_life_ends(tmp_path: Path) -> None:
    home = made_home(tmp_path, now=NOW, federation_id="fed")
    assert home.current_server_certificate(NOW) == home.server
    assert home.current_server_certificate(NOW + timedelta(days=200)) == home.server
    later = home.current_server_certificate(NOW + timedelta(days=300))
    assert later.not_valid_after_utc > home.server.not_valid_after_utc
    text = (tmp_path / "coordinator.toml").read_text().replace('"127.0.0.1"', '"fed.example.org", "::1"', 1)
    (tmp_path / "coordinator.toml").write_text(text)
    moved = CoordinatorHome.load(tmp_path).current_server_certificate(NOW)
    names = moved.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "fed.example.org"]


def said(log: str, path: Path) -> None:
    """One line says that a directory is gone and what to do, and no other line shows that anything failed."""
    assert log.count(f"fedpareto: {path} is gone: ") == 1, log
    assert "put it back, and start again" in log
    assert "Traceback" not in log
    assert " ERROR " not in log
    assert " WARNING " not in log


@pytest.mark.full
def test_a_coordinator_whose_home_is_moved_ends_with_one_line_and_makes_nothing_in_its_place(tmp_path: Path) -> None:
    with federation(tmp_path) as fed:
        coordinator = fed.serve()
        fed.home.rename(tmp_path / "elsewhere")
        assert coordinator.popen.wait(SECONDS) == 1
        said(coordinator.text, fed.home)
        assert not fed.home.exists()
        (tmp_path / "elsewhere").rename(fed.home)
        fed.serve()


@pytest.mark.full
@pytest.mark.parametrize("way", ["moved", "unmounted", "replaced"])
def test_a_run_goes_on_when_the_home_is_there_again(tmp_path: Path, database_url: str, way: str) -> None:
    disk, elsewhere = tmp_path / "coordinator", tmp_path / "elsewhere"
    url = database_url if database_url.startswith("postgresql") else ""  # SQLite is in the home
    with attended(tmp_path, *(["--database", url] if url else [])) as made:
        made.fed.database_url = url
        calm, coordinator = made.fed.wait_completed(made.submit()), made.fed.serving
        run = made.submit()
        under_way(made, run)
        disk.rename(elsewhere)
        if way == "replaced":
            disk.mkdir()
        elif way == "unmounted":  # what was below the mount is an empty directory
            disk.mkdir()
            mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", disk], capture_output=True, check=False)
            if mounted.returncode != 0:
                pytest.skip("a file system cannot be mounted here")
        assert coordinator.popen.wait(SECONDS) == 1
        said(coordinator.text, disk)
        if way == "unmounted":
            subprocess.run(["umount", disk], check=True)
        assert not disk.exists() or not list(disk.iterdir())
        if disk.exists():
            disk.rmdir()
        elsewhere.rename(disk)
        made.fed.serve()
        made.completes(run, calm)


@pytest.mark.full
def test_blobs_on_a_disk_of_their_own_that_is_gone_end_the_coordinator(tmp_path: Path) -> None:
    with attended(tmp_path) as made:
        blobs = made.fed.home / "blobs"
        run = made.submit()
        under_way(made, run)
        blobs.rename(tmp_path / "blobs")
        coordinator = made.fed.serving
        assert coordinator.popen.wait(SECONDS) == 1
        said(coordinator.text, blobs)
        assert not blobs.exists()
        (tmp_path / "blobs").rename(blobs)
        made.fed.serve()
        made.fed.wait_completed(run)


def test_a_directory_is_gone_when_it_is_missing_another_one_or_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    directories = Directories([home])

    def write_instead() -> None:
        home.rmdir()
        home.write_text("")

    directories.check_there()
    for change, cause in (
        (lambda: home.rename(tmp_path / "away"), "No such file or directory"),
        (home.mkdir, "another directory is there now"),
        (write_instead, "another directory is there now"),
    ):
        change()
        with pytest.raises(DirectoryGone, match=cause):
            directories.check_there()
    home.unlink()
    (tmp_path / "away").rename(home)
    directories.check_there()
    monkeypatch.setattr("federation.directories.os.access", lambda *_: False)  # root may read everything
    with pytest.raises(DirectoryGone, match="cannot be read and written"):
        directories.check_there()


def test_every_fault_is_due_to_a_directory_that_is_gone_and_nothing_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home, heard = tmp_path / "home", list[StorageFault | None]()
    home.mkdir()
    faults = FaultState(directories=Directories([home]))
    faults.noted.listen(heard.append)
    assert faults.note(ValueError("a bug")) is None
    home.rmdir()
    with caplog.at_level(logging.INFO):
        assert faults.note(ValueError("a bug")) is StorageFault.GONE
        refusal = faults.refusal(BlobMissing("blake3:" + "0" * 64))
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.status) == ("stopping", "UNAVAILABLE")
    home.mkdir()
    assert faults.gone() is not None, "it does not change back"
    assert heard == [StorageFault.GONE]
    assert not caplog.text


def test_of_a_store_that_is_gone_no_blob_counts_as_missing(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "blobs")
    kept, missing = store.put(b"kept"), "blake3:" + "0" * 64
    with pytest.raises(BlobMissing):
        store.stat(missing)
    shutil.move(tmp_path / "blobs", tmp_path / "away")
    for look in (store.stat, store.claim, store.verify, lambda digest: store.open_range(digest, 0)):
        with pytest.raises(OSError, match=r"No such file|the directory of the blobs is gone"):
            look(kept)


@pytest.mark.full
@pytest.mark.parametrize("way", ["moved", "replaced"])
def test_a_worker_whose_home_is_gone_ends_with_one_line_and_declines_nothing(tmp_path: Path, way: str) -> None:
    with attended(tmp_path) as made:
        calm = made.fed.wait_completed(made.submit())
        home, elsewhere, worker = made.fed.directory / CLIENTS[0], tmp_path / "elsewhere", made.fed.workers[CLIENTS[0]]
        home.rename(elsewhere)
        if way == "replaced":
            home.mkdir()
        run = made.submit()
        assert worker.popen.wait(SECONDS) == 1
        said(worker.text, home)
        assert "declined" not in worker.text
        if way == "replaced":
            assert not list(home.iterdir())
            home.rmdir()
        assert not home.exists()
        elsewhere.rename(home)
        made.work(CLIENTS[0])
        made.completes(run, calm)
