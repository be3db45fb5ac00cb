"""What a curious coordinator learns of a hospital from the vector that it stores of it: here, which scanner it has.

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
from federation.v1.admin_pb2 import GetRoundRequest, ListRepliesRequest
from federation.v1.admin_pb2_grpc import AdminStub
from federation.vectors import Array, model_row, update_rows
from fedpareto.demo.stage import HOSPITALS, TWO
from storage.directory import DirectoryStore

CLASSES, PIXELS = 10, 64
PARAMETERS = CLASSES * PIXELS + CLASSES
SHOWN = 0  # the digit whose picture is shown


@dataclass(frozen=True)
class Guess:
    """What the stored vectors of a round tell.

    Attributes:
        right: hospitals whose scanner is guessed right from the vector that is stored of them.
        of: hospitals of whom a vector is stored.
        right_from_sum: hospitals whose scanner is guessed right from the step, the sum of all vectors.
        pictures: by hospital, the picture of the digit `SHOWN`, 64 numbers in [0, 1].
    """

    right: int
    of: int
    right_from_sum: int
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
    last = stub.GetRound(GetRoundRequest(run=run, round=number)).summary
    before, after = (model_row(blobs.local(model)).read() for model in (last.base_model, last.result_model))
    summed = has_other_scanner(rows(before - after))
    return Guess(
        right=sum(has_other_scanner(update) == (name in TWO) for name, update in stored.items()),
        of=len(stored),
        right_from_sum=sum(summed == (name in TWO) for name in stored),
        pictures={name: picture(update) for name, update in sorted(stored.items())},
    )


def rows(content: Array) -> NDArray[np.float64]:
    """A vector of the linear model as pictures, (10, 64); a masked one as if its words were the numbers."""
    numbers = content.view(np.int32) if content.dtype.kind == "u" else content
    return np.asarray(numbers[: CLASSES * PIXELS], dtype=np.float64).reshape(CLASSES, PIXELS)


def has_other_scanner(update: NDArray[np.float64]) -> bool:
    """Whether an update (10, 64), which is w_t - w, looks like turned digits rather than upright ones."""
    return _likeness(update, turn=True) > _likeness(update, turn=False)


def picture(update: NDArray[np.float64]) -> tuple[float, ...]:
    """The digit `SHOWN` as an update (10, 64) shows it: 64 numbers in [0, 1]."""
    pixels = -update[SHOWN]
    low, high = pixels.min(), pixels.max()
    return tuple(((pixels - low) / max(high - low, 1e-12)).round(3).tolist())


def _likeness(update: NDArray[np.float64], *, turn: bool) -> float:
    """The product of what an update shows with the mean image of each digit."""
    x, y = bundled()
    images = (turned(x) if turn else x).astype(np.float64)
    means = np.stack([images[y == digit].mean(axis=0) for digit in range(CLASSES)])
    return float(-(update * (means - images.mean(axis=0))).sum())
