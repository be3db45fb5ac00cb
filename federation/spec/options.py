"""Options: numbers and choices of a rule, a stage before it, an optimiser or an attack, as fields of a dataclass."""

import dataclasses
from typing import Any, ClassVar


def option(default: Any, words: str, within: str = "(-inf, inf)") -> Any:
    """A field of a class that inherits from `Options`.

    Args:
        default: its value if none is given.
        words: its description, for lists of rules and attacks.
        within: the interval of accepted numbers, such as "[0, 1)"; by default, any finite number is accepted.
    """
    return dataclasses.field(default=default, metadata={"help": words, "within": within})


@dataclasses.dataclass(frozen=True)
class Options:
    """The base of classes with options. A subclass with its own `__post_init__` calls this one first.

    Attributes:
        refusal: the exception for a number outside its interval.
    """

    refusal: ClassVar[type[ValueError]] = ValueError

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, within = getattr(self, field.name), field.metadata.get("within")
            if within and isinstance(value, int | float) and not _contains(within, value):
                word = f'be "{field.default}" or ' if isinstance(field.default, str) else ""
                raise self.refusal(f"{field.name} must {word}lie in {within}; got {value!r}")


def _contains(interval: str, value: float) -> bool:
    low, high = map(float, interval[1:-1].split(","))
    above = low <= value if interval[0] == "[" else low < value
    return above and (value <= high if interval[-1] == "]" else value < high)
