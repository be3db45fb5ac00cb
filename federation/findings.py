"""The results of checks, for people and programs."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Self


class CheckOutcome(StrEnum):
    """The outcome of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """The result of one check: the finding, with the value, and the remedy for a problem."""

    subject: str
    outcome: CheckOutcome
    message: str

    @classmethod
    def ok(cls, subject: str, message: str) -> Self:
        """Nothing is wrong."""
        return cls(subject, CheckOutcome.OK, message)

    @classmethod
    def warning(cls, subject: str, message: str) -> Self:
        """Something may go wrong later."""
        return cls(subject, CheckOutcome.WARNING, message)

    @classmethod
    def failed(cls, subject: str, message: str) -> Self:
        """Something is wrong."""
        return cls(subject, CheckOutcome.FAILED, message)

    @classmethod
    def skipped(cls, subject: str, message: str) -> Self:
        """It was not checked; the message says why."""
        return cls(subject, CheckOutcome.SKIPPED, message)

    @property
    def line(self) -> str:
        """One line for people."""
        return f"{self.outcome:<8} {self.subject:<13} {' '.join(self.message.split())}"
