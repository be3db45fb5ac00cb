"""Private keys as files: PKCS#8, mode 0600, optionally under a passphrase (docs/operate/operations.md)."""

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ec import generate_private_key as _generate_ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from federation.durable_files import make_directories, rename_durably, sync_directory
from federation.errors import Error

_REPLACING = "replacing.json"  # the new content of several files, until all are replaced


class IdentityError(Error, ValueError):
    """A key, a certificate, a join string or a directory cannot be used; the message says why."""


class FileDamaged(IdentityError):
    """A file is missing or has the wrong content; the message names it."""


@contextmanager
def remedy(text: str) -> Iterator[None]:
    """Adds the remedy to the message of a FileDamaged."""
    try:
        yield
    except FileDamaged as error:
        raise FileDamaged(f"{error}; {text}") from None


def new_tls_key() -> EllipticCurvePrivateKey:
    """A fresh P-256 key."""
    return _generate_ec(SECP256R1())


def private_key_pem(key: EllipticCurvePrivateKey | Ed25519PrivateKey, passphrase: bytes | None = None) -> bytes:
    """The key as PKCS#8 PEM, encrypted when there is a passphrase."""
    encryption = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)


def write_private(path: Path, data: bytes) -> None:
    """Writes a new file of mode 0600, durably. Raises FileExistsError if there is one: a key is never overwritten."""
    _write_new(path, data)
    sync_directory(path.parent)


def _write_new(path: Path, data: bytes) -> None:
    """Writes a new file of mode 0600; its bytes are durable, and its name is not."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)  # with any umask
        file.write(data)
        file.flush()
        os.fsync(descriptor)


def write_private_key(
    path: Path, key: EllipticCurvePrivateKey | Ed25519PrivateKey, passphrase: bytes | None = None
) -> None:
    """Writes a private key to a new file with `write_private`: PKCS#8, encrypted when there is a passphrase."""
    write_private(path, private_key_pem(key, passphrase))


def make_private_directory(path: Path) -> None:
    """Makes a directory and its missing parents, durably; only its owner can enter it."""
    make_directories(path)
    path.chmod(0o700)


def replace_private(path: Path, data: bytes) -> None:
    """Replaces a file by another one of mode 0600, atomically and durably."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        _write_new(temporary, data)
        rename_durably(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise


def replace_together(directory: Path, files: Mapping[str, str]) -> None:
    """Replaces several text files of a directory, of mode 0600: all of them, or none if it fails before it has begun.

    If the process or the machine dies meanwhile, `finish_replacing` replaces the rest; call it before you read them.
    """
    replace_private(directory / _REPLACING, json.dumps(dict(files)).encode())
    finish_replacing(directory)


def finish_replacing(directory: Path) -> None:
    """Completes an interrupted `replace_together`. Raises FileDamaged if its journal is damaged."""
    journal = directory / _REPLACING
    try:
        files = json.loads(journal.read_bytes())
    except FileNotFoundError:
        return
    except ValueError:
        raise FileDamaged(f"{journal} is damaged") from None
    except OSError as error:
        raise IdentityError(f"cannot read {journal}: {error.strerror}") from None
    for name, text in files.items():
        replace_private(directory / name, text.encode())
    journal.unlink(missing_ok=True)  # another process may have done the same


def is_encrypted(path: Path) -> bool:
    """True if the private key in a file needs a passphrase. Raises IdentityError if there is no such file."""
    return b"BEGIN ENCRYPTED PRIVATE KEY" in read_file(path)


def read_file(path: Path) -> bytes:
    """The bytes of a file. Raises IdentityError if it cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise FileDamaged(f"{path} is missing") from None
    except OSError as error:
        raise IdentityError(f"cannot read {path}: {error.strerror}") from None


def _load_key(path: Path, passphrase: bytes | None) -> object:
    data = read_file(path)
    encrypted = b"BEGIN ENCRYPTED PRIVATE KEY" in data
    if encrypted and not passphrase:
        raise IdentityError(
            f"{path} needs its passphrase: give it with --passphrase-file, or passphrase_file in worker.toml"
        )
    try:
        return load_pem_private_key(data, passphrase if encrypted else None)
    except ValueError:
        if encrypted:
            raise IdentityError(f"{path} cannot be opened: wrong passphrase") from None
        raise FileDamaged(f"{path} is damaged: it does not hold a private key") from None


def load_tls_key(path: Path, passphrase: bytes | None = None) -> EllipticCurvePrivateKey:
    """Reads a P-256 key.

    Raises:
        IdentityError: the file is missing or has no such key, or the passphrase is missing or wrong.
    """
    key = _load_key(path, passphrase)
    if not isinstance(key, EllipticCurvePrivateKey) or not isinstance(key.curve, SECP256R1):
        raise FileDamaged(f"{path} does not hold a P-256 key")
    return key


def load_signing_key(path: Path, passphrase: bytes | None = None) -> Ed25519PrivateKey:
    """Reads an Ed25519 key. Errors as of `load_tls_key`."""
    key = _load_key(path, passphrase)
    if not isinstance(key, Ed25519PrivateKey):
        raise FileDamaged(f"{path} does not hold an Ed25519 key")
    return key
