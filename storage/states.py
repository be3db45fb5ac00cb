"""The states of the rows of the tables."""

from enum import StrEnum


class ClientState(StrEnum):
    """The states of a client."""

    PENDING = "PENDING"
    ACTIVE = "ACTIVE"
    REVOKED = "REVOKED"
    LEFT = "LEFT"


class RunState(StrEnum):
    """The states of a run."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"


class RoundState(StrEnum):
    """The states of a round."""

    OPEN = "OPEN"
    STEPPED = "STEPPED"
    COMPLETED = "COMPLETED"
    SKIPPED = "SKIPPED"


class Answer(StrEnum):
    """A client's answer to a run."""

    ACCEPTED = "accepted"
    WAITING = "waiting"
    REFUSED = "refused"


class PhaseState(StrEnum):
    """The states of a phase."""

    OPEN = "OPEN"
    CLOSED = "CLOSED"


class AssignmentState(StrEnum):
    """The states of an assignment."""

    OPEN = "OPEN"
    FULFILLED = "FULFILLED"
    REFUSED = "REFUSED"
    DECLINED = "DECLINED"
    EXPIRED = "EXPIRED"
    CANCELLED = "CANCELLED"


class RequestState(StrEnum):
    """The states of a request for an action that takes two officers. One that is open may have expired."""

    OPEN = "OPEN"
    DONE = "DONE"
    REFUSED = "REFUSED"
    WITHDRAWN = "WITHDRAWN"


class AlertKind(StrEnum):
    """The kinds of alerts."""

    RUN_STALLED = "RUN_STALLED"
    RUN_PAUSED = "RUN_PAUSED"
    RUN_ENDED = "RUN_ENDED"
    MEMBER_PENDING = "MEMBER_PENDING"
    MEMBER_SILENT = "MEMBER_SILENT"
    MEMBER_FAILS = "MEMBER_FAILS"
    HOME_COPIED = "HOME_COPIED"
    FORGET_ASKED = "FORGET_ASKED"
    MEMBER_OPPOSES = "MEMBER_OPPOSES"
    NORM_OUTLIER = "NORM_OUTLIER"
    LOSS_OUTLIER = "LOSS_OUTLIER"
    WEIGHT_AT_CAP = "WEIGHT_AT_CAP"
    NOBODY_IMPROVES = "NOBODY_IMPROVES"
    STEP_TOO_LONG = "STEP_TOO_LONG"
    DISK_LOW = "DISK_LOW"
    BACKUP_OLD = "BACKUP_OLD"
    CERTIFICATE_ENDS = "CERTIFICATE_ENDS"
    CLOCK_WRONG = "CLOCK_WRONG"


class AlertSeverity(StrEnum):
    """How much an alert matters."""

    NOTICE = "NOTICE"
    WARNING = "WARNING"
    CRITICAL = "CRITICAL"
