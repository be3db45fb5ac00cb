"""Published numbers: CSV files whose lines that begin with # say where they come from and under which conditions."""

import csv
import math
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Self

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationInfo, field_validator, model_validator

CATALOGUE: Traversable = files("experiments") / "catalogue"


class _Published(BaseModel):
    """A CSV file beside the experiment, in the directory `place` of the validation's context.

    Attributes:
        file: its name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: str
    _directory: Traversable = PrivateAttr(CATALOGUE)

    @field_validator("file")
    @classmethod
    def _exists(cls, value: str, info: ValidationInfo) -> str:
        if not (_place(info) / value).is_file():
            raise ValueError("no such file beside the experiment")
        return value

    @model_validator(mode="after")
    def _beside_the_experiment(self, info: ValidationInfo) -> Self:
        self._directory = _place(info)
        return self

    def rows(self) -> list[dict[str, str]]:
        """The file, without its comments."""
        text = (self._directory / self.file).read_text(encoding="utf-8")
        return list(csv.DictReader(line for line in text.splitlines() if line and not line.startswith("#")))


class PublishedTable(_Published):
    """A table of a paper.

    Attributes:
        key: the column that holds the names of the methods.
    """

    key: str = "method"

    def rows_with(self, wanted: Mapping[str, str]) -> list[dict[str, str]]:
        """The rows that have these values in these columns."""
        return [row for row in self.rows() if all(row.get(column) == value for column, value in wanted.items())]


class PublishedCurves(_Published):
    """A figure of a paper as numbers, in long form.

    Attributes:
        key: the column that tells the curves apart.
        metric: the column that says what a row measures, where a row holds one number, in column "value".
        columns: our measure and the column that holds it, or what `metric` calls it.
        scale: what numbers are multiplied by, by our measure: 100 makes percent of shares.
    """

    key: str = "run"
    metric: str = ""
    columns: dict[str, str]
    scale: dict[str, float] = {}

    def curve(self, key: str, measure: str) -> tuple[list[float], list[float]]:
        """Rounds and values of one curve; empty where it was not published."""
        if measure not in self.columns:
            return [], []
        name, scale = self.columns[measure], self.scale.get(measure, 1.0)
        rows = [row for row in self.rows() if row[self.key] == key and row.get(self.metric, name) == name]
        column = "value" if self.metric else name
        return [float(row["round"]) for row in rows], [scale * float(row[column]) for row in rows]


def _place(info: ValidationInfo) -> Traversable:
    place: Traversable = (info.context or {}).get("place", CATALOGUE)
    return place


def number(row: Mapping[str, str], column: str) -> float:
    """A number of a row; NaN where it is empty or was not printed whole."""
    try:
        return float(row.get(column, ""))
    except ValueError:
        return math.nan
