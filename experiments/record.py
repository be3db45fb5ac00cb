"""The lasting record of an experiment's runs: results.csv, curves.csv, and run.json, which lists the runs of both.

The files in `runs/` can be restored from these three. So a published table keeps its rows when runs are added later.
"""

import csv
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from experiments import results as files
from experiments.results import DamagedError, Job, Key, Keyed, Measures, RunResult, Session, Store, checked, write_json

RESULTS, CURVES, RECORD = "results.csv", "curves.csv", "run.json"


@dataclass(frozen=True)
class TableRun(Keyed):
    """A run of a table.

    Attributes:
        changes: the sections of its specification that differ from those of the session's first run.
    """

    changes: dict[str, Any]


@dataclass
class Runs:
    """The runs of a table that one call made; `spec` is the whole specification of the first run."""

    session: Session
    spec: dict[str, Any]
    runs: list[TableRun]


@dataclass(frozen=True)
class TableRecord:
    """The content of run.json.

    Attributes:
        experiment: the experiment's name.
        sessions: the calls that made the runs of the table, the oldest first.
        failed: the reasons of failed runs that no later call finished, by the label of the run.
    """

    experiment: str = ""
    sessions: list[Runs] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def write(store: Store, experiment: str, results: Sequence[RunResult], failed: Mapping[str, str]) -> TableRecord:
    """Writes run.json and, if there are results, results.csv and curves.csv. For `failed` see `TableRecord`."""
    if results:
        write_results(store.directory / RESULTS, results)
        _write(store.directory / CURVES, ((item, measures) for item in results for measures in item.rounds))
    record = TableRecord(experiment, _sessions(results), dict(failed))
    write_json(store.directory / RECORD, asdict(record))
    return record


def read(store: Store) -> TableRecord:
    """The content of run.json; an empty record if there is no file.

    Raises:
        DamagedError: the file cannot be read.
    """
    try:
        return checked(store.directory / RECORD, TableRecord) or TableRecord()
    except DamagedError as error:
        raise DamagedError(f"{RECORD} cannot be read ({error})") from error


def set_aside(store: Store) -> list[str]:
    """Renames run.json and the CSV files, and returns their new names."""
    paths = [store.directory / name for name in (RECORD, RESULTS, CURVES)]
    return [files.set_aside(path).name for path in paths if path.exists()]


def restore(store: Store) -> None:
    """Restores the files of runs that run.json lists and `runs/` lacks, from the CSV files.

    Raises:
        DamagedError: one of the three files cannot be read.
    """
    listed = [(made.session, run, {**made.spec, **run.changes}) for made in read(store).sessions for run in made.runs]
    missing = [item for item in listed if not store.file(str(item[2].get("name"))).exists()]
    if not missing:
        return
    finals, curves = dict(_rows(store.directory / RESULTS)), defaultdict[Key, list[Measures]](list)
    for key, measures in _rows(store.directory / CURVES):
        curves[key].append(measures)
    for session, run, spec in missing:
        if run.key in finals:
            store.put(RunResult(*run.key, spec, finals[run.key], curves[run.key], session))


def forget(store: Store, jobs: Collection[Job]) -> None:
    """Removes runs from run.json, so that they are not restored.

    Raises:
        DamagedError: run.json cannot be read.
    """
    record = read(store)
    removed = {job.key for job in jobs}
    for made in record.sessions:
        made.runs = [run for run in made.runs if run.key not in removed]
    write_json(store.directory / RECORD, asdict(record))


def write_results(path: Path, results: Sequence[RunResult]) -> None:
    """Writes results.csv: a row for each method, condition and seed."""
    _write(path, ((item, item.final) for item in results))


def _sessions(results: Iterable[RunResult]) -> list[Runs]:
    sessions: list[Runs] = []
    for item in results:
        made = next((made for made in sessions if made.session == item.session), None)
        if made is None:
            made = Runs(item.session, item.spec, [])
            sessions.append(made)
        changes = {key: value for key, value in item.spec.items() if made.spec.get(key) != value}
        made.runs.append(TableRun(*item.key, changes))
    return sorted(sessions, key=lambda made: made.session.began)


def row(result: RunResult, measures: Measures) -> dict[str, Any]:
    """Measures of a run with its key in tables, by column."""
    return {"method": result.method, "condition": result.condition, "seed": result.seed, **measures}


def _write(path: Path, measured: Iterable[tuple[RunResult, Measures]]) -> None:
    rows = [row(*item) for item in measured]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for item in rows for name in item)), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _shown(value) for key, value in item.items()} for item in rows)


def _shown(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def _rows(path: Path) -> Iterator[tuple[Key, Measures]]:
    if not path.exists():
        return
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for fields in csv.DictReader(file):
                key = fields.pop("method"), fields.pop("condition"), int(fields.pop("seed"))
                yield key, {name: _number(text) for name, text in fields.items() if text}
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{path.name} cannot be read ({type(error).__name__}: {error})") from error


def _number(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else math.nan
