"""What a curious coordinator learns of hospitals from the vectors that it stores of them: which have another scanner.

The model is linear, so a row of an update is a sum of the hospital's images: those of the row's digit with one sign,
the others, with less weight, with the other. It shows the digit as the hospital's scanner delivers it. Of a masked
vector, whose words are uniform, the picture is noise, and the guess is blind.
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
    """What the stored vectors of a round tell.

    Attributes:
        picked: the two hospitals whose vectors look most like turned images.
        right: how many of them have the other scanner.
        of: hospitals of whom a vector is stored.
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
                    if row.length >= PARAMETERS and row.dtype != "U8":  # others are shares and ciphertexts
                        stored[reply.client_id] = rows(row.read())
    picked = sorted(stored, key=lambda name: turn(stored[name]))[-len(TWO) :]
    return Guess(
        picked=tuple(sorted(picked)),
        right=len(set(picked) & set(TWO)),
        of=len(stored),
        pictures={name: picture(update) for name, update in sorted(stored.items())},
    )


def rows(content: Array) -> NDArray[np.float64]:
    """A vector of the linear model as pictures, (10, 64); a masked one as if its words were the numbers."""
    numbers = content.view(np.int32) if content.dtype.kind == "u" else content
    return np.asarray(numbers[: CLASSES * PIXELS], dtype=np.float64).reshape(CLASSES, PIXELS)


def turn(update: NDArray[np.float64]) -> float:
    """How much more an update (10, 64), which is w_t - w, looks like turned digits than like upright ones, in [-2, 2].

    It compares the rows with the mean image of each digit, which everybody knows.
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
