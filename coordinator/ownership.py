"""The federation that a database belongs to: written once by `coordinator init`, compared before it is served.

A home without its database, or with that of another federation, must not be served: it would refuse every member's
certificate as unknown.
"""

from datetime import datetime
from pathlib import Path

from cryptography import x509
from sqlalchemy import func, inspect, select

from federation.errors import Error
from federation.trust.certificates import fingerprint
from storage.database import Database
from storage.models import Certificate, Federation


class CoordinatorHomeError(Error, ValueError):
    """A directory that cannot be used, or settings that are wrong; the message says which and what to do."""


def claim_database(database: Database, federation_id: str, ca: x509.Certificate, *, now: datetime) -> None:
    """Records the federation of an empty, migrated database.

    Raises:
        HomeError: it belongs to one already.
    """
    with database.begin() as session:
        if any(session.scalar(select(func.count()).select_from(table)) for table in (Federation, Certificate)):
            raise CoordinatorHomeError(
                f"the database {database.url} holds a federation already, with its certificates and its "
                "record: take an empty one for the new federation"
            )
        session.add(Federation(federation_id=federation_id, ca_fingerprint=fingerprint(ca), created=now))


def check_owner(database: Database, home: Path, federation_id: str, ca: x509.Certificate) -> None:
    """Compares a home, its settings' `federation_id` and its CA with the database that the settings name.

    Raises:
        HomeError: the database holds no federation, or another one; or `federation_id` was edited.
    """
    owner = None
    if inspect(database.engine).has_table(Federation.__tablename__):
        with database.read() as session:
            owner = session.scalar(select(Federation))
    if owner is None:
        empty = f"the database {database.url} is empty: it holds no federation"
        raise CoordinatorHomeError(lost_database(empty, home, federation_id))
    shown = fingerprint(ca)
    if owner.ca_fingerprint != shown:
        raise CoordinatorHomeError(
            f"the database {database.url} is of the federation {owner.federation_id}, whose CA certificate has the "
            f"SHA-256 fingerprint {owner.ca_fingerprint}; {home / 'ca.pem'} is another one, with {shown}. They do not "
            "belong together: no member's certificate would be known. Restore the database of this directory, or "
            f"correct `database` in {home / 'coordinator.toml'}"
        )
    if owner.federation_id != federation_id:
        raise CoordinatorHomeError(
            f"{home / 'coordinator.toml'} says federation_id = {federation_id!r}, but the database {database.url} and "
            f"the CA are of the federation {owner.federation_id!r}. The name is in every certificate and signature "
            f"and cannot be changed: set federation_id = {owner.federation_id!r} again"
        )


def lost_database(cause: str, home: Path, federation_id: str) -> str:
    """The message when a home's database is missing or empty, as `cause` says."""
    return (
        f"{cause}, but {home} has the keys of the federation {federation_id}, whose members are known to its database "
        "alone. Nothing was changed. Restore the database from a backup, or correct `database` in "
        f"{home / 'coordinator.toml'}. A new federation, which every member has to join, is made by `fedpareto "
        "coordinator init` in another directory"
    )
