"""What came out: one JSON file for each finished run, and CSV files of all of them."""

import csv
import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from experiments.definition import Cell
from federation.problems import explain

Measures = dict[str, float]

_UNSET = object()


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


class DamagedError(ValueError):
    """A file that is not what was written; the message says what is wrong with it."""


class _Stored(BaseModel):
    model_config = ConfigDict(strict=True)


def _with_a_number(measures: dict[str, float | None]) -> dict[str, float | None]:
    if measures.get("round") is None:
        raise ValueError("no round")
    return measures


_Document = TypeVar("_Document", bound=_Stored)


class _StoredResult(_Stored):
    spec: dict[str, Any]
    final: dict[str, float | None]
    rounds: list[Annotated[dict[str, float | None], AfterValidator(_with_a_number)]]


class _StoredHardware(_Stored):
    device: str


class _StoredSession(_Stored):
    command: str
    hardware: _StoredHardware


class _StoredRecord(_Stored):
    sessions: list[_StoredSession] = []


class Store:
    """The directory of one experiment's results: `runs/` for finished runs, `work/` for those under way."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def workspace(self, job: Job) -> Path:
        """Where a run under way keeps its state."""
        return self.directory / "work" / job.name

    def find(self, job: Job) -> Result | None:
        """The result of a run; None when there is none, only one of another specification, or one that is damaged."""
        try:
            stored = self._stored(job)
        except DamagedError:
            return None
        if stored is None or difference(stored.spec, job.document, job.given):
            return None
        return Result(
            job.cell.method.name,
            job.cell.condition.name,
            job.seed,
            job.document,
            _numbers(stored.final),
            [_numbers(item) for item in stored.rounds],
        )

    def damage(self, job: Job) -> str:
        """Why the result of a run cannot be read; empty when it can, or when there is none."""
        try:
            self._stored(job)
        except DamagedError as error:
            return f"runs/{self._file(job).name} cannot be read ({error})"
        return ""

    def other(self, job: Job) -> str:
        """How the specification of the result that is there differs from the run's; empty when it does not."""
        try:
            stored = self._stored(job)
        except DamagedError:
            return ""
        return "" if stored is None else difference(stored.spec, job.document, job.given)

    def count(self) -> int:
        """How many runs are finished, of whatever specification."""
        return len(list((self.directory / "runs").glob("*.json")))

    def keep(self, job: Job, final: Measures, rounds: list[Measures]) -> None:
        """Stores what a run came to: whole, or not at all."""
        cell = job.cell
        write_json(
            self._file(job),
            asdict(Result(cell.method.name, cell.condition.name, job.seed, job.document, final, rounds)),
        )

    def forget(self, job: Job) -> None:
        """Removes the result of a run, and what was there of one under way."""
        for path in (self._file(job), self.workspace(job)):
            _remove(path)

    def record(self) -> dict[str, Any]:
        """run.json: how the results came about; empty before the first run.

        Raises:
            DamagedError: it cannot be read.
        """
        there = _checked(self._record, _StoredRecord) is not None
        record: dict[str, Any] = json.loads(self._record.read_bytes()) if there else {}
        return record

    def keep_record(self, record: Mapping[str, Any]) -> None:
        """Writes run.json."""
        write_json(self._record, record)

    def set_record_aside(self) -> None:
        """Makes run.json.bad of run.json, for another to begin."""
        _set_aside(self._record)

    @property
    def _record(self) -> Path:
        return self.directory / "run.json"

    def _file(self, job: Job) -> Path:
        return self.directory / "runs" / f"{job.name}.json"

    def _stored(self, job: Job) -> _StoredResult | None:
        return _checked(self._file(job), _StoredResult)


def difference(stored: Any, now: Any, given: Any) -> str:
    """The first key in which a stored specification is not today's, with both values; empty when there is none.

    A key that came since counts as its default, unless it was given.

    Args:
        stored: the specification of what is there.
        now: the one that is asked for.
        given: the same as it is written, without the defaults.
    """
    found = _differing(stored, now, given)
    if found is None:
        return ""
    key, before, after = found
    return f"{'.'.join(key)} = {_spelled(before)}, not {_spelled(after)}"


def write_json(path: Path, document: Any) -> None:
    """Writes a JSON document, numbers that are not finite as null; whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    text = json.dumps(_plain(document), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    draft.write_text(text, encoding="utf-8")
    if path.is_dir():  # nothing of ours, and in the way
        _set_aside(path)
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


def _differing(stored: Any, now: Any, given: Any) -> tuple[tuple[str, ...], Any, Any] | None:
    if not (isinstance(stored, Mapping) and isinstance(now, Mapping)):
        return None if stored == now else ((), stored, now)
    told = given if isinstance(given, Mapping) else {}
    for key in dict.fromkeys([*now, *stored]):
        if key not in stored and key not in told:
            continue
        before, after = stored.get(key, _UNSET), now.get(key, _UNSET)
        if before is _UNSET and isinstance(after, Mapping):
            before = {}
        if found := _differing(before, after, told.get(key)):
            return (key, *found[0]), *found[1:]
    return None


def _spelled(value: Any) -> str:
    return "unset" if value is _UNSET else json.dumps(value, ensure_ascii=False, default=str)


def _checked(path: Path, model: type[_Document]) -> _Document | None:
    """What a model makes of a file; None when there is no file.

    Raises:
        DamagedError: it cannot be read, or the model does not take it.
    """
    try:
        return model.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedError(error.strerror) from error
    except ValidationError as error:
        raise DamagedError(explain(error.errors()[0], "").partition("; ")[0]) from error


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _set_aside(path: Path) -> None:
    bad = path.with_name(f"{path.name}.bad")
    _remove(bad)
    os.replace(path, bad)


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
