"""Completion of names with Tab, for built-in names and those of installed packages and `--code`."""

from collections.abc import Callable
from importlib import import_module

from fedpareto.on_first_use import on_first_use

with on_first_use():
    from federation.tasks import available


def _names_of(module: str) -> Callable[[str], list[str]]:
    """Completes the names that the function `names` of a module returns; the module is loaded when Tab is pressed."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in import_module(module).names() if name.startswith(incomplete)]

    return complete


algorithms = _names_of("coordinator.aggregation.registry")
attacks = _names_of("federation.attacks.catalogue")
experiments = _names_of("experiments.loading")


def tasks(incomplete: str) -> list[str]:
    """Names of tasks."""
    return [offer.name for offer in available() if offer.name.startswith(incomplete)]
