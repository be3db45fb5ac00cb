"""No compression: what the others are measured against."""

from dataclasses import dataclass
from typing import Any, ClassVar

from numpy.typing import NDArray

from federation.sketches.base import Jacobian, LinearSketch, Message


@dataclass(frozen=True, kw_only=True)
class Exact(LinearSketch):
    """The whole Jacobian, M_i d floats whatever the budget."""

    name: ClassVar[str] = "exact"

    def layout(self, served: int) -> tuple[tuple[str, int], ...]:
        """See the base: the rows, one after the other."""
        return (("jacobian", served * self.d),)

    def vectors(self, message: Message, served: int, *, shared_seed: int) -> NDArray[Any]:
        """See the base."""
        return message["jacobian"].reshape(served, self.d)

    def message(self, A: Jacobian, shared_seed: int, own_seed: int) -> dict[str, NDArray[Any]]:
        """A itself."""
        return {"jacobian": A}
