"""ResNet-18 as federated experiments have it: for small images, and without running statistics."""

from functools import partial

from torch import nn
from torchvision.models import resnet18


def small_resnet18() -> nn.Module:
    """32 x 32 colour images, float32 (n, 3, 32, 32) -> (n, 512); 11,168,832 parameters.

    Torchvision's (He et al. 2016) with a stem of 3 x 3, stride 1, and no pooling after it, and with GroupNorm of two
    groups in place of BatchNorm. As in the code of FedCMOO, the last 4 x 4 map is averaged over its first three rows
    and columns.
    """
    network: nn.Module = resnet18(norm_layer=partial(nn.GroupNorm, 2))
    network.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    network.maxpool = nn.Identity()
    network.avgpool = nn.AvgPool2d(3)
    network.fc = nn.Identity()
    return network
