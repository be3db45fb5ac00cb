"""Statistics as a StatisticsWork, and back."""

from federation.statistics.data_columns import Column, ColumnError
from federation.v1.common_pb2 import StatisticsColumn, StatisticsWork
from federation.work.base import Shape, WorkError
from federation.work.registry import Kind
from federation.work.statistics.work import Statistics


def to_proto(work: Statistics) -> StatisticsWork:
    """The message."""
    columns = [StatisticsColumn(name=one.name, low=one.low, high=one.high, classes=one.classes) for one in work.columns]
    return StatisticsWork(columns=columns, bins=work.bins, splits=work.splits)


def from_proto(message: StatisticsWork, shape: Shape) -> Statistics:
    """The work of a message. Raises WorkError: a column makes no sense."""
    try:
        columns = tuple(
            Column(
                name=one.name,
                low=one.low if one.HasField("low") else None,
                high=one.high if one.HasField("high") else None,
                classes=one.classes,
            )
            for one in message.columns
        )
    except ColumnError as error:
        raise WorkError(str(error)) from None
    return Statistics(columns=columns, bins=message.bins, splits=tuple(message.splits))


KIND = Kind(Statistics, StatisticsWork, to_proto, from_proto)
