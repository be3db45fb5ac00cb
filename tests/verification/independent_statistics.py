"""The result of a run that describes data, computed from docs/research/statistics.md, "The result, to the byte"; and
the scale that follows from it, from docs/research/standardise.md, "The layer".

Nothing is imported from the code that computes results.
"""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

FEWEST, FEWER, NOT_SHOWN = 10, "fewer than 10", "not shown"
SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)
FAR = 2.0**500
LEAST, MOST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # normal numbers of float32


class NoData(Exception):
    """No data can have these numbers."""


@dataclass(frozen=True)
class Asked:
    """A column of the specification."""

    name: str
    ends: tuple[float, float] | None
    classes: int
    edges: tuple[float, ...]

    @property
    def counts(self) -> int:
        return self.classes or len(self.edges) + 1

    @property
    def range(self) -> tuple[float, float]:
        return self.ends or (-FAR, FAR)


@dataclass
class Sums:
    """The numbers of a column."""

    values: int
    unit: int
    missing: int
    outside: int
    first: Fraction
    second: Fraction
    counts: list[int]

    @property
    def there(self) -> int:
        return self.values - self.missing


def asked(run: Mapping[str, Any]) -> list[Asked]:
    """The columns of a specification."""
    section = run["statistics"]
    found = []
    for name in section["columns"]:
        ends, classes = section.get("ranges", {}).get(name), section.get("classes", {}).get(name, 0)
        ends = None if ends is None else (float(ends[0]), float(ends[1]))
        found.append(Asked(name, ends, classes, () if classes else edges(ends, bins(run))))
    return found


def bins(run: Mapping[str, Any]) -> int:
    return int(run["statistics"].get("bins", 20))


def splits(run: Mapping[str, Any]) -> list[str]:
    return list(run["statistics"].get("splits", ["train"]))


def edges(ends: tuple[float, float] | None, count: int) -> tuple[float, ...]:
    if ends is not None:
        width = (ends[1] - ends[0]) / count
        return tuple(ends[0] + n * width for n in range(1, count))
    h = count // 2
    w = math.ceil(32 / max(1, h - 1))
    positive = [math.ldexp(1.0, w * (n - math.floor((h - 2) / 2))) for n in range(h - 1)]
    return (*(-edge for edge in positive[::-1]), 0.0, *positive)


# --- the numbers of a member


def read(payload: bytes, columns: Sequence[Asked]) -> tuple[int, list[Sums]]:
    """The samples and the sums of a payload. Raises NoData."""
    length = int.from_bytes(payload[:8], "little")
    header = json.loads(payload[8 : 8 + length])
    if header.keys() - {"__metadata__"} != {"statistics"} or header["statistics"]["dtype"] != "U8":
        raise NoData("the tensors of the payload")
    start, stop = header["statistics"]["data_offsets"]
    data = payload[8 + length :][start:stop]
    if len(data) != 8 * (1 + sum(4 + 6 * (not one.classes) + one.counts for one in columns)):
        raise NoData("the number of numbers")
    numbers = iter(struct.unpack(f"<{len(data) // 8}d", data))

    def count() -> int:
        number = next(numbers)
        if not (0 <= number <= 2**53 and number == math.floor(number)):
            raise NoData("a count")
        return int(number)

    def exact() -> Fraction:
        terms = [next(numbers) for _ in range(3)]
        if not all(map(math.isfinite, terms)):
            raise NoData("a sum")
        return sum(map(Fraction, terms), Fraction(0))

    samples, found = count(), []
    for column in columns:
        values, unit, missing, outside = (count() for _ in range(4))
        first, second = (Fraction(0), Fraction(0)) if column.classes else (exact(), exact())
        told = Sums(values, unit, missing, outside, first, second, [count() for _ in range(column.counts)])
        check_possible(samples, told, column)
        found.append(told)
    return samples, found


def check_possible(samples: int, told: Sums, column: Asked) -> None:
    if told.values > samples * told.unit or told.missing + told.outside + sum(told.counts) > told.values:
        raise NoData("more values than there are")
    low, high = map(Fraction, column.range)
    if not low * told.there <= told.first <= high * told.there:
        raise NoData("a sum beyond the range")
    most = told.second * (1 + Fraction(1, 2**100)) + told.there * Fraction(1, 2**1000)
    if told.first**2 > told.there * most:
        raise NoData("a sum of squares that is too small")


