"""`fedpareto aggregate`: one aggregation, off line, on an .npz file."""

# ruff: noqa: PLC0415 - numpy is loaded by the command, not by `fedpareto --help`
import dataclasses
import json
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpareto.cli import completion
from fedpareto.cli.code_option import CodeOption
from fedpareto.cli.failure import USAGE, Failure

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from coordinator.aggregation import Aggregate
    from coordinator.aggregation.hyperparameters import Hyperparameter
    from coordinator.aggregation.registry import Listed

_PER_ROW = ("losses", "accuracies", "samples", "prior", "ages")
_ARRAYS = ("updates", *_PER_ROW, "state")


def aggregate_command(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE.npz",
            help="Arrays: updates (m, d), and optionally losses, accuracies, samples, prior, ages (m,) "
            "and state (a JSON text).",
        ),
    ] = None,
    name: Annotated[
        str,
        typer.Option(
            "--algorithm",
            "-a",
            metavar="NAME",
            help="An algorithm of --list, or your own, module:Class.",
            autocompletion=completion.algorithms,
        ),
    ] = "fedmgda+",
    param: Annotated[
        list[str] | None,
        typer.Option("--param", "-p", metavar="KEY=VALUE", help="A hyper-parameter; repeat it for several."),
    ] = None,
    code: CodeOption = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.npy", help="Write the direction (d,) here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    as_list: Annotated[bool, typer.Option("--list", help="Show the algorithms and their hyper-parameters.")] = False,
) -> None:
    """Combine the updates in a file into one direction.

    No federation is needed.

    A model w moves by -rate * direction. Rows that are not finite are left out.
    """
    if as_list:
        _list(as_json)
        return
    if file is None:
        raise Failure(
            "no file was given: name an .npz file with an array `updates` of shape (m, d); see --help", code=USAGE
        )
    import numpy as np

    from coordinator.aggregation import HyperparameterError, aggregate
    from federation.owners_code import described, owners_frame

    arrays = _load(file)
    per_row: dict[str, Any] = {key: arrays[key] for key in _PER_ROW if key in arrays}
    try:
        result = aggregate(
            name,
            arrays["updates"],
            **per_row,
            state=_state(file, arrays),
            **_parameters(param or []),
        )
    except HyperparameterError as error:
        raise Failure(str(error), code=USAGE) from None
    except Exception as error:
        if owners_frame(error):
            raise Failure(f"{name}: {described(error)}") from None
        if not isinstance(error, ValueError | ArithmeticError):
            raise
        raise Failure(f"{file}: {error}", code=USAGE if isinstance(error, ValueError) else 1) from None
    if out is not None:
        try:
            with out.open("wb") as target:  # np.save on a path would append .npy to it
                np.save(target, result.direction, allow_pickle=False)
        except OSError as error:
            raise Failure(f"could not write the direction to {out}: {error.strerror}") from None
    if as_json:
        document = {
            "algorithm": name,
            "coefficients": None if result.coefficients is None else result.coefficients.tolist(),
            "weights": result.weights.tolist(),
            "dropped": list(result.dropped),
            "diagnostics": result.diagnostics,
            "state": result.state,
        }
        typer.echo(json.dumps(document, allow_nan=False))
    else:
        _print(name, result)


def _load(file: Path) -> "dict[str, NDArray[Any]]":
    import numpy as np

    try:
        archive = np.load(file, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise Failure(f"{file} is a single array; an .npz file with `updates` is needed: np.savez", code=USAGE)
        with archive:
            arrays = {key: archive[key] for key in archive.files}
    except FileNotFoundError:
        raise Failure(f"{file} does not exist", code=USAGE) from None
    except OSError as error:
        raise Failure(f"{file} could not be read: {error.strerror or error}", code=USAGE) from None
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        # Object arrays are among them: reading one would run code from the file.
        raise Failure(f"{file} is not an .npz file of plain arrays: {error}", code=USAGE) from None
    unknown = sorted(arrays.keys() - set(_ARRAYS))
    if unknown:
        raise Failure(f"{file}: no use for array {unknown[0]!r}; there are {', '.join(_ARRAYS)}", code=USAGE)
    if "updates" not in arrays:
        raise Failure(f"{file} has no array `updates` of shape (m, d), one row per client", code=USAGE)
    for key in arrays.keys() - {"state"}:
        if arrays[key].dtype.kind not in "fiu":
            raise Failure(f"{file}: {key} must be numbers; it is {arrays[key].dtype}", code=USAGE)
    return arrays


def _state(file: Path, arrays: "dict[str, NDArray[Any]]") -> dict[str, Any] | None:
    if "state" not in arrays:
        return None
    try:
        state = json.loads(str(arrays["state"].item()))
    except ValueError:
        state = None
    if not isinstance(state, dict):
        raise Failure(f'{file}: state must be the text of a JSON object, such as the "state" of --json', code=USAGE)
    return state


def _parameters(texts: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise Failure(f"--param {text!r}: expected KEY=VALUE, such as epsilon=0.1", code=USAGE)
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def _list(as_json: bool) -> None:
    from coordinator.aggregation import torchjd
    from coordinator.aggregation.registry import common_hyperparameters, listed, listed_stages

    table = _table("algorithm", "hyper-parameter", "default", "meaning")

    def described(each: "Hyperparameter") -> dict[str, Any]:
        default = {} if each.default is dataclasses.MISSING else {"default": each.default}
        return {"name": each.name, **default, "help": each.help}

    def add(name: str, summary: str, fields: "Iterable[Hyperparameter]") -> None:
        table.add_row(name, "", "", summary)
        for each in map(described, fields):
            table.add_row("", each["name"], json.dumps(each["default"]) if "default" in each else "–", each["help"])

    def entry(item: "Listed") -> dict[str, Any]:
        brought = {"package": item.package} if item.package else {}
        own = [described(each) for each in item.hyperparameters]
        return {"name": item.name, "summary": item.summary, **brought, "hyperparameters": own}

    rules, stages, common = listed(), listed_stages(), common_hyperparameters()
    if as_json:
        document = {
            "algorithms": [entry(rule) for rule in rules],
            "stages": [entry(stage) for stage in stages],
            "common": [described(each) for each in common],
        }
        typer.echo(json.dumps(document))
        return
    for rule in rules:
        add(rule.name, _with_package(rule), rule.hyperparameters)
    table.add_row(f"{torchjd.PREFIX}NAME", "", "", torchjd.SUMMARY)
    add("every algorithm", "What is done to the updates before the algorithm sees them.", common)
    for stage in stages:
        add(f"stage {stage.name}", _with_package(stage), stage.hyperparameters)
    _console().print(table)


def _with_package(item: "Listed") -> str:
    return f"{item.summary} [package {item.package}]" if item.package else item.summary


def _print(name: str, result: "Aggregate") -> None:
    table = _table("row", "weight λ", "coefficient c", "")
    for row, weight in enumerate(result.weights):
        note = "dropped: not finite" if row in result.dropped else ""
        coefficient = "-" if result.coefficients is None else f"{result.coefficients[row]:.6g}"
        table.add_row(str(row), f"{weight:.6f}", coefficient, note)
    console = _console()
    console.print(table)
    diagnostics = _table("diagnostic", "value")
    for key, value in result.diagnostics.items():
        diagnostics.add_row(key, f"{value:.6g}")
    console.print(diagnostics)
    if result.diagnostics.get("stationary"):
        console.print(f"{name}: no direction improves every row; the direction is zero.")


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in {"weight λ", "coefficient c", "value"} else "left")
    return table


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False)
