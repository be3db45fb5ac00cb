"""Random changes of a training minibatch of images."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample


def rotated(images: Tensor, degrees: Tensor, mean: Sequence[float], mirrored: Tensor | None = None) -> Tensor:
    """Every image turned about its centre, bilinear. Pixels from outside are the mean, zero once standardised.

    Args:
        images: (n, channels, side, side), bytes or floats from 0 to 255.
        degrees: (n,), counter-clockwise.
        mean: of each channel, of pixels scaled to [0, 1]: what the model subtracts.
        mirrored: bool, (n,) or one for all: which are mirrored afterwards, left to right. None: none.

    Returns:
        float32, of the images' shape.
    """
    angle = torch.deg2rad(degrees.to(torch.float32))
    cosine, sine, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    sign = 1.0 if mirrored is None else 1.0 - 2.0 * mirrored
    # Where in the given image each pixel of the new one lies, the y axis pointing down.
    where = torch.stack([cosine * sign, -sine, zero, sine * sign, cosine, zero], dim=1).view(-1, 2, 3)
    grid = affine_grid(where, list(images.shape), align_corners=False)
    border = 255 * torch.tensor(mean, device=images.device).view(-1, 1, 1)
    return grid_sample(images.float() - border, grid, padding_mode="zeros", align_corners=False) + border
