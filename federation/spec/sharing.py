"""Splits the parameters of a task's model into those that a run shares and those that stay with its members."""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Protocol

from federation.errors import Error

if TYPE_CHECKING:
    from federation.vectors import Layout, Vector

PATTERN = r"^[A-Za-z0-9_.*-]{1,200}$"  # for the names of parameters: * is any text
MAX_PATTERNS = 100
# Of buffers: kept by each member, the mean of the members', or left at their initial values.
TREATMENTS = ("local", "averaged", "frozen")
BUFFERS = "averaged.buffers"  # the row of a reply with averaged buffers; no objective can have this name


class Chosen(Protocol):
    """The parameters that a run does not share, as a specification or a message has them."""

    @property
    def personal(self) -> Iterable[str]:
        """Patterns of the names of parameters that each member keeps and trains."""

    @property
    def frozen(self) -> Iterable[str]:
        """Patterns of the names of parameters that stay at their initial values."""

    @property
    def buffers(self) -> str:
        """What becomes of buffers: one of `TREATMENTS`, or empty."""

    @property
    def fixed(self) -> Iterable[str]:
        """Patterns of the names of tensors that stay as the run's model has them: no reply has them."""

    @property
    def statistics(self) -> str:
        """The digest of the signed result that a layer Standardise is filled from; empty without one."""


@dataclass(frozen=True)
class Unshared:
    """The parameters that a run does not share: patterns, and what becomes of buffers; see `Chosen`."""

    personal: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    buffers: str = ""
    fixed: tuple[str, ...] = ()
    statistics: str = ""

    @classmethod
    def of(cls, chosen: Chosen) -> "Unshared":
        """Those of a specification or a message."""
        kept = tuple(chosen.personal), tuple(chosen.frozen), chosen.buffers
        return cls(*kept, tuple(chosen.fixed), chosen.statistics)


class SharingError(Error, ValueError):
    """The patterns do not suit a model; the message names the key and the error."""


@dataclass(frozen=True)
class Sharing:
    """The tensors of a model by their treatment in a run: shared, personal, frozen or fixed.

    Attributes:
        whole: the layout of the task's model, (d,).
        personal_names: of the tensors that each member keeps and trains.
        frozen_names: of the tensors that stay at their initial values.
        averaged_names: of the shared tensors that are buffers; they come after the parameters in the run's model.
        fixed_names: of the tensors that stay as the run's model has them; they come last in it.
    """

    whole: "Layout"
    personal_names: frozenset[str]
    frozen_names: frozenset[str]
    averaged_names: frozenset[str] = frozenset()
    fixed_names: frozenset[str] = frozenset()

    @classmethod
    def of(cls, whole: "Layout", chosen: Chosen, buffers: Collection[str] = ()) -> "Sharing":
        """Applies the patterns to the parameters, and one of `TREATMENTS` to the tensors called `buffers`.

        The patterns of `fixed` apply to all tensors.

        Raises:
            SharingError: a pattern is malformed or matches nothing, a tensor is treated in two ways, none is shared, or
                there are buffers and no treatment, or the other way round.
        """
        treatment = chosen.buffers
        everything = [tensor.name for tensor in whole.tensors]
        fixed_names = _matched("fixed", tuple(chosen.fixed), everything)
        buffers = frozenset(buffers) - fixed_names
        names = [name for name in everything if name not in buffers]
        if buffers and treatment not in TREATMENTS:
            raise SharingError(
                f"parameters.buffers: the model keeps {len(buffers)} buffers, such as {min(buffers)!r}: say what "
                f"becomes of them, one of {', '.join(map(repr, TREATMENTS))}"
            )
        if treatment and not buffers:
            raise SharingError(f"parameters.buffers: {treatment!r}, but the model keeps no buffers")
        kept, averaged, initial = (frozenset(buffers if treatment == name else ()) for name in TREATMENTS)
        personal_names = _matched("personal", tuple(chosen.personal), names) | kept
        frozen_names = _matched("frozen", tuple(chosen.frozen), names) | initial
        found = {"personal": personal_names, "frozen": frozen_names, "fixed": fixed_names}
        for one, other in combinations(found, 2):
            if both := sorted(found[one] & found[other]):
                raise SharingError(f"parameters: {both[0]!r} is both {one} and {other}")
        if not set(names) - personal_names - frozen_names - fixed_names:
            raise SharingError("parameters: no parameter of the model is shared")
        return cls(whole, personal_names, frozen_names, averaged, fixed_names)

    @cached_property
    def shared(self) -> "Layout":
        """The tensors of the run's model, in the order of the task's; then averaged buffers; then fixed tensors."""
        left_out = self.personal_names | self.frozen_names | self.averaged_names | self.fixed_names
        names = {tensor.name for tensor in self.whole.tensors} - left_out
        return self._layout(names, self.averaged_names, self.fixed_names)

    @cached_property
    def buffers(self) -> int:
        """The number of elements of the averaged buffers, which come after the parameters in the run's model."""
        return sum(tensor.size for tensor in self.whole.tensors if tensor.name in self.averaged_names)

    @cached_property
    def fixed(self) -> int:
        """The number of elements of the fixed tensors, which are at the end of the run's model."""
        return sum(tensor.size for tensor in self.whole.tensors if tensor.name in self.fixed_names)

    @cached_property
    def personal(self) -> "Layout":
        """The personal tensors, in the order of the task's model. Raises ValueError if there are none."""
        return self._layout(self.personal_names)

    @cached_property
    def frozen(self) -> tuple[slice, ...]:
        """The columns in the whole model of the tensors that no training changes: frozen and fixed ones."""
        still = self.frozen_names | self.fixed_names
        return tuple(part for name, part in self._columns.items() if name in still)

    def shared_of(self, model: "Vector") -> "Vector":
        """The run's model (d',) within a whole model (d,)."""
        return self._taken(model, self.shared)

    def personal_of(self, model: "Vector") -> "Vector":
        """The personal parameters of a whole model (d,)."""
        return self._taken(model, self.personal)

    def with_shared(self, model: "Vector", shared: "Vector") -> "Vector":
        """A whole model (d,) with this run's model; the rest is as in `model`, which stays unchanged."""
        return self._put(model, self.shared, shared)

    def with_personal(self, model: "Vector", personal: "Vector") -> "Vector":
        """A whole model (d,) with these personal parameters; the rest is as in `model`, which stays unchanged."""
        return self._put(model, self.personal, personal)

    def _layout(self, *groups: Collection[str]) -> "Layout":
        """The tensors of each group in turn, in the order of the whole model."""
        from federation.vectors import Layout  # noqa: PLC0415 - it needs NumPy, which `fedpareto --help` does not

        return Layout(tuple(tensor for names in groups for tensor in self.whole.tensors if tensor.name in names))

    @cached_property
    def _columns(self) -> dict[str, slice]:
        """The columns of each tensor in the whole model."""
        columns, offset = {}, 0
        for tensor in self.whole.tensors:
            columns[tensor.name] = slice(offset, offset + tensor.size)
            offset += tensor.size
        return columns

    def _taken(self, model: "Vector", part: "Layout") -> "Vector":
        import numpy as np  # noqa: PLC0415

        return np.concatenate([model[self._columns[tensor.name]] for tensor in part.tensors])

    def _put(self, model: "Vector", part: "Layout", values: "Vector") -> "Vector":
        whole = model.copy()
        for name, tensor in part.split(values).items():
            whole[self._columns[name]] = tensor.reshape(-1)
        return whole


