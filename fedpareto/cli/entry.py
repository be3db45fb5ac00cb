"""The start of the `fedpareto` command: checks that Python finds this project's packages, then runs the command."""

import sys
from importlib import import_module

from fedpareto.cli.code_path import hidden_packages


def main() -> None:
    """The console script."""
    if hidden := hidden_packages():
        lines = [f"  {item.hidden_by} hides {item.path}" for item in hidden]
        message = "\n".join(
            [
                "fedpareto: Python would import other packages in place of fedpareto's own:",
                *lines,
                "Take their directory out of PYTHONPATH, or start in another directory. Name the directory of your own "
                "code with --code DIR or in FEDPARETO_CODE",
            ]
        )
        print(message, file=sys.stderr)  # noqa: T201
        sys.exit(2)
    import_module("fedpareto.cli.main").main()  # whose imports would be those of the other packages
