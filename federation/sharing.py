"""Which parameters of a task's model a run shares, and which stay with its members."""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from federation.vectors import Layout, Vector

PATTERN = r"^[A-Za-z0-9_.*-]{1,200}$"  # over the names of parameters: * is any text
MAX_PATTERNS = 100
TREATMENTS = ("local", "frozen")  # of buffers: kept by each member, or left at their initial values


class SharingError(ValueError):
    """Patterns that do not suit a model; the message names the key and what is wrong."""


@dataclass(frozen=True)
class Sharing:
    """The tensors of a model by what a run does with them: shared, personal or frozen.

    Attributes:
        whole: the layout of the task's model, (d,).
        personal_names: of the tensors that each member keeps and trains.
        frozen_names: of those that stay at their initial values.
    """

    whole: "Layout"
    personal_names: frozenset[str]
    frozen_names: frozenset[str]

    @classmethod
    def of(
        cls,
        whole: "Layout",
        personal: Sequence[str],
        frozen: Sequence[str],
        buffers: Collection[str] = (),
        treatment: str = "",
    ) -> "Sharing":
        """What patterns choose, and of the tensors called `buffers` a treatment: "local" or "frozen".

        Raises:
            SharingError: a pattern is malformed or matches nothing, a tensor is personal and frozen, none is shared, or
                there are buffers and no treatment, or the other way round.
        """
        names = [tensor.name for tensor in whole.tensors if tensor.name not in buffers]
        if buffers and treatment not in TREATMENTS:
            raise SharingError(
                f"parameters.buffers: the model keeps {len(buffers)} buffers, such as {min(buffers)!r}: say what "
                f"becomes of them, {' or '.join(map(repr, TREATMENTS))}"
            )
        if treatment and not buffers:
            raise SharingError(f"parameters.buffers: {treatment!r}, but the model keeps no buffers")
        kept, fixed = (frozenset(buffers if treatment == name else ()) for name in TREATMENTS)
        chosen = cls(whole, _matched("personal", personal, names) | kept, _matched("frozen", frozen, names) | fixed)
        if both := sorted(chosen.personal_names & chosen.frozen_names):
            raise SharingError(f"parameters: {both[0]!r} is both personal and frozen")
        if not set(names) - chosen.personal_names - chosen.frozen_names:
            raise SharingError("parameters: no parameter of the model is shared")
        return chosen

    @cached_property
    def shared(self) -> "Layout":
        """The tensors of the run's model, in the order of the task's."""
        return self._layout(lambda name: name not in self.personal_names | self.frozen_names)

    @cached_property
    def personal(self) -> "Layout":
        """The personal tensors, in the order of the task's model. Raises ValueError if there are none."""
        return self._layout(self.personal_names.__contains__)

    @cached_property
    def frozen(self) -> tuple[slice, ...]:
        """The columns of the frozen tensors in the whole model."""
        return self._columns(self.frozen_names)

    def shared_of(self, model: "Vector") -> "Vector":
        """The shared parameters of a whole model (d,)."""
        return self._taken(model, {tensor.name for tensor in self.shared.tensors})

    def personal_of(self, model: "Vector") -> "Vector":
        """The personal parameters of a whole model (d,)."""
        return self._taken(model, self.personal_names)

    def with_shared(self, model: "Vector", shared: "Vector") -> "Vector":
        """A whole model (d,) with these shared parameters; the rest is as in `model`, which stays unchanged."""
        return self._put(model, {tensor.name for tensor in self.shared.tensors}, shared)

    def with_personal(self, model: "Vector", personal: "Vector") -> "Vector":
        """A whole model (d,) with these personal parameters; the rest is as in `model`, which stays unchanged."""
        return self._put(model, self.personal_names, personal)

    def _layout(self, wanted: Callable[[str], bool]) -> "Layout":
        from federation.vectors import Layout  # noqa: PLC0415 - it needs NumPy, which `fedpareto --help` does not

        return Layout(tuple(tensor for tensor in self.whole.tensors if wanted(tensor.name)))

    def _columns(self, names: Collection[str]) -> tuple[slice, ...]:
        found, offset = [], 0
        for tensor in self.whole.tensors:
            if tensor.name in names:
                found.append(slice(offset, offset + tensor.size))
            offset += tensor.size
        return tuple(found)

    def _taken(self, model: "Vector", names: Collection[str]) -> "Vector":
        import numpy as np  # noqa: PLC0415

        return np.concatenate([model[part] for part in self._columns(names)])

    def _put(self, model: "Vector", names: Collection[str], values: "Vector") -> "Vector":
        made, offset = model.copy(), 0
        for part in self._columns(names):
            length = part.stop - part.start
            made[part] = values[offset : offset + length]
            offset += length
        return made


def _matched(key: str, patterns: Sequence[str], names: Sequence[str]) -> frozenset[str]:
    """The names that the patterns match."""
    if len(patterns) > MAX_PATTERNS:
        raise SharingError(f"parameters.{key}: {len(patterns)} patterns; at most {MAX_PATTERNS}")
    found: set[str] = set()
    for pattern in patterns:
        if re.fullmatch(PATTERN, pattern) is None:
            raise SharingError(f"parameters.{key}: {pattern[:200]!r} is no pattern: letters, digits, _ . - and *")
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
            raise SharingError(f"parameters.{key}: {pattern!r} matches no parameter of the model; there are {shown}")
        found.update(matching)
    return frozenset(found)
