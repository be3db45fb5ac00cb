"""The coordinator's directory: settings, keys, certificates; made once by `fedpareto coordinator init`."""

import contextlib
import json
import os
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.audit.checkpoints import LogKey
from coordinator.members.administrators import certify_administrator, register_administrator
from coordinator.members.authority import Authority
from coordinator.members.coordinators import CoordinatorAddresses
from coordinator.ownership import CoordinatorHomeError, check_owner, claim_database, lost_database
from coordinator.settings import SETTINGS_FILE, SQLITE, Settings
from coordinator.signing_keys import Signing
from federation.digests import digest
from federation.refusals import Refusal
from federation.text_files import EncodingError, decoded
from federation.transport.addresses import known_addresses
from federation.trust.admin_files import Account, AdminFiles
from federation.trust.certificates import SERVER_LIFETIME, der, fingerprint, load_certificate_file, make_ca, pem
from federation.trust.identity import Role, check_name, coordinator_uri, parse_peer, signing_key_uri
from federation.trust.key_chain import read_rotations, whole_chain
from federation.trust.keys import (
    FileDamaged,
    finish_replacing,
    load_signing_key,
    load_tls_key,
    make_private_directory,
    new_tls_key,
    read_file,
    remedy,
    replace_private,
    write_private_key,
)
from federation.trust.member_files import note_addresses
from federation.v1.common_pb2 import KeyRotation
from storage import audit
from storage.blob_directory import DirectoryStore
from storage.blobs import BlobStore
from storage.database import Database, DatabaseIncompatible
from storage.table_claims import TableClaims

FIRST_ADMIN = "admin"
TWO_OFFICERS = "two_officers"  # the subject of log entries: the actions that need two officers from then on
ROTATIONS_FILE = "signing.rotations"


