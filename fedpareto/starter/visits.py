"""Who comes back? One row of measurements for each visit; a patient has several visits."""

import numpy as np
import torch
from torch import nn

from fedpareto import Column, DataError, DataSource, Pool, Standardise, Task

MEASUREMENTS = [Column(name=f"measurement_{number}", low=0, high=200) for number in range(1, 7)]


class Visits(Task):
    """Predicts from six measurements whether a patient comes back."""

    def columns(self) -> tuple[Column, ...]:
        """What a run of kind = "statistics" describes: the inputs, then the target."""
        return (*MEASUREMENTS, Column(name="comes_back", classes=2))

    def model(self) -> nn.Module:
        """The model, which all members train; its first layer has the means and deviations of all members' data."""
        return nn.Sequential(Standardise(MEASUREMENTS), nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))

    def pool(self, source: DataSource) -> Pool:
        """All rows of a member."""
        if source.directory is None:
            raise DataError("name the directory of the data: --data DIR")
        path = source.directory / "visits.csv"  # patient, six measurements, 0 or 1
        try:
            table = np.genfromtxt(path, delimiter=",", skip_header=1, ndmin=2)  # an empty field is missing: NaN
            patients, x, y = table[:, 0].astype(int), table[:, 1:7], table[:, 7]
        except (OSError, ValueError, IndexError) as error:
            raise DataError(f"expected {path}: a header, then patient, 6 numbers, 0 or 1 ({error})") from error
        return Pool(torch.from_numpy(x).float(), torch.from_numpy(y).long(), groups=patients, stratify=True)
