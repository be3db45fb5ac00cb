import socket
import ssl
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID
from hypothesis import given
from hypothesis import strategies as st

from coordinator.home import Home, HomeError, Settings
from federation.certificates import csr_public_key, der, fingerprint, issue_certificate, make_ca, make_csr, pem
from federation.identity import (
    AdminFiles,
    IdentityError,
    Join,
    MemberFiles,
    Role,
    admin_uris,
    check_name,
    client_uri,
    coordinator_uri,
    fetch_ca,
    move_address,
    new_tls_key,
    parse_peer,
    signing_public_key,
)
from federation.keys import load_signing_key, load_tls_key, write_private_key
from storage.database import Database
from storage.models import Certificate

NOW = datetime.now(UTC).replace(microsecond=0)


class Authority:
    def __init__(self) -> None:
        self.key = new_tls_key()
        self.ca = make_ca(self.key, "fed", NOW)

    def issue(self, uris: list[str], hosts: tuple[str, ...] = (), key: ec.EllipticCurvePrivateKey | None = None):
        return issue_certificate(
            ca=self.ca,
            ca_key=self.key,
            public_key=(key or new_tls_key()).public_key(),
            federation_id="fed",
            common_name="x",
            uris=uris,
            now=NOW,
            lifetime=timedelta(days=90),
            hosts=hosts,
        )


@pytest.fixture
def authority() -> Authority:
    return Authority()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_certificate_of_a_client_names_the_client(authority: Authority) -> None:
    certificate = authority.issue([client_uri("fed", "ward-3")])
    identity = parse_peer(pem(certificate))
    assert identity == parse_peer(der(certificate))
    assert (identity.federation_id, identity.kind, identity.name, identity.roles) == (
        "fed",
        "client",
        "ward-3",
        frozenset(),
    )
    assert identity.uri == "fedpareto://fed/client/ward-3"
    assert identity.serial == f"{certificate.serial_number:x}"
    assert identity.not_after == NOW + timedelta(days=90)


def test_a_certificate_of_an_administrator_carries_its_roles(authority: Authority) -> None:
    identity = parse_peer(pem(authority.issue(admin_uris("fed", "eve", [Role.VIEWER, Role.OPERATOR]))))
    assert (identity.kind, identity.name, identity.roles) == ("admin", "eve", {"viewer", "operator"})


@pytest.mark.parametrize(
    "uris",
    [
        [],
        ["https://example.org"],
        ["fedpareto://fed/client/a", "fedpareto://fed/client/b"],
        ["fedpareto://fed/client/a", "fedpareto://fed/admin/a"],
        ["fedpareto://fed/client/a", "fedpareto://fed/role/operator"],
        ["fedpareto://fed/admin/a", "fedpareto://other/role/operator"],
        ["fedpareto://fed/client/A B"],
        ["fedpareto://fed/client/"],
        ["fedpareto:///client/a"],
        ["fedpareto://fed/role/operator"],
    ],
)
def test_a_certificate_that_names_nobody_or_two_is_nobodys(authority: Authority, uris: list[str]) -> None:
    with pytest.raises(IdentityError):
        parse_peer(pem(authority.issue(uris, hosts=("localhost",))))


def test_certificates_may_be_used_for_what_they_are_and_nothing_else(authority: Authority) -> None:
    def extension(certificate: x509.Certificate, kind):
        return certificate.extensions.get_extension_for_class(kind)

    client, server = (
        authority.issue([client_uri("fed", "a")]),
        authority.issue([coordinator_uri("fed")], ("localhost",)),
    )
    for leaf, usage in ((client, ExtendedKeyUsageOID.CLIENT_AUTH), (server, ExtendedKeyUsageOID.SERVER_AUTH)):
        assert extension(leaf, x509.BasicConstraints).critical
        assert not extension(leaf, x509.BasicConstraints).value.ca
        assert list(extension(leaf, x509.ExtendedKeyUsage).value) == [usage]
        assert extension(leaf, x509.KeyUsage).critical
        assert extension(leaf, x509.KeyUsage).value.digital_signature
        assert not extension(leaf, x509.KeyUsage).value.key_cert_sign
        issuer = extension(authority.ca, x509.SubjectKeyIdentifier).value.digest
        assert extension(leaf, x509.AuthorityKeyIdentifier).value.key_identifier == issuer
        leaf.verify_directly_issued_by(authority.ca)
    constraints = extension(authority.ca, x509.BasicConstraints)
    assert constraints.critical
    assert (constraints.value.ca, constraints.value.path_length) == (True, 0)
    assert extension(authority.ca, x509.KeyUsage).value.key_cert_sign
    assert authority.ca.not_valid_after_utc == NOW + timedelta(days=3650)


