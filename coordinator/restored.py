"""The signed statement that the record was restored from a backup, for the workers, who have seen later rounds."""

from datetime import datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select

from coordinator.rounds.states import RUN_ENDED
from federation.envelope import seal
from federation.keys import replace_private
from federation.v1.common_pb2 import KeptRun, RestoreManifest, SignedEnvelope
from storage import audit
from storage.database import Database
from storage.models import Round, RoundState, Run

_FILE = "restored.envelope"
_OPEN = (RoundState.OPEN, RoundState.STEPPED)


def sign_restore(
    home: Path, database: Database, *, federation_id: str, signing_key: Ed25519PrivateKey, now: datetime
) -> RestoreManifest:
    """Signs how far the record goes, for every run that has not ended, and keeps the statement in the home.

    Every worker gets it with the next welcome.

    Args:
        home: the coordinator's directory.
        database: the record, locked by the caller.
        federation_id: the federation.
        signing_key: the coordinator's.
        now: the time.
    """
    manifest = RestoreManifest(federation_id=federation_id)
    manifest.restored.FromDatetime(now)
    with database.begin() as session:
        for run_id in session.scalars(select(Run.run_id).where(Run.state.not_in(RUN_ENDED)).order_by(Run.run_id)).all():
            newest = session.scalar(select(Round).where(Round.run_id == run_id).order_by(Round.number.desc()).limit(1))
            rounds = 0 if newest is None else newest.number + (newest.state not in _OPEN)
            manifest.runs.append(KeptRun(run_id=run_id, next_round=rounds))
        audit.record(
            session,
            at=now,
            actor="coordinator restored",
            action="coordinator.restored",
            detail=f"{len(manifest.runs)} runs go on",
        )
    replace_private(home / _FILE, seal(manifest, signing_key).SerializeToString(deterministic=True))
    return manifest


def newest_restore(home: Path) -> SignedEnvelope | None:
    """The newest statement that `sign_restore` has made; None when there is none."""
    try:
        return SignedEnvelope.FromString((home / _FILE).read_bytes())
    except FileNotFoundError:
        return None
