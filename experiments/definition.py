"""An experiment: a TOML file of the catalogue, with the published numbers as CSV files beside it.

A cell of an experiment is one method under one condition; it is run once for every seed. Its run specification is the
experiment's `spec`, with what the method and then the condition change in it.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from experiments.published import CATALOGUE, PublishedCurves, PublishedTable
from federation.problems import explain
from federation.runs import RunSpec, ServerSpec

_KEYS = "docs/experiments.md lists the keys"

Overrides = dict[str, Any]


class ExperimentError(ValueError):
    """An experiment, a method or a condition that does not exist or cannot be used; the message says what does."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Method(_Section):
    """A row of the table.

    Attributes:
        name: as the paper prints it.
        spec: what the method changes in the experiment's specification.
        conditions: the conditions that it is run under; all of them when empty.
        row: the columns of the published table that pick its row, with their values.
        curve: its key in the published curves.
        x: where it stands on the horizontal axis of a plot of kind "sweep".
    """

    name: str = Field(min_length=1)
    spec: Overrides = {}
    conditions: tuple[str, ...] = ()
    row: dict[str, str] | None = None
    curve: str = ""
    x: float | None = None


class Condition(_Section):
    """What every method is put under: an attack, say. See `Method` for the attributes."""

    name: str = ""
    spec: Overrides = {}
    row: dict[str, str] = {}


class Column(_Section):
    """A measure in the table.

    Attributes:
        title: the column's head.
        measure: a key of `measures.final`.
        published: the column of the published table that it is compared with; its deviation is in the same + "_pm".
    """

    title: str
    measure: str
    published: str = ""


class Plot(_Section):
    """A figure.

    Attributes:
        kind: "curves" over rounds, "bars" of the methods, "sweep" of the methods over their `x`, "heat" map of
            methods and conditions, "plane" of two objectives with the methods' paths and preferences, "radar" of
            several objectives.
        measure: a key of `measures.final`, of `measures.rounds` for curves; in a plane the horizontal one; of a radar
            chart what the names of its measures begin with.
        title: what is shown.
        axis: the label of the measure.
        over: curves only: the horizontal measure, of `measures.rounds`.
        against: planes only: the vertical measure.
        x: the label of the horizontal axis of a sweep, or of curves that are not over rounds; of the vertical one of a
            plane.
        smooth: curves only: the mean over so many evaluated rounds.
    """

    kind: Literal["curves", "bars", "sweep", "heat", "plane", "radar"]
    measure: str
    title: str
    axis: str = "accuracy (%)"
    over: str = "round"
    against: str = ""
    x: str = ""
    smooth: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _two_axes(self) -> Self:
        if (self.kind == "plane") != bool(self.against):
            raise ValueError("against is the second measure of a plane, which needs one; nothing else has it")
        return self

    @property
    def slug(self) -> str:
        """Its name in the names of files."""
        return slug(f"{self.kind} {self.measure}" + (f" over {self.over}" if self.over != "round" else ""))


class Target(_Section):
    """A value of a measure that runs are to reach: a loss at most, an accuracy at least that.

    Attributes:
        measure: a key of `measures.rounds`.
        value: what is to be reached.
    """

    measure: str
    value: float


class Derived(_Section):
    """What is measured over several runs, or over the rounds of one (`experiments.derived`).

    Attributes:
        targets: when they are reached.
        delta_m: by measure, the method that was made for it alone: what the others lose against these.
        front: the losses of two objectives, in the order of the task's: where runs come out along the front.
    """

    targets: tuple[Target, ...] = ()
    delta_m: dict[str, str] = {}
    front: tuple[str, str] | None = None


class Quick(_Section):
    """The form that finishes in minutes on two cores: fewer seeds, methods and conditions, and a smaller spec.

    Attributes:
        data: in place of the experiment's, where the smaller spec has another task.
    """

    seeds: tuple[int, ...] = Field((0,), min_length=1)
    methods: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()
    data: tuple[str, ...] | None = None
    spec: Overrides = {}


class Cost(_Section):
    """What a round of a run takes one core, evaluation included, on average over methods: measured, to plan with.

    Attributes:
        seconds: of the whole experiment's rounds.
        quick: of the quick form's.
    """

    seconds: float = Field(gt=0)
    quick: float = Field(gt=0)


