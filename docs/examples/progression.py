"""A regression: how far has diabetes progressed after a year? The data comes with scikit-learn (Efron et al. 2004)."""

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torchmetrics import MeanSquaredError

from fedpareto import DataSource, Metric, Pool, Task


class RootMeanSquare(MeanSquaredError):
    def __init__(self) -> None:
        super().__init__(squared=False)

    def update(self, output: Tensor, y: Tensor) -> None:
        super().update(output[:, 0], y)


class Progression(Task):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))

    def pool(self, source: DataSource) -> Pool:
        x, y = load_diabetes(return_X_y=True)  # each column of x is standardised and divided by 21
        return Pool(21 * torch.from_numpy(x).float(), torch.from_numpy(y).float() / 100)

    def losses(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(output[:, 0], y)}

    def correct(self, output: Tensor, y: Tensor) -> None:
        return None

    def metrics(self) -> dict[str, Metric]:
        return {"rmse": Metric(RootMeanSquare(), better="lower", largest=4.0)}
