"""`femnist`: digits and letters by the people who wrote them, the natural owners.

Source: LEAF (Caldas et al. 2018), whose scripts make the files from NIST's Special Database 19.
"""

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.tasks import DataError, DataSource, Pool
from federation.tasks.published import Published

_CLASSES = 62
_PIXELS = 784

Samples = tuple[NDArray[np.uint8], NDArray[np.int64]]
_NOTHING: Samples = np.empty((0, 1, 28, 28), np.uint8), np.empty(0, np.int64)


class Femnist(Published):
    """Classify a character, 62 classes, of 28 x 28 pixels. `--data DIR` reads what LEAF makes, from DIR/femnist.

    That is train/*.json and test/*.json, when LEAF has split the writers' samples (the test part is then dealt to the
    same writers), or else all_data/all_data_*.json.
    """

    evaluation_batch = 500
    network = "femnist_cnn"
    files = "LEAF's femnist/all_data/all_data_*.json"

    def pool(self, source: DataSource) -> Pool:
        """Images as bytes, (n, 1, 28, 28), dark on light as LEAF has them, with labels (n,), by writer."""
        folder = self.directory(source) / "femnist"
        if not (folder / "train").is_dir():
            return _pool(_writers(folder / "all_data"))
        train, test = _writers(folder / "train"), _writers(folder / "test")
        if strangers := sorted(set(test) - set(train)):
            raise DataError(f"{folder / 'test'}: writer {strangers[0]!r} is not in {folder / 'train'}")
        return _pool(train, _pool({name: test.get(name, _NOTHING) for name in train}))


def _pool(writers: dict[str, Samples], test: Pool | None = None) -> Pool:
    import torch  # noqa: PLC0415

    owners = tuple(sorted(writers))
    x = np.concatenate([writers[name][0] for name in owners])
    y = np.concatenate([writers[name][1] for name in owners])
    owner = np.repeat(np.arange(len(owners)), [len(writers[name][1]) for name in owners])
    return Pool(torch.from_numpy(x), torch.from_numpy(y), owners=owners, owner=owner, test=test)


def _writers(folder: Path) -> dict[str, Samples]:
    """Everything in the .json files of a folder, by writer."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise DataError(f"no .json file in {folder}; expected LEAF's FEMNIST, as its preprocess.sh makes it")
    writers: dict[str, Samples] = {}
    for path in files:
        for name, samples in _read(path):
            if name in writers:
                raise DataError(f"{path}: writer {name!r} is in another file of {folder} too")
            writers[name] = samples
    return writers


def _read(path: Path) -> Iterator[tuple[str, Samples]]:
    wanted = f"expected LEAF's FEMNIST: user_data, by writer x ({_PIXELS} numbers from 0 to 1 each) and y (0 to 61)"
    try:
        # A file has ten million numbers but 256 different ones: made once each, they take a fifth of the memory.
        with path.open(encoding="utf-8-sig") as file:
            data: dict[str, dict[str, Any]] = json.load(file, parse_float=lru_cache(maxsize=1024)(float))["user_data"]
        for name, samples in data.items():
            x = np.array(samples["x"], dtype=np.float32).reshape(-1, 1, 28, 28)
            y = np.array(samples["y"], dtype=np.int64)
            if y.shape != x.shape[:1] or not ((x >= 0) & (x <= 1)).all() or not ((y >= 0) & (y < _CLASSES)).all():
                raise ValueError(f"writer {name!r} has x {x.shape} and y {y.shape}, or a number is out of range")
            yield name, (np.rint(x * 255).astype(np.uint8), y)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"cannot read {path} ({error}); {wanted}") from error
