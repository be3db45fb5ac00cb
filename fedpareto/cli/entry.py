"""The start of the `fedpareto` command: checks that Python finds this project's packages, then runs the command."""

import sys
from importlib import import_module

from fedpareto.code_path import hidden_text


def main() -> None:
    """The console script."""
    if hidden := hidden_text():
        print(f"fedpareto: {hidden}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    import_module("fedpareto.cli.main").main()  # whose imports would be those of the other packages
