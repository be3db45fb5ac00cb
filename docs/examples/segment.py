"""A U-Net (Ronneberger et al., 2015) that marks bright discs in noisy images, measured by Dice."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from fedpareto import DataSource, Metric, Pool, Task

SIDE = 32


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Two convolutions with GroupNorm, which does not mix the samples of a minibatch."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Images (n, 1, H, W) to logits (n, H, W)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList([block(1, width), block(width, 2 * width)])
        self.bottom = block(2 * width, 4 * width)
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)]
        )
        self.join = nn.ModuleList([block(4 * width, 2 * width), block(2 * width, width)])
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for down in self.down:
            x = down(x)
            kept.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), kept.pop()], dim=1))
        return self.last(x)[:, 0]


def dice(marked: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """2 |A and B| / (|A| + |B|) of each image, (n,), for shares from 0 to 1."""
    overlap, size = (marked * mask).sum((1, 2)), (marked + mask).sum((1, 2))
    return (2 * overlap + 1) / (size + 1)


class Dice:
    """The mean Dice score of the images of a split."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, output: torch.Tensor, y: torch.Tensor) -> None:
        self.total += float(dice((output > 0).float(), y).sum())
        self.count += len(y)

    def compute(self) -> float:
        return self.total / max(1, self.count)


class Discs(Task):
    """Made-up images; a member's own come from `source.directory`."""

    evaluation_batch = 64

    def model(self) -> nn.Module:
        return UNet()

    def pool(self, source: DataSource) -> Pool:
        random = torch.Generator().manual_seed(0)
        centres = torch.randint(8, SIDE - 8, (240, 2), generator=random)
        radii = torch.randint(3, 8, (240,), generator=random)
        rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
        distances = (rows - centres[:, 0, None, None]) ** 2 + (columns - centres[:, 1, None, None]) ** 2
        masks = (distances <= radii[:, None, None] ** 2).float()
        images = masks + 0.7 * torch.randn(masks.shape, generator=random)
        return Pool(images[:, None], masks)

    def losses(self, output: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        soft = 1 - dice(output.sigmoid(), y).mean()
        return {"loss": binary_cross_entropy_with_logits(output, y) + soft}

    def correct(self, output: torch.Tensor, y: torch.Tensor) -> None:
        return None  # the share of right pixels says little where few are marked

    def metrics(self) -> dict[str, Metric]:
        return {"dice": Metric(Dice())}
