"""The face of fedpareto: the `fedpareto` command. Imports the other packages, lazily; is imported by none of them."""


def __getattr__(name: str) -> str:
    """`fedpareto.__version__`, read from the installed distribution when somebody asks for it."""
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 - nothing here before it is needed

        return version("fedpareto")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
