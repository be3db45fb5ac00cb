"""What came out: one JSON file for each finished run."""

import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
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
class Session:
    """The call that made a run; unknown unless said.

    Attributes:
        command: the command line, without the directories of the machine.
        began: when the call began (ISO 8601, UTC).
        hardware: the machine; `device` is where clients were trained.
        versions: of Python and the packages that the numbers depend on.
        commit: of the code; None outside a git tree.
    """

    command: str = ""
    began: str = ""
    hardware: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None


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
        session: the call that made it.
    """

    method: str
    condition: str
    seed: int
    spec: dict[str, Any]
    final: Measures
    rounds: list[Measures]
    session: Session = field(default_factory=Session)


class DamagedError(ValueError):
    """A file that is not what was written; the message says what is wrong with it."""


class _Stored(BaseModel):
    model_config = ConfigDict(strict=True)


def _with_a_number(measures: dict[str, float | None]) -> dict[str, float | None]:
    if measures.get("round") is None:
        raise ValueError("no round")
    return measures


_Document = TypeVar("_Document", bound=BaseModel)


class _StoredResult(_Stored):
    spec: dict[str, Any]
    final: dict[str, float | None]
    rounds: list[Annotated[dict[str, float | None], AfterValidator(_with_a_number)]]
    session: Session = Session()


class Store:
    """The directory of one experiment's results: `runs/` for finished runs, `work/` for those under way.

    Args:
        directory: of the results.
        session: the call that makes the runs that are kept.
    """

    def __init__(self, directory: Path, session: Session | None = None) -> None:
        self.directory = directory
        self._session = session or Session()

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
            stored.session,
        )

    def damage(self, job: Job) -> str:
        """Why the result of a run cannot be read; empty when it can, or when there is none."""
        try:
            self._stored(job)
        except DamagedError as error:
            return f"runs/{job.name}.json cannot be read ({error})"
        return ""

    def other(self, job: Job) -> str:
        """How the specification of the result that is there differs from the run's; empty when it does not."""
        try:
            stored = self._stored(job)
        except DamagedError:
            return ""
        return "" if stored is None else difference(stored.spec, job.document, job.given)

    def names(self) -> set[str]:
        """The names of the finished runs, of any specification."""
        return {path.stem for path in self._runs.glob("*.json")}

    def seeds(self) -> set[int]:
        """The seeds of the finished runs."""
        found = (name.rpartition("-")[2] for name in self.names())
        return {int(seed) for seed in found if seed.isdecimal()}

    def keep(self, job: Job, final: Measures, rounds: list[Measures]) -> None:
        """Stores what a run came to: whole, or not at all."""
        method, condition = job.cell.method.name, job.cell.condition.name
        self.put(Result(method, condition, job.seed, job.document, final, rounds, self._session))

    def put(self, result: Result) -> None:
        """Stores a result that may be of another call."""
        write_json(self.file(result.spec["name"]), asdict(result))

    def forget(self, job: Job) -> None:
        """Removes the result of a run, and what was there of one under way."""
        for path in (self.file(job.name), self.workspace(job)):
            _remove(path)

    def file(self, name: str) -> Path:
        """Where the result of the run of that name is."""
        return self._runs / f"{name}.json"

    @property
    def _runs(self) -> Path:
        return self.directory / "runs"

    def _stored(self, job: Job) -> _StoredResult | None:
        return checked(self.file(job.name), _StoredResult)


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
        set_aside(path)
    os.replace(draft, path)


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


def checked(path: Path, model: type[_Document]) -> _Document | None:
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


def set_aside(path: Path) -> Path:
    """Gives a file that is in the way another name, NAME.bad.

    Returns:
        Where it is now.
    """
    bad = path.with_name(f"{path.name}.bad")
    _remove(bad)
    os.replace(path, bad)
    return bad


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
