"""The tables: the coordinator's record, as SQLAlchemy models.

Signed envelopes are kept as the bytes that were received, so that a third party can verify them.
"""

from datetime import datetime
from enum import StrEnum
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from federation.spec.task_metrics import MetricKind
from storage.columns import Numbers, Prose, Real, Records, UtcDateTime
from storage.records import VoidRecord
from storage.states import (
    AlertKind,
    AlertSeverity,
    Answer,
    AssignmentState,
    ClientState,
    PhaseState,
    RequestState,
    RoundState,
    RunState,
)

DIGEST = sa.String(71)  # "blake3:" and 64 hexadecimal characters
NAME = sa.String(63)
ALERT_MESSAGE, ALERT_REMEDY = 600, 400  # characters
RUN_REASON = 400  # likewise
NAMES = {  # of constraints and indexes
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    """The root of the tables."""

    metadata = sa.MetaData(naming_convention=NAMES)
    type_annotation_map = {  # noqa: RUF012 - read by SQLAlchemy as declared
        datetime: UtcDateTime(),
        dict[str, Any]: sa.JSON(),
        dict[str, float]: Numbers(),
        dict[str, int]: sa.JSON(),
        dict[str, str]: sa.JSON(),
        dict[str, list[str]]: sa.JSON(),
        dict[str, dict[str, int]]: sa.JSON(),
        float: Real(),
        list[str]: sa.JSON(),
        bytes: sa.LargeBinary(),
        StrEnum: sa.Enum(StrEnum, native_enum=False, length=16),  # and what is derived from it
    }


class Federation(Base):
    """The federation whose record this database is: one row, written by `coordinator init`."""

    __tablename__ = "federations"

    federation_id: Mapped[str] = mapped_column(NAME, primary_key=True)
    ca_fingerprint: Mapped[str] = mapped_column(sa.String(64))  # SHA-256 of the CA certificate, hexadecimal
    # The digest of a blob that each of several coordinators must find in its blob store; empty with one coordinator.
    shared_blob: Mapped[str] = mapped_column(DIGEST, default="")
    created: Mapped[datetime]


class CoordinatorProcess(Base):
    """A process that serves as a coordinator of this database. The row of one that has died stays for a while."""

    __tablename__ = "coordinators"

    coordinator: Mapped[str] = mapped_column(sa.String(32), primary_key=True)  # its id, made at each start
    address: Mapped[str] = mapped_column(sa.String(300), default="")  # "host:port" for members
    enrollment_address: Mapped[str] = mapped_column(sa.String(300), default="")  # likewise for newcomers
    software: Mapped[str] = mapped_column(Prose(200), default="")
    keys: Mapped[str] = mapped_column(DIGEST, default="")  # of its public keys
    settings: Mapped[str] = mapped_column(DIGEST, default="")  # of the settings that all coordinators share
    started: Mapped[datetime]
    last_seen: Mapped[datetime]  # its last sign of life, by the database's clock


class BlobClaim(Base):
    """When a blob was last stored or claimed, with several coordinators and a bucket; see `storage.table_claims`.

    Each garbage collection removes the rows that are older than its grace.
    """

    __tablename__ = "blob_claims"

    digest: Mapped[str] = mapped_column(DIGEST, primary_key=True)
    claimed: Mapped[datetime]  # by the database's clock, as the next one
    # While the blob is being deleted, or when that broke off: until then the bucket may remove it.
    deletion_ends: Mapped[datetime | None]


class Client(Base):
    """A member of the federation."""

    __tablename__ = "clients"

    client_id: Mapped[str] = mapped_column(NAME, primary_key=True)
    state: Mapped[ClientState]
    signing_key: Mapped[bytes]  # raw Ed25519 public key, 32 bytes
    key_id: Mapped[str] = mapped_column(sa.String(64), unique=True)  # hexadecimal
    tasks: Mapped[dict[str, int]] = mapped_column(default=dict)  # task -> training samples, from the last hello
    objectives: Mapped[dict[str, list[str]]] = mapped_column(
        default=dict
    )  # task -> the objectives that it serves, likewise
    # task -> private rounds left of each kind, from its last message
    sessions_left: Mapped[dict[str, dict[str, int]]] = mapped_column(default=dict)
    abilities: Mapped[dict[str, list[str]]] = mapped_column(
        default=dict
    )  # task -> the abilities of its trainer, likewise
    # task -> the layout of its whole model, as of `TaskLayout`, likewise; without tasks whose layout it has not told
    layouts: Mapped[dict[str, Any]] = mapped_column(default=dict)
    private_only: Mapped[list[str]] = mapped_column(default=list)  # tasks for which it declines open rounds, likewise
    noise_budgets: Mapped[dict[str, Any]] = mapped_column(default=dict)  # task -> as of `NoiseBudget`, likewise
    # The bounds of its owner, as of `WorkBounds`, likewise; empty if it has not told any.
    limits: Mapped[dict[str, Any]] = mapped_column(default=dict)
    tags: Mapped[list[str]] = mapped_column(default=list)  # given by an operator
    contact: Mapped[str] = mapped_column(Prose(200), default="")  # whom operators reach there, likewise
    consents: Mapped[bool] = mapped_column(default=False)  # True if it answers each run before it works for it
    # The kinds of runs, besides "train", in which its worker takes part, from the last hello.
    run_kinds: Mapped[list[str]] = mapped_column(default=list, server_default="[]")
    device: Mapped[str] = mapped_column(Prose(200), default="")
    software: Mapped[str] = mapped_column(Prose(200), default="")
    enrolled: Mapped[datetime]
    last_seen: Mapped[datetime | None]
    # Whether its site was closed, or paused by its owner, when it was last seen, and until when.
    closed_until: Mapped[datetime | None]
    paused: Mapped[bool] = mapped_column(default=False, server_default=sa.false())
    revoked: Mapped[datetime | None]
    revoked_reason: Mapped[str] = mapped_column(Prose(400), default="")
    forgotten: Mapped[datetime | None]  # payloads received up to then are not kept after their round
    # The id of the last start of its worker, hexadecimal; empty if none is known. See coordinator.members.home_starts.
    start: Mapped[str] = mapped_column(sa.String(32), default="", server_default="")
    copied: Mapped[datetime | None]  # when another home with its identity was refused last
    left: Mapped[datetime | None]  # when it left; None once it has come back
    left_from: Mapped[ClientState | None]  # its state before, which it has again when it comes back


class Withdrawal(Base):
    """A member's withdrawal from one of its joinings."""

    __tablename__ = "withdrawals"

    digest: Mapped[str] = mapped_column(DIGEST, primary_key=True)  # of the envelope
    client_id: Mapped[str] = mapped_column(sa.ForeignKey("clients.client_id"), index=True)
    envelope: Mapped[bytes]  # SignedEnvelope of a WithdrawalManifest, as received
    forget: Mapped[bool]  # True if the member asks officers to remove its payloads
    received: Mapped[datetime]


class Administrator(Base):
    """An administrator's signing key. A name that is issued again gets another row, and the older one ends."""

    __tablename__ = "administrators"

    key_id: Mapped[str] = mapped_column(sa.String(64), primary_key=True)  # hexadecimal
    name: Mapped[str] = mapped_column(NAME, index=True)
    signing_key: Mapped[bytes]  # raw Ed25519 public key, 32 bytes
    roles: Mapped[list[str]]  # sorted
    issued: Mapped[datetime]
    last_seen: Mapped[datetime | None]  # its last call, to the minute
    ended: Mapped[datetime | None]  # when it was revoked, or issued again


class ActionRequest(Base):
    """The request of one security officer, and the decision of another one. The signed request is what is done."""

    __tablename__ = "action_requests"

    request_id: Mapped[str] = mapped_column(DIGEST, primary_key=True)  # of the envelope
    state: Mapped[RequestState] = mapped_column(index=True)
    requested_by: Mapped[str] = mapped_column(sa.ForeignKey("administrators.key_id"))
    envelope: Mapped[bytes]  # SignedEnvelope of a RequestManifest, as received
    created: Mapped[datetime]
    expires: Mapped[datetime]
    decided_by: Mapped[str | None] = mapped_column(sa.ForeignKey("administrators.key_id"))
    decision: Mapped[bytes | None]  # SignedEnvelope of a DecisionManifest, as received
    ended: Mapped[datetime | None]


class Rotation(Base):
    """The replacement of a member's signing key; that of its present key is in `clients`."""

    __tablename__ = "rotations"

    key_id: Mapped[str] = mapped_column(sa.String(64), primary_key=True)  # of the key that was replaced, hexadecimal
    client_id: Mapped[str] = mapped_column(sa.ForeignKey("clients.client_id"), index=True)
    number: Mapped[int]  # among those of the client, from 1
    rotation: Mapped[bytes]  # a KeyRotation with its receipt


class Certificate(Base):
    """A TLS certificate that this federation's CA issued, to a client or to an administrator."""

    __tablename__ = "certificates"

    serial: Mapped[str] = mapped_column(sa.String(40), primary_key=True)  # hexadecimal
    client_id: Mapped[str | None] = mapped_column(sa.ForeignKey("clients.client_id"), index=True)
    administrator: Mapped[str | None] = mapped_column(sa.ForeignKey("administrators.key_id"), index=True)
    subject: Mapped[str] = mapped_column(sa.String(200))  # the SAN URI
    certificate: Mapped[bytes]  # DER
    login: Mapped[str | None] = mapped_column(DIGEST, unique=True)  # of the LoginManifest that asked for it
    not_before: Mapped[datetime]
    not_after: Mapped[datetime]
    revoked: Mapped[datetime | None]


class JoinString(Base):
    """A join string; only the hash of its secret is kept."""

    __tablename__ = "join_strings"

    secret_hash: Mapped[str] = mapped_column(sa.String(64), primary_key=True)  # SHA-256, hexadecimal
    client_id: Mapped[str] = mapped_column(NAME, index=True)  # the future client
    created_by: Mapped[str] = mapped_column(sa.String(200))
    created: Mapped[datetime]
    expires: Mapped[datetime]
    used: Mapped[datetime | None]
    cancelled: Mapped[datetime | None]


class Model(Base):
    """A model blob that a run received or made."""

    __tablename__ = "models"

    digest: Mapped[str] = mapped_column(DIGEST, primary_key=True)
    size: Mapped[int] = mapped_column(sa.BigInteger)  # of the safetensors file, in bytes
    parameters: Mapped[int] = mapped_column(sa.BigInteger)  # trainable parameters, float32
    created: Mapped[datetime]


def note_model(session: Session, digest: str, *, size: int, parameters: int, created: datetime) -> None:
    """Records a model unless it is on record; another transaction may do the same at the same time."""
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    row = insert(Model).values(digest=digest, size=size, parameters=parameters, created=created)
    session.execute(row.on_conflict_do_nothing())


_NOT_ENDED = sa.text("state IN ('PENDING', 'RUNNING', 'PAUSED')")


class Run(Base):
    """A run: one specification, one model, many rounds."""

    __tablename__ = "runs"
    # Of the runs that have not ended, each has a name of its own.
    __table_args__ = (
        sa.Index("uq_runs_open_name", "name", unique=True, postgresql_where=_NOT_ENDED, sqlite_where=_NOT_ENDED),
    )

    run_id: Mapped[str] = mapped_column(sa.String(32), primary_key=True)
    name: Mapped[str] = mapped_column(NAME, index=True)
    state: Mapped[RunState] = mapped_column(index=True)
    reason: Mapped[str] = mapped_column(Prose(RUN_REASON), default="")
    spec: Mapped[bytes]  # the TOML document as submitted
    spec_digest: Mapped[str] = mapped_column(DIGEST)
    initial_model: Mapped[str] = mapped_column(sa.ForeignKey("models.digest"))
    model: Mapped[str] = mapped_column(sa.ForeignKey("models.digest"))  # the current one
    objectives: Mapped[list[str]] = mapped_column(default=lambda: ["loss"])  # of the task, in its order
    metrics: Mapped[tuple[MetricKind, ...]] = mapped_column(Records(MetricKind), default=tuple)  # of the task
    state_data: Mapped[dict[str, Any]] = mapped_column(default=dict)  # a RunMemory, after the last step
    submitted_by: Mapped[str] = mapped_column(sa.String(200))
    created: Mapped[datetime]
    started: Mapped[datetime | None]
    ended: Mapped[datetime | None]
    # The lease: which coordinator conducts the run. `epoch` grows with each lease, so a write of an earlier holder is
    # refused. Without other coordinators no lease is taken.
    conductor: Mapped[str] = mapped_column(sa.String(32), default="")  # its id; empty when none does
    epoch: Mapped[int] = mapped_column(default=0)
    lease_until: Mapped[datetime | None]  # by the database's clock


class AttendanceRow(Base):
    """The newest stream of a member, with several coordinators. One coordinator keeps it in memory instead."""

    __tablename__ = "attendances"

    client_id: Mapped[str] = mapped_column(sa.ForeignKey("clients.client_id"), primary_key=True)
    coordinator: Mapped[str] = mapped_column(sa.String(32), index=True)  # the id of the process that has the stream
    stream: Mapped[int]  # its number among the member's streams; a stream with a lower one has been superseded
    since: Mapped[datetime]
    last_seen: Mapped[datetime]  # its last heartbeat
    left: Mapped[datetime | None]  # when it ended; None while the member attends
    closed_until: Mapped[datetime | None]  # while the member's site is closed, or paused until a time
    paused: Mapped[bool] = mapped_column(default=False, server_default=sa.false())  # while its owner has paused it


class Consent(Base):
    """The newest answer of a client to a run."""

    __tablename__ = "consents"

    run_id: Mapped[str] = mapped_column(sa.ForeignKey("runs.run_id"), primary_key=True)
    client_id: Mapped[str] = mapped_column(sa.ForeignKey("clients.client_id"), primary_key=True)
    answer: Mapped[Answer]
    reason: Mapped[str] = mapped_column(Prose(80), default="")
    message: Mapped[str] = mapped_column(Prose(400), default="")
    envelope: Mapped[bytes]  # SignedEnvelope of a ConsentManifest, as received
    at: Mapped[datetime]


class Round(Base):
    """A round: a conversation in phases that ends in a step, or is skipped."""

    __tablename__ = "rounds"
    __table_args__ = (sa.UniqueConstraint("run_id", "number"),)

    round_id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(sa.ForeignKey("runs.run_id"))
    number: Mapped[int]
    state: Mapped[RoundState]
    reason: Mapped[str] = mapped_column(Prose(400), default="")
    base_model: Mapped[str] = mapped_column(sa.ForeignKey("models.digest"))
    result_model: Mapped[str | None] = mapped_column(sa.ForeignKey("models.digest"))  # the next round trains from it
    deployed_model: Mapped[str | None] = mapped_column(sa.ForeignKey("models.digest"))  # evaluated; may be a mean
    gram: Mapped[str | None] = mapped_column(DIGEST, index=True)  # .npy blob (m, m) float64 of the accepted updates
    combined: Mapped[str | None] = mapped_column(DIGEST, index=True)  # the combined vector of a private round
    noise: Mapped[str | None] = mapped_column(DIGEST, index=True)  # that protects clients; recorded before its use
    step: Mapped[bytes | None]  # SignedEnvelope of a StepManifest
    result: Mapped[bytes | None]  # SignedEnvelope of a ResultManifest, of a round that describes data
    document: Mapped[bytes | None] = mapped_column(deferred=True)  # of this result, JSON
    state_after: Mapped[dict[str, Any]] = mapped_column(default=dict)  # a RunMemory, after the step; empty without one
    selected: Mapped[list[str]] = mapped_column(default=list)  # clients asked to train, by name
    not_asked: Mapped[dict[str, str]] = mapped_column(
        default=dict
    )  # clients that attended and could not be asked: the reason
    wanted: Mapped[int]  # replies that the round needs; over-selection asks more clients
    attempt: Mapped[int] = mapped_column(default=0)  # at the round
    voided: Mapped[tuple[VoidRecord, ...]] = mapped_column(Records(VoidRecord), default=tuple)  # before that one
    named: Mapped[dict[str, str]] = mapped_column(
        default=dict
    )  # members that cheated in that one, without effect: the reason
    evaluation_phase: Mapped[int | None]  # the number of the phase that evaluates the result; it follows the others
    metrics: Mapped[dict[str, float]] = mapped_column(default=dict)
    objectives: Mapped[dict[str, Any]] = mapped_column(default=dict)  # an ObjectivesRecord; empty for one objective
    started: Mapped[datetime]
    stepped: Mapped[datetime | None]
    ended: Mapped[datetime | None]
    run: Mapped[Run] = relationship()

    @property
    def given_up(self) -> bool:
        """True if its last attempt was voided, so that it is skipped."""
        return bool(self.voided) and self.voided[-1].attempt == self.attempt


class Phase(Base):
    """One question to some clients, with a deadline."""

    __tablename__ = "phases"
    __table_args__ = (sa.UniqueConstraint("round_id", "number"),)

    phase_id: Mapped[int] = mapped_column(primary_key=True)
    round_id: Mapped[int] = mapped_column(sa.ForeignKey("rounds.round_id"))
    number: Mapped[int]  # in the round, over all attempts
    attempt: Mapped[int] = mapped_column(default=0)  # at the round, that the phase belongs to
    kind: Mapped[str] = mapped_column(sa.String(32))  # the kind of work
    decides: Mapped[bool] = mapped_column(default=True)  # True if the step depends on the replies
    state: Mapped[PhaseState]
    wanted: Mapped[int]  # replies that are needed; the rest of the assignments is over-selection
    # A ConversationFacts, in the first phase of an attempt and in that of an evaluation; empty in the others.
    conversation: Mapped[dict[str, Any]] = mapped_column(default=dict)
    started: Mapped[datetime]
    deadline: Mapped[datetime]
    ended: Mapped[datetime | None]
    round: Mapped[Round] = relationship()
    assignments: Mapped[list["Assignment"]] = relationship(
        back_populates="phase", order_by="Assignment.client_id", cascade="all"
    )


class Assignment(Base):
    """The work of one client in one phase; fulfilled at most once."""

    __tablename__ = "assignments"
    __table_args__ = (
        sa.UniqueConstraint("phase_id", "client_id"),
        sa.Index("ix_assignments_open", "client_id", "state"),
    )

    assignment_id: Mapped[str] = mapped_column(sa.String(32), primary_key=True)
    phase_id: Mapped[int] = mapped_column(sa.ForeignKey("phases.phase_id"), index=True)
    client_id: Mapped[str] = mapped_column(sa.ForeignKey("clients.client_id"))
    state: Mapped[AssignmentState]
    reason: Mapped[str] = mapped_column(Prose(80), default="")
    message: Mapped[str] = mapped_column(Prose(400), default="")
    base_model: Mapped[str] = mapped_column(sa.ForeignKey("models.digest"), index=True)
    objectives: Mapped[list[str]] = mapped_column(default=list)  # the objectives that the client works on
    envelope: Mapped[bytes]  # SignedEnvelope of an AssignmentManifest, as sent
    decline: Mapped[bytes | None]  # SignedEnvelope of a DeclineManifest, as received
    created: Mapped[datetime]
    ended: Mapped[datetime | None]

    phase: Mapped[Phase] = relationship(back_populates="assignments")
    replies: Mapped[list["Reply"]] = relationship(back_populates="assignment", cascade="all")
    inputs: Mapped[list["Input"]] = relationship(order_by="Input.name", cascade="all")


class Input(Base):
    """A blob that an assignment needs besides the base model, and that its client may fetch."""

    __tablename__ = "inputs"

    assignment_id: Mapped[str] = mapped_column(sa.ForeignKey("assignments.assignment_id"), primary_key=True)
    name: Mapped[str] = mapped_column(NAME, primary_key=True)
    digest: Mapped[str] = mapped_column(DIGEST, index=True)
    size: Mapped[int] = mapped_column(sa.BigInteger)  # in bytes


class Reply(Base):
    """A reply to an assignment, with a valid signature: the accepted one, or one refused for its content."""

    __tablename__ = "replies"
    __table_args__ = (sa.Index("ix_replies_assignment_accepted", "assignment_id", "accepted"),)

    reply_id: Mapped[int] = mapped_column(primary_key=True)
    assignment_id: Mapped[str] = mapped_column(sa.ForeignKey("assignments.assignment_id"))
    client_id: Mapped[str] = mapped_column(sa.ForeignKey("clients.client_id"), index=True)
    accepted: Mapped[bool]
    reason: Mapped[str] = mapped_column(Prose(80), default="")
    envelope: Mapped[bytes]  # SignedEnvelope of a ReplyManifest, as received
    envelope_digest: Mapped[str] = mapped_column(DIGEST, index=True)
    receipt: Mapped[bytes]  # SignedEnvelope of a ReceiptManifest, as sent
    payload: Mapped[str] = mapped_column(DIGEST, default="", index=True)  # empty when there is none
    payload_bytes: Mapped[int] = mapped_column(sa.BigInteger, default=0)
    samples: Mapped[int] = mapped_column(sa.BigInteger, default=0)
    losses: Mapped[dict[str, float]] = mapped_column(default=dict)
    metrics: Mapped[dict[str, float]] = mapped_column(default=dict)
    privacy: Mapped[dict[str, float]] = mapped_column(default=dict)  # a SamplePrivacy; empty without noise
    unrepeatable: Mapped[bool] = mapped_column(default=False)  # the trainer may give another result
    # Known after the step.
    norm: Mapped[float | None]
    weight: Mapped[float | None]  # lambda
    coefficient: Mapped[float | None]
    cosine: Mapped[float | None]  # with the step
    received: Mapped[datetime]

    assignment: Mapped[Assignment] = relationship(back_populates="replies")


class Evaluation(Base):
    """The scores of a model on one split of one client."""

    __tablename__ = "evaluations"
    __table_args__ = (sa.UniqueConstraint("round_id", "client_id", "split"),)

    evaluation_id: Mapped[int] = mapped_column(primary_key=True)
    round_id: Mapped[int] = mapped_column(sa.ForeignKey("rounds.round_id"))
    client_id: Mapped[str] = mapped_column(sa.ForeignKey("clients.client_id"))
    model: Mapped[str] = mapped_column(sa.ForeignKey("models.digest"))
    split: Mapped[str] = mapped_column(sa.String(20))
    loss: Mapped[float | None]
    accuracy: Mapped[float | None]
    others: Mapped[dict[str, float]] = mapped_column(default=dict)  # "loss/<objective>", the task's own "<metric>", ...
    samples: Mapped[int] = mapped_column(sa.BigInteger)


class Alert(Base):
    """Something that an operator should look at, from when it began until it ended.

    Rows follow from the record: `coordinator.alerts` makes those again that a crash prevented.
    """

    __tablename__ = "alerts"
    __table_args__ = (sa.UniqueConstraint("kind", "run_id", "client_id", "began"), sa.Index(None, "began", "alert_id"))

    alert_id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[AlertKind]
    severity: Mapped[AlertSeverity]
    run_id: Mapped[str] = mapped_column(sa.String(32), default="", index=True)  # empty for an alert about no run
    client_id: Mapped[str] = mapped_column(NAME, default="", index=True)  # empty for an alert about no member
    message: Mapped[str] = mapped_column(Prose(ALERT_MESSAGE))  # the case, in a sentence with the numbers
    remedy: Mapped[str] = mapped_column(Prose(ALERT_REMEDY))  # what to do, in a sentence
    first_round: Mapped[int | None]  # with which it began
    last_round: Mapped[int | None]  # the last one that it is about
    began: Mapped[datetime]
    ended: Mapped[datetime | None] = mapped_column(index=True)  # None while it lasts


class AuditEntry(Base):
    """An event. Rows are appended; a row changes once, when the sequencer gives it its place."""

    __tablename__ = "audit_log"

    entry_id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[datetime] = mapped_column(index=True)
    actor: Mapped[str] = mapped_column(
        Prose(200), index=True
    )  # see federation.record.log_entries.LogEntry, here and below
    action: Mapped[str] = mapped_column(Prose(80))
    subject: Mapped[str] = mapped_column(Prose(200), default="")
    outcome: Mapped[str] = mapped_column(Prose(80), default="")
    detail: Mapped[str] = mapped_column(Prose(2000), default="")
    digest: Mapped[str] = mapped_column(DIGEST, default="")
    times: Mapped[int] = mapped_column(default=1)  # repetitions, counted in one row
    number: Mapped[int | None] = mapped_column(unique=True)  # its place in the log, from 0; None until it is chained
    leaf: Mapped[bytes | None]  # its leaf in the log's tree, 32 bytes; None until it is chained
    tag: Mapped[bytes | None] = mapped_column(unique=True)  # by the coordinator's key; None in simulations


class Checkpoint(Base):
    """A signed checkpoint of the audit log."""

    __tablename__ = "audit_checkpoints"

    size: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)  # the number of entries
    envelope: Mapped[bytes]  # SignedEnvelope of a CheckpointManifest
    shown: Mapped[bool] = mapped_column(default=False)  # True if members may have seen it; it is then kept