def test_a_certificate_does_not_outlive_its_ca(authority: Authority) -> None:
    late = authority.ca.not_valid_after_utc - timedelta(days=1)
    certificate = issue_certificate(
        ca=authority.ca,
        ca_key=authority.key,
        public_key=new_tls_key().public_key(),
        federation_id="fed",
        common_name="x",
        uris=[client_uri("fed", "a")],
        now=late,
        lifetime=timedelta(days=90),
    )
    assert certificate.not_valid_after_utc == authority.ca.not_valid_after_utc


def test_a_request_for_another_curve_or_with_a_forged_signature_is_no_request() -> None:
    good = make_csr(new_tls_key())
    assert isinstance(csr_public_key(good), ec.EllipticCurvePublicKey)
    other = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    p384 = other.sign(ec.generate_private_key(ec.SECP384R1()), hashes.SHA256())
    forged = bytearray(good)
    forged[-5] ^= 1
    for csr in (p384.public_bytes(serialization.Encoding.DER), bytes(forged), b"", b"\x30\x03\x02\x01\x05", good * 40):
        with pytest.raises(IdentityError):
            csr_public_key(csr)


@given(st.binary(max_size=400))
def test_no_bytes_make_the_request_parser_fail_otherwise(data: bytes) -> None:
    with pytest.raises(IdentityError):
        csr_public_key(data)


