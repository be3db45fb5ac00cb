"""Where updates are aggregated."""


class DeviceError(ValueError):
    """A device that this machine does not have; the message says what to do."""


def require_device(device: str) -> None:
    """Checks that updates can be aggregated on a device.

    Args:
        device: "cpu" or "cuda".

    Raises:
        DeviceError: it is "cuda", and torch is not installed or finds no GPU.
    """
    if device != "cuda":
        return
    try:
        import torch  # noqa: PLC0415 - only a coordinator that aggregates on a GPU needs it
    except ModuleNotFoundError:
        raise DeviceError(
            'device = "cuda" needs torch, which is not installed here: install fedpareto[torch], or set device = "cpu"'
        ) from None
    if not torch.cuda.is_available():
        raise DeviceError('device = "cuda": torch finds no GPU on this machine; set device = "cpu"')
