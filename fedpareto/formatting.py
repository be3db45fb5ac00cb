"""Values as text, for the commands and for reports: numbers, shares, sizes, digests, times."""

import math
import re
from collections.abc import Callable
from datetime import UTC

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from coordinator.rounds.runs.metric_definitions import Unit, definition

DIGITS = 12  # of a digest
UNKNOWN = "–"
PERSONALISED = "of every member's own model: the shared parameters with its personal ones"


def natural(name: str) -> tuple[tuple[str, int], ...]:
    """Sorts names by the numbers in them: member-2 comes before member-10."""
    return tuple((text, int(digits or 0)) for text, digits in re.findall(r"(\D*)([0-9]{0,18})", name))


def number(value: float, digits: int = 3) -> str:
    """A number with this many decimals, in scientific notation where they would hide it; a dash if it is not finite."""
    if not math.isfinite(value):
        return UNKNOWN
    if value != 0 and not 10.0**-digits <= abs(value) < 1e5:
        return f"{value:.{max(digits - 1, 1)}e}"
    return f"{value:.{digits}f}"


def percent(value: float) -> str:
    """A share in [0, 1] as a percentage; a dash if it is not finite."""
    return f"{100 * value:.1f} %" if math.isfinite(value) else UNKNOWN


def size(count: float) -> str:
    """Bytes in decimal units; a dash if they are not finite."""
    if not math.isfinite(count):
        return UNKNOWN
    power = next((power for power in range(3) if count < 1000 ** (power + 1)), 3)
    return f"{count:.0f} B" if power == 0 else f"{count / 1000**power:.1f} {('kB', 'MB', 'GB')[power - 1]}"


def whole(value: float) -> str:
    """A number without decimals if it is whole, else with one; a dash if it is not finite."""
    if not math.isfinite(value):
        return UNKNOWN
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


def when(message: Message, field: str) -> str:
    """A message's time in the local zone, to the second; a dash if it is not set."""
    return local(getattr(message, field)) if message.HasField(field) else UNKNOWN
