"""The coordinators that serve a federation, and the addresses that its members and administrators are told."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Self

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from federation.transport.addresses import MAX_ADDRESSES
from storage.models import CoordinatorProcess

TOLD_WITHIN = timedelta(minutes=1)  # since the last sign of life of a coordinator whose addresses are told


@dataclass(frozen=True)
class CoordinatorAddresses:
    """Addresses of coordinators, "host:port", in the same order: at least one of each, at most `MAX_ADDRESSES`.

    Attributes:
        federation: for members and administrators.
        enrollment: for newcomers, and for administrators who log in.
    """

    federation: tuple[str, ...]
    enrollment: tuple[str, ...]

    @classmethod
    def serving(cls, session: Session, address: str, enrollment_address: str) -> Self:
        """A coordinator's own addresses, then those of the others that have given a sign of life.

        With SQLite there are no others.
        """
        others = list[CoordinatorProcess]()
        if session.get_bind().dialect.name != "sqlite":
            others = list(
                session.scalars(
                    select(CoordinatorProcess)
                    .where(
                        CoordinatorProcess.last_seen > func.clock_timestamp() - TOLD_WITHIN,
                        CoordinatorProcess.address.not_in(["", address]),
                        CoordinatorProcess.enrollment_address != "",
                    )
                    .order_by(CoordinatorProcess.started, CoordinatorProcess.coordinator)
                )
            )
        federation = dict.fromkeys([address, *(other.address for other in others)])
        enrollment = dict.fromkeys([enrollment_address, *(other.enrollment_address for other in others)])
        return cls(tuple(federation)[:MAX_ADDRESSES], tuple(enrollment)[:MAX_ADDRESSES])
