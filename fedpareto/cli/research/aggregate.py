"""`fedpareto aggregate`: one aggregation, off line, on an .npz file."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fedpareto.cli import completion
from fedpareto.cli.failure import USAGE, CommandFailure, failing
from fedpareto.cli.shared_options import CodeOption, JsonOption
from fedpareto.on_first_use import on_first_use
from fedpareto.standard_streams import print_document

with on_first_use():
    import numpy as np
    from numpy.typing import NDArray

    from federation import plugins
    from federation.aggregation import interface
    from federation.aggregation.hyperparameters import Hyperparameter
    from federation.aggregation.registry import ListedRule, common_hyperparameters, listed, listed_stages
    from federation.aggregation.rules import torchjd
    from federation.files.npz import NpzError, read_npz
    from fedpareto.cli.show.tables import console, new_table
    from fedpareto.offline_aggregation import Aggregate, aggregate


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
    as_json: JsonOption = False,
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
        raise CommandFailure(
            "no file was given: name an .npz file with an array `updates` of shape (m, d); see --help", code=USAGE
        )
    arrays = _load(file)
    per_row: dict[str, Any] = {key: arrays[key] for key in _PER_ROW if key in arrays}
    state, parameters = _state(file, arrays), parameters_of(param or [])
    try:
        result = aggregate(name, arrays["updates"], **per_row, state=state, measure=True, **parameters)
    except interface.HyperparameterError as error:
        raise CommandFailure(str(error), code=USAGE) from None
    except plugins.PluginError as error:
        raise CommandFailure(str(error)) from None
    except Exception as error:
        if not isinstance(error, ValueError | ArithmeticError):
            raise
        raise CommandFailure(f"{file}: {error}", code=USAGE if isinstance(error, ValueError) else 1) from None
    if out is not None:
        with failing(OSError, what=f"could not write the direction to {out}"), out.open("wb") as target:
            np.save(target, result.direction, allow_pickle=False)  # on a path it would append .npy
    if as_json:
        document = {
            "algorithm": name,
            "coefficients": None if result.coefficients is None else result.coefficients.tolist(),
            "weights": result.weights.tolist(),
            "dropped": list(result.dropped),
            "diagnostics": result.diagnostics,
            "state": result.state,
        }
        print_document(json.dumps(document, allow_nan=False))
    else:
        _print(name, result)


def _load(file: Path) -> "Mapping[str, NDArray[Any]]":
    with (
        failing(OSError, code=USAGE, what=f"{file} could not be read"),
        failing(NpzError, code=USAGE, what=str(file)),
    ):
        arrays = read_npz(file)
    unknown = sorted(arrays.keys() - set(_ARRAYS))
    if unknown:
        raise CommandFailure(f"{file}: no use for array {unknown[0]!r}; there are {', '.join(_ARRAYS)}", code=USAGE)
    if "updates" not in arrays:
        raise CommandFailure(f"{file} has no array `updates` of shape (m, d), one row per client", code=USAGE)
    for key in arrays.keys() - {"state"}:
        if arrays[key].dtype.kind not in "fiu":
            raise CommandFailure(f"{file}: {key} must be numbers; it is {arrays[key].dtype}", code=USAGE)
    return arrays


def _state(file: Path, arrays: "Mapping[str, NDArray[Any]]") -> dict[str, Any] | None:
    if "state" not in arrays:
        return None
    try:
        state = json.loads(str(arrays["state"].item()))
    except ValueError:
        state = None
    if not isinstance(state, dict):
        raise CommandFailure(
            f'{file}: state must be the text of a JSON object, such as the "state" of --json', code=USAGE
        )
    return state


def parameters_of(texts: list[str]) -> dict[str, Any]:
    """Hyper-parameters from KEY=VALUE; a value is JSON, or a text. Raises CommandFailure."""
    values: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise CommandFailure(f"{text!r}: expected KEY=VALUE, such as epsilon=0.1", code=USAGE)
        try:
            values[key] = json.loads(value)
        except ValueError:
            values[key] = value
    return values


def _list(as_json: bool) -> None:
    def described(fields: "Iterable[Hyperparameter]") -> list[dict[str, Any]]:
        defaults = ({} if field.default is dataclasses.MISSING else {"default": field.default} for field in fields)
        return [
            {"name": field.name, **default, "help": field.help} for field, default in zip(fields, defaults, strict=True)
        ]

    def entry(item: "ListedRule") -> dict[str, Any]:
        brought = {"package": item.package} if item.package else {}
        parameters = described(item.hyperparameters)
        return {"name": item.name, "summary": item.summary, **brought, "hyperparameters": parameters}

    algorithms, stages = list(map(entry, listed())), list(map(entry, listed_stages()))
    common = described(common_hyperparameters())
    if as_json:
        print_document(json.dumps({"algorithms": algorithms, "stages": stages, "common": common}))
        return
    others: dict[str, Any] = {"name": f"{torchjd.PREFIX}NAME", "summary": torchjd.SUMMARY, "hyperparameters": []}
    stage_summary = "What is done to the updates before the algorithm sees them."
    table = new_table("algorithm", "hyper-parameter", "default", "meaning")
    table.columns[0].max_width = None
    for item in [
        *algorithms,
        others,
        {"name": "every algorithm", "summary": stage_summary, "hyperparameters": common},
        *({**stage, "name": f"stage {stage['name']}"} for stage in stages),
    ]:
        package = f" [package {item['package']}]" if "package" in item else ""
        table.add_row(item["name"], "", "", item["summary"] + package)
        for field in item["hyperparameters"]:
            default = json.dumps(field["default"]) if "default" in field else "–"
            table.add_row("", field["name"], default, field["help"])
    console().print(table)


def _print(name: str, result: "Aggregate") -> None:
    table = new_table("row", ">weight λ", ">coefficient c", "")
    for row, weight in enumerate(result.weights):
        note = "dropped: not finite" if row in result.dropped else ""
        coefficient = "-" if result.coefficients is None else f"{result.coefficients[row]:.6g}"
        table.add_row(str(row), f"{weight:.6f}", coefficient, note)
    screen = console()
    screen.print(table)
    diagnostics = new_table("diagnostic", ">value")
    diagnostics.columns[0].max_width = None
    for key, value in result.diagnostics.items():
        diagnostics.add_row(key, f"{value:.6g}")
    screen.print(diagnostics)
    if result.diagnostics.get("stationary"):
        screen.print(f"{name}: no direction improves every row; the direction is zero.")
