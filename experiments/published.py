"""Published numbers: CSV files whose lines that begin with # say where they come from and under which conditions."""

import csv
import math
from collections.abc import Mapping
from importlib.resources import files
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict


def _must_exist(name: str) -> str:
    if not files("experiments").joinpath("catalogue", name).is_file():
        raise ValueError("no such file beside the experiments")
    return name


File = Annotated[str, AfterValidator(_must_exist)]


class PublishedTable(BaseModel):
    """A table of a paper.

    Attributes:
        file: a CSV file of the catalogue.
        key: the column that holds the names of the methods.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: File
    key: str = "method"

    def rows_with(self, wanted: Mapping[str, str]) -> list[dict[str, str]]:
        """The rows that have these values in these columns."""
        return [row for row in read(self.file) if all(row.get(column) == value for column, value in wanted.items())]


class PublishedCurves(BaseModel):
    """A figure of a paper as numbers, in long form.

    Attributes:
        file: a CSV file of the catalogue.
        key: the column that tells the curves apart.
        metric: the column that says what a row measures, where a row holds one number, in column "value".
        columns: our measure and the column that holds it, or what `metric` calls it.
        scale: what numbers are multiplied by, by our measure: 100 makes percent of shares.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: File
    key: str = "run"
    metric: str = ""
    columns: dict[str, str]
    scale: dict[str, float] = {}

    def curve(self, key: str, measure: str) -> tuple[list[float], list[float]]:
        """Rounds and values of one curve; empty where it was not published."""
        if measure not in self.columns:
            return [], []
        name, scale = self.columns[measure], self.scale.get(measure, 1.0)
        rows = [row for row in read(self.file) if row[self.key] == key and row.get(self.metric, name) == name]
        column = "value" if self.metric else name
        return [float(row["round"]) for row in rows], [scale * float(row[column]) for row in rows]


def read(name: str) -> list[dict[str, str]]:
    """A CSV file of the catalogue, without its comments."""
    text = files("experiments").joinpath("catalogue", name).read_text(encoding="utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if line and not line.startswith("#")))


def number(row: Mapping[str, str], column: str) -> float:
    """A number of a row; NaN where it is empty or was not printed whole."""
    try:
        return float(row.get(column, ""))
    except ValueError:
        return math.nan