@dataclass(frozen=True)
class Cell:
    """One method under one condition.

    Attributes:
        slug: its name in file names and run names.
        document: the run specification, all but its name and seed.
    """

    experiment: str
    method: Method
    condition: Condition
    slug: str
    document: Overrides

    @property
    def label(self) -> str:
        """What people call it."""
        return f"{self.method.name}, {self.condition.name}" if self.condition.name else self.method.name

    def given(self, seed: int) -> Overrides:
        """The specification of one run as it is written: without the defaults."""
        return {"name": f"{self.slug}-{seed}", "seed": seed, **self.document}

    def spec(self, seed: int) -> RunSpec:
        """The specification of one run.

        Raises:
            ExperimentError: it is not one; each wrong key is named.
        """
        try:
            return RunSpec.model_validate(self.given(seed))
        except ValidationError as error:
            problems = "\n".join(explain(problem, "see docs/run-spec.md") for problem in error.errors())
            raise ExperimentError(f"{self.experiment}, {self.label}: {problems}") from error


class Experiment(_Section):
    """An experiment as it is written down.

    Attributes:
        name: the file's.
        title: one line.
        source: paper, and its table or figure.
        data: what must be in the data directory: any one of these paths is enough; nothing where the task brings its
            data along.
        seeds: one run for each.
        spec: the run specification that all have in common, without name and seed.
        exclude_attackers: whether accuracies are those of honest clients only.
    """

    name: str
    title: str
    source: str = ""
    data: tuple[str, ...] = ()
    seeds: tuple[int, ...] = Field(min_length=1)
    spec: Overrides
    methods: tuple[Method, ...] = Field(min_length=1)
    conditions: tuple[Condition, ...] = Field((Condition(),), min_length=1)
    columns: tuple[Column, ...] = Field(min_length=1)
    published: PublishedTable | None = None
    curves: PublishedCurves | None = None
    derived: Derived = Derived()
    plots: tuple[Plot, ...] = ()
    quick: Quick = Quick()
    cost: Cost | None = None
    exclude_attackers: bool = False
    _shortened: float = PrivateAttr(1.0)  # the rounds divided by those of the experiment's file

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _must_be_distinct("methods", [method.name for method in self.methods])
        _must_be_distinct("conditions", [condition.name for condition in self.conditions])
        _must_be_distinct("seeds", [str(seed) for seed in self.seeds])
        _must_be_distinct("methods, as names of files", [cell.slug for cell in self.cells()])
        names = [condition.name for condition in self.conditions]
        for method in self.methods:
            chosen("condition", names, method.conditions)
        chosen("condition", names, self.quick.conditions)
        for wanted in (self.quick.methods, tuple(self.derived.delta_m.values())):
            chosen("method", [method.name for method in self.methods], wanted)
        _must_be_distinct("plots, as names of files", [plot.slug for plot in self.plots])
        if self.published is None and any(column.published for column in self.columns):
            raise ValueError("a column names a published one, but there is no [published] table")
        for method in self.methods:
            if method.row and not (self.published and self.published.rows_with(method.row)):
                raise ValueError(f"method {method.name!r}: no published row has {method.row}")
        return self

    def cells(self, methods: Sequence[str] = (), conditions: Sequence[str] = ()) -> tuple[Cell, ...]:
        """Every method under every condition that it is run under.

        Args:
            methods: only these, by name; all when empty.
            conditions: likewise.

        Raises:
            ExperimentError: no such method or condition.
        """
        wanted = chosen("method", [method.name for method in self.methods], methods)
        places = chosen("condition", [condition.name for condition in self.conditions], conditions)
        return tuple(
            self._cell(method, condition)
            for method in self.methods
            for condition in self.conditions
            if method.name in wanted
            and condition.name in places
            and (not method.conditions or condition.name in method.conditions)
        )

    def with_rounds(self, rounds: int) -> "Experiment":
        """The same with another number of rounds.

        The period of each decaying server rate (`server.decay_every`) changes in proportion, so that the rate still
        falls from its first value to `decay` times that.
        """
        made = self.model_copy(update={"spec": merged(self.spec, {"rounds": rounds})})
        made._shortened = self._shortened * rounds / int(self.spec["rounds"])
        return made

    def in_quick_form(self) -> "Experiment":
        """The same in minutes; the published numbers are those of the whole."""
        quick = self.quick
        methods = chosen("method", [method.name for method in self.methods], quick.methods)
        conditions = chosen("condition", [condition.name for condition in self.conditions], quick.conditions)
        kept = [
            method.model_copy(update={"conditions": tuple(name for name in method.conditions if name in conditions)})
            for method in self.methods
            if method.name in methods and (not method.conditions or set(method.conditions) & set(conditions))
        ]
        shorter = self.with_rounds(int(merged(self.spec, quick.spec)["rounds"]))
        return shorter.model_copy(
            update={
                "data": self.data if quick.data is None else quick.data,
                "seeds": quick.seeds,
                "methods": tuple(kept),
                "conditions": tuple(item for item in self.conditions if item.name in conditions),
                "spec": merged(self.spec, quick.spec),
                "cost": None if self.cost is None else Cost(seconds=self.cost.quick, quick=self.cost.quick),
            }
        )

    def core_seconds(self, cells: Sequence[Cell], seeds: int) -> float | None:
        """About what so many seeds of some cells take one core; None where it was not measured."""
        if self.cost is None:
            return None
        return self.cost.seconds * seeds * sum(int(cell.document["rounds"]) for cell in cells)

    def published_values(self, cell: Cell) -> dict[str, str]:
        """The row of the published table that a cell is compared with; empty where there is none.

        Raises:
            ExperimentError: several rows fit.
        """
        if self.published is None:
            return {}
        wanted = {self.published.key: cell.method.name} if cell.method.row is None else cell.method.row
        found = self.published.rows_with({**wanted, **cell.condition.row})
        if len(found) > 1:
            raise ExperimentError(f"{self.name}, {cell.label}: {len(found)} rows of {self.published.file} fit")
        return found[0] if found else {}

    def _cell(self, method: Method, condition: Condition) -> Cell:
        document = merged(merged(self.spec, method.spec), condition.spec)
        if (server := document.get("server", {})).get("decay") and self._shortened != 1.0:
            period = server.get("decay_every", ServerSpec().decay_every) * self._shortened
            document = merged(document, {"server": {"decay_every": max(1, round(period))}})
        return Cell(self.name, method, condition, slug(f"{method.name} {condition.name}"), document)


