"""The values that an owner's own code gives, in a few words, for errors: their kinds and shapes, not their content."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

_NAMES = 6  # keys that are shown
_CHARACTERS = 30  # of a key


def in_words(value: Any) -> str:
    """A value in words: "a Tensor (8, 2) of float32", "a dict with 'ids' and 'mask'", "None"."""
    kind = "array" if type(value).__name__ == "ndarray" else type(value).__name__
    if value is None or isinstance(value, type):
        return "None" if value is None else f"the class {value.__name__}"
    if hasattr(value, "shape") and hasattr(value, "__len__"):  # of PyTorch, NumPy, pandas or SciPy
        of = f" of {dtype_name(value.dtype)}" if hasattr(value, "dtype") else ""
        return f"{_article(kind)} {tuple(value.shape)}{of}"
    if isinstance(value, Mapping):
        names = [repr(key)[:_CHARACTERS] for key in islice(value, _NAMES)]
        more = [f"{len(value) - _NAMES} more"] if len(value) > _NAMES else []
        return f"{_article(kind)} with {_listed([*names, *more])}" if names else f"an empty {kind}"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        parts = f" of {_listed([in_words(part) for part in value])}" if 0 < len(value) <= 2 else ""
        return f"{_article(kind)}{parts or f' of {len(value)}'}"
    return _article(kind)


def dtype_name(dtype: object) -> str:
    """The type of the elements of an array: "float32"; of text "str"."""
    name = str(dtype).removeprefix("torch.")
    return "str" if name.startswith(("<U", ">U", "|S")) else name


def _article(kind: str) -> str:
    return f"an {kind}" if kind[:1] in "aeiouAEIO" else f"a {kind}"


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
