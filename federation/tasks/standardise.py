"""The layer that standardises the inputs of a model, with the means and deviations of all members' data."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from federation.statistics.data_columns import Column

_TABLE = 2  # dimensions: samples and features


class Standardise(nn.Module):
    """(x - mean) / deviation for each feature of x (n, features, ...); a missing value (NaN, infinite) becomes 0.

    It is the first layer of a model. Means and deviations come from the result of a run that has described the members'
    data (`fedpareto admin submit --statistics`); before that they are 0 and 1. They are in each model of the run, and
    neither trained nor sent.

    Args:
        columns: the features in their order: columns, or their names. Of images, the channels.

    Raises:
        ValueError: no column, or one name twice.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, columns: Sequence[Column | str]) -> None:
        super().__init__()
        if isinstance(columns, str):
            raise TypeError(f"Standardise({columns!r}): give a sequence of columns, such as [{columns!r}]")
        self.columns = tuple(column if isinstance(column, str) else column.name for column in columns)
        if not self.columns or len(set(self.columns)) < len(self.columns):
            raise ValueError(
                f"Standardise needs at least one column, each once; got {', '.join(self.columns) or 'none'}"
            )
        self.register_buffer("mean", torch.zeros(len(self.columns)))
        self.register_buffer("deviation", torch.ones(len(self.columns)))

    def forward(self, x: Tensor) -> Tensor:
        """The standardised inputs, (n, features, ...) float32.

        Raises:
            ValueError: x has another number of features.
        """
        if x.dim() < _TABLE or x.shape[1] != len(self.columns):
            raise ValueError(
                f"Standardise: inputs of shape {tuple(x.shape)}; needed: (samples, {len(self.columns)}, ...)"
            )
        shape = (1, -1, *(1 for _ in x.shape[_TABLE:]))
        values = x if x.is_floating_point() else x.float()
        scaled = ((values - self.mean.view(shape)) / self.deviation.view(shape)).to(self.mean.dtype)
        return torch.where(torch.isfinite(values), scaled, torch.zeros_like(scaled))

    def extra_repr(self) -> str:
        """The number of columns."""
        return f"{len(self.columns)} columns"
