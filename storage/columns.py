"""The types of columns: times with a zone, text from other parties, numbers that may be non-finite, records."""

import math
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, ClassVar, Protocol, TypeVar

import sqlalchemy as sa


class DataclassColumn(Protocol):
    """An instance of a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


RecordT = TypeVar("RecordT", bound=DataclassColumn)
LARGEST_INTEGER = 2**63 - 1
"""That a BigInteger column holds, and that a query may compare it with."""
LARGEST_NUMBER = 2**31 - 1
"""The same for an Integer column, which has 4 bytes in PostgreSQL: the numbers of rounds and of entries."""


class UtcDateTime(sa.TypeDecorator[datetime]):
    """A point in time: aware on the Python side, UTC in the database (SQLite keeps no zone)."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        """Refuses a time without a zone."""
        if value is not None and value.tzinfo is None:
            raise ValueError(f"a naive time reached the database: {value!r}")
        return value and value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        """Adds the zone."""
        return value and (value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC))


class Prose(sa.TypeDecorator[str]):
    """Free text, possibly from an unknown peer: cut to the column's length, unprintable characters replaced.

    PostgreSQL would refuse NUL and text that is too long; a line break or an escape sequence could forge a log line.
    White space becomes a space, any other unprintable character U+FFFD; cut text ends in an ellipsis.
    """

    impl = sa.String
    cache_ok = True

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.length = length

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        """Cleans the text, in comparisons too."""
        return None if value is None else cleaned(value, self.length)


def cleaned(text: str, length: int) -> str:
    """Free text, cut and cleaned as in a column `Prose(length)`."""
    cut = text if len(text) <= length else text[: length - 1] + "…"
    if cut.isprintable():
        return cut
    return "".join(x if x.isprintable() else " " if x.isspace() else "\ufffd" for x in cut)


class Real(sa.TypeDecorator[float]):
    """A float64. NaN is kept as NULL, as SQLite does."""

    impl = sa.Float
    cache_ok = True

    def process_bind_param(self, value: float | None, dialect: sa.Dialect) -> float | None:
        """Writes NaN as NULL."""
        return None if value is None or math.isnan(value) else float(value)


class Numbers(sa.TypeDecorator[dict[str, float]]):
    """Named float64 numbers as JSON, non-finite ones included: as the strings "nan", "inf", "-inf"."""

    impl = sa.JSON
    cache_ok = True

    def process_bind_param(self, value: dict[str, float] | None, dialect: sa.Dialect) -> dict[str, Any] | None:
        """Writes non-finite numbers as strings."""
        return value and {key: float(x) if math.isfinite(x) else str(float(x)) for key, x in value.items()}

    def process_result_value(self, value: dict[str, Any] | None, dialect: sa.Dialect) -> dict[str, float] | None:
        """Reads them back."""
        return value and {key: float(x) for key, x in value.items()}


class Records(sa.TypeDecorator[tuple[RecordT, ...]]):
    """Records of one dataclass, whose fields hold what JSON can: a list of objects in the database."""

    impl = sa.JSON
    cache_ok = True

    def __init__(self, kind: type[RecordT]) -> None:
        super().__init__()
        self.kind = kind

    def process_bind_param(self, value: tuple[RecordT, ...] | None, dialect: sa.Dialect) -> list[dict[str, Any]] | None:
        """Writes the fields of each record."""
        return None if value is None else [asdict(record) for record in value]

    def process_result_value(
        self, value: list[dict[str, Any]] | None, dialect: sa.Dialect
    ) -> tuple[RecordT, ...] | None:
        """Reads them back."""
        return None if value is None else tuple(self.kind(**fields) for fields in value)
