"""Limits the calls of each kind that a member makes: token buckets in memory, checked before any work is done."""

from collections.abc import Mapping
from dataclasses import dataclass

DAY = 86_400.0
REFUSED = "refused"  # every refused call is charged to this kind, besides its own
DECLINE = "decline"  # a message of the worker, in its attendance, that is written to the database
MESSAGE = "message"  # any other message
_OTHERS = "others"
_MAX_BUCKETS = 10_000


@dataclass(frozen=True)
class Rate:
    """The size of a token bucket, and its rate in calls per second."""

    burst: float
    per_second: float


# A member that works in 50 rounds a second, each with a model, an update and an evaluation, stays below every rate.
RATES: Mapping[str, Rate] = {
    "Attend": Rate(100, 2),
    "Renew": Rate(5, 5 / DAY),
    "Login": Rate(30, 30 / 3600),
    "RotateKey": Rate(5, 5 / DAY),
    "FetchBlob": Rate(1000, 100),
    "Submit": Rate(2000, 200),
    "VerifyAudit": Rate(5, 5 / 60),
    REFUSED: Rate(500, 50),
    DECLINE: Rate(500, 100),
    MESSAGE: Rate(2000, 400),
    _OTHERS: Rate(1000, 100),
}


class Buckets:
    """A token bucket for each member and kind of call; kinds without a rate of their own have that of `others`."""

    def __init__(self, rates: Mapping[str, Rate]) -> None:
        self._rates = rates
        self._levels: dict[tuple[str, str], tuple[float, float]] = {}  # tokens, and when they were counted

    def wait(self, member: str, kind: str, now: float) -> float:
        """The seconds until the member may make one more call of a kind; `now` is by a clock that only goes forward."""
        rate = self._rate(kind)
        return max(0.0, (1 - self._level(member, kind, now)) / rate.per_second)

    def charge(self, member: str, kind: str, now: float) -> None:
        """Takes a token; the bucket does not go below empty."""
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