@dataclass(frozen=True)
class CoordinatorHome:
    """The directory of a federation's coordinator.

    The signing key signs assignments, receipts and steps. The log key, which it certifies, signs the audit log.
    """

    directory: Path
    settings: Settings
    ca: x509.Certificate
    ca_key: EllipticCurvePrivateKey
    server: x509.Certificate
    server_key: EllipticCurvePrivateKey
    signing_key: Ed25519PrivateKey
    log_key: LogKey
    rotations: tuple[KeyRotation, ...] = ()  # of the signing key, the oldest first

    @cached_property
    def signing(self) -> Signing:
        """The coordinator's signing key, with the chain of its former keys.

        Raises:
            FileDamaged: the rotations do not lead to the signing key.
        """
        present = self.signing_key.public_key()
        try:
            chain = whole_chain(self.rotations, present, federation_id=self.federation_id)
        except Refusal as refusal:
            raise FileDamaged(f"{self.directory / ROTATIONS_FILE} and signing.key: {refusal.message}") from None
        return Signing(self.federation_id, self.signing_key, chain, self.log_key.key.private_bytes_raw())

    @property
    def federation_id(self) -> str:
        """The name of the federation."""
        return self.settings.federation_id

    @property
    def database_url(self) -> str:
        """The URL of the database; a file's path is absolute."""
        return database_url(self.directory, self.settings)

    @property
    def blobs_dir(self) -> Path:
        """The absolute path of the directory of models and updates; with a bucket, of its cache."""
        return blobs_dir(self.directory, self.settings)

    @property
    def admin_dir(self) -> Path:
        """The directory of the first administrator, who has every role."""
        return self.directory / FIRST_ADMIN

    @property
    def ports_file(self) -> Path:
        """Holds the ports while a coordinator serves."""
        return self.directory / "ports.json"

    @property
    def authority(self) -> Authority:
        """Issues certificates."""
        return Authority(self.federation_id, self.ca, self.ca_key)

    @classmethod
    def init(cls, directory: Path, settings: Settings, *, now: datetime, passphrase: bytes | None = None) -> Self:
        """Makes a federation: its CA, the coordinator's keys, the database, and an administrator with every role.

        The directory is made if it is missing. The passphrase encrypts every private key. `coordinator.toml` is written
        last, so that everything else is there if it is.

        Raises:
            HomeError: directory or database hold a federation already.
        """
        check_vacant(directory)
        make_private_directory(directory)
        with closing(Database.open(database_url(directory, settings))) as database:
            database.migrate()
            ca_key, server_key, signing_key = new_tls_key(), new_tls_key(), Ed25519PrivateKey.generate()
            log_key = LogKey(federation_id=settings.federation_id, key=Ed25519PrivateKey.generate())
            database.entry_key = log_key.entry_key
            ca = make_ca(ca_key, settings.federation_id, now)
            claim_database(database, settings.federation_id, ca, now=now)
            write_private_key(directory / "ca.key", ca_key, passphrase)
            write_private_key(directory / "server.key", server_key, passphrase)
            write_private_key(directory / "signing.key", signing_key, passphrase)
            write_private_key(directory / "log.key", log_key.key, passphrase)
            replace_private(directory / "ca.pem", pem(ca))
            authority = Authority(settings.federation_id, ca, ca_key)
            server = server_certificate(authority, server_key, signing_key, settings.names, now)
            replace_private(directory / "server.pem", pem(server))
            home = cls(directory, settings, ca, ca_key, server, server_key, signing_key, log_key)
            make_private_directory(home.blobs_dir)
            home.record_configuration(database, by="coordinator init", now=now)
            home.issue_admin(
                database, FIRST_ADMIN, Role, home.admin_dir, now=now, by="coordinator init", passphrase=passphrase
            )
        replace_private(directory / SETTINGS_FILE, settings.render().encode())
        return home

    @classmethod
    def load(cls, directory: Path, passphrase: bytes | None = None) -> Self:
        """Reads the directory that `init` made.

        Raises:
            HomeError: there is no federation, or its settings are wrong.
            IdentityError: a key or a certificate is missing or wrong, or the passphrase is.
        """
        settings = read_settings(directory)
        finish_replacing(directory)
        with remedy("restore it from the backup of the keys; without it this federation cannot be served"):
            ca_key = load_tls_key(directory / "ca.key", passphrase)
            server_key = load_tls_key(directory / "server.key", passphrase)
            ca = load_certificate_file(directory / "ca.pem", ca_key)
            server = load_certificate_file(directory / "server.pem", server_key)
            signing_key = load_signing_key(directory / "signing.key", passphrase)
            log_key = load_signing_key(directory / "log.key", passphrase)
            rotations = read_rotations(directory / ROTATIONS_FILE)
            log = LogKey(federation_id=settings.federation_id, key=log_key)
            home = cls(directory, settings, ca, ca_key, server, server_key, signing_key, log, rotations)
            _ = home.signing
        return home

    def open_blobs(self, database: Database | None, *, durable: bool = True) -> BlobStore:
        """Opens the blob store; see `DirectoryStore` for `durable`.

        `database` is the record, which has the claims of a bucket that several coordinators may use at the same time.
        It is None for a process that keeps all others away, with the exclusive lock.

        Raises:
            HomeError: the blobs are in a bucket, and the extra for it is missing.
            BlobStoreUnavailable: the environment does not say how the bucket is reached.
        """
        return open_blobs(self.directory, self.settings, self.ca, database, durable=durable)

    def open_database(self, *, durable: bool = True) -> Database:
        """Opens the federation's database; see `Database.open` for `durable`.

        Raises:
            HomeError: the database is missing, is of another federation, or a version made it whose databases this one
                cannot upgrade.
        """
        try:
            idle = self.settings.lease_seconds / 2
            database = Database.open(self.database_url, durable=durable, create=False, idle_seconds=idle)
        except FileNotFoundError as error:
            missing = f"the database {error.filename} is missing"
            raise CoordinatorHomeError(lost_database(missing, self.directory, self.federation_id)) from None
        except ValueError as error:  # such as a file with two names
            raise CoordinatorHomeError(str(error)) from None
        try:
            database.check_known()
            check_owner(database, self.directory, self.federation_id, self.ca)
        except BaseException as error:
            database.close()
            if isinstance(error, DatabaseIncompatible):
                raise CoordinatorHomeError(str(error)) from None
            raise
        database.entry_key = self.log_key.entry_key
        return database

    def issue_admin(
        self,
        database: Database,
        name: str,
        roles: Iterable[Role],
        directory: Path,
        *,
        now: datetime,
        by: str,
        passphrase: bytes | None = None,
    ) -> AdminFiles:
        """Makes an administrator: its signing key, a first login, and the directory that holds them.

        An older administrator of the name ends. It has `roles` besides `viewer`. The directory is made, or is empty.
        `by` is the actor, for the record; the passphrase encrypts the signing key.

        Raises:
            HomeError: the directory is in use.
            IdentityError: no administrator can have this name.
        """
        check_name(name, "administrator")
        if directory.exists() and any(directory.iterdir()):
            raise CoordinatorHomeError(f"{directory} is not empty: an administrator gets a directory of its own")
        signing_key, tls_key = Ed25519PrivateKey.generate(), new_tls_key()
        with database.read() as session:
            addresses = CoordinatorAddresses.serving(session, **self.addresses(*self.ports()))
        account = Account(
            federation_id=self.federation_id,
            name=name,
            ca=pem(self.ca),
            addresses=addresses.federation,
            enrollment_addresses=addresses.enrollment,
        )
        account.save(directory, signing_key, passphrase)  # before the older one ends: a full disk ends no access
        with database.begin() as session:
            row = register_administrator(session, name, {Role.VIEWER, *roles}, signing_key.public_key(), by=by, now=now)
            certificate = certify_administrator(
                session,
                row,
                tls_key.public_key(),
                authority=self.authority,
                lifetime=self.settings.admin_certificate_lifetime,
                login=None,
                by=by,
                now=now,
            )
        files = account.files(tls_key, certificate)
        files.save(directory)
        return files

    def public_keys(self) -> dict[str, str]:
        """The digests of the keys that all coordinators of the federation have, by what they are."""
        return {
            "CA certificate": digest(der(self.ca)),
            "signing key": digest(self.signing_key.public_key().public_bytes_raw()),
            "log key": digest(self.log_key.public.public_bytes_raw()),
        }

    def record_configuration(self, database: Database, *, by: str, now: datetime) -> None:
        """Records the settings and the public keys, each if it differs from its last record.

        With several coordinators these are the settings that they share. A server certificate is recorded once, since
        each of them has one of its own.

        Raises:
            HomeError: one of several coordinators has a key that was replaced.
        """
        several = database.serves_many
        settings = self.settings.shared if several else self.settings
        configuration = {"settings": settings.changed_text, TWO_OFFICERS: ", ".join(self.settings.two_officers)}
        with database.begin() as session:
            for name, text in configuration.items():
                newest = audit.newest_digest(session, audit.CONFIGURED, name)
                if newest != (shown := digest(text.encode())) and (text or newest or name == "settings"):
                    audit.record(
                        session, at=now, actor=by, action=audit.CONFIGURED, subject=name, detail=text, digest=shown
                    )
            for name, shown in {**self.public_keys(), "server certificate": digest(der(self.server))}.items():
                if audit.newest_digest(session, audit.KEY_SET, name) == shown:
                    continue
                if several and audit.has_digest(session, audit.KEY_SET, name, shown):
                    if name == "server certificate":
                        continue
                    raise CoordinatorHomeError(
                        f"the {name} in {self.directory} was replaced: make this directory again, with `fedpareto "
                        "coordinator copy-keys` from one that has the newest keys"
                    )
                audit.record(session, at=now, actor=by, action=audit.KEY_SET, subject=name, digest=shown)

    @property
    def _kept_ports_file(self) -> Path:
        return self.directory / "kept-ports.json"

    def ports(self) -> tuple[int, int]:
        """The federation port and the enrollment port, which may be the same: as set, or as once picked, or 0.

        Raises:
            OSError: those once picked cannot be read: with others, nobody would find this coordinator.
        """
        federation, enrollment = self.settings.federation_port, self.settings.enrollment_port
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            picked = json.loads(self._kept_ports_file.read_text())
            federation, enrollment = federation or int(picked["federation"]), enrollment or int(picked["enrollment"])
        return federation, federation if self.settings.enrollment_host else enrollment

    def addresses(self, federation: int, enrollment: int) -> dict[str, str]:
        """The addresses, "host:port", for members, and for newcomers who enroll and administrators who log in."""
        host = self.settings.hosts[0]
        newcomers = self.settings.enrollment_host or host
        return {"address": address(host, federation), "enrollment_address": address(newcomers, enrollment)}

    def note_ports(self, federation: int, enrollment: int) -> None:
        """Notes the ports that this process serves; a later start uses the picked ports again."""
        ports = {"federation": federation, "enrollment": enrollment}
        if 0 in (self.settings.federation_port, self.settings.enrollment_port):
            replace_private(self._kept_ports_file, json.dumps(ports).encode() + b"\n")
        if (self.admin_dir / "member.toml").is_file():
            own, known = self.addresses(federation, enrollment), Account.load(self.admin_dir)
            others = not self.settings.database.startswith(SQLITE)
            note_addresses(
                self.admin_dir,
                AdminFiles.name_key,
                addresses=known_addresses(own["address"], (), known.addresses if others else ()),
                enrollment_addresses=known_addresses(
                    own["enrollment_address"], (), known.enrollment_addresses if others else ()
                ),
            )
        replace_private(self.ports_file, json.dumps({**ports, "pid": os.getpid()}).encode() + b"\n")

    def current_server_certificate(self, now: datetime) -> x509.Certificate:
        """The certificate to show: issued anew in the last third of its life, or when the hosts have changed."""
        names = self.server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        hosts = {*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))}
        fresh = now < self.server.not_valid_after_utc - SERVER_LIFETIME / 3
        signs = parse_peer(pem(self.server)).signing_key == self.signing_key.public_key().public_bytes_raw()
        if fresh and signs and hosts == set(self.settings.names):
            return self.server
        certificate = server_certificate(self.authority, self.server_key, self.signing_key, self.settings.names, now)
        replace_private(self.directory / "server.pem", pem(certificate))
        return certificate


