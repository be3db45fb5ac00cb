"""The layout of a task's whole model as a digest and two counts: two sites compare their versions of a task by it."""

import json
from collections.abc import Collection
from dataclasses import dataclass

from federation.digests import digest, parse
from federation.vectors import MAX_ELEMENTS, Layout


@dataclass(frozen=True)
class TaskLayout:
    """All tensors of a task's model.

    Attributes:
        digest: of their names and shapes, in their order, and of which of them are buffers.
        tensors: their number.
        elements: those that they have together.

    Raises:
        ValueError: not a digest, or numbers that no model has.
    """

    digest: str
    tensors: int
    elements: int

    def __post_init__(self) -> None:
        parse(self.digest)
        if not 1 <= self.tensors <= self.elements <= MAX_ELEMENTS:
            raise ValueError(
                f"{self.tensors} tensors with {self.elements} elements: a model has at least one tensor, each has at "
                f"least one element, and together they have at most {MAX_ELEMENTS}"
            )

    @classmethod
    def of(cls, layout: Layout, buffers: Collection[str] = ()) -> "TaskLayout":
        """The layout of a model whose tensors called `buffers` are no parameters."""
        entries = [[tensor.name, list(tensor.shape), tensor.name in buffers] for tensor in layout.tensors]
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False)
        return cls(digest(text.encode()), len(entries), layout.size)

    def __str__(self) -> str:
        return f"{self.tensors} tensors with {self.elements} elements"
