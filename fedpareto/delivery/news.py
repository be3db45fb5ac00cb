"""What a receiver is told: that an alert begins, gets worse, or has ended."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Self

from federation.text import escaped
from federation.text_files import FORMAT
from federation.v1.admin_pb2 import Alert
from fedpareto.admin_messages import name_of

AWAY, TEST = "COORDINATOR_AWAY", "TEST"  # the alerts that only this client makes
SEVERITIES = ("notice", "warning", "critical")


class State(StrEnum):
    """What is new about an alert."""

    BEGINS = "begins"
    WORSE = "worse"
    ENDED = "ended"


@dataclass(frozen=True)
class KnownAlert:
    """An alert as it was read: `key` tells it from all others, also after the coordinator was restored.

    `ended` is empty while it lasts; times are ISO 8601 in UTC. `about` has the other fields of the document.
    """

    key: str
    severity: str
    began: str
    ended: str
    about: Mapping[str, Any]

    @classmethod
    def of(cls, alert: Alert) -> Self:
        """An alert of the coordinator."""
        began = _time(alert.began.ToDatetime(UTC))
        about = {
            "kind": name_of(alert, "kind"),
            "run_id": escaped(alert.run_id),
            "run_name": escaped(alert.run_name),
            "client_id": escaped(alert.client_id),
            "message": escaped(alert.message),
            "remedy": escaped(alert.remedy),
        }
        key = "|".join((about["kind"], about["run_id"], about["client_id"], str(alert.began.ToNanoseconds())))
        ended = _time(alert.ended.ToDatetime(UTC)) if alert.HasField("ended") else ""
        return cls(key, name_of(alert, "severity").lower(), began, ended, about)

    @classmethod
    def away(cls, since: datetime) -> Self:
        """The alert that no coordinator has answered since a time."""
        return cls._own(
            AWAY,
            since,
            f"no coordinator has answered since {since:%Y-%m-%d %H:%M} UTC",
            "`fedpareto admin status` says why; a coordinator that was stopped is started again with `fedpareto "
            "coordinator serve`. Until it answers, there are no other alerts",
        )

    @classmethod
    def test(cls, now: datetime) -> Self:
        """The alert of a test."""
        return cls._own(TEST, now, "this message is a test", "nothing is to be done")

    @classmethod
    def _own(cls, kind: str, began: datetime, message: str, remedy: str) -> Self:
        nobody = dict.fromkeys(("run_id", "run_name", "client_id"), "")
        about = {"kind": kind, **nobody, "message": message, "remedy": remedy}
        return cls(f"{kind}|||{began.timestamp()}", "critical", _time(began), "", about)

    def rank(self) -> int:
        """The place of its severity in `SEVERITIES`; one that is not known is the highest."""
        return SEVERITIES.index(self.severity) if self.severity in SEVERITIES else len(SEVERITIES) - 1


@dataclass(frozen=True)
class News:
    """What is sent to a receiver; `queued` is when it was found, in seconds since 1970.

    Its `id` follows from what it tells, so that it is the same if it is found again after a crash.
    """

    key: str
    queued: float
    document: Mapping[str, Any]

    @classmethod
    def of(cls, federation_id: str, alert: KnownAlert, state: State, number: int, now: datetime) -> Self:
        """News about an alert; `number` news about it came before."""
        told = "\n".join((federation_id, alert.key, state, str(number)))
        return cls(
            alert.key,
            now.timestamp(),
            {
                "format": FORMAT,
                "id": hashlib.sha256(told.encode()).hexdigest()[:32],
                "federation_id": federation_id,
                "state": state.value,
                "severity": alert.severity,
                **alert.about,
                "began": alert.began,
                "ended": alert.ended or None,
            },
        )

    @property
    def id(self) -> str:
        """The same at each attempt."""
        return str(self.document["id"])

    @property
    def title(self) -> str:
        """One line for people."""
        facts = self.document
        about = " ".join(filter(None, (facts["run_name"] or facts["run_id"], facts["client_id"])))
        return (
            f"{facts['federation_id']}: {facts['kind']} {about}".rstrip() + f" {facts['state']} ({facts['severity']})"
        )


def _time(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="seconds")