def address(host: str, port: int) -> str:
    """HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def read_settings(directory: Path) -> Settings:
    """The settings in a coordinator's directory. Raises HomeError if there are none, or if they are wrong."""
    path = directory / SETTINGS_FILE
    if not path.is_file():
        raise CoordinatorHomeError(
            f"{directory} holds no federation (no {SETTINGS_FILE}): mount its disk if it had one; otherwise make one "
            f"with `fedpareto coordinator init --home {directory}`"
        )
    try:
        return Settings.parse(decoded(read_file(path)), str(path))
    except EncodingError as error:
        raise CoordinatorHomeError(f"{path} cannot be read: {error}") from None


def database_url(directory: Path, settings: Settings) -> str:
    """The URL of the database that the settings name; a file's path is absolute."""
    if not settings.database.startswith(SQLITE):
        return settings.database
    return SQLITE + str((directory / settings.database.removeprefix(SQLITE)).absolute())


def blobs_dir(directory: Path, settings: Settings) -> Path:
    """The absolute path of the directory of models and updates; with a bucket, of its cache."""
    return (directory / (settings.blob_cache if settings.in_bucket else settings.blobs)).absolute()


def open_blobs(
    directory: Path, settings: Settings, ca: x509.Certificate, database: Database | None, *, durable: bool = True
) -> BlobStore:
    """The blob store that the settings name; see `CoordinatorHome.open_blobs`."""
    place = blobs_dir(directory, settings)
    if not settings.in_bucket:
        return DirectoryStore(place, durable=durable)
    try:
        # Only where it is set: the extra `objects` is not installed everywhere.
        from storage.objects.bucket import ObjectBucket  # noqa: PLC0415
        from storage.objects.store import ObjectStore  # noqa: PLC0415
    except ImportError as error:
        raise CoordinatorHomeError(
            f"blobs is {settings.blobs}, and the package for buckets is missing ({error}): pip install "
            "'fedpareto[objects]'"
        ) from None
    bucket = ObjectBucket(settings.blobs, endpoint=settings.blobs_endpoint)
    claims = TableClaims(database) if database is not None and database.serves_many else None
    return ObjectStore(
        bucket,
        place,
        limit=settings.blob_cache_bytes,
        federation=fingerprint(ca),
        claims=claims,
        url_seconds=settings.blob_urls_seconds,
    )


