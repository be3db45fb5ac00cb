"""The device that updates are aggregated on."""

from coordinator.ownership import CoordinatorHomeError


def check_torch_device(device: str) -> None:
    """Checks that updates can be aggregated on a device, "cpu" or "cuda".

    Raises:
        HomeError: it is "cuda", and torch is not installed or finds no GPU; the message says what to do.
    """
    if device != "cuda":
        return
    try:
        import torch  # noqa: PLC0415 - only a coordinator that aggregates on a GPU needs it
    except ModuleNotFoundError:
        raise CoordinatorHomeError(
            'device = "cuda" needs torch, which is not installed here: install fedpareto[torch], or set device = "cpu"'
        ) from None
    if not torch.cuda.is_available():
        raise CoordinatorHomeError('device = "cuda": torch finds no GPU on this machine; set device = "cpu"')
