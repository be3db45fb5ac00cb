import stat
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.home import CoordinatorHome
from coordinator.settings import Settings
from federation.trust.admin_files import LOGIN, Account, AdminFiles, load_admin_key
from federation.trust.certificates import pem
from federation.trust.identity import Role, admin_uris, client_uri
from federation.trust.key_chain import CoordinatorKeys
from federation.trust.keys import IdentityError, load_signing_key, load_tls_key, new_tls_key, write_private_key
from federation.trust.member_files import MemberFiles, note_addresses, save_renewal
from tests.federation.trust.scene import NOW, Authority


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("passphrase", [None, b"correct horse"])
def test_a_private_key_is_a_file_for_its_owner_alone(tmp_path: Path, passphrase: bytes | None) -> None:
    path = tmp_path / "signing.key"
    key = Ed25519PrivateKey.generate()
    write_private_key(path, key, passphrase)
    assert mode(path) == 0o600
    assert (b"ENCRYPTED" in path.read_bytes()) == (passphrase is not None)
    assert load_signing_key(path, passphrase).private_bytes_raw() == key.private_bytes_raw()
    with pytest.raises(FileExistsError):
        write_private_key(path, key, passphrase)
    with pytest.raises(IdentityError, match="P-256"):
        load_tls_key(path, passphrase)
    if passphrase:
        with pytest.raises(IdentityError, match="--passphrase-file"):
            load_signing_key(path)
        with pytest.raises(IdentityError, match="wrong passphrase"):
            load_signing_key(path, b"wrong")


def member(authority: Authority) -> MemberFiles:
    return authority.member(CoordinatorKeys("test", Ed25519PrivateKey.generate().public_key()))


@pytest.mark.parametrize("passphrase", [None, b"correct horse"])
def test_a_members_directory_is_read_as_it_was_written(tmp_path: Path, passphrase: bytes | None) -> None:
    files = member(Authority())
    home = tmp_path / "member"
    files.save(home, passphrase)
    assert mode(home) == 0o700
    assert {mode(path) for path in home.iterdir()} == {0o600}
    found = MemberFiles.load(home, passphrase)
    assert (found.federation_id, found.client_id, found.address) == ("fed", "a", "localhost:1")
    assert (found.ca, found.certificate) == (files.ca, files.certificate)
    assert found.not_after == NOW + timedelta(days=90)
    assert found.tls_key.private_numbers() == files.tls_key.private_numbers()
    assert found.signing_key.private_bytes_raw() == files.signing_key.private_bytes_raw()
    assert found.coordinator.chain.present == files.coordinator.chain.present
    assert "tls_key" not in repr(found)
    assert "signing_key" not in repr(found)
    with found.channel() as channel:
        assert isinstance(channel, grpc.Channel)
    with pytest.raises(FileExistsError):
        files.save(home, passphrase)
    with pytest.raises(IdentityError, match="administrator"):
        AdminFiles.load(home)
    with pytest.raises(IdentityError, match="no membership"):
        MemberFiles.load(tmp_path)


@pytest.mark.parametrize("passphrase", [None, b"correct horse"])
def test_an_administrators_directory_is_read_as_it_was_written(tmp_path: Path, passphrase: bytes | None) -> None:
    authority, key, signing_key, home = Authority(), new_tls_key(), Ed25519PrivateKey.generate(), tmp_path / "admin"
    account = Account(
        federation_id="fed",
        name="eve",
        addresses=("localhost:1",),
        enrollment_addresses=("localhost:2",),
        ca=pem(authority.ca),
    )
    account.save(home, signing_key, passphrase)
    assert Account.load(home) == account
    assert load_admin_key(home, passphrase).private_bytes_raw() == signing_key.private_bytes_raw()
    assert (b"ENCRYPTED" in (home / "signing.key").read_bytes()) == (passphrase is not None)
    with pytest.raises(IdentityError, match=r"login\.pem is missing"):
        AdminFiles.load(home)
    for _ in range(2):  # a login replaces the one before
        files = account.files(key, authority.issue(admin_uris("fed", "eve", [Role.VIEWER]), key=key))
        files.save(home)
        found = AdminFiles.load(home)
        assert (found.federation_id, found.name, found.address) == ("fed", "eve", "localhost:1")
        assert (found.ca, found.certificate) == (files.ca, files.certificate)
        assert found.not_after == NOW + timedelta(days=90)
        assert found.tls_key.private_numbers() == key.private_numbers()
        assert "tls_key" not in repr(found)
    assert {mode(path) for path in home.iterdir()} == {0o600}
    with found.channel() as channel:
        assert isinstance(channel, grpc.Channel)
    with pytest.raises(FileExistsError):
        account.save(home, signing_key)
    with pytest.raises(IdentityError, match="it is not the directory of a worker"):
        MemberFiles.load(home, passphrase)
    key_alone = (home / LOGIN).read_bytes().partition(b"-----BEGIN CERTIFICATE")[0]
    other = pem(authority.issue(admin_uris("fed", "eve", [])))
    for damaged in (b"", key_alone, key_alone + other):
        (home / LOGIN).write_bytes(damaged)
        with pytest.raises(IdentityError, match=r"login\.pem is damaged"):
            AdminFiles.load(home)