def test_points_of_small_order_are_no_signing_keys() -> None:
    # Found by arithmetic, not copied: 8 P is the neutral element, for every point of that kind and its encodings.
    p, one = 2**255 - 19, 1
    d = -121665 * pow(121666, -1, p) % p

    def add(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
        (x1, y1), (x2, y2) = a, b
        t = d * x1 * x2 * y1 * y2 % p
        return (x1 * y2 + x2 * y1) * pow(1 + t, -1, p) % p, (y1 * y2 + x1 * x2) * pow(1 - t, -1, p) % p

    def order_divides_8(point: tuple[int, int]) -> bool:
        for _ in range(3):
            point = add(point, point)
        return point == (0, one)

    def decode(raw: bytes) -> tuple[int, int] | None:
        y = (int.from_bytes(raw, "little") & (2**255 - 1)) % p
        square = (y * y - 1) * pow(d * y * y + 1, -1, p) % p
        for x in (pow(square, (p + 3) // 8, p), pow(square, (p + 3) // 8, p) * pow(2, (p - 1) // 4, p) % p):
            if x * x % p == square:
                return x, y
        return None

    for encoding in (
        "00" * 32,
        "01" + "00" * 31,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ec" + "ff" * 30 + "7f",
        "ed" + "ff" * 30 + "7f",
        "ee" + "ff" * 30 + "7f",
    ):
        raw = bytes.fromhex(encoding)
        point = decode(raw)
        assert point is not None
        assert order_divides_8(point)
        for key in (raw, raw[:31] + bytes([raw[31] | 0x80])):
            with pytest.raises(IdentityError):
                signing_public_key(key)
    assert signing_public_key(Ed25519PrivateKey.generate().public_key().public_bytes_raw())
    with pytest.raises(IdentityError, match="31"):
        signing_public_key(b"\x05" * 31)


@given(
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=32, max_size=32),
    st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True),
)
def test_a_join_string_says_what_was_put_into_it(ca: bytes, secret: bytes, client_id: str) -> None:
    join = Join(address="[::1]:7444", ca_fingerprint=ca.hex(), secret=secret, client_id=client_id)
    word = join.encode()
    assert word.replace("_", "").replace("-", "").isalnum()
    assert Join.decode(f" {word}\n") == join


def test_a_damaged_join_string_is_refused_and_not_repeated() -> None:
    word = Join(address="host:1", ca_fingerprint="ab" * 32, secret=b"s" * 32, client_id="a").encode()
    for damaged in (
        "",
        "hello",
        word[:-1],
        word[:-9],
        word + "A",
        word.replace("c3", "c4"),
        word[:9] + "€" + word[10:],
    ):
        with pytest.raises(IdentityError) as caught:
            Join.decode(damaged)
        assert not damaged or damaged == "hello" or damaged[9:] not in str(caught.value)


def test_a_join_string_in_a_log_does_not_show_its_secret() -> None:
    assert "SECRET" not in repr(Join(address="h:1", ca_fingerprint="ab" * 32, secret=b"SECRET" * 6, client_id="a"))


@pytest.mark.parametrize("name", ["", "A", "a_b", "-a", "a-", "a" * 64, "a/b", "a b", "ä", "a\n"])
def test_names_that_would_not_survive_a_uri_are_refused(name: str) -> None:
    with pytest.raises(IdentityError):
        check_name(name)


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


@pytest.mark.parametrize("passphrase", [None, b"correct horse"])
def test_a_members_directory_is_read_as_it_was_written(
    authority: Authority, tmp_path: Path, passphrase: bytes | None
) -> None:
    key, signing, coordinator = new_tls_key(), Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    files = MemberFiles(
        federation_id="fed",
        client_id="a",
        address="localhost:1",
        ca=pem(authority.ca),
        certificate=pem(authority.issue([client_uri("fed", "a")], key=key)),
        tls_key=key,
        signing_key=signing,
        coordinator_key=coordinator.public_key(),
    )
    home = tmp_path / "member"
    files.save(home, passphrase)
    assert mode(home) == 0o700
    assert {mode(path) for path in home.iterdir()} == {0o600}
    found = MemberFiles.load(home, passphrase)
    assert (found.federation_id, found.client_id, found.address) == ("fed", "a", "localhost:1")
    assert found.certificate == files.certificate
    assert found.signing_key.private_bytes_raw() == signing.private_bytes_raw()
    assert found.coordinator_key.public_bytes_raw() == coordinator.public_key().public_bytes_raw()
    with pytest.raises(IdentityError, match="administrator"):
        AdminFiles.load(home, passphrase)
    with pytest.raises(IdentityError, match="no membership"):
        MemberFiles.load(tmp_path)


def test_init_makes_a_federation_whose_files_are_its_owners_alone(tmp_path: Path) -> None:
    directory = tmp_path / "home"
    home = Home.init(directory, Settings.check({"federation_id": "fed"}, "test"), now=NOW)
    for path in directory.rglob("*"):
        assert mode(path) == (0o700 if path.is_dir() else 0o600), path
    loaded = Home.load(directory)
    assert loaded.settings == home.settings
    assert fingerprint(loaded.ca) == fingerprint(home.ca)
    admin = AdminFiles.load(home.admin_dir)
    assert parse_peer(admin.certificate).roles == set(Role)
    database = Database.open(home.database_url)
    with database.read() as session:
        assert session.get(Certificate, parse_peer(admin.certificate).serial) is not None
    database.close()


def test_init_leaves_a_federation_that_is_there_alone(tmp_path: Path) -> None:
    settings = Settings.check({"federation_id": "fed"}, "test")
    Home.init(tmp_path, settings, now=NOW)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(HomeError, match=r"holds a federation already \(fed\): nothing was changed"):
        Home.init(tmp_path, settings, now=NOW)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_init_refuses_a_database_of_another_federation(tmp_path: Path, database_url: str) -> None:
    settings = Settings.check({"federation_id": "fed", "database": database_url}, "test")
    Home.init(tmp_path / "one", settings, now=NOW)
    with pytest.raises(HomeError, match="holds a federation already"):
        Home.init(tmp_path / "two", settings, now=NOW)
    assert not (tmp_path / "two" / "ca.key").exists()


def test_every_private_key_of_a_federation_is_under_its_passphrase(tmp_path: Path) -> None:
    Home.init(tmp_path, Settings.check({"federation_id": "fed"}, "test"), now=NOW, passphrase=b"pass")
    keys = list(tmp_path.rglob("*.key"))
    assert len(keys) == 4
    assert all(b"ENCRYPTED" in key.read_bytes() for key in keys)
    assert Home.load(tmp_path, b"pass").federation_id == "fed"
    with pytest.raises(IdentityError, match="passphrase"):
        Home.load(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("port = 3", "port: no such key; there are federation_id"),
        ("federation_port = 70000", "federation_port: .*70000"),
        ('hosts = ["a b"]', "'a b' is not a host name"),
        ('hosts = ["localhost:3"]', "a port does not belong here"),
        ('database = "mysql://u:secretword@h/d"', r"database: expected sqlite(?!.*secretword)"),
        ("heartbeat_seconds = nan", "heartbeat_seconds"),
        ('approval = "perhaps"', "approval"),
        ("federation_id = ", "is not TOML.*line"),
    ],
)
def test_wrong_settings_are_refused_by_their_key(tmp_path: Path, line: str, message: str) -> None:
    Home.init(tmp_path, Settings.check({"federation_id": "fed"}, "test"), now=NOW)
    (tmp_path / "coordinator.toml").write_text(f'federation_id = "fed"\n{line}\n')
    with pytest.raises(HomeError, match=message):
        Home.load(tmp_path)


