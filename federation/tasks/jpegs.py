"""CIFAR-10 as JPEG copies in one .npz file: lossy, and so not the original pixels.

The file holds `jpeg` (uint8, all files joined), `offsets` (int64, where each begins and the last ends), `labels` and
`is_test` (uint8), in the order of split, class and number.
"""

import io
import logging
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from federation.files.npz import NpzError, read_npz
from federation.tasks.errors import DataError
from federation.tasks.published_files import BROKEN

FILE = "cifar10_jpeg/cifar10_jpeg.npz"
_NAMES = ("jpeg", "offsets", "labels", "is_test")
_WANTED = "expected an .npz with JPEG images of 32 x 32 (jpeg, offsets), their labels from 0 to 9, and is_test"

_log = logging.getLogger(__name__)


def read(path: Path, *, test: bool) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """One official part: images (n, 3, 32, 32), labels (n,). Raises DataError if it is missing or malformed.

    Decoding takes seconds; later calls in the same process return the same arrays, which must not be changed.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"cannot read {path} ({error}); {_WANTED}") from error
    _log.warning("%s holds lossy JPEG copies of CIFAR-10: accuracy is not that on the original pixels", path)
    return _decoded(path, test, (status.st_mtime_ns, status.st_size))


@lru_cache(maxsize=2)  # both parts of one file
def _decoded(path: Path, test: bool, version: tuple[int, int]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    from PIL import Image  # noqa: PLC0415

    joined, offsets, labels = _arrays(path, test)
    images = np.empty((len(labels), 32, 32, 3), np.uint8)
    for number, (begin, end) in enumerate(offsets):
        try:
            with Image.open(io.BytesIO(joined[begin:end]), formats=("JPEG",)) as image:
                if image.size != (32, 32):
                    raise DataError(f"{path}: an image is {image.size[0]} x {image.size[1]} large; {_WANTED}")
                images[number] = np.asarray(image.convert("RGB"))
        except (*BROKEN, SyntaxError) as error:
            raise DataError(f"{path}: bytes {begin} to {end} are no image ({error}); {_WANTED}") from error
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2)), labels


def _arrays(path: Path, test: bool) -> tuple[bytes, NDArray[np.int64], NDArray[np.int64]]:
    """All files joined, the bounds (n, 2) of those of one part, and their labels (n,)."""
    try:
        arrays = read_npz(path, _NAMES)
    except (NpzError, OSError) as error:
        raise DataError(f"cannot read {path} ({error}); {_WANTED}") from error
    joined, offsets, labels, is_test = (arrays[name] for name in _NAMES)
    bytewise = all(array.dtype == np.uint8 and array.ndim == 1 for array in (joined, labels, is_test))
    count = len(labels) if bytewise else 0
    if offsets.dtype.kind not in "iu" or offsets.shape != (count + 1,) or is_test.shape != (count,) or count == 0:
        raise DataError(f"{path}: its arrays do not belong together; {_WANTED}")
    bounds = np.stack([offsets[:-1], offsets[1:]], axis=1).astype(np.int64)
    if offsets[0] < 0 or offsets[-1] > len(joined) or (np.diff(bounds) <= 0).any() or labels.max() > 9:
        raise DataError(f"{path}: an offset or a label is out of range; {_WANTED}")
    own = is_test == test
    return joined.tobytes(), bounds[own], labels[own].astype(np.int64)
