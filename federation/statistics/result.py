"""The result of a round that describes data: a JSON document, which follows from what the members told."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from federation.statistics.data_columns import Column, ColumnError
from federation.statistics.shown import FEWEST, Description, described
from federation.statistics.sums import ColumnSums, decoded, total, width
from federation.statistics.words import Words, from_words

FORMAT = 1
_BYTES = 8  # of a number


@dataclass(frozen=True)
class StatisticsResult:
    """What is shown.

    Attributes:
        document: JSON, with sorted keys.
        used: the clients that it is made from, sorted.
        left_out: the others, sorted, with the reason: no data can have their numbers.
    """

    document: bytes
    used: tuple[str, ...]
    left_out: Mapping[str, str]


def result(
    told: Mapping[str, bytes], columns: Sequence[Column], bins: int, splits: Sequence[str], *, fewest: int = FEWEST
) -> StatisticsResult:
    """The result, from the bytes that each client told, by name.

    Raises:
        ColumnError: no data can have the numbers of any client, or all have fewer than `fewest` samples together.
    """
    found: dict[str, tuple[int, list[ColumnSums]]] = {}
    left_out = {}
    for name in sorted(told):
        try:
            if len(told[name]) != _BYTES * width(columns, bins):
                raise ColumnError(f"{len(told[name])} bytes are not the numbers of these columns")
            found[name] = decoded(np.frombuffer(told[name], dtype="<f8"), columns, bins)
        except ColumnError as error:
            left_out[name] = str(error)
    if not found:
        why = next(iter(left_out.values()), "nobody replied")
        raise ColumnError(f"no member's numbers can be used: {why}")
    samples = sum(held for held, _ in found.values())
    totals = [total(sums[at] for _, sums in found.values()) for at in range(len(columns))]
    shown = [described(sums, column, bins, fewest=fewest) for sums, column in zip(totals, columns, strict=True)]
    return _result({}, samples, shown, splits, fewest, (*found,), left_out)


def summed(
    words: Words,
    members: Sequence[str],
    columns: Sequence[Column],
    bins: int,
    splits: Sequence[str],
    *,
    fewest: int = FEWEST,
) -> StatisticsResult:
    """The result of a private sum over these members, from the sum of their words.

    Raises ColumnError: no data can have this sum, or there are fewer than `fewest` samples.
    """
    samples, totals = from_words(words, len(members), columns, bins)
    shown = [
        described(one.sums, column, bins, fewest=fewest, averaged=one.averaged)
        for one, column in zip(totals, columns, strict=True)
    ]
    return _result({"private": True}, samples, shown, splits, fewest, (*members,), {})


def _result(
    more: Mapping[str, bool],
    samples: int,
    shown: Sequence[Description],
    splits: Sequence[str],
    fewest: int,
    used: tuple[str, ...],
    left_out: Mapping[str, str],
) -> StatisticsResult:
    if samples < fewest:
        raise ColumnError(f"there are fewer than {fewest} samples at all members together")
    document = {
        "format": FORMAT,
        **more,
        "members": [*used],
        "left_out": [*left_out],
        "samples": samples,
        "splits": [*splits],
        "fewest": fewest,
        "columns": [one.document for one in shown],
    }
    return StatisticsResult(written(document), used, left_out)


def written(document: Mapping[str, Any]) -> bytes:
    """The bytes of a result: JSON with sorted keys. Raises ValueError for what cannot be in one."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
