"""Messages for a first-time operator: settings, clocks, certificates and damaged files are named, with what to do."""

import shutil
from contextlib import closing
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path

import pytest

from coordinator.home import CoordinatorHome
from coordinator.ownership import CoordinatorHomeError
from coordinator.server import serve
from federation.trust.admin_files import Account, AdminFiles, load_admin_key
from federation.trust.identity import Role
from federation.trust.key_chain import CoordinatorKeys
from federation.trust.keys import IdentityError, new_tls_key, private_key_pem
from federation.trust.member_files import MemberFiles
from federation.v1.admin_pb2 import CreateJoinStringRequest, ListClientsRequest
from fedpareto.cli.admin.client import connect
from fedpareto.cli.failure import CommandFailure
from storage.database import Database
from tests.federation.trust.scene import Authority
from tests.running import made_home, running

NOWHERE = "no-such-host.invalid"
DAMAGES = ["empty", "missing", "other"]


@pytest.fixture(scope="module")
def centre(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A coordinator's directory with an administrator; tests change copies of it."""
    return made_home(tmp_path_factory.mktemp("centre") / "home", now=datetime.now(UTC)).directory


@pytest.fixture(scope="module")
def worker(centre: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A worker's directory."""
    home, directory = CoordinatorHome.load(centre), tmp_path_factory.mktemp("worker") / "home"
    authority = Authority("test", home.ca, home.ca_key)
    authority.member(CoordinatorKeys(home.federation_id, home.signing_key.public_key())).save(directory)
    return directory


def test_a_coordinator_that_shall_aggregate_on_a_gpu_does_not_start_without_one(centre: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, so the coordinator would start")
    home = shutil.copytree(centre, tmp_path / "home")
    settings = home / "coordinator.toml"
    settings.write_text(settings.read_text().replace('device = "cpu"', 'device = "cuda"'))
    with pytest.raises(
        CoordinatorHomeError, match=r'device = "cuda": torch finds no GPU on this machine; set device = "cpu"'
    ):
        serve(CoordinatorHome.load(home))


@pytest.mark.parametrize(
    ("owner", "name", "damage"),
    [
        *product(["coordinator"], ["ca.key", "ca.pem", "server.key", "server.pem", "signing.key"], DAMAGES),
        *product(["worker"], ["tls.key", "certificate.pem", "ca.pem", "signing.key", "coordinator.pub"], DAMAGES[:2]),
    ],
)
def test_a_damaged_file_of_the_coordinator_or_of_a_worker_is_named_with_the_remedy(
    centre: Path, worker: Path, tmp_path: Path, owner: str, name: str, damage: str
) -> None:
    of_worker = owner == "worker"
    home = shutil.copytree(worker if of_worker else centre, tmp_path / "home")
    _damage(home / name, damage)
    named = home / name.replace("key", "pem") if damage == "other" and name != "signing.key" else home / name
    remedy = "or join again" if of_worker else "restore it from the backup of the keys"
    with pytest.raises(IdentityError, match=remedy, check=lambda error: str(named) in str(error)):
        (MemberFiles if of_worker else CoordinatorHome).load(home)


def test_a_damaged_file_of_an_administrator_is_named_with_the_remedy(centre: Path, tmp_path: Path) -> None:
    home = shutil.copytree(centre / "admin", tmp_path / "admin")
    _damage(home / "signing.key", "empty")
    with pytest.raises(IdentityError, match=r"signing\.key is damaged.*fedpareto coordinator admin --help"):
        load_admin_key(home)
    _damage(home / "ca.pem", "empty")
    with pytest.raises(IdentityError, match=r"ca\.pem is damaged.*fedpareto coordinator admin --help"):
        Account.load(home)


def _damage(path: Path, kind: str) -> None:
    if kind == "missing":
        path.unlink()
    elif kind == "empty":
        path.write_bytes(b"")
    elif path.name == "signing.key" or path.suffix == ".key":
        path.write_bytes(private_key_pem(new_tls_key()))
    else:
        path.write_bytes(path.with_name("admin").joinpath("login.pem").read_bytes())


@pytest.mark.parametrize("days", [-700, 700], ids=["ended", "not yet valid"])
def test_a_login_outside_its_time_names_the_file_the_clock_and_the_remedy(
    centre: Path, tmp_path: Path, days: int
) -> None:
    home = CoordinatorHome.load(centre)
    made, name = datetime.now(UTC) + timedelta(days=days), "early" if days > 0 else "late"
    with closing(Database.open(home.database_url)) as database:
        home.issue_admin(database, name, [Role.VIEWER], tmp_path / name, now=made, by="test", passphrase=b"word")
    with pytest.raises(CommandFailure) as caught, connect(tmp_path / name):
        pass
    message = caught.value.message
    assert str(tmp_path / name / "login.pem") in message
    assert f"this machine's clock says {datetime.now(UTC):%Y-%m-%d}" in message
    assert ("set it" if days > 0 else f"run `fedpareto admin --home {tmp_path / name} login`") in message


def test_commands_beside_a_coordinator_reach_it_although_its_public_name_leads_nowhere(tmp_path: Path) -> None:
    with running(tmp_path / "home", hosts=[NOWHERE, "localhost"]) as served:
        assert AdminFiles.load(served.home.admin_dir).address == f"{NOWHERE}:{served.coordinator.federation_port}"
        with connect(served.home.directory) as stub:  # which goes there: a record that is read offers no such call
            assert not stub.ListClients(ListClientsRequest()).clients
            assert stub.CreateJoinString(CreateJoinStringRequest(client_id="ann")).join_string
