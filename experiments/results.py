"""What came out: one JSON file for each finished run, and CSV files of all of them."""

import csv
import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.definition import Cell

Measures = dict[str, float]


@dataclass(frozen=True)
class Job:
    """One run: a cell with a seed."""

    cell: Cell
    seed: int

    @property
    def name(self) -> str:
        """Of its files, and of the run."""
        return f"{self.cell.slug}-{self.seed}"

    @property
    def label(self) -> str:
        """What people call it."""
        return f"{self.cell.label}, seed {self.seed}"

    @property
    def given(self) -> dict[str, Any]:
        """The specification of the run as it is written: without the defaults."""
        return self.cell.given(self.seed)

    @property
    def document(self) -> dict[str, Any]:
        """The specification of the run, whole, as JSON has it."""
        return self.cell.spec(self.seed).model_dump(mode="json")


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
        method: the method's name.
        condition: the condition's name.
        seed: the run's seed.
        spec: its whole specification.
        final: what is measured at the end (`measures.final`).
        rounds: what is measured in every evaluated round (`measures.rounds`).
    """

    method: str
    condition: str
    seed: int
    spec: dict[str, Any]
    final: Measures
    rounds: list[Measures]


class Store:
    """The directory of one experiment's results: `runs/` for finished runs, `work/` for those under way."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def workspace(self, job: Job) -> Path:
        """Where a run under way keeps its state."""
        return self.directory / "work" / job.name

    def find(self, job: Job) -> Result | None:
        """The result of a run; None when there is none yet, or only one of another specification."""
        try:
            document = json.loads(self._file(job).read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        if not _same(document.get("spec"), job.document, job.given):
            return None
        return Result(
            job.cell.method.name,
            job.cell.condition.name,
            job.seed,
            job.document,
            _numbers(document["final"]),
            [_numbers(item) for item in document["rounds"]],
        )

    def keep(self, job: Job, final: Measures, rounds: list[Measures]) -> None:
        """Stores what a run came to: whole, or not at all."""
        cell = job.cell
        write_json(
            self._file(job),
            asdict(Result(cell.method.name, cell.condition.name, job.seed, job.document, final, rounds)),
        )

    def forget(self, job: Job) -> None:
        """Removes the result of a run, and what was there of one under way."""
        self._file(job).unlink(missing_ok=True)
        shutil.rmtree(self.workspace(job), ignore_errors=True)

    def record(self) -> dict[str, Any]:
        """run.json: how the results came about; empty before the first run."""
        try:
            document: dict[str, Any] = json.loads((self.directory / "run.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return document

    def keep_record(self, record: Mapping[str, Any]) -> None:
        """Writes run.json."""
        write_json(self.directory / "run.json", record)

    def _file(self, job: Job) -> Path:
        return self.directory / "runs" / f"{job.name}.json"


def write_json(path: Path, document: Any) -> None:
    """Writes a JSON document, numbers that are not finite as null; whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(_plain(document), indent=1, allow_nan=False, ensure_ascii=False) + "\n")
    os.replace(draft, path)


def write_results(path: Path, results: Sequence[Result]) -> None:
    """results.csv: a row for each method, condition and seed."""
    _write(path, [{**_heading(item), **item.final} for item in results])


def write_curves(path: Path, results: Sequence[Result]) -> None:
    """curves.csv: a row for each evaluated round of each run."""
    _write(path, [{**_heading(item), **measures} for item in results for measures in item.rounds])


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
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else ""
    return value


def _same(stored: Any, now: Any, given: Any) -> bool:
    """Whether a stored specification is today's: a key that came since counts as its default, unless it was given."""
    if not (isinstance(stored, dict) and isinstance(now, dict)):
        return bool(stored == now)
    told = given if isinstance(given, dict) else {}
    return stored.keys() <= now.keys() and all(
        _same(stored[key], value, told.get(key)) if key in stored else key not in told for key, value in now.items()
    )


def _numbers(document: Mapping[str, float | None]) -> Measures:
    return {key: math.nan if value is None else value for key, value in document.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