# --- a column as it is shown


def shown_counts(counts: Sequence[int], values: int, f: int) -> list[int | str]:
    """The counts of a column: missing values, values outside, and those of bins or classes."""
    small = [place for place, count in enumerate(counts) if count < f]
    hidden = list(small)
    order = sorted(range(2, len(counts)), key=lambda place: counts[place])
    order += sorted((0, 1), key=lambda place: counts[place])
    while small:
        shown = [place for place in range(len(counts)) if place not in hidden]
        r, k = values - sum(counts[place] for place in shown), len(hidden) - len(small)
        c = min((counts[place] for place in shown if place > 1), default=r)
        if k == 0 and f - 1 <= r <= (f - 1) * (len(small) - 1):
            break
        if k > 0 and f * k + f - 1 <= r <= k * c:
            break
        if not shown:
            return [NOT_SHOWN for _ in counts]
        hidden.append(next(place for place in order if place in shown))
    names = dict.fromkeys(hidden, NOT_SHOWN) | dict.fromkeys(small, FEWER)
    return [names.get(place, count) for place, count in enumerate(counts)]


def nearest(number: float, step: float) -> float:
    times = Fraction(number) / Fraction(step)
    whole = math.floor(times)
    over = times - whole
    up = over > Fraction(1, 2) or (over == Fraction(1, 2) and whole % 2 == 1)
    return float((whole + up) * Fraction(step))


def quantiles(told: Sequence[int | str], column: Asked, values: int) -> dict[str, float]:
    known = [count for count in told if not isinstance(count, str)]
    unknown = len(told) - len(known)
    each = (values - sum(known)) / unknown if unknown else 0.0
    counts = [each if isinstance(count, str) else count for count in told[2:]]
    T = math.fsum(counts)
    ends = [column.range[0], *column.edges, column.range[1]]
    found: dict[str, float] = {}
    for q in SHARES if T else ():
        b, place = 0.0, -1
        for number, c in enumerate(counts):
            if c:
                b = b + counts[place] if place >= 0 else 0.0
                place = number
                if b + c >= q * T:
                    break
        u, v = ends[place], ends[place + 1]
        if column.ends is None and place == 0:
            found[str(q)] = v
        elif column.ends is None and place == len(counts) - 1:
            found[str(q)] = u
        else:
            found[str(q)] = u + (v - u) * (q * T - b) / counts[place]
    return found


def shown_column(total: Sums, column: Asked, *, sums: bool = True) -> dict[str, Any]:
    """A column of the document; `sums` is False if those of x and x^2 are not known."""
    told = shown_counts([total.missing, total.outside, *total.counts], total.values, FEWEST * total.unit)
    missing, outside, *counts = told
    found: dict[str, Any] = {
        "name": column.name,
        "values": total.values,
        "missing": missing,
        "outside": outside,
        "count": NOT_SHOWN if isinstance(missing, str) else total.values - missing,
        "mean": None,
        "deviation": None,
        "edges": list(column.edges),
        "counts": counts,
        "quantiles": {},
    }
    found |= {"classes": column.classes} if column.classes else {"bins": len(counts)}
    found |= {"range": list(column.ends)} if column.ends else {}
    if column.classes or total.there == 0 or all(isinstance(count, str) for count in counts):
        return found
    found["quantiles"] = quantiles(told, column, total.values)
    if not sums:
        return found
    M = total.first / total.there
    mean = float(M)
    deviation = math.sqrt(float(max(Fraction(0), total.second / total.there - M * M)))
    a = 20 * total.unit * deviation / total.there
    if FEWER in told and a > 0:
        power = 10.0 ** math.floor(math.log10(a))
        step = min(power * times for times in (1, 2, 5, 10, 20) if power * times >= a)
        mean, deviation = nearest(mean, step), nearest(deviation, step)
    return {**found, "mean": mean, "deviation": deviation}


# --- the document


