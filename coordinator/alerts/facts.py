"""Facts that are alerts: the kind, whom it is about, a sentence with the numbers, and what to do."""

from dataclasses import dataclass
from datetime import datetime

from storage.states import AlertKind, AlertSeverity

Key = tuple[AlertKind, str, str]  # of the facts that are one alert while it lasts: the kind, the run, the member


@dataclass(frozen=True, kw_only=True)
class AlertFact:
    """Something that an operator should look at.

    Attributes:
        run_id: empty if it is about no run.
        client_id: empty if it is about no member.
        message: the case, in a sentence with the numbers, without a full stop.
        remedy: what to do, likewise.
        first_round: the round with which it began; None if it is about no round.
        last_round: the last round that it is about, likewise.
        began: aware.
        ended: aware; None while it lasts.
    """

    kind: AlertKind
    severity: AlertSeverity
    run_id: str = ""
    client_id: str = ""
    message: str
    remedy: str
    first_round: int | None = None
    last_round: int | None = None
    began: datetime
    ended: datetime | None = None

    @property
    def key(self) -> Key:
        """The same for all forms of one alert while it lasts."""
        return self.kind, self.run_id, self.client_id
