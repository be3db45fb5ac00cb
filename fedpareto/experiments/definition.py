"""An experiment: a TOML file of the catalogue, with the published numbers as CSV files beside it.

A cell of an experiment is one method under one condition; it is run once for every seed. Its run specification is the
experiment's `spec` with the changes of the method, and then those of the condition. The classes are the sections of the
file; docs/research/experiments.md describes their keys.
"""

import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, PrivateAttr, ValidationError, field_validator, model_validator

from federation.errors import Error
from federation.spec.problems import explain
from federation.spec.run_sections import ServerSpec
from fedpareto.experiments.kinds import SIMULATION, specification_of
from fedpareto.experiments.published_numbers import CATALOGUE, PublishedCurves, PublishedTable

Overrides = dict[str, Any]
_PAGE = "docs/research/experiments.md"


class ExperimentError(Error, ValueError):
    """An experiment, method or condition does not exist or cannot be used; the message lists what exists."""


class _Section(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """A section of the file."""


class Method(_Section):
    """A row of the table."""

    name: str = Field(min_length=1)
    spec: Overrides = {}
    conditions: tuple[str, ...] = ()
    row: dict[str, str] = {}
    curve: str = ""
    x: float | None = None


class ExperimentCondition(_Section):
    """A condition under which the methods are compared, such as an attack."""

    name: str = ""
    spec: Overrides = {}
    row: dict[str, str] = {}


class TableColumn(_Section):
    """A measure in the table, with a column of the published table; its column NAME_pm holds the deviation."""

    title: str
    measure: str
    published: str = ""


class Plot(_Section):
    """A figure. In a radar chart, `measure` is the common prefix of its measures; heat maps end at `top`."""

    kind: Literal["curves", "bars", "sweep", "heat", "plane", "radar", "images"]
    measure: str
    title: str
    axis: str = "accuracy (%)"
    over: str = "round"
    against: str = ""
    x: str = ""
    smooth: int = Field(1, ge=1)
    top: float = Field(100.0, gt=0)

    @property
    def slug(self) -> str:
        """The name of the file, without suffix."""
        return slug(f"{self.kind} {self.measure}" + (f" over {self.over}" if self.over != "round" else ""))


class Target(_Section):
    """A value that a measure of `measures.rounds` should reach: an upper bound for losses, a lower one for others."""

    measure: str
    value: float


class DeltaQ(_Section):
    """FMOL's distance from optimal: the method whose last losses are optimal, and each loss with its weight.

    With `mu` and `eta`, also the mean over the rounds for a round that is drawn (`metrics.drawn_round`).
    """

    reference: str
    weights: dict[str, str] = Field(min_length=1)
    mu: float = Field(0.0, ge=0)
    eta: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if (self.mu > 0) != (self.eta > 0) or self.mu * self.eta >= 2:
            raise ValueError("mu and eta: give both or neither, with mu eta < 2")
        return self


class Derived(_Section):
    """Measures of several runs, or of the rounds of one run (`experiments.derived`)."""

    targets: tuple[Target, ...] = ()
    delta_m: dict[str, str] = {}
    delta_q: DeltaQ | None = None
    front: tuple[str, str] | None = None
    groups: dict[str, tuple[int, ...]] = {}
    after: tuple[int, ...] = ()


class Quick(_Section):
    """The form that takes minutes on two cores."""

    seeds: tuple[int, ...] = Field((0,), min_length=1)
    methods: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()
    data: tuple[str, ...] | None = None
    spec: Overrides = {}


class Cost(_Section):
    """The measured core-seconds of a round with its evaluation, as means over the methods."""

    seconds: float = Field(gt=0)
    quick: float = Field(gt=0)


@dataclass(frozen=True)
class Cell:
    """One method under one condition.

    Attributes:
        kind: what makes its runs.
        slug: its name in the names of files and runs.
        document: the run specification without name and seed.
    """

    experiment: str
    kind: str
    method: Method
    condition: ExperimentCondition
    slug: str
    document: Overrides

    @property
    def key(self) -> tuple[str, str]:
        """The names of its method and its condition."""
        return self.method.name, self.condition.name

    @property
    def rounds(self) -> int:
        """The rounds of a run."""
        return int(self.document["rounds"])

    @property
    def label(self) -> str:
        """The name that is shown."""
        return ", ".join(filter(None, self.key))

    def given(self, seed: int) -> Overrides:
        """The specification of one run as it is written, without defaults."""
        return {"name": f"{self.slug}-{seed}", "seed": seed, **self.document}

    def spec(self, seed: int) -> BaseModel:
        """The specification of one run.

        Raises:
            ExperimentError: it is not valid; the message names each wrong key.
        """
        try:
            return specification_of(self.kind).model_validate(self.given(seed))
        except ValidationError as error:
            page = "docs/reference/run-spec.md" if self.kind == SIMULATION else _PAGE
            raise _refusal(f"{self.experiment}, {self.label}", error, f"see {page}") from error


class Experiment(_Section):
    """An experiment as it is written. Its `spec` has neither name nor seed."""

    name: str
    title: str
    source: str = ""
    kind: str = SIMULATION
    data: tuple[str, ...] = ()
    seeds: tuple[int, ...] = Field(min_length=1)
    spec: Overrides
    methods: tuple[Method, ...] = Field(min_length=1)
    conditions: tuple[ExperimentCondition, ...] = Field((ExperimentCondition(),), min_length=1)
    columns: tuple[TableColumn, ...] = Field(min_length=1)
    published: PublishedTable | None = None
    curves: PublishedCurves | None = None
    derived: Derived = Derived()
    plots: tuple[Plot, ...] = ()
    quick: Quick = Quick()
    cost: Cost | None = None
    exclude_attackers: bool = False
    _shortened: float = PrivateAttr(1.0)  # the rounds divided by those of the experiment's file

    @field_validator("kind")
    @classmethod
    def _there(cls, kind: str) -> str:
        specification_of(kind)  # raises PluginError, a ValueError
        return kind

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        methods, conditions = self._names()
        distinct = {"methods": methods, "conditions": conditions, "seeds": list(map(str, self.seeds))}
        distinct["methods, as names of files"] = [cell.slug for cell in self.cells()]
        distinct["plots, as names of files"] = [plot.slug for plot in self.plots]
        for what, values in distinct.items():
            if twice := sorted({value for value in values if values.count(value) > 1}):
                raise ValueError(f"{what}: twice {', '.join(map(repr, twice))}")
        for named in (self.quick.conditions, *(method.conditions for method in self.methods)):
            chosen("condition", conditions, named)
        optimal = (self.derived.delta_q.reference,) if self.derived.delta_q else ()
        for named in (self.quick.methods, tuple(self.derived.delta_m.values()), optimal):
            chosen("method", methods, named)
        if self.published is None and any(column.published for column in self.columns):
            raise ValueError("a column names a published one, but there is no [published] table")
        for plot in self.plots:
            if (plot.kind == "plane") != bool(plot.against):
                raise ValueError(f"plot {plot.slug}: a plane needs a second measure, against; other figures have none")
        for method in self.methods:
            if method.row and not (self.published and self.published.rows_with(method.row)):
                raise ValueError(f"method {method.name!r}: no published row has {method.row}")
        return self

    def _names(self) -> tuple[list[str], list[str]]:
        return [method.name for method in self.methods], [condition.name for condition in self.conditions]

    def cells(self, methods: Sequence[str] = (), conditions: Sequence[str] = ()) -> tuple[Cell, ...]:
        """The methods of these names under each of their conditions of these names; all if no names are given.

        Raises:
            ExperimentError: no such method or condition.
        """
        all_methods, all_conditions = self._names()
        methods, conditions = chosen("method", all_methods, methods), chosen("condition", all_conditions, conditions)
        return tuple(
            self._cell(method, condition)
            for method in self.methods
            for condition in self.conditions
            if method.name in methods and condition.name in conditions
            if not method.conditions or condition.name in method.conditions
        )

    def grid(self, keys: Collection[tuple[str, str]]) -> tuple[list[str], list[str]]:
        """The methods and the conditions of cells with these keys, in the order of the experiment."""
        methods, conditions = self._names()
        there = [set(names) for names in zip(*keys, strict=True)] or [set(), set()]
        return [name for name in methods if name in there[0]], [name for name in conditions if name in there[1]]

    def with_rounds(self, rounds: int) -> "Experiment":
        """The experiment with another number of rounds.

        The period of each decaying server rate (`server.decay_every`) changes in proportion, so that the rate still
        falls from its first value to `decay` times that.
        """
        changed = self.model_copy(update={"spec": merged(self.spec, {"rounds": rounds})})
        changed._shortened = self._shortened * rounds / int(self.spec["rounds"])
        return changed

    def in_quick_form(self) -> "Experiment":
        """The quick form; the published numbers stay those of the whole experiment."""
        quick, spec = self.quick, merged(self.spec, self.quick.spec)
        methods, conditions = self.grid({cell.key for cell in self.cells(quick.methods, quick.conditions)})
        changes = {
            "data": self.data if quick.data is None else quick.data,
            "seeds": quick.seeds,
            "methods": tuple(item for item in self.methods if item.name in methods),
            "conditions": tuple(item for item in self.conditions if item.name in conditions),
            "spec": spec,
            "cost": self.cost and Cost(seconds=self.cost.quick, quick=self.cost.quick),
        }
        return self.with_rounds(int(spec["rounds"])).model_copy(update=changes)

    def core_seconds(self, cells: Sequence[Cell], seeds: int) -> float | None:
        """The estimated time of cells with a number of seeds each on one core; None if it was not measured."""
        rounds = sum(cell.rounds for cell in cells)
        return None if self.cost is None else self.cost.seconds * seeds * rounds

    def published_values(self, cell: Cell) -> dict[str, str]:
        """The row of the published table that a cell is compared with; empty if there is none.

        Raises:
            ExperimentError: several rows fit.
        """
        if self.published is None:
            return {}
        row = cell.method.row or {self.published.key: cell.method.name}
        rows = self.published.rows_with({**row, **cell.condition.row})
        if len(rows) > 1:
            raise ExperimentError(f"{self.name}, {cell.label}: {len(rows)} rows of {self.published.file} fit")
        return rows[0] if rows else {}

    def _cell(self, method: Method, condition: ExperimentCondition) -> Cell:
        document = merged(merged(self.spec, method.spec), condition.spec)
        if (server := document.get("server", {})).get("decay") and self._shortened != 1.0:
            period = server.get("decay_every", ServerSpec().decay_every) * self._shortened
            document = merged(document, {"server": {"decay_every": max(1, round(period))}})
        return Cell(self.name, self.kind, method, condition, slug(f"{method.name} {condition.name}"), document)


def parse(name: str, text: str, place: Traversable = CATALOGUE) -> Experiment:
    """Reads the TOML document of an experiment, whose CSV files are in the directory `place`.

    Raises:
        ExperimentError: it is not valid; the message names each wrong key.
    """
    try:
        return Experiment.model_validate({**tomllib.loads(text), "name": name}, context={"place": place})
    except ValidationError as error:
        raise _refusal(name, error, f"{_PAGE} lists the keys") from error
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, an endless number
        raise ExperimentError(f"{name}: not a TOML document: {error}") from error


def _refusal(name: str, error: ValidationError, known: str) -> ExperimentError:
    problems = "\n".join(explain(problem, known, Experiment) for problem in error.errors())
    return ExperimentError(f"{name}: {problems}")


def chosen(kind: str, existing: Sequence[str], wanted: Sequence[str]) -> tuple[str, ...]:
    """The existing names that are wanted, regardless of case; all existing names if none is wanted.

    Raises:
        ExperimentError: a wanted name does not exist.
    """
    by_slug = {slug(name): name for name in existing}
    for name in wanted:
        if slug(name) not in by_slug:
            there = ", ".join(map(repr, filter(None, existing)))  # quoted, since names can contain commas
            raise ExperimentError(f"no {kind} {name!r}: there are {there or 'none'}")
    return tuple(by_slug[slug(name)] for name in wanted) or tuple(existing)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Overrides:
    """`base` with `changes`, section by section."""
    result = dict(base)
    for key, value in changes.items():
        present = result.get(key)
        result[key] = merged(present, value) if isinstance(present, Mapping) and isinstance(value, Mapping) else value
    return result


def slug(text: str) -> str:
    """A text as part of the name of a run or file: lower-case letters, digits and hyphens."""
    spelled = text.lower().replace("+", "-plus").replace("%", "-percent")
    return re.sub(r"[^a-z0-9]+", "-", spelled).strip("-")
