"""The record of a stopped coordinator, read from its directory by the calls that a running coordinator serves.

It needs no key and no passphrase, and writes nothing but the cache of a bucket. The database is opened read-only, so
that another process can start the coordinator meanwhile.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from coordinator.home import ROTATIONS_FILE, database_url, open_blobs, read_settings
from coordinator.ownership import CoordinatorHomeError, check_owner, lost_database
from coordinator.rounds.fleets.presence import Presence
from coordinator.services.record_calls import RecordCalls
from coordinator.services.views.reader import RecordParts
from coordinator.settings import SQLITE
from coordinator.thread_pool import ThreadPool
from federation.errors import Error
from federation.trust.certificates import load_certificate_file, pem
from federation.trust.identity import parse_peer
from federation.trust.key_chain import KeyChain, read_rotations, whole_chain
from storage.database import Database, DatabaseMissing


class ElsewhereError(Error, RuntimeError):
    """The rows of the record are on a database server, and only the coordinator reads them."""


@contextmanager
def stopped_record(directory: Path, *, clock: Callable[[], datetime]) -> Iterator[RecordCalls]:
    """The record in a coordinator's directory; no member attends. `clock` is aware.

    Raises:
        ElsewhereError: the rows are in PostgreSQL.
        HomeError: the directory holds no federation, or its database is missing or another federation's.
        IdentityError: a certificate is missing or damaged.
        DatabaseTooOld, DatabaseIncompatible: another version made the database.
        Refusal: the rotations of the signing key do not lead to the present one.
    """
    settings = read_settings(directory)
    if not settings.database.startswith(SQLITE):
        raise ElsewhereError("the rows of its record are in PostgreSQL")
    federation = settings.federation_id
    present = parse_peer(pem(load_certificate_file(directory / "server.pem"))).signing_key
    rotations = read_rotations(directory / ROTATIONS_FILE)
    chain: KeyChain = whole_chain(rotations, Ed25519PublicKey.from_public_bytes(present), federation_id=federation)
    try:
        database = Database.open_to_read(database_url(directory, settings))
    except DatabaseMissing as error:
        missing = f"the database {error.filename} is missing"
        raise CoordinatorHomeError(lost_database(missing, directory, federation)) from None
    with closing(database), ThreadPoolExecutor(1) as executor:
        database.check_known()
        ca = load_certificate_file(directory / "ca.pem")
        check_owner(database, directory, federation, ca)
        database.check_current()
        yield RecordCalls(
            RecordParts(
                settings=settings,
                chain=chain,
                threads=ThreadPool(database, executor),
                blobs=open_blobs(directory, settings, ca, database),
                presence=Presence(),
                clock=clock,
            )
        )
