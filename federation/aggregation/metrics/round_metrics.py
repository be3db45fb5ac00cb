"""The metrics of one round: each with its value here, and with the values on record that pass for it.

Sums of float64 depend on their order in the last bits, and so on the processor, and two solvers may find different
weights of one direction. So each number on record is compared with a tolerance.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from federation.record.metric_definitions import Basis, basis

RELATIVE = 1e-9  # of a metric of signed numbers
_ABSOLUTE = 1e-12  # of any metric


@dataclass(frozen=True)
class Span:
    """The value of a metric, and the least and the largest that pass for it; none pass if it is not finite."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, relative: float = RELATIVE, absolute: float = 0.0) -> "Span":
        """A value that follows from signed facts, with its tolerance."""
        error = max(relative * abs(value), absolute, _ABSOLUTE)
        return cls(value, value - error, value + error)

    @classmethod
    def of_length(cls, value: float, square: float) -> "Span":
        """A length whose square has this tolerance."""
        low, high = value**2 - square, value**2 + square
        return cls(value, math.sqrt(max(low, 0.0)) - _ABSOLUTE, math.sqrt(high) + _ABSOLUTE)

    @classmethod
    def of_share(cls, value: float, low: float, high: float) -> "Span":
        """A share between two others, which may differ from it, since a share has steps."""
        return cls(value, low - _ABSOLUTE, high + _ABSOLUTE)

    @classmethod
    def measured(cls, value: float) -> "Span":
        """A value that only the coordinator measures: elsewhere any passes. If it is NaN, a round may lack it."""
        return cls(value, -math.inf, math.inf)

    @property
    def is_measured(self) -> bool:
        """True if only the coordinator measures the value."""
        return (self.low, self.high) == (-math.inf, math.inf)

    def problem(self, name: str, recorded: float | None) -> str:
        """The difference of the value on record, None if there is none, as text; empty if it passes."""
        if recorded is None:
            given = "" if self.is_measured else f"; what was signed gives {self.value!r}"
            return f"the record lacks {name}{given}" if math.isfinite(self.value) else ""
        if not math.isfinite(recorded):
            return f"the record says {name} = {recorded!r}, which is no finite number"
        if self.low <= recorded <= self.high:
            return ""
        given = repr(self.value) if math.isfinite(self.value) else "no finite number"
        return f"the record says {name} = {recorded!r}; what was signed gives {given}"


@dataclass(frozen=True)
class NotComputed:
    """Metrics that a round may have, and that cannot be computed here: those of some bases, and some by name.

    `why` says what is missing; it is empty if nothing is, and only the coordinator can compute them.
    """

    why: str
    bases: tuple[Basis, ...]
    names: Collection[str]

    def __contains__(self, name: str) -> bool:
        return name in self.names or basis(name) in self.bases


class Named(NamedTuple):
    """The names of metrics on record, sorted."""

    verified: tuple[str, ...]
    measured: tuple[str, ...]  # by the coordinator alone
    unchecked: tuple[str, ...]  # they cannot be computed here
    why: str


@dataclass(frozen=True, kw_only=True)
class RoundMetrics:
    """The metrics of a round: those with a value here, by name, and those that cannot be computed here."""

    spans: Mapping[str, Span] = field(default_factory=dict)
    hidden: tuple[NotComputed, ...] = ()

    @classmethod
    def exact(cls, found: Mapping[str, float]) -> "RoundMetrics":
        """Metrics that follow from signed numbers."""
        return cls(spans={name: Span.of(value) for name, value in found.items()})

    @classmethod
    def hiding(cls, why: str, *bases: Basis, names: Collection[str] = ()) -> "RoundMetrics":
        """No metrics, some of which cannot be computed here; see `NotComputed`."""
        return cls(hidden=(NotComputed(why, bases, names),))

    @classmethod
    def measured(cls, found: Mapping[str, float]) -> "RoundMetrics":
        """Metrics that only the coordinator measures."""
        return cls(spans={name: Span.measured(value) for name, value in found.items()})

    def __or__(self, other: "RoundMetrics") -> "RoundMetrics":
        return RoundMetrics(spans={**self.spans, **other.spans}, hidden=(*self.hidden, *other.hidden))

    @property
    def numbers(self) -> dict[str, float]:
        """The values for the record: the finite ones."""
        return {name: float(span.value) for name, span in self.spans.items() if math.isfinite(span.value)}

    def problem(self, recorded: Mapping[str, float]) -> str:
        """The first difference of the metrics on record, as text; empty if there is none."""
        for name, span in self.spans.items():
            if said := span.problem(name, recorded.get(name)):
                return said
        for name, value in recorded.items():
            if name not in self.spans and all(name not in one for one in self.hidden):
                return f"the record says {name} = {value!r}; nothing that was signed gives this number"
        return ""

    def named(self, recorded: Iterable[str]) -> Named:
        """Sorts the names of metrics on record by what is known of them here."""
        names = sorted(recorded)
        measured = {name for name in names if name in self.spans and self.spans[name].is_measured}
        hidden = {name: self._why_hidden(name) for name in names if name not in self.spans}
        measured |= {name for name, why in hidden.items() if not why}
        return Named(
            verified=tuple(name for name in names if name not in measured and name not in hidden),
            measured=tuple(sorted(measured)),
            unchecked=tuple(name for name, why in hidden.items() if why),
            why=next(filter(None, hidden.values()), ""),
        )

    def _why_hidden(self, name: str) -> str:
        return next((one.why for one in self.hidden if one.why and name in one), "")
