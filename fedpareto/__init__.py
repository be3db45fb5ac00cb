"""The face of fedpareto: the `fedpareto` command and the calls for notebooks. Imports the other packages, lazily.

>>> import fedpareto
>>> history = fedpareto.simulate("run.toml", data="data")  # doctest: +SKIP
>>> history.rounds["accuracy/mean"].plot()  # doctest: +SKIP
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpareto.notebook import simulate as simulate


def __getattr__(name: str) -> Any:
    """`fedpareto.simulate`, and `fedpareto.__version__`: loaded when somebody asks for them."""
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 - nothing here before it is needed

        return version("fedpareto")
    if name == "simulate":
        from fedpareto.notebook import simulate  # noqa: PLC0415

        return simulate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
