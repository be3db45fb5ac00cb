"""Why a site begins no work now: it is outside its hours, or its owner has paused it."""

from dataclasses import dataclass
from datetime import datetime
from typing import Self

CLOSED, PAUSED = "closed", "paused"  # the reasons of a decline


@dataclass(frozen=True)
class SiteClosing:
    """A time in which a site begins no training and no evaluation.

    Attributes:
        until: when it begins work again, aware; None until its owner resumes.
        paused: True if its owner has paused it; False outside its hours.

    Raises:
        ValueError: a site that is outside its hours has no time at which it opens.
    """

    until: datetime | None
    paused: bool = False

    def __post_init__(self) -> None:
        if self.until is None and not self.paused:
            raise ValueError("a site that is not paused opens at some time")

    @classmethod
    def of(cls, until: datetime | None, *, paused: bool) -> Self | None:
        """The closing that messages and tables tell by a time and a mark; None while the site is open."""
        return None if until is None and not paused else cls(until, paused)

    @property
    def reason(self) -> str:
        """The reason of a decline: `CLOSED` or `PAUSED`."""
        return PAUSED if self.paused else CLOSED

    def __str__(self) -> str:
        return self.reason if self.until is None else f"{self.reason} until {self.until:%Y-%m-%d %H:%M} UTC"

    def lasts_beyond(self, time: datetime) -> bool:
        """True if the site begins no work before that time, or if nobody knows."""
        return self.until is None or self.until > time
