"""What is kept of an experiment's runs for good: results.csv, curves.csv, and run.json, which lists the runs of both.

The files in `runs/` can be made again from these three, so that a table that was published without them loses no row
when later runs are added to it.
"""

import csv
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from experiments import results as files
from experiments.results import DamagedError, Job, Measures, Result, Session, Store, checked, write_json

RESULTS, CURVES, RECORD = "results.csv", "curves.csv", "run.json"

_Heading = tuple[str, str, int]


class Run(BaseModel):
    """A run of a table.

    Attributes:
        method: the method's name.
        condition: the condition's name.
        seed: the run's seed.
        changes: the sections of its specification that are not those of the session's first run.
    """

    model_config = ConfigDict(strict=True)

    method: str
    condition: str
    seed: int
    changes: dict[str, Any]

    @property
    def heading(self) -> _Heading:
        """What its rows in the CSV files begin with."""
        return self.method, self.condition, self.seed


class Runs(BaseModel):
    """The runs of a table that one call made.

    Attributes:
        session: the call.
        spec: the whole specification of its first run.
        runs: all of them.
    """

    model_config = ConfigDict(strict=True)

    session: Session
    spec: dict[str, Any]
    runs: list[Run]


class Record(BaseModel):
    """run.json.

    Attributes:
        experiment: the experiment's name.
        sessions: the calls that made the runs of the table, the oldest first.
        failed: by run, why it failed, where it was not made since.
    """

    model_config = ConfigDict(strict=True)

    experiment: str = ""
    sessions: list[Runs] = []
    failed: dict[str, str] = {}


def write(store: Store, experiment: str, results: Sequence[Result], failed: Mapping[str, str]) -> Record:
    """Writes results.csv, curves.csv and run.json; the CSV files only where there are results.

    Args:
        store: where to.
        experiment: the experiment's name.
        results: of all runs of the table.
        failed: by run, why it failed.
    """
    if results:
        write_results(store.directory / RESULTS, results)
        write_curves(store.directory / CURVES, results)
    record = Record(experiment=experiment, sessions=_sessions(results), failed=dict(failed))
    write_json(store.directory / RECORD, record.model_dump(mode="json"))
    return record


def read(store: Store) -> Record:
    """run.json; without sessions when there is none.

    Raises:
        DamagedError: it cannot be read.
    """
    try:
        return checked(store.directory / RECORD, Record) or Record()
    except DamagedError as error:
        raise DamagedError(f"{RECORD} cannot be read ({error})") from error


def set_aside(store: Store) -> list[str]:
    """Gives run.json and the CSV files other names, for others to begin.

    Returns:
        These names.
    """
    there = [path for name in (RECORD, RESULTS, CURVES) if (path := store.directory / name).exists()]
    return [files.set_aside(path).name for path in there]


def restore(store: Store) -> None:
    """Makes the files of the runs that run.json lists and `runs/` lacks, from the CSV files.

    Raises:
        DamagedError: one of the three files cannot be read.
    """
    listed = [(part.session, run, {**part.spec, **run.changes}) for part in read(store).sessions for run in part.runs]
    lacking = [item for item in listed if not store.file(str(item[2].get("name"))).exists()]
    if not lacking:
        return
    finals, curves = dict[_Heading, Measures](), defaultdict[_Heading, list[Measures]](list)
    finals.update(_rows(store.directory / RESULTS))
    for heading, measures in _rows(store.directory / CURVES):
        curves[heading].append(measures)
    for session, run, spec in lacking:
        if run.heading in finals:
            store.put(Result(*run.heading, spec, finals[run.heading], curves[run.heading], session))


def forget(store: Store, jobs: Collection[Job]) -> None:
    """Removes runs from run.json, so that they are not restored.

    Raises:
        DamagedError: run.json cannot be read.
    """
    record = read(store)
    gone = {(job.cell.method.name, job.cell.condition.name, job.seed) for job in jobs}
    for part in record.sessions:
        part.runs = [run for run in part.runs if run.heading not in gone]
    write_json(store.directory / RECORD, record.model_dump(mode="json"))


def write_results(path: Path, results: Sequence[Result]) -> None:
    """results.csv: a row for each method, condition and seed."""
    _write(path, [{**_heading(item), **item.final} for item in results])


def write_curves(path: Path, results: Sequence[Result]) -> None:
    """curves.csv: a row for each evaluated round of each run."""
    _write(path, [{**_heading(item), **measures} for item in results for measures in item.rounds])


def _sessions(results: Iterable[Result]) -> list[Runs]:
    found: list[Runs] = []
    for item in results:
        part = next((part for part in found if part.session == item.session), None)
        if part is None:
            part = Runs(session=item.session, spec=item.spec, runs=[])
            found.append(part)
        changes = {key: value for key, value in item.spec.items() if part.spec.get(key) != value}
        part.runs.append(Run(method=item.method, condition=item.condition, seed=item.seed, changes=changes))
    return sorted(found, key=lambda part: part.session.began)


def _heading(result: Result) -> dict[str, Any]:
    return {"method": result.method, "condition": result.condition, "seed": result.seed}


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    rows = list(rows)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _shown(value) for key, value in row.items()} for row in rows)


def _shown(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def _rows(path: Path) -> Iterator[tuple[_Heading, Measures]]:
    if not path.exists():
        return
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                heading = row.pop("method"), row.pop("condition"), int(row.pop("seed"))
                yield heading, {key: _number(value) for key, value in row.items() if value}
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{path.name} cannot be read ({type(error).__name__}: {error})") from error


def _number(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else math.nan
