"""A part of a shared data set, named by the specification of a simulation or the owner of a rehearsing worker."""

import re
from dataclasses import dataclass

from federation.errors import Error

_POSITIVE = r"(?=.*[1-9])[0-9]{1,6}(\.[0-9]{1,9})?"
_COUNT = r"[1-9][0-9]{0,5}"
_SCHEMES = {"iid": None, "natural": None, "shards": _COUNT, "labels": _COUNT, "dirichlet": _POSITIVE}
_SIZES = {"equal": None, "lognormal": _POSITIVE}


class PartError(Error, ValueError):
    """The part of a data set does not exist."""


@dataclass(frozen=True)
class Part:
    """The part of one shared data set with which this client rehearses. Members with data of their own need none.

    Attributes:
        index: 0 to count - 1.
        count: the number of clients that share the data set.
        scheme: "iid", "shards:S", "labels:S", "dirichlet:ALPHA" or "natural"; see
            `federation.tasks.partition.partition`.
        seed: clients with the same seed, count, scheme and sizes hold disjoint parts.
        sizes: "equal", or for iid and dirichlet "lognormal:SIGMA" (see `federation.tasks.partition.quotas`).

    Raises:
        PartError: an index or a count out of range, or an unknown scheme.
    """

    index: int
    count: int
    scheme: str = "iid"
    seed: int = 0
    sizes: str = "equal"

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.index < self.count:
            raise PartError(f"part {self.index + 1} of {self.count}: parts count from 1/{max(self.count, 1)}")
        if self.seed < 0:
            raise PartError(f"the seed of a partition is not negative; got {self.seed}")
        if not _known(self.scheme, _SCHEMES):
            raise PartError(
                f"unknown scheme {self.scheme!r}: use iid, shards:S or labels:S (S >= 1), dirichlet:ALPHA (ALPHA > 0) "
                "or natural"
            )
        if not _known(self.sizes, _SIZES):
            raise PartError(f"unknown sizes {self.sizes!r}: use equal or lognormal:SIGMA (SIGMA > 0)")
        if self.sizes != "equal" and self.scheme.partition(":")[0] not in ("iid", "dirichlet"):
            raise PartError(f"sizes {self.sizes!r} go with iid and dirichlet; {self.scheme!r} has sizes of its own")

    @classmethod
    def parse(cls, text: str, scheme: str = "iid", seed: int = 0, sizes: str = "equal") -> "Part":
        """Reads "3/8", the third of eight parts, counted from 1. Raises PartError."""
        match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
        if match is None:
            raise PartError(f"{text!r} is no part: write 3/8 for the third of eight")
        return cls(int(match[1]) - 1, int(match[2]), scheme, seed, sizes)


def _known(text: str, forms: dict[str, str | None]) -> bool:
    """True if a text is one of these kinds, followed by an argument of its form if it takes one."""
    kind, colon, argument = text.partition(":")
    form = forms.get(kind)
    return kind in forms and (re.fullmatch(form, argument) is not None if form else not colon)
