"""A curious coordinator's guess, from the vectors that it stores, which hospitals have another scanner.

The model is linear, so a row of an update is a weighted sum of the hospital's images: the images of the row's digit
have one sign, the others the opposite sign and less weight. It shows the digit as the hospital's scanner delivers it.
The words of a masked vector are uniform, so its picture is noise, and the guess is random.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from federation.tasks.digits import bundled
from federation.tasks.scanners import turned
from federation.v1.admin_pb2 import ListRepliesRequest
from federation.v1.admin_pb2_grpc import AdminStub
from federation.vectors import Array, update_rows
from fedpareto.demo.hospitals import HOSPITALS, TWO
from storage.blob_directory import DirectoryStore

CLASSES, PIXELS = 10, 64
PARAMETERS = CLASSES * PIXELS + CLASSES
SHOWN = 0  # the digit whose picture is shown


@dataclass(frozen=True)
class Guess:
    """The guess from the stored vectors of a round.

    Attributes:
        picked: the two hospitals whose vectors look most like turned images.
        right: the number of them that have the other scanner.
        of: the number of hospitals with a stored vector.
        pictures: by hospital, the picture of the digit `SHOWN`, 64 numbers in [0, 1].
    """

    picked: tuple[str, ...]
    right: int
    of: int
    pictures: Mapping[str, tuple[float, ...]]


def guess(stub: AdminStub, home: Path, run: str, number: int) -> Guess:
    """Guesses from the record and the blobs of the coordinator in `home`, for a round of a run."""
    blobs = DirectoryStore(home / "blobs")
    stored: dict[str, NDArray[np.float64]] = {}
    for response in stub.ListReplies(ListRepliesRequest(run=run, round=number)):
        for reply in response.replies:
            if reply.accepted and reply.payload and reply.client_id in HOSPITALS:
                for row in update_rows(blobs.local(reply.payload)).values():
                    if row.length >= PARAMETERS and row.dtype != "U8":  # other rows are shares and ciphertexts
                        stored[reply.client_id] = rows(row.read())
    picked = sorted(stored, key=lambda name: turn(stored[name]))[-len(TWO) :]
    return Guess(
        picked=tuple(sorted(picked)),
        right=len(set(picked) & set(TWO)),
        of=len(stored),
        pictures={name: picture(update) for name, update in sorted(stored.items())},
    )


def rows(content: Array) -> NDArray[np.float64]:
    """A vector of the linear model as pictures, (10, 64); the words of a masked vector are taken as numbers."""
    numbers = content.view(np.int32) if content.dtype.kind == "u" else content
    return np.asarray(numbers[: CLASSES * PIXELS], dtype=np.float64).reshape(CLASSES, PIXELS)


def turn(update: NDArray[np.float64]) -> float:
    """The cosine of an update (10, 64), which is w_t - w, with turned digits, minus that with upright ones: in [-2, 2].

    The digits are the mean images of a public data set.
    """
    x, y = bundled()
    mean_digits = np.stack([x[y == digit].mean(axis=0) for digit in range(CLASSES)])
    shapes = mean_digits - mean_digits.mean(axis=0)
    return _cosine(-update, turned(shapes)) - _cosine(-update, shapes)


def picture(update: NDArray[np.float64]) -> tuple[float, ...]:
    """The digit `SHOWN` as an update (10, 64) shows it: 64 numbers in [0, 1]."""
    pixels = -update[SHOWN]
    low, high = pixels.min(), pixels.max()
    return tuple(((pixels - low) / max(high - low, 1e-12)).round(3).tolist())


def _cosine(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    return float((a * b).sum() / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-12))
