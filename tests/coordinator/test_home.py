import stat
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509

from coordinator.home import CoordinatorHome
from coordinator.ownership import CoordinatorHomeError
from coordinator.settings import Settings
from federation.trust.admin_files import AdminFiles
from federation.trust.certificates import fingerprint
from federation.trust.identity import Role, parse_peer
from federation.trust.keys import IdentityError
from storage.database import Database
from storage.models import Certificate
from tests.federation.trust.scene import NOW
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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("port = 3", "port: no such key; there are federation_id"),
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
