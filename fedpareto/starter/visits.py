"""Who comes back? One row of measurements for each visit; a patient has several visits."""

import numpy as np
import torch
from torch import nn

from fedpareto import DataError, DataSource, Pool, Task


class Visits(Task):
    """Predicts from six measurements whether a patient comes back."""

    def model(self) -> nn.Module:
        """The model, which all members train."""
        return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 2))

    def pool(self, source: DataSource) -> Pool:
        """All rows of a member."""
        if source.directory is None:
            raise DataError("name the directory of the data: --data DIR")
        path = source.directory / "visits.csv"  # patient, six measurements, 0 or 1
        try:
            table = np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2)
            patients, x, y = table[:, 0].astype(int), table[:, 1:7], table[:, 7]
        except (OSError, ValueError, IndexError) as error:
            raise DataError(f"expected {path}: a header, then patient, 6 numbers, 0 or 1 ({error})") from error
        return Pool(torch.from_numpy(x).float(), torch.from_numpy(y).long(), groups=patients, stratify=True)
