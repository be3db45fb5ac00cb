"""Arguments and options that the commands of `fedpareto experiment` share."""

from pathlib import Path
from typing import Annotated

import typer

from fedpareto.cli import completion

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="See `fedpareto experiment list`; or a file of your own, ./my.toml.",
        autocompletion=completion.experiments,
    ),
]
Data = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Directory of the data sets, as their tasks expect them.")
]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Directory of the results. Default: results/NAME...")]
QuickForm = Annotated[bool, typer.Option("--quick", help="Use the quick form, which takes minutes on two cores.")]
Rounds = Annotated[int | None, typer.Option(min=1, help="Another number of rounds; the table says how many.")]
