"""Published numbers as CSV files; lines that begin with # name their source and its conditions."""

import csv
import math
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Self

from pydantic import BaseModel, PrivateAttr, ValidationInfo, model_validator

from federation.text_files import read_text

CATALOGUE: Traversable = files("fedpareto.experiments") / "catalogue"


class _Published(BaseModel, extra="forbid", frozen=True):
    """A CSV file beside the experiment, in the directory `place` of the validation's context."""

    file: str
    _directory: Traversable = PrivateAttr(CATALOGUE)

    @model_validator(mode="after")
    def _beside_the_experiment(self, info: ValidationInfo) -> Self:
        self._directory = (info.context or {}).get("place", CATALOGUE)
        try:
            there = (self._directory / self.file).is_file()
        except OSError:  # a name that is too long
            there = False
        if not there:
            raise ValueError(f"there is no file {self.file!r} beside the experiment")
        return self

    def rows(self) -> list[dict[str, str]]:
        """The rows of the file, without its comments."""
        text = read_text(self._directory / self.file)
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        return list(csv.DictReader(lines, restval=""))


class PublishedTable(_Published):
    """A table of a paper.

    Attributes:
        key: the column that holds the names of the methods.
    """

    key: str = "method"

    def rows_with(self, values: Mapping[str, str]) -> list[dict[str, str]]:
        """The rows with these values, by column."""
        return [row for row in self.rows() if values.items() <= row.items()]


class PublishedCurves(_Published):
    """The curves of a figure of a paper.

    Attributes:
        key: the column with the name of the curve.
        metric: the column with the name of the measure, if each row holds one number, in column "value".
        columns: by our measure, its column, or its name in column `metric`.
        scale: by our measure, the factor of the published numbers, such as 100 for percent.
    """

    key: str = "run"
    metric: str = ""
    columns: dict[str, str]
    scale: dict[str, float] = {}

    def curve(self, key: str, measure: str) -> tuple[list[float], list[float]]:
        """The rounds and values of a curve; empty if it was not published."""
        if measure not in self.columns:
            return [], []
        name, scale = self.columns[measure], self.scale.get(measure, 1.0)
        rows = [row for row in self.rows() if row[self.key] == key and row.get(self.metric, name) == name]
        column = "value" if self.metric else name
        return [float(row["round"]) for row in rows], [scale * float(row[column]) for row in rows]


def number(row: Mapping[str, str], column: str) -> float:
    """A number of a row; NaN if the field is not a number."""
    try:
        return float(row.get(column, ""))
    except ValueError:
        return math.nan
