"""The signed statement that the record was restored from a backup, for the workers, who have seen later rounds."""

from contextlib import closing
from datetime import datetime
from pathlib import Path

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from coordinator.audit.checkpoints import newest_signed, note
from coordinator.home import CoordinatorHome
from coordinator.members.home_starts import forget_starts
from coordinator.rounds.transitions import RUN_ENDED
from federation.trust.envelope import envelope_digest, sign
from federation.trust.keys import replace_private
from federation.v1.common_pb2 import KeptLog, KeptRun, RestoreManifest, SignedEnvelope
from storage import audit
from storage.database import Database
from storage.models import AttendanceRow, BlobClaim, CoordinatorProcess, Round, Run
from storage.states import RoundState

STATEMENT_FILE = "restored.envelope"
_OPEN = (RoundState.OPEN, RoundState.STEPPED)


def sign_restore(home: CoordinatorHome, *, now: datetime) -> RestoreManifest:
    """Signs the extent of the record, for every run that has not ended and for the audit log, and keeps it in the home.

    Every worker gets the statement with the next welcome. The log goes on after the restored entries.

    Raises:
        DatabaseBusy: a coordinator serves.
        DatabaseIncompatible: a newer or an unreleased version made the database.
        HomeError: the database belongs to another home.
    """
    with closing(home.open_database()) as database:
        database.lock_exclusive()
        database.migrate()
        return state_restore(home, database, newest_restore(home.directory), now=now)


def state_restore(
    home: CoordinatorHome, database: Database, before: SignedEnvelope | None, *, now: datetime
) -> RestoreManifest:
    """The same for a database that the caller has locked and migrated; `before` is the newest statement so far."""
    manifest = RestoreManifest(federation_id=home.federation_id)
    manifest.restored.FromDatetime(now)
    if before is not None:
        manifest.logs.extend(RestoreManifest.FromString(before.manifest).logs)
    with database.begin() as session:
        going = select(Run.run_id).where(Run.state.not_in(RUN_ENDED)).order_by(Run.run_id)
        manifest.runs.extend(_kept(session, run_id) for run_id in session.scalars(going).all())
        log = KeptLog(size=audit.size(session))
        log.restored.FromDatetime(now)
        manifest.logs.append(log)
        envelope = sign(manifest, home.signing_key)
        for gone in (CoordinatorProcess, AttendanceRow, BlobClaim):  # of the time of the backup
            session.execute(delete(gone))
        session.execute(update(Run).values(conductor="", epoch=0, lease_until=None))
        forget_starts(session)
        audit.record(
            session,
            at=now,
            actor="coordinator restored",
            action="coordinator.restored",
            detail=f"{len(manifest.runs)} runs go on, the audit log after {log.size} entries",
            digest=envelope_digest(envelope),
        )
        signed = newest_signed(session)
    replace_private(home.directory / STATEMENT_FILE, envelope.SerializeToString(deterministic=True))
    note(home.directory, signed)
    return manifest


def _kept(session: Session, run_id: str) -> KeptRun:
    newest = session.scalar(select(Round).where(Round.run_id == run_id).order_by(Round.number.desc()).limit(1))
    return KeptRun(run_id=run_id, next_round=0 if newest is None else newest.number + (newest.state not in _OPEN))


def newest_restore(directory: Path) -> SignedEnvelope | None:
    """The newest statement that `sign_restore` has made in a coordinator's directory; None when there is none."""
    data = kept_statement(directory)
    return SignedEnvelope.FromString(data) if data else None


def kept_statement(directory: Path) -> bytes:
    """The bytes of this statement; empty when there is none."""
    try:
        return (directory / STATEMENT_FILE).read_bytes()
    except FileNotFoundError:
        return b""
