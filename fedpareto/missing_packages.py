"""Packages of extras that a call needs and that may be missing."""

from importlib.util import find_spec

from federation.errors import Error


class PackagesMissing(Error, ModuleNotFoundError):
    """Packages of an extra are not installed; the message names them, and the extra."""


def need(what: str, *packages: str, extra: str) -> None:
    """Checks that packages are installed; `what` begins the message, such as "fedpareto.simulate needs".

    Raises:
        PackagesMissing: one of them is missing; the message says which and how to install it.
    """
    if missing := [name for name in packages if find_spec(name) is None]:
        raise PackagesMissing(f"{what} {' and '.join(missing)}, not installed here: install fedpareto[{extra}]")
