"""Values as text, for the commands and for reports: numbers, shares, sizes, digests, times."""

import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from datetime import UTC, datetime

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from federation.record.metric_definitions import Unit, definition

DIGITS = 12  # of a digest
UNKNOWN = "–"
NOT_DISCLOSED = "not disclosed"
NOT_A_NUMBER = "not a number"
PERSONALISED = "of every member's own model: the shared parameters with its personal ones"


def natural(name: str) -> tuple[tuple[str, int], ...]:
    """Sorts names by the numbers in them: member-2 comes before member-10."""
    return tuple((text, int(digits or 0)) for text, digits in re.findall(r"(\D*)([0-9]{0,18})", name))


def _without_digits(value: float) -> str:
    """A number that is not finite: a dash for NaN, which stands for an unknown number."""
    return UNKNOWN if math.isnan(value) else "infinite" if value > 0 else "-infinite"


def number(value: float, digits: int = 3) -> str:
    """A number with this many decimals, in scientific notation where they would hide it; a dash for NaN."""
    if not math.isfinite(value):
        return _without_digits(value)
    if value != 0 and not 10.0**-digits <= abs(value) < 1e5:
        return f"{value:.{max(digits - 1, 1)}e}"
    return f"{value:.{digits}f}"


def percent(value: float) -> str:
    """A share in [0, 1] as a percentage; a dash for NaN."""
    return f"{100 * value:.1f} %" if math.isfinite(value) else _without_digits(value)


def size(count: float) -> str:
    """Bytes in decimal units; a dash for NaN."""
    if not math.isfinite(count):
        return _without_digits(count)
    power = next((power for power in range(3) if count < 1000 ** (power + 1)), 3)
    return f"{count:.0f} B" if power == 0 else f"{count / 1000**power:.1f} {('kB', 'MB', 'GB')[power - 1]}"


def whole(value: float) -> str:
    """A number without decimals if it is whole, else with one; a dash for NaN."""
    if not math.isfinite(value):
        return _without_digits(value)
    return f"{value:.0f}" if abs(value - round(value)) < 1e-9 else f"{value:.1f}"


def format_of(name: str) -> Callable[[float], str]:
    """The function that writes a number of a round, by its name in the record."""
    match definition(name).unit:
        case Unit.COUNT:
            return whole
        case Unit.SHARE:
            return percent
        case Unit.BYTES:
            return size
        case Unit.NUMBER:
            return number


def recorded(name: str, numbers: Mapping[str, float], undisclosed: Container[str]) -> str:
    """A number of a round as text, by its name in the record.

    A dash if the round has no such number, and the words "not disclosed" if privacy hides it. A number that is there
    and is not finite is "not a number" or "infinite".
    """
    if name not in numbers:
        return NOT_DISCLOSED if name in undisclosed else UNKNOWN
    return NOT_A_NUMBER if math.isnan(numbers[name]) else format_of(name)(numbers[name])


def of_member(text: str, field: str, undisclosed: Container[str]) -> str:
    """A number of a member in a round: its `text`, or "not disclosed" instead of a dash if privacy hides the field."""
    return NOT_DISCLOSED if text == UNKNOWN and field in undisclosed else text


def seconds(count: float) -> str:
    """Seconds with two decimals; a dash if they are not finite."""
    return f"{count:.2f} s" if math.isfinite(count) else UNKNOWN


def span(seconds: float) -> str:
    """A length of time in the unit that fits, rounded up to whole seconds."""
    whole = max(0, math.ceil(seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min" if whole < 360_000 else f"{whole // 86400} days"


def short(digest: str) -> str:
    """The first digits of a digest or a key id."""
    return digest.rpartition(":")[2][:DIGITS]


def local(timestamp: Timestamp) -> str:
    """A time in the local zone, to the second, with the zone's name."""
    try:
        return timestamp.ToDatetime(UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    except (ValueError, OverflowError):
        return "not a time"


def moment(time: Timestamp | datetime) -> str:
    """A time in the local zone: of today "12:03", of another day "2026-11-04 12:03"."""
    at = (time.ToDatetime(UTC) if isinstance(time, Timestamp) else time).astimezone()
    return at.strftime("%H:%M" if at.date() == datetime.now(UTC).astimezone().date() else "%Y-%m-%d %H:%M")


def when(message: Message, field: str) -> str:
    """A message's time in the local zone, to the second; a dash if it is not set."""
    return local(getattr(message, field)) if message.HasField(field) else UNKNOWN


def some(names: Sequence[str], most: int) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
