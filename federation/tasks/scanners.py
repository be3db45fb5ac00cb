"""`scanners`: handwritten digits at ten hospitals, two of which have another scanner: their images are turned.

The digits are those of `digits`, dealt evenly. Hospitals 9 and 10 hold theirs turned by 90 degrees. The model is
linear, so the two kinds of images compete for it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from federation.tasks import DataError, DataSource, Pool
from federation.tasks.digits import bundled, inputs, read_arrays
from federation.tasks.published import Published

FILE = "scanners.npz"
HOSPITALS = 10
TURNED = (8, 9)  # the indices of the hospitals with the other scanner
_SIDE = 8  # pixels
PixelT = TypeVar("PixelT", np.uint8, np.float64)

_TESTED = 3  # one image of three tests: 60 of a hospital's 180, so one image is 1.7 points of its accuracy


class Scanners(Published):
    """Classify a digit from another hospital's scanner, too.

    `--data DIR` reads the hospital's own DIR/scanners.npz. Without it, the digits of all hospitals are dealt from
    scikit-learn's copy; with the scheme "natural" each part is one hospital.
    """

    network = "digits_linear"

    def pool(self, source: DataSource) -> Pool:
        """Pixels in [0, 1], (n, 64), with labels (n,); a third of each hospital's images is its test part."""
        if source.directory is None:
            return _all_hospitals(*bundled())
        x, y, test = _read(source.directory / FILE)
        return _pool(x[~test], y[~test], test=_pool(x[test], y[test]))


def write_parts(directories: Sequence[Path], *, seed: int = 0) -> tuple[Path, ...]:
    """Deals scikit-learn's digits to ten hospitals: writes a scanners.npz into each directory; returns the files.

    Raises:
        ValueError: not ten directories.
    """
    if len(directories) != HOSPITALS:
        raise ValueError(f"there are {HOSPITALS} hospitals; got {len(directories)} directories")
    x, y = bundled()
    written = []
    for index, (directory, own) in enumerate(zip(directories, _deal(len(y), seed), strict=True)):
        directory.mkdir(parents=True, exist_ok=True)
        np.savez(directory / FILE, x=scanned(x[own], index), y=y[own], test=_tested(len(own)))
        written.append(directory / FILE)
    return tuple(written)


def scanned(images: NDArray[np.uint8], hospital: int) -> NDArray[np.uint8]:
    """Images (n, 64) as the scanner of a hospital (0 to 9) delivers them: hospitals 8 and 9 turn them by 90 degrees."""
    if hospital not in TURNED:
        return images
    return turned(images)


def turned(images: NDArray[PixelT]) -> NDArray[PixelT]:
    """Images (n, 64) turned by 90 degrees, counter-clockwise."""
    squares = images.reshape(-1, _SIDE, _SIDE)
    return np.ascontiguousarray(np.rot90(squares, axes=(1, 2))).reshape(-1, _SIDE * _SIDE)


def _deal(count: int, seed: int) -> list[NDArray[np.int64]]:
    """The images of each hospital, in random order."""
    return np.array_split(np.random.default_rng(seed).permutation(count), HOSPITALS)


def _tested(count: int) -> NDArray[np.bool_]:
    """The mask of a hospital's test images, (n,)."""
    return np.equal(np.arange(count) % _TESTED, 0)


def _all_hospitals(x: NDArray[np.uint8], y: NDArray[np.int64]) -> Pool:
    parts = _deal(len(y), 0)
    images = np.concatenate([scanned(x[own], index) for index, own in enumerate(parts)])
    labels = np.concatenate([y[own] for own in parts])
    owner = np.repeat(np.arange(HOSPITALS), [len(own) for own in parts])
    test = np.concatenate([_tested(len(own)) for own in parts])
    owners = tuple(f"hospital-{index + 1:02d}" for index in range(HOSPITALS))
    tested = _pool(images[test], labels[test], owners, owner[test])
    return _pool(images[~test], labels[~test], owners, owner[~test], tested)


def _pool(
    x: NDArray[np.uint8],
    y: NDArray[np.int64],
    owners: tuple[str, ...] = (),
    owner: NDArray[np.int64] | None = None,
    test: Pool | None = None,
) -> Pool:
    import torch  # noqa: PLC0415

    return Pool(torch.from_numpy(inputs(x)), torch.from_numpy(y), owners=owners, owner=owner, test=test)


def _read(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.bool_]]:
    expected = "test, (n,) of bool, besides"
    x, y, (test,) = read_arrays(path, "federation.tasks.scanners.write_parts", "test")
    if test.dtype != np.bool_ or test.shape != y.shape or not 0 < test.sum() < len(test):
        raise DataError(f"{path} holds test {test.shape} of {test.dtype}; expected {expected}, with some of each kind")
    return x, y, test