def test_the_server_certificate_is_issued_anew_when_hosts_change_or_its_life_ends(tmp_path: Path) -> None:
    home = Home.init(tmp_path, Settings.check({"federation_id": "fed"}, "test"), now=NOW)
    assert home.current_server_certificate(NOW) == home.server
    assert home.current_server_certificate(NOW + timedelta(days=200)) == home.server
    later = home.current_server_certificate(NOW + timedelta(days=300))
    assert later.not_valid_after_utc > home.server.not_valid_after_utc
    text = (tmp_path / "coordinator.toml").read_text().replace('"127.0.0.1"]', '"fed.example.org", "::1"]')
    (tmp_path / "coordinator.toml").write_text(text)
    moved = Home.load(tmp_path).current_server_certificate(NOW)
    names = moved.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "fed.example.org"]


def test_an_administrators_directory_follows_the_coordinator(tmp_path: Path) -> None:
    home = Home.init(tmp_path, Settings.check({"federation_id": "fed"}, "test"), now=NOW)
    home.note_ports(4321, 4322)
    assert AdminFiles.load(home.admin_dir).address == "localhost:4321"
    assert home.ports() == (4321, 4322)
    move_address(home.admin_dir, "elsewhere:1")
    assert AdminFiles.load(home.admin_dir).address == "elsewhere:1"


def test_the_ca_is_fetched_by_its_fingerprint_and_an_impostor_is_told(authority: Authority, tmp_path: Path) -> None:
    key = new_tls_key()
    (tmp_path / "server.pem").write_bytes(pem(authority.issue([coordinator_uri("fed")], ("localhost",), key)))
    write_private_key(tmp_path / "server.key", key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"localhost:{listener.getsockname()[1]}"

        def serve() -> None:
            for _ in range(2):
                plain, _ = listener.accept()
                with plain, context.wrap_socket(plain, server_side=True) as connection:
                    assert connection.recv(1) == b""  # the stranger says nothing before it knows who answers

        thread = threading.Thread(target=serve)
        thread.start()
        assert fetch_ca(address, fingerprint(authority.ca), timeout=30) == pem(authority.ca)
        with pytest.raises(IdentityError, match="not the coordinator of this federation"):
            fetch_ca(address, "00" * 32, timeout=30)
        thread.join(30)
        assert not thread.is_alive()
