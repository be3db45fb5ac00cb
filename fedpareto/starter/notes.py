"""Is it urgent? Short notes; a patient has several notes."""

import csv
from zlib import crc32

import torch
from torch import nn

from fedpareto import DataError, DataSource, Pool, Task

WORDS = 512  # places of a bag of words; each word has the same place at every member


class Notes(Task):
    """Tells urgent notes by their words."""

    def model(self) -> nn.Module:
        """The model, which all members train."""
        return nn.Linear(WORDS, 2)

    def pool(self, source: DataSource) -> Pool:
        """All rows of a member."""
        if source.directory is None:
            raise DataError("name the directory of the data: --data DIR")
        path = source.directory / "notes.csv"  # patient, urgent (0 or 1), text
        try:
            with path.open(encoding="utf-8", newline="") as file:
                rows = [(row["patient"], int(row["urgent"]), row["text"].split()) for row in csv.DictReader(file)]
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise DataError(f"expected {path} with the columns patient, urgent and text ({error!r})") from error
        x = torch.zeros(len(rows), WORDS)
        for index, (_, _, words) in enumerate(rows):
            x[index, [crc32(word.lower().encode()) % WORDS for word in words]] = 1
        return Pool(x, torch.tensor([row[1] for row in rows]), groups=[row[0] for row in rows], stratify=True)
