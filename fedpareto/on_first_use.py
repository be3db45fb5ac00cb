"""Imports that wait until something that they name is used, so that a command shows its help without its work."""

import builtins
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any


class WaitingImport:
    """Stands for a module, or for a function or class in a module, which is imported when this is called or read."""

    def __init__(self, module: str, name: str = "") -> None:
        self._module, self._name = module, name

    def imported(self) -> Any:
        """What this stands for; its module is imported, if that has not been done yet."""
        module = import_module(self._module)
        if not self._name:
            return module
        try:
            return getattr(module, self._name)
        except AttributeError:
            return import_module(f"{self._module}.{self._name}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.imported(), name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Calls what this stands for."""
        return self.imported()(*arguments, **options)


@contextmanager
def on_first_use() -> Iterator[None]:
    """The imports in this block are made when what they name is first used.

        with on_first_use():
            import numpy as np

            from fedpareto.run_names import RunNames

    The block is at the top of a file, where readers, type checkers and the import rules find it. Its names can be
    called, or asked for an attribute (`RunNames.read(stub)`), inside functions; `failing` and `partial` take them, too.
    For all else, the block imports the module: `except keys.IdentityError`. Annotations with its names are in quotes.
    `tests/fedpareto/test_on_first_use.py` checks this.
    """
    here, importing = sys._getframe(2).f_globals, builtins.__import__

    def waiting(
        name: str,
        globals: Mapping[str, object] | None = None,  # noqa: A002 - Python's names
        locals: Mapping[str, object] | None = None,  # noqa: A002
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        if globals is not here:  # another thread imports something
            return importing(name, globals, locals, fromlist or (), level)
        return (
            SimpleNamespace(**{each: WaitingImport(name, each) for each in fromlist})
            if fromlist
            else WaitingImport(name)
        )

    builtins.__import__ = waiting
    try:
        yield
    finally:
        builtins.__import__ = importing


def what_waits(value: Any) -> Any:
    """What this stands for if it is the name of an import that waits, else the value itself."""
    return value.imported() if isinstance(value, WaitingImport) else value
