"""A task of one's own: is a tumour malignant? Thirty measurements of cell nuclei, from a CSV file at each clinic.

Try it without any file, on the data set that scikit-learn brings (Wolberg, Street, Mangasarian 1995).
"""

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torchmetrics.classification import MulticlassAUROC, MulticlassCalibrationError, MulticlassRecall

from fedpareto import DataError, DataSource, Metric, Pool, Task


class Tumours(Task):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(30, 16), nn.GroupNorm(4, 16), nn.Tanh(), nn.Linear(16, 2))

    def pool(self, source: DataSource) -> Pool:
        if source.directory is None:
            x, y = load_breast_cancer(return_X_y=True)
        else:
            path = source.directory / "tumours.csv"
            try:
                table = np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2)
                x, y = table[:, :30], table[:, 30]
            except (OSError, ValueError, IndexError) as error:
                raise DataError(
                    f"expected {path}: a header, then 30 measurements and 0 or 1 on a line ({error})"
                ) from error
        # The same scale at every clinic, whatever its own patients look like.
        features = torch.log(torch.from_numpy(x).float() + 1e-3)
        return Pool(features, torch.from_numpy(y).long())

    def metrics(self) -> dict[str, Metric]:
        return {
            "auc": Metric(MulticlassAUROC(num_classes=2)),
            "recall": Metric(MulticlassRecall(num_classes=2, average=None)),
            "calibration": Metric(MulticlassCalibrationError(num_classes=2), better="lower"),
        }
