"""A record of two rounds and its log, a log alone, and what somebody edits behind the coordinator's back."""

from collections.abc import Callable
from datetime import UTC, datetime

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import text
from sqlalchemy.orm import Session

from coordinator.audit.checkpoints import LogKey
from coordinator.audit.log_verifier import log_problems
from coordinator.audit.sequencer import Sequencer
from coordinator.services.checks.envelope_checks import EnvelopeChecks
from coordinator.services.checks.record_check import record_problems
from federation.record.log_entries import FIRST
from federation.trust.envelope import sign, verify
from federation.v1.common_pb2 import CheckpointManifest, LogHead, SignedEnvelope, StepManifest
from storage import audit
from storage.blobs import BlobStore
from storage.database import Database
from storage.models import Round
from tests.running import command
from tests.stage import Stage

Edit = str | Callable[["Recorded", Session], object]


class Recorded:
    """Two rounds of three clients, with a refused reply and a declined assignment, and the log of it."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.run, (ann, ben, cleo) = stage.begin("ann", "ben", "cleo", rounds=2, more="selection.quorum = 0.1")
        ben.submit_zeros(ben.order())
        cleo.decline(cleo.order(), "no-data")
        stage.play(self.run, ann, ben, cleo)
        self.sequencer.sequence(show=True)

    @property
    def sequencer(self) -> Sequencer:
        return self.stage.served.coordinator.record.sequencer

    def sign_step(self, session: Session, key: Ed25519PrivateKey, created: datetime | None = None) -> None:
        """Signs the step of the first round again."""
        row = self.first_round(session)
        own = self.stage.served.home.signing_key.public_key()
        manifest = verify(SignedEnvelope.FromString(row.step or b""), StepManifest, own)
        if created is not None:
            manifest.created.FromDatetime(created)
        row.step = sign(manifest, key).SerializeToString()

    def first_round(self, session: Session) -> Round:
        return session.query(Round).filter_by(run_id=self.run, number=0).one()

    def problems(self, *edits: Edit, blobs: BlobStore | None = None) -> list[str]:
        """What is found after some edits, which are undone; with other blobs than those of the coordinator."""
        home = self.stage.served.home
        checks = EnvelopeChecks(home.federation_id, home.signing.chain)
        newest = self.sequencer.newest
        with self.stage.served.database.begin() as session:
            for edit in edits:
                if isinstance(edit, str):
                    assert session.execute(text(edit.replace("RUN", self.run))).rowcount > 0, edit  # type: ignore[attr-defined]
                else:
                    edit(self, session)
            session.flush()
            session.expire_all()
            found = [
                *log_problems(session, home.log_key, newest),
                *record_problems(session, checks, home.log_key.entry_key, blobs or self.stage.blobs),
            ]
            session.rollback()
        return [item for item in found if isinstance(item, str)]

    def of_rounds(self) -> list[str]:
        """The problems of rounds, on one snapshot of a database in which they go on."""
        home = self.stage.served.home
        checks, key = EnvelopeChecks(home.federation_id, home.signing.chain), home.log_key.entry_key
        found = self.stage.look(lambda session: list(record_problems(session, checks, key, self.stage.blobs)))
        return [item for item in found if isinstance(item, str) and item.startswith("round ")]

    def command(self, *arguments: str, code: int = 0) -> str:
        done = command("admin", "--home", self.stage.served.home.admin_dir, "audit", *arguments, code=code)
        return done.output + str(done.exception or "")


# --- a log without a record


NOON = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)
KEY = LogKey(federation_id="fed", key=Ed25519PrivateKey.generate())


def act(database: Database, count: int = 1, action: str = "act") -> None:
    with database.begin() as session:
        for _ in range(count):
            audit.record(session, at=NOON, actor="a", action=action)


def edit(database: Database, statement: str) -> None:
    """Changes the database behind the coordinator's back."""
    with database.engine.begin() as connection:
        assert connection.execute(text(statement)).rowcount > 0


def checkpoint(head: LogHead) -> CheckpointManifest:
    return KEY.open(head.checkpoint.SerializeToString())


def wrong(database: Database, newest: bytes = b"") -> list[str]:
    """What is found to be wrong with the log."""
    with database.read() as session:
        return [item for item in log_problems(session, KEY, newest) if isinstance(item, str)]


# --- edits of a record and its log


def shift(start: int, by: int) -> list[Edit]:
    """Gives the entries from one on other numbers."""
    free = 1_000_000
    return [
        f"update audit_log set number = number + {free} where number >= {start}",
        f"update audit_log set number = number - {free - by} where number >= {free}",
    ]


def chain_anew(start: int) -> Callable[[Recorded, Session], None]:
    """Computes the leaves from an entry on again, as somebody does who knows how they are made."""

    def edit(recorded: Recorded, session: Session) -> None:
        session.flush()
        entries = audit.chained(session, 0, 10_000)
        previous = entries[start - 1].leaf if start else FIRST
        for one in entries[start:]:
            previous = one.entry.leaf(previous)
            audit.chain(session, [(one.entry.entry_id, one.entry.number, previous)])

    return edit


def forge(number: int) -> str:
    """Inserts an entry."""
    return f"""
    insert into audit_log (entry_id, at, actor, action, subject, outcome, detail, digest, times, number, leaf)
    select 100000, at, actor, 'forged', subject, outcome, detail, digest, times, {number}, leaf
    from audit_log where number = 1"""


def cut(size: int) -> list[Edit]:
    return [f"delete from audit_log where number >= {size}", f"delete from audit_checkpoints where size > {size}"]


def changed(column: str, value: object = "'x'", number: int = 5) -> str:
    return f"update audit_log set {column} = {value} where number = {number}"


def logged(action: str, subject: str) -> Edit:
    """Records an entry as the coordinator does, for a fact that the record has not."""
    return lambda recorded, session: audit.record(
        session, at=recorded.stage.clock(), actor="test", action=action, subject=subject
    )