def document(run: Mapping[str, Any], payloads: Mapping[str, bytes]) -> tuple[bytes, list[str], list[str]]:
    """The document, its members, and the clients that it leaves out. Raises NoData: there is none."""
    columns, members, left_out = asked(run), {}, []
    for name in sorted(payloads):
        try:
            members[name] = read(payloads[name], columns)
        except NoData:
            left_out.append(name)
    samples = sum(held for held, _ in members.values())
    if not members or samples < FEWEST:
        raise NoData("there is no result")
    shown = []
    for place, column in enumerate(columns):
        of = [sums[place] for _, sums in members.values()]
        total = Sums(
            values=sum(one.values for one in of),
            unit=max(one.unit for one in of),
            missing=sum(one.missing for one in of),
            outside=sum(one.outside for one in of),
            first=sum((one.first for one in of), Fraction(0)),
            second=sum((one.second for one in of), Fraction(0)),
            counts=[sum(several) for several in zip(*(one.counts for one in of), strict=True)],
        )
        shown.append(shown_column(total, column))
    return written(run, [*members], left_out, samples, shown), [*members], left_out


def written(
    run: Mapping[str, Any], members: Sequence[str], left_out: Sequence[str], samples: int, shown: object, **more: bool
) -> bytes:
    about: dict[str, Any] = {"format": 1, "members": [*members], "left_out": [*left_out], "samples": samples, **more}
    about |= {"splits": splits(run), "fewest": FEWEST, "columns": shown}
    return json.dumps(about, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


# --- private runs


def width(column: Asked) -> int:
    """The words of a column in a private sum."""
    return 5 + 2 * (column.ends is not None) + column.counts


def private_document(run: Mapping[str, Any], words: Sequence[int], members: Sequence[str]) -> bytes:
    """The document of a private run, from the sum of its members' words. Raises NoData: no data can have it."""
    m, columns = len(members), asked(run)
    if len(words) != 1 + sum(map(width, columns)):
        raise NoData("the number of words")
    signed = iter([word - 2**64 if word >= 2**63 else word for word in map(int, words)])

    def count() -> int:
        number = next(signed)
        if not 0 <= number <= 2**53:
            raise NoData("a count")
        return number

    samples, shown = count(), []
    if samples < FEWEST or samples > m * 10**7:
        raise NoData("the number of samples")
    for column in columns:
        values, units, squares, missing, outside = (count() for _ in range(5))
        X, Y = (Fraction(next(signed), 2**32) for _ in range(2)) if column.ends is not None else (Fraction(0),) * 2
        counts = [count() for _ in range(column.counts)]
        equal = m * squares == units**2
        u = units // m if equal else math.isqrt(squares)
        if units**2 > m * squares or values > samples * u or missing + outside + sum(counts) > values:
            raise NoData("more values than there are")
        total = Sums(values, u, missing, outside, Fraction(0), Fraction(0), counts)
        if column.ends is not None and equal:
            low, high = map(Fraction, column.ends)
            c, h, n = (low + high) / 2, (high - low) / 2, total.there
            most, e = Fraction(n, max(1, u)), Fraction(m, 2**33)
            if abs(X) > most + e or not -e <= Y <= most + e or max(abs(X) - e, Fraction(0)) ** 2 > most * (Y + e):
                raise NoData("a sum beyond the range")
            total.first = n * c + X * h * u
            total.second = max(Y, Fraction(0)) * h * h * u + 2 * c * total.first - n * c * c
        shown.append(shown_column(total, column, sums=column.ends is not None and equal))
    return written(run, members, [], samples, shown, private=True)


# --- the scale of a model


def scale(document: bytes, count: int) -> tuple[list[float], list[float]]:
    """The means and the deviations of the first columns of a document, before they are rounded to float32.

    Raises NoData: a column has none.
    """
    told = json.loads(document)
    if told["format"] != 1 or count > len(told["columns"]):
        raise NoData("the columns of the result")
    found = []
    for column in told["columns"][:count]:
        mean, deviation = column["mean"], column["deviation"]
        if column.get("classes"):
            mean, deviation = 0.0, 1.0
        elif mean is None and "range" in column:
            low, high = column["range"]
            mean, deviation = low / 2 + high / 2, high / 2 - low / 2
        if mean is None or max(abs(mean), deviation) > MOST:
            raise NoData(f"the scale of {column['name']}")
        found.append((mean, deviation if deviation >= LEAST else 1.0))
    return [mean for mean, _ in found], [deviation for _, deviation in found]