def parse(name: str, text: str, place: Traversable = CATALOGUE) -> Experiment:
    """Reads the TOML document of an experiment.

    Args:
        name: of the experiment.
        text: the document.
        place: the directory of the CSV files that it names.

    Raises:
        ExperimentError: it is wrong; each wrong key is named.
    """
    try:
        return Experiment.model_validate({**tomllib.loads(text), "name": name}, context={"place": place})
    except tomllib.TOMLDecodeError as error:
        raise ExperimentError(f"{name}: not a TOML document: {error}") from error
    except ValidationError as error:
        problems = "\n".join(explain(problem, _KEYS) for problem in error.errors())
        raise ExperimentError(f"{name}: {problems}") from error


def chosen(kind: str, existing: Sequence[str], wanted: Sequence[str]) -> tuple[str, ...]:
    """The existing names that are wanted, capitals aside; all of them when none is.

    Raises:
        ExperimentError: a wanted name does not exist.
    """
    by_slug = {slug(name): name for name in existing}
    for name in wanted:
        if slug(name) not in by_slug:
            there = ", ".join(map(repr, filter(None, existing)))  # which may hold commas
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
    """A name as it may stand in the name of a run and of a file: lower-case letters, digits and hyphens."""
    spelled = text.lower().replace("+", "-plus").replace("%", "-percent")
    return re.sub(r"[^a-z0-9]+", "-", spelled).strip("-")


def _must_be_distinct(what: str, values: Sequence[str]) -> None:
    twice = sorted({value for value in values if values.count(value) > 1})
    if twice:
        raise ValueError(f"{what}: twice {', '.join(map(repr, twice))}")