def check_vacant(directory: Path) -> None:
    """Raises HomeError if a directory holds a federation, or the beginning of one."""
    settings = directory / SETTINGS_FILE
    if settings.exists():
        try:
            name = read_settings(directory).federation_id
        except (CoordinatorHomeError, OSError):
            name = "unreadable"
        raise CoordinatorHomeError(
            f"{directory} holds a federation already ({name}): nothing was changed. Start it with `fedpareto "
            f"coordinator serve --home {directory}`, or choose another directory for a new one"
        )
    if (directory / "ca.key").exists():
        raise CoordinatorHomeError(
            f"{directory} holds a federation that was not made to the end (there are keys, but no {SETTINGS_FILE}): "
            "remove the directory, or choose another one"
        )


def server_certificate(
    authority: Authority,
    key: EllipticCurvePrivateKey,
    signing_key: Ed25519PrivateKey,
    hosts: Iterable[str],
    now: datetime,
) -> x509.Certificate:
    """The certificate of a coordinator: it names the hosts, the federation and the signing key."""
    federation = authority.federation_id
    uris = [coordinator_uri(federation), signing_key_uri(federation, signing_key.public_key().public_bytes_raw())]
    return authority.issue(key.public_key(), "coordinator", uris, now=now, lifetime=SERVER_LIFETIME, hosts=list(hosts))
