"""`fedpareto experiment list`: the experiments, in a table."""

from pathlib import Path
from typing import Any

from fedpareto.cli.research.experiment import Data
from fedpareto.cli.shared_options import CodeOption, ProgressJsonOption
from fedpareto.on_first_use import on_first_use
from fedpareto.standard_streams import print_document

with on_first_use():
    from fedpareto.cli.document import dumps
    from fedpareto.cli.show.tables import console, new_table
    from fedpareto.experiments import definition, loading
    from fedpareto.experiments.definition import Experiment
    from fedpareto.formatting import span


def list_command(data: Data = None, code: CodeOption = None, as_json: ProgressJsonOption = False) -> None:
    """List the experiments.

    The list shows their source, their size, and whether their data was found.

    The time is estimated from measured rounds, for one core of an AMD EPYC of 2024; the time of the quick form is in
    brackets. --jobs divides it among cores.
    """
    show(data, as_json=as_json)


def data_exists(experiment: "Experiment", data: Path | None) -> bool | None:
    """True if the data directory has the data of an experiment; None if it is unknown."""
    if not experiment.data:
        return True
    return None if data is None else any((data / path).exists() for path in experiment.data)


def show(data: Path | None, *, as_json: bool) -> None:
    """Prints the experiments, and those that cannot be used."""
    packages = {offer.name: {"package": offer.package} for offer in loading.plugins()}
    usable, unusable = list[dict[str, Any]](), list[dict[str, Any]]()
    for name in loading.names():
        package = packages.get(name, {})
        try:
            usable.append(_overview(loading.load(name), data) | package)
        except definition.ExperimentError as error:
            unusable.append({"name": name, "error": str(error)} | package)
    if as_json:
        print_document(dumps({"experiments": usable, "unusable": unusable}))
        return
    table = new_table("experiment", ">runs", ">quick", "on a core", "data", "what")
    for item in usable:
        whole, quick = item["core_seconds"], item["quick_core_seconds"]
        table.add_row(
            item["name"],
            str(item["runs"]),
            str(item["quick_runs"]),
            f"{span(whole)} ({span(quick)})" if whole and quick else "–",
            {None: "give --data", True: "there", False: "missing"}[item["data_there"]],
            f"{item['title']}\n{item['source']}" + (f" [package {item['package']}]" if "package" in item else ""),
        )
    for item in unusable:
        table.add_row(item["name"], "", "", "", "", f"cannot be used: {item['error']}")
    console().print(table)


def _overview(experiment: "Experiment", data: Path | None) -> dict[str, Any]:
    quick = experiment.in_quick_form()
    return {
        "name": experiment.name,
        "title": experiment.title,
        "source": experiment.source,
        "methods": [method.name for method in experiment.methods],
        "conditions": [condition.name for condition in experiment.conditions if condition.name],
        "seeds": list(experiment.seeds),
        "rounds": experiment.spec["rounds"],
        "runs": len(experiment.cells()) * len(experiment.seeds),
        "quick_runs": len(quick.cells()) * len(quick.seeds),
        "core_seconds": experiment.core_seconds(experiment.cells(), len(experiment.seeds)),
        "quick_core_seconds": quick.core_seconds(quick.cells(), len(quick.seeds)),
        "data": list(experiment.data),
        "data_there": data_exists(experiment, data),
    }
