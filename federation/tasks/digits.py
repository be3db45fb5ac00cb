"""`digits`: 1797 handwritten digits of 8 x 8 pixels, which come with scikit-learn: no download.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.files.npz import NpzError, read_npz
from federation.tasks import Column, DataError, DataSource, Part, Pool
from federation.tasks.partition import partition
from federation.tasks.published import Published

FILE = "digits.npz"
_INK = 16  # pixels count the dots in a block of 4 x 4


class Digits(Published):
    """Classify a digit. `--data DIR` reads DIR/digits.npz; without it, scikit-learn's own copy, or a part of it."""

    network = "digits_mlp"

    def pool(self, source: DataSource) -> Pool:
        """Pixels in [0, 1], (n, 64), with labels (n,)."""
        import torch  # noqa: PLC0415

        x, y = bundled() if source.directory is None else _read(source.directory / FILE)
        return Pool(torch.from_numpy(inputs(x)), torch.from_numpy(y))

    def columns(self) -> tuple[Column, ...]:
        """The pixels `x0` to `x63` in [0, 1], and the digit `y`."""
        return (*(Column(name=f"x{number}", low=0.0, high=1.0) for number in range(64)), Column(name="y", classes=10))


def write_parts(directories: Sequence[Path], *, scheme: str = "shards:2", seed: int = 0) -> tuple[Path, ...]:
    """Deals scikit-learn's digits: writes a digits.npz with its own part into each directory; returns the files.

    Raises:
        PartError: more parts than digits, or an unknown scheme.
    """
    x, y = bundled()
    written = []
    parts = partition(Pool(x, y), Part(0, len(directories), scheme, seed))
    for directory, own in zip(directories, parts, strict=True):
        directory.mkdir(parents=True, exist_ok=True)
        np.savez(directory / FILE, x=x[own], y=y[own])
        written.append(directory / FILE)
    return tuple(written)


def inputs(x: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Images (n, 64) as inputs of a model: pixels in [0, 1]."""
    return x.astype(np.float32) / np.float32(_INK)


def bundled() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The digits that scikit-learn brings, images (n, 64) and labels (n,), without importing it, which takes seconds.

    Raises:
        DataError: scikit-learn is not installed, or brings no digits.
    """
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise DataError("the digits come with scikit-learn, which is not installed here: install fedpareto[torch]")
    file = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    try:
        table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    except OSError as error:
        raise DataError(f"cannot read the digits of scikit-learn: {error}") from error
    return np.ascontiguousarray(table[:, :-1]), table[:, -1].astype(np.int64)


def read_arrays(path: Path, maker: str, *more: str) -> tuple[NDArray[np.uint8], NDArray[np.int64], list[NDArray[Any]]]:
    """Images (n, 64) and labels (n,) from an .npz file, and its arrays of the names `more`.

    `maker` is the function that the message about a missing file names.

    Raises:
        DataError: it is missing, or malformed.
    """
    names = "".join(f", {name}" for name in more)
    wanted = f"expected an .npz with x, (n, 64) numbers from 0 to {_INK}, and y, (n,) labels from 0 to 9{names}"
    if not path.is_file():
        raise DataError(
            f"no file {path}; {wanted}. {maker} makes one; without --data the digits that scikit-learn brings are used"
        )
    try:
        arrays = read_npz(path, ("x", "y", *more))
    except (NpzError, OSError) as error:
        raise DataError(f"cannot read {path} ({error}); {wanted}") from error
    x, y = arrays["x"], arrays["y"]
    numbers = all(array.dtype.kind in "uif" for array in (x, y))
    if not numbers or x.ndim != 2 or x.shape[1] != 64 or y.shape != x.shape[:1]:
        raise DataError(f"{path} holds x {x.shape} of {x.dtype} and y {y.shape} of {y.dtype}; {wanted}")
    for name, values, top in (("x", x, _INK), ("y", y, 9)):
        if not np.isin(values, np.arange(top + 1)).all():
            raise DataError(f"{path}: {name} holds a value that is no integer from 0 to {top}; {wanted}")
    return x.astype(np.uint8), y.astype(np.int64), [arrays[name] for name in more]


def _read(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    x, y, _ = read_arrays(path, "federation.tasks.digits.write_parts")
    return x, y