def without_fixed(layout: "Layout", patterns: Sequence[str]) -> "Layout":
    """The tensors of a run's model before the fixed ones, the last, whose names match patterns.

    Raises:
        SharingError: no tensor is fixed, all are, or one that is not comes after one that is.
    """
    from federation.vectors import Layout  # noqa: PLC0415

    fixed = [any(fnmatchcase(tensor.name, pattern) for pattern in patterns) for tensor in layout.tensors]
    count = len(fixed) - sum(fixed)
    if count in (0, len(fixed)) or not all(fixed[count:]):
        raise SharingError(
            "parameters.fixed: a model is needed whose last tensors, and no others, have names that match "
            f"{', '.join(patterns)}; this one holds {_shown([tensor.name for tensor in layout.tensors])}"
        )
    return Layout(layout.tensors[:count])


def parameters_of(layout: "Layout", patterns: Sequence[str]) -> "Layout":
    """The parameters of a run's model whose averaged buffers, the last tensors, have names that match patterns.

    Raises:
        SharingError: no tensor is a buffer, none is a parameter, or a parameter comes after a buffer.
    """
    from federation.vectors import Layout  # noqa: PLC0415

    buffers = [any(fnmatchcase(tensor.name, pattern) for pattern in patterns) for tensor in layout.tensors]
    count = len(buffers) - sum(buffers)
    if count in (0, len(buffers)) or not all(buffers[count:]):
        raise SharingError(
            'parameters.buffers: "averaged": a model of parameters and, after them, buffers is needed, whose names '
            f"match parameters.buffer_names ({', '.join(patterns)}); this one holds "
            + _shown([tensor.name for tensor in layout.tensors])
        )
    return Layout(layout.tensors[:count])


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")


def _matched(key: str, patterns: Sequence[str], names: Sequence[str]) -> frozenset[str]:
    """The names that the patterns match."""
    if len(patterns) > MAX_PATTERNS:
        raise SharingError(f"parameters.{key}: {len(patterns)} patterns; at most {MAX_PATTERNS}")
    matched: set[str] = set()
    for pattern in patterns:
        if re.fullmatch(PATTERN, pattern) is None:
            raise SharingError(f"parameters.{key}: {pattern[:200]!r} is no pattern: letters, digits, _ . - and *")
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise SharingError(
                f"parameters.{key}: {pattern!r} matches no parameter of the model; there are {_shown(names)}"
            )
        matched.update(matching)
    return frozenset(matched)
