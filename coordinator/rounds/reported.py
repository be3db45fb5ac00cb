"""What a client reports beside its payload, within bounds: times that are times, and numbers by printable names."""

import re
from collections.abc import Iterable

from google.protobuf.timestamp_pb2 import Timestamp

from federation.refusals import Refusal
from federation.text import escaped
from federation.v1.common_pb2 import UpdateManifest

MAX_NUMBERS = 2000  # losses and metrics of one reply
NUMBER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./:-]{0,119}")
_YEAR_1, _YEAR_10000 = -62_135_596_800, 253_402_300_800  # in seconds from 1970


def must_be_a_time(created: Timestamp) -> None:
    """Makes sure that a client's timestamp is one.

    Raises:
        Refusal: `manifest`.
    """
    if not (_YEAR_1 <= created.seconds < _YEAR_10000 and 0 <= created.nanos < 1_000_000_000):
        raise Refusal("manifest", f"created is not a time: {created.seconds} s and {created.nanos} ns")


def names_problem(manifest: UpdateManifest) -> Refusal | None:
    """What is wrong with the names of the losses and metrics that a client reports; None when nothing is."""
    count = len(manifest.losses) + len(manifest.metrics)
    if count > MAX_NUMBERS:
        return Refusal("limit:metrics", f"{count} losses and metrics; at most {MAX_NUMBERS}")
    return _first_wrong([*manifest.losses, *manifest.metrics])


def _first_wrong(names: Iterable[str]) -> Refusal | None:
    for name in names:
        if NUMBER_NAME.fullmatch(name) is None:
            words = "at most 120 letters, digits and _ . / : -"
            return Refusal("limit:metrics", f"'{escaped(name, 80)}' cannot be the name of a loss or a metric: {words}")
    return None
