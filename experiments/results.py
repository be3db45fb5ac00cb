"""Results of finished runs: one JSON file for each run."""

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, TypeAdapter, ValidationError

from experiments.definition import Cell
from federation.spec.problems import explain

Measures = dict[str, Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]]
Key = tuple[str, str, int]  # the names of method and condition, and the seed

_UNSET = object()
_Document = TypeVar("_Document")


@dataclass(frozen=True)
class Job:
    """One run: a cell with a seed."""

    cell: Cell
    seed: int

    @property
    def name(self) -> str:
        """The name of the run and of its files."""
        return f"{self.cell.slug}-{self.seed}"

    @property
    def label(self) -> str:
        """The name that is shown."""
        return f"{self.cell.label}, seed {self.seed}"

    @property
    def key(self) -> Key:
        """The key of the run in tables."""
        return *self.cell.key, self.seed

    @property
    def given(self) -> dict[str, Any]:
        """The run specification as it is written, without defaults."""
        return self.cell.given(self.seed)

    @property
    def document(self) -> dict[str, Any]:
        """The whole run specification, as JSON values."""
        return self.cell.spec(self.seed).model_dump(mode="json")


@dataclass(frozen=True)
class Session:
    """The call of a command that made runs; an empty command if unknown.

    Attributes:
        command: the command line, without directories.
        began: when the call began (ISO 8601, UTC).
        hardware: the machine; `device` is where clients were trained.
        versions: of Python and of the packages that the numbers depend on.
        commit: of the code; None outside a Git tree.
    """

    command: str = ""
    began: str = ""
    hardware: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None


def _must_have_a_round(measures: Measures) -> Measures:
    if math.isnan(measures.get("round", math.nan)):
        raise ValueError("no round")
    return measures


@dataclass(frozen=True)
class Keyed:
    """A run by the names of its method and condition, and its seed."""

    method: str
    condition: str
    seed: int

    @property
    def key(self) -> Key:
        """The key of the run in tables."""
        return self.method, self.condition, self.seed


@dataclass(frozen=True)
class RunResult(Keyed):
    """A finished run, its whole specification, and its measures: `measures.final` and `measures.rounds`."""

    spec: dict[str, Any]
    final: Measures
    rounds: list[Annotated[Measures, AfterValidator(_must_have_a_round)]]
    session: Session = field(default_factory=Session)

    def is_of(self, cell: Cell) -> bool:
        """Whether the run is one of a cell's."""
        return self.key[:2] == cell.key


class DamagedError(ValueError):
    """A file does not hold what was written; the message says what is wrong."""


class Store:
    """The directory of an experiment's results: `runs/` for finished runs, `work/` for interrupted ones.

    `keep` stores runs as made by `session`.
    """

    def __init__(self, directory: Path, session: Session | None = None) -> None:
        self.directory = directory
        self._runs = directory / "runs"
        self._session = session or Session()

    def workspace(self, job: Job) -> Path:
        """The directory of a run's state until it is finished."""
        return self.directory / "work" / job.name

    def file(self, name: str) -> Path:
        """The file of a run's result, by the name of the run."""
        return self._runs / f"{name}.json"

    def find(self, job: Job) -> RunResult | None:
        """The result of a run; None if there is none, if it has another specification, or if it is damaged."""
        with suppress(DamagedError):
            stored = self._stored(job)
            if stored and not difference(stored.spec, job.document, job.given):
                return RunResult(*job.key, job.document, stored.final, stored.rounds, stored.session)
        return None

    def damage(self, job: Job) -> str:
        """Why the result of a run cannot be read; empty if it can, or if there is none."""
        try:
            self._stored(job)
        except DamagedError as error:
            return f"runs/{job.name}.json cannot be read ({error})"
        return ""

    def other(self, job: Job) -> str:
        """How the specification of a stored result differs from the run's; empty if it does not."""
        with suppress(DamagedError):
            if stored := self._stored(job):
                return difference(stored.spec, job.document, job.given)
        return ""

    def names(self) -> set[str]:
        """The names of the finished runs, of any specification."""
        return {path.stem for path in self._runs.glob("*.json")}

    def seeds(self) -> set[int]:
        """The seeds of the finished runs."""
        return {int(seed) for name in self.names() if (seed := name.rpartition("-")[2]).isdecimal()}

    def keep(self, job: Job, final: Measures, rounds: list[Measures]) -> None:
        """Stores the result of a run atomically."""
        self.put(RunResult(*job.key, job.document, final, rounds, self._session))

    def put(self, result: RunResult) -> None:
        """Stores a result, which may come from another call."""
        write_json(self.file(result.spec["name"]), asdict(result))

    def forget(self, job: Job) -> None:
        """Removes the result of a run and its workspace."""
        _remove(self.file(job.name))
        _remove(self.workspace(job))

    def _stored(self, job: Job) -> RunResult | None:
        return checked(self.file(job.name), RunResult)


def difference(stored: Any, now: Any, given: Any) -> str:
    """The first key in which two specifications differ, with both values; empty if there is none.

    `given` is the specification `now` as it is written, without defaults. A key that is missing in the stored
    specification counts as its default, unless it was given.
    """
    return next(_differences("", stored, now, given), "")


def _differences(path: str, stored: Any, now: Any, given: Any) -> Iterator[str]:
    if not (isinstance(stored, Mapping) and isinstance(now, Mapping)):
        if stored != now:
            yield f"{path} = {_spelled(stored)}, not {_spelled(now)}"
        return
    given = given if isinstance(given, Mapping) else {}
    for key in dict.fromkeys([*now, *stored]):
        if key in stored or key in given:
            after = now.get(key, _UNSET)
            before = stored.get(key, {} if isinstance(after, Mapping) else _UNSET)
            yield from _differences(f"{path}.{key}".lstrip("."), before, after, given.get(key))


def _spelled(value: Any) -> str:
    return "unset" if value is _UNSET else json.dumps(value, ensure_ascii=False, default=str)


def write_json(path: Path, document: Any) -> None:
    """Writes a JSON document atomically; numbers that are not finite become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    text = json.dumps(_plain(document), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    draft.write_text(text, encoding="utf-8")
    if path.is_dir():
        set_aside(path)
    os.replace(draft, path)


def checked(path: Path, kind: type[_Document]) -> _Document | None:
    """The content of a JSON file as a dataclass; None if there is no file.

    Raises:
        DamagedError: the file cannot be read, or its content is not of this kind.
    """
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes(), strict=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedError(error.strerror) from error
    except ValidationError as error:
        raise DamagedError(explain(error.errors()[0], "").partition("; ")[0]) from error


def set_aside(path: Path) -> Path:
    """Renames a file to NAME.bad, and returns its new path."""
    bad = path.with_name(f"{path.name}.bad")
    _remove(bad)
    os.replace(path, bad)
    return bad


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
