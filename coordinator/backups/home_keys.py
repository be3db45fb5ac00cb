"""The keys of a coordinator's directory: copied for a further coordinator, and the signing key replaced."""

from contextlib import closing
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.audit.checkpoints import NEWEST_FILE
from coordinator.backups.statement import STATEMENT_FILE
from coordinator.home import ROTATIONS_FILE, CoordinatorHome, check_vacant, server_certificate
from coordinator.ownership import CoordinatorHomeError
from coordinator.settings import SETTINGS_FILE, SQLITE, Settings
from federation.trust.certificates import pem
from federation.trust.key_chain import rotate, rotations_text
from federation.trust.keys import (
    make_private_directory,
    new_tls_key,
    private_key_pem,
    replace_private,
    replace_together,
    write_private,
    write_private_key,
)
from storage import audit


def check_takes_several(settings: Settings, path: Path) -> None:
    """Raises HomeError if the settings, which the file `path` has, are not those of several coordinators."""
    if settings.database.startswith(SQLITE):
        raise CoordinatorHomeError(
            f"{path}: the database is SQLite, which takes one coordinator only; several coordinators share a "
            "PostgreSQL: database = postgresql://USER:PASSWORD@HOST/NAME"
        )
    if settings.in_bucket:
        return
    if not Path(settings.blobs).is_absolute():
        raise CoordinatorHomeError(
            f"{path}: blobs = {settings.blobs!r} is a directory of this coordinator alone; several coordinators share "
            "the blobs: stop the coordinator, move the directory to a file system that all machines mount, and set "
            "blobs to its absolute path; or set it to a bucket, s3://BUCKET/PREFIX"
        )
    if not Path(settings.blobs).is_dir():
        raise CoordinatorHomeError(
            f"{path}: blobs = {settings.blobs!r} is missing on this machine: mount the file system that the "
            "coordinators share"
        )


def copy_keys(
    source: CoordinatorHome, directory: Path, settings: Settings, *, now: datetime, passphrase: bytes | None = None
) -> CoordinatorHome:
    """Makes the directory of a further coordinator: the keys of `source`, and a server key and certificate of its own.

    The newest checkpoint of the audit log that `source` has noted and its statement of a restore are copied, too. The
    first administrator's directory is not: it belongs to a person. `settings` are those of the further coordinator; the
    passphrase encrypts its keys. As with `CoordinatorHome.init`, `coordinator.toml` is written last.

    Raises:
        HomeError: the directory holds a federation, or database or blobs are not shared (see `check_takes_several`).
    """
    check_takes_several(settings, source.directory / SETTINGS_FILE)
    check_vacant(directory)
    make_private_directory(directory)
    server_key = new_tls_key()
    keys: dict[str, EllipticCurvePrivateKey | Ed25519PrivateKey] = {
        "ca.key": source.ca_key,
        "server.key": server_key,
        "signing.key": source.signing_key,
        "log.key": source.log_key.key,
    }
    for name, key in keys.items():
        write_private_key(directory / name, key, passphrase)
    server = server_certificate(source.authority, server_key, source.signing_key, settings.names, now)
    write_private(directory / "ca.pem", pem(source.ca))
    write_private(directory / "server.pem", pem(server))
    if source.rotations:
        write_private(directory / ROTATIONS_FILE, rotations_text(source.rotations).encode())
    for name in (NEWEST_FILE, STATEMENT_FILE):
        if (source.directory / name).is_file():
            write_private(directory / name, (source.directory / name).read_bytes())
    home = replace(source, directory=directory, settings=settings, server=server, server_key=server_key)
    if settings.in_bucket:
        make_private_directory(home.blobs_dir)  # of the cache
    replace_private(directory / SETTINGS_FILE, settings.render().encode())
    return home


def rotate_signing_key(home: CoordinatorHome, *, now: datetime, passphrase: bytes | None = None) -> CoordinatorHome:
    """Replaces the signing key: the old one signs the new one, and the CA certifies it. No coordinator may serve.

    The directory changes as a whole or not at all. Returns the changed home.

    Raises:
        DatabaseBusy: a coordinator serves.
    """
    with closing(home.open_database()) as database:
        database.lock_exclusive()
        database.migrate()
        with database.read() as session:  # no signature of the old key is later, even if the clock was set back
            now = max(now, audit.newest_time(session) or now)
        key = Ed25519PrivateKey.generate()
        number = len(home.rotations) + 1
        rotation = rotate(home.signing_key, key, federation_id=home.federation_id, number=number, now=now)
        certificate = server_certificate(home.authority, home.server_key, key, home.settings.names, now)
        changed = replace(home, signing_key=key, server=certificate, rotations=(*home.rotations, rotation))
        files = {
            "signing.key": private_key_pem(key, passphrase).decode(),
            ROTATIONS_FILE: rotations_text(changed.rotations),
            "server.pem": pem(certificate).decode(),
        }
        replace_together(home.directory, files)
        changed.record_configuration(database, by="coordinator rotate-key", now=now)
    return changed
