"""Limits the calls of members and of callers without a certificate: token buckets, checked before any work is done."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass

DAY = 86_400.0
REFUSED = "refused"  # every refused call is charged to this kind, besides its own
DECLINE = "decline"  # a message of the worker, in its attendance, that is written to the database
CONSENT = "consent"  # another answer to a run that the member has answered before
MESSAGE = "message"  # any other message
STRANGER = "stranger"  # calls without a certificate of one address
STRANGERS = "strangers"  # and of all addresses
_OTHERS = "others"
_MAX_BUCKETS = 10_000


@dataclass(frozen=True)
class Rate:
    """The size of a token bucket, and its rate in calls per second."""

    burst: float
    per_second: float


# Each of these calls of an administrator writes rows, or an entry of the audit log.
RECORDED = (
    *("CreateJoinString", "CancelJoinStrings", "ApproveClient", "TagClient", "RevokeClient", "ForgetClient"),
    *("RevokeAdministrator", "RequestAction", "DecideRequest", "SubmitRun", "PauseRun", "ResumeRun", "StopRun"),
    *("ListReplies", "ExportRounds", "ExportModel", "ExportBundle", "WatchRun"),
)

# A member that works in 50 rounds a second, each with a model, an update and an evaluation, stays below every rate.
RATES: Mapping[str, Rate] = {
    "Attend": Rate(100, 2),
    "Renew": Rate(5, 5 / DAY),
    "Login": Rate(30, 30 / 3600),
    "RotateKey": Rate(5, 5 / DAY),
    "Leave": Rate(30, 100 / DAY),
    "FetchBlob": Rate(1000, 100),
    "LocateBlob": Rate(1000, 100),
    "GetModel": Rate(100, 1000 / DAY),
    "Submit": Rate(2000, 200),
    "VerifyAudit": Rate(5, 5 / 60),
    **dict.fromkeys(RECORDED, Rate(2000, 5000 / DAY)),
    REFUSED: Rate(500, 50),
    DECLINE: Rate(500, 100),
    CONSENT: Rate(1000, 1000 / DAY),
    MESSAGE: Rate(2000, 400),
    STRANGER: Rate(300, 5),
    STRANGERS: Rate(1000, 50),
    _OTHERS: Rate(1000, 100),
}


class Buckets:
    """A token bucket for each member and kind of call; kinds without a rate of their own have that of `others`.

    Any thread may call.
    """

    def __init__(self, rates: Mapping[str, Rate]) -> None:
        self._rates = rates
        self._lock = threading.Lock()
        self._levels: dict[tuple[str, str], tuple[float, float]] = {}  # tokens, and when they were counted

    def wait(self, member: str, kind: str, now: float) -> float:
        """The seconds until the member may make one more call of a kind; `now` is by a clock that only goes forward."""
        with self._lock:
            return max(0.0, (1 - self._level(member, kind, now)) / self._rate(kind).per_second)

    def charge(self, member: str, kind: str, now: float) -> None:
        """Takes a token; the bucket does not go below empty."""
        with self._lock:
            if len(self._levels) >= _MAX_BUCKETS:
                self._forget_full(now)
            self._levels[member, kind] = max(0.0, self._level(member, kind, now) - 1), now

    def _level(self, member: str, kind: str, now: float) -> float:
        rate = self._rate(kind)
        tokens, counted = self._levels.get((member, kind), (rate.burst, now))
        return min(rate.burst, tokens + (now - counted) * rate.per_second)

    def _rate(self, kind: str) -> Rate:
        return self._rates.get(kind, self._rates[_OTHERS])

    def _forget_full(self, now: float) -> None:
        """Forgets the buckets that are full again."""
        for member, kind in list(self._levels):
            if self._level(member, kind, now) >= self._rate(kind).burst:
                del self._levels[member, kind]
