"""Results of finished runs: one JSON-lines file for each table, with a line for each run."""

import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from federation.digests import digest
from federation.errors import Error
from federation.spec.problems import explain
from fedpareto.experiments.definition import Cell, slug
from storage.records import canonical

RUNS = "runs.jsonl"

Measures = dict[str, Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]]

_UNSET = object()


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
        software: the versions of Python and of the packages that the numbers depend on.
        commit: of the code; None outside a Git tree.
    """

    command: str = ""
    began: str = ""
    hardware: dict[str, Any] = field(default_factory=dict)
    software: dict[str, str] = field(default_factory=dict)
    commit: str | None = None


def _by_round(columns: Any) -> list[dict[str, Any]]:
    """The measures of each round, from a column for each measure, in which None is not measured."""
    lists = isinstance(columns, dict) and all(isinstance(column, list) for column in columns.values())
    if not lists or len(set(map(len, columns.values()))) > 1:
        raise ValueError("expected lists of the same length")
    values = zip(*columns.values(), strict=True)
    rounds = [{name: value for name, value in zip(columns, row, strict=True) if value is not None} for row in values]
    if not all("round" in measures for measures in rounds):
        raise ValueError("no round")
    return rounds


@dataclass(frozen=True)
class RunResult:
    """A finished run, its whole specification, and its measures: `measures.final` and `measures.rounds`."""

    method: str
    condition: str
    seed: int
    spec: dict[str, Any]
    final: Measures
    rounds: Annotated[list[Measures], BeforeValidator(_by_round)]
    session: Session = field(default_factory=Session)

    @property
    def name(self) -> str:
        """The name of the run: that of its job."""
        return f"{slug(f'{self.method} {self.condition}')}-{self.seed}"

    @property
    def digest(self) -> str:
        """The digest of the specification."""
        return digest(canonical(self.spec).encode())

    @property
    def row(self) -> dict[str, Any]:
        """The measures with the run's key in tables."""
        return {"method": self.method, "condition": self.condition, "seed": self.seed, **self.final}

    def is_of(self, cell: Cell) -> bool:
        """Whether the run is one of a cell's."""
        return (self.method, self.condition) == cell.key

    def line(self) -> bytes:
        """The run as a line of the file; numbers that are not finite become null."""
        measured = list(dict.fromkeys(name for measures in self.rounds for name in measures))
        document = {
            **{"method": self.method, "condition": self.condition, "seed": self.seed, "digest": self.digest},
            **{"spec": self.spec, "session": asdict(self.session)},
            "final": {name: _finite(value) for name, value in self.final.items()},
            "rounds": {name: [_finite(measures.get(name)) for measures in self.rounds] for name in measured},
        }
        return json.dumps(document, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode() + b"\n"


class DamagedError(Error, ValueError):
    """A line does not hold what was written; the message says what is wrong."""


_RESULT = TypeAdapter(RunResult)


def parsed(line: bytes) -> RunResult:
    """Reads a line of the file.

    Raises:
        DamagedError: it is not one.
    """
    try:
        result = _RESULT.validate_json(line, strict=True)
        stated, digest_of_spec = json.loads(line).get("digest"), result.digest
    except ValidationError as error:
        raise DamagedError(explain(error.errors()[0], "").partition("; ")[0]) from error
    except ValueError as error:  # a number that JSON does not have
        raise DamagedError(f"spec: {error}") from error
    if stated != digest_of_spec:
        raise DamagedError("digest: not that of the specification")
    return result


class Store:
    """The directory of a table: `runs.jsonl` has a line for each finished run, `work/` the state of interrupted ones.

    Several processes may add runs. If a run has several lines, the last one counts. `keep` stores runs as made by
    `session`. All methods raise OSError, and those that read runs DamagedError.
    """

    def __init__(self, directory: Path, session: Session | None = None) -> None:
        self.directory = directory
        self._file = directory / RUNS
        self._session = session or Session()

    def workspace(self, job: Job) -> Path:
        """The directory of a run's state until it is finished."""
        return self.directory / "work" / job.name

    def runs(self) -> dict[str, RunResult]:
        """The finished runs, of any specification, by name."""
        try:
            status = self._file.stat()
        except FileNotFoundError:
            return {}
        return _read(self._file, (status.st_ino, status.st_size, status.st_mtime_ns))

    def find(self, job: Job) -> RunResult | None:
        """The result of a run; None if there is none, or if it has another specification."""
        stored = self.runs().get(job.name)
        if stored is None or self.other(job):
            return None
        method, condition = job.cell.key
        return replace(stored, method=method, condition=condition, spec=job.document)

    def other(self, job: Job) -> str:
        """How the specification of a stored result differs from the run's; empty if it does not."""
        stored = self.runs().get(job.name)
        return difference(stored.spec, job.document, job.given) if stored else ""

    def keep(self, job: Job, final: Measures, rounds: list[Measures]) -> None:
        """Adds the result of a run. If that fails, the file is left as it was."""
        line = RunResult(*job.cell.key, job.seed, job.document, final, rounds, self._session).line()
        self.directory.mkdir(parents=True, exist_ok=True)
        with self.locked():
            self._mend()
            with self._file.open("ab", buffering=0) as file:
                end = file.tell()
                try:
                    _write(file, line)
                except OSError:
                    file.truncate(end)
                    raise

    def forget(self, jobs: Sequence[Job]) -> None:
        """Removes the results of runs and their workspaces."""
        names, draft = {job.name for job in jobs}, self._file.with_suffix(".tmp")
        if not names.isdisjoint(self.runs()):
            with self.locked(), draft.open("wb", buffering=0) as file:
                _write(file, b"".join(run.line() for name, run in self.runs().items() if name not in names))
                os.replace(draft, self._file)
        for job in jobs:
            shutil.rmtree(self.workspace(job), ignore_errors=True)

    def mend(self) -> bool:
        """Drops a last line that was not written to its end; whether there was one."""
        if not self._file.exists():
            return False
        with self.locked():
            return self._mend()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other process writes here meanwhile. Not to be nested."""
        descriptor = os.open(self.directory, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _mend(self) -> bool:
        with self._file.open("a+b", buffering=0) as file:
            file.seek(0)
            data = file.read()
            end = data.rfind(b"\n") + 1
            if end == len(data):
                return False
            try:
                parsed(data[end:])
            except DamagedError:
                file.truncate(end)
                return True
            _write(file, b"\n")  # only its end was missing
            return False


@lru_cache(maxsize=4)
def _read(path: Path, _: tuple[int, ...]) -> dict[str, RunResult]:
    runs = dict[str, RunResult]()
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                result = parsed(line)
                runs[result.name] = result
        except DamagedError as error:
            if number < len(lines):  # the last one is perhaps being written
                remedy = "remove the line, and its run is made again"
                raise DamagedError(f"{path}, line {number} cannot be read ({error}): {remedy}") from error
    return runs


def _write(file: FileIO, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]
    os.fsync(file.fileno())


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


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
