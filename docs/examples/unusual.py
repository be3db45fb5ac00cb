"""Tasks whose inputs, outputs or losses do not have the usual form, on made-up data."""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fedpareto import DataSource, Pool, Task


def made_up(*shape: int) -> Tensor:
    return torch.randn(120, *shape, generator=torch.Generator().manual_seed(0))


# --- several inputs

SIDE, COLUMNS = 8, 5


class ImageAndTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(1, 4, 3)
        self.out = nn.Linear(4 * 6 * 6 + COLUMNS, 2)

    def forward(self, x: Tensor) -> Tensor:
        pixels, table = x.split([SIDE * SIDE, COLUMNS], dim=1)
        maps = self.image(pixels.view(-1, 1, SIDE, SIDE)).relu()
        logits: Tensor = self.out(torch.cat([maps.flatten(1), table], dim=1))
        return logits


class Patients(Task):
    def model(self) -> nn.Module:
        return ImageAndTable()

    def pool(self, source: DataSource) -> Pool:
        images, table = made_up(SIDE, SIDE), made_up(COLUMNS)
        return Pool(torch.cat([images.flatten(1), table], dim=1), table[:, 0] > 0)


# --- a loss that is made inside of the model

PLACES = 4  # a box: its corners


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(SIDE * SIDE, 32), nn.ReLU(), nn.Linear(32, PLACES))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        pixels, target = x.split([SIDE * SIDE, PLACES], dim=1)
        box = self.net(pixels)
        return {"box": box, "loss": functional.smooth_l1_loss(box, target, reduction="none").mean(dim=1)}


class Boxes(Task):
    def model(self) -> nn.Module:
        return Detector()

    def pool(self, source: DataSource) -> Pool:
        images = made_up(SIDE, SIDE)
        boxes = images.flatten(1)[:, :PLACES]
        return Pool(torch.cat([images.flatten(1), boxes], dim=1), boxes)

    def losses(self, output: dict[str, Tensor], y: Tensor) -> dict[str, Tensor]:
        return {"loss": output["loss"].mean()}

    def correct(self, output: dict[str, Tensor], y: Tensor) -> None:
        return None


# --- auxiliary outputs in training alone


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 16)
        self.early, self.out = nn.Linear(16, 2), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        hidden = self.first(x).tanh()
        logits: Tensor = self.out(self.second(hidden).tanh())
        return (logits, self.early(hidden)) if self.training else logits


class Helped(Task):
    def model(self) -> nn.Module:
        return Deep()

    def pool(self, source: DataSource) -> Pool:
        x = made_up(6)
        return Pool(x, x.sum(dim=1) > 0)

    def losses(self, output: Tensor | tuple[Tensor, Tensor], y: Tensor) -> dict[str, Tensor]:
        if isinstance(output, Tensor):
            return super().losses(output, y)
        logits, early = output
        return {"loss": functional.cross_entropy(logits, y.long()) + 0.3 * functional.cross_entropy(early, y.long())}


# --- a loss that differentiates


class Potential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            places = x.detach().requires_grad_()
            energy = self.net(places).sum()
            (slope,) = torch.autograd.grad(energy, places, create_graph=True)
        return -slope


class Forces(Task):
    def model(self) -> nn.Module:
        return Potential()

    def pool(self, source: DataSource) -> Pool:
        places = made_up(3)
        return Pool(places, -places)

    def losses(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": functional.mse_loss(output, y)}

    def correct(self, output: Tensor, y: Tensor) -> None:
        return None


# --- two networks that are trained against each other


class Rivals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        self.judge = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        made = self.maker(torch.randn(len(x), 4, device=x.device))
        fixed = {name: parameter.detach() for name, parameter in self.judge.named_parameters()}
        return {
            "real": self.judge(x),
            "made": self.judge(made.detach()),  # moves the judge alone
            "passed": functional_call(self.judge, fixed, (made,)),  # moves the maker alone
        }


class Points(Task):
    objectives = ("judge", "maker")

    def model(self) -> nn.Module:
        return Rivals()

    def pool(self, source: DataSource) -> Pool:
        x = made_up(2) / 4 + 1
        return Pool(x, torch.zeros(len(x)))

    def losses(self, output: dict[str, Tensor], y: Tensor) -> dict[str, Tensor]:
        return {
            "judge": (functional.softplus(-output["real"]) + functional.softplus(output["made"])).mean(),
            "maker": functional.softplus(-output["passed"]).mean(),
        }

    def correct(self, output: dict[str, Tensor], y: Tensor) -> None:
        return None
