"""Is there a spot? Grey images of 12 x 12 pixels; a patient has several images."""

import numpy as np
import torch
from torch import nn

from fedpareto import DataError, DataSource, Pool, Task


class Scans(Task):
    """Finds bright spots in small images."""

    def model(self) -> nn.Module:
        """The model, which all members train."""
        convolution = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        return nn.Sequential(convolution, nn.Flatten(), nn.Linear(8 * 5 * 5, 2))

    def pool(self, source: DataSource) -> Pool:
        """All rows of a member."""
        if source.directory is None:
            raise DataError("name the directory of the data: --data DIR")
        path = source.directory / "scans.npz"  # x (n, 12, 12) from 0 to 255; y (n,) 0 or 1; patient (n,)
        try:
            with np.load(path, allow_pickle=False) as arrays:
                x, y, patients = arrays["x"], arrays["y"], arrays["patient"]
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"expected {path} with the arrays x, y and patient ({error})") from error
        return Pool(torch.from_numpy(x)[:, None] / 255, torch.from_numpy(y), groups=patients, stratify=True)
