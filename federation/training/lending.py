"""Lends a client's samples to own code that may write into them, as `x.div_(255)` or `y[y == 255] = 0` does.

An evaluation passes views of the client's samples, and a minibatch of the whole split is the samples themselves. What a
model or a loss writes there would stay for as long as the process runs. So the first batch of each kind of pass is lent
as copies, which show whether the code writes. Code that writes gets copies from then on, one for each call, and its
results are those of code that copies first. Code that does not write gets the samples themselves, and pays nothing.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from torch import Tensor
from torch.utils._pytree import tree_map_only

from federation.tasks import Task, TaskError


class SamplesWrittenError(TaskError):
    """Own code wrote into the samples themselves, and not into the first batch. Later passes get copies."""


class Lending:
    """What is known of the code of a task; trainers that share a model share it.

    With `copies`, own code always gets copies.
    """

    def __init__(self, task: Task, *, copies: bool = False) -> None:
        self._task = task
        self._tried: set[str] = set()
        self._writes = copies

    def of(self, kind: str, *samples: Tensor) -> "_Loan":
        """Lends samples for one pass, whose kind is "training" or "evaluation".

        Raises:
            SamplesWrittenError: at the end of the pass.
        """
        return _Loan(self, kind, samples, known=self._writes, copies=self._writes or kind not in self._tried)

    def returned(self, kind: str, *, written: bool, spoilt: bool) -> None:
        """Notes the end of a pass: whether the code wrote at all, and into the samples themselves."""
        self._tried.add(kind)
        self._writes |= written
        if spoilt:
            raise SamplesWrittenError(
                f"task {self._task.name!r}: its code wrote into the samples that it was given, in some batches of the "
                f"{kind} only: copy them first, as in x = x.clone() or y = y.clone()"
            )


class _Loan:
    """Samples during one pass. `give` is called for each call of own code, with the tensors among its arguments."""

    def __init__(self, lending: Lending, kind: str, samples: tuple[Tensor, ...], *, known: bool, copies: bool) -> None:
        self._lending, self._kind, self._samples, self._known = lending, kind, samples, known
        self._versions = [version(part) for part in samples]
        self._copies: list[tuple[Tensor, Tensor, object]] = []
        self.give: Callable[..., Any] = self._copied if copies else _as_it_is

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            return
        spoilt = [version(part) for part in self._samples] != self._versions
        written = self._known or spoilt or any(self._written(*each) for each in self._copies)
        self._lending.returned(self._kind, written=written, spoilt=spoilt)

    def _copied(self, *given: Any) -> Any:
        """Copies of the tensors in some arguments, in any nesting; of a single argument, that alone."""
        copied = tree_map_only(Tensor, self._copy, given)
        return copied if len(copied) > 1 else copied[0]

    def _copy(self, part: Tensor) -> Tensor:
        if part.requires_grad:  # of a loss that differentiates, which would not depend on a copy
            return part
        copy = part.clone()
        self._copies.append((part, copy, version(copy)))
        return copy

    def _written(self, part: Tensor, copy: Tensor, before: object) -> bool:
        """True if a copy was changed. PyTorch does not count what is written through `.data` or an array of NumPy."""
        sample = any(part is each for each in self._samples)
        return version(copy) != before or (sample and not _equal(part, copy))


def _as_it_is(*given: Any) -> Any:
    return given if len(given) > 1 else given[0]


def version(part: Tensor) -> object:
    """The version of a tensor: another one after each write that PyTorch counts."""
    return None if part.is_inference() else part._version, part.requires_grad


def _equal(a: Tensor, b: Tensor) -> bool:
    """True if the values are equal, also those that are not numbers."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())
