"""What Tab offers for names: what is built in, and what installed packages and `--code` bring."""

# ruff: noqa: PLC0415 - NumPy is loaded when Tab asks for a name of this kind


def algorithms(incomplete: str) -> list[str]:
    """Names of algorithms."""
    from coordinator.aggregation.registry import names

    return [name for name in names() if name.startswith(incomplete)]


def attacks(incomplete: str) -> list[str]:
    """Names of attacks."""
    from federation.attacks.catalogue import names

    return [name for name in names() if name.startswith(incomplete)]


def tasks(incomplete: str) -> list[str]:
    """Names of tasks."""
    from federation.tasks import available

    return [offer.name for offer in available() if offer.name.startswith(incomplete)]


def experiments(incomplete: str) -> list[str]:
    """Names of experiments."""
    from experiments.loading import names

    return [name for name in names() if name.startswith(incomplete)]