@pytest.mark.parametrize("dies", [None, "tls.key", "certificate.pem"])
def test_a_renewal_that_was_interrupted_is_finished_when_the_directory_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: str | None
) -> None:
    authority, key, home = Authority(), new_tls_key(), tmp_path / "member"
    member(authority).save(home, b"word")
    certificate = pem(authority.issue([client_uri("fed", "a")], key=key))
    replace = Path.replace

    def dying(path: Path, target: Path) -> Path:
        if Path(target).name == dies:
            raise KeyboardInterrupt
        return replace(path, target)

    with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
        patched.setattr(Path, "replace", dying)
        save_renewal(home, key, certificate, b"word")
    assert (home / "replacing.json").exists() == (dies is not None)
    found = MemberFiles.load(home, b"word")
    assert found.certificate == certificate
    assert found.tls_key.private_numbers() == key.private_numbers()
    assert not (home / "replacing.json").exists()
    assert {mode(path) for path in home.iterdir()} == {0o600}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("coordinator.pub", "hello", r"coordinator\.pub does not hold an Ed25519 key.*restore it from a backup"),
        ("coordinator.pub", "ab", r"coordinator\.pub does not hold an Ed25519 key.*restore it from a backup"),
        ("member.toml", "=", r"member\.toml is not TOML"),
        ("member.toml", "federation_id = 'fed'\nclient_id = 'a'\n", r"member\.toml has no address"),
        ("member.toml", "federation_id = 1\nclient_id = 'a'\naddress = 'a:1'\n", r"member\.toml has no federation_id"),
    ],
)
def test_a_damaged_file_of_a_member_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    home = tmp_path / "member"
    member(Authority()).save(home)
    (home / name).write_text(text)
    with pytest.raises(IdentityError, match=message):
        MemberFiles.load(home)


def test_an_administrators_directory_follows_the_coordinator(tmp_path: Path) -> None:
    home = CoordinatorHome.init(tmp_path, Settings.check({"federation_id": "fed"}, "test"), now=NOW)
    home.note_ports(4321, 4322)
    account = Account.load(home.admin_dir)
    assert (account.addresses, account.enrollment_addresses) == (("localhost:4321",), ("localhost:4322",))
    assert home.ports() == (4321, 4322)
    picked = tmp_path / "kept-ports.json"
    picked.rename(tmp_path / "aside")
    picked.mkdir()  # to read it is an error of the system
    with pytest.raises(IsADirectoryError):
        home.ports()
    picked.rmdir()
    (tmp_path / "aside").rename(picked)
    assert home.ports() == (4321, 4322)
    note_addresses(home.admin_dir, "admin", addresses=("elsewhere:1",), enrollment_addresses=("elsewhere:2",))
    assert Account.load(home.admin_dir).addresses == ("elsewhere:1",)
    assert Account.load(home.admin_dir).enrollment_addresses == ("elsewhere:2",)
    member(Authority()).save(tmp_path / "member")
    with pytest.raises(IdentityError, match="administrator"):
        note_addresses(tmp_path / "member", "admin", addresses=("elsewhere:1",))
