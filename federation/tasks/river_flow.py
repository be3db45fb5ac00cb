"""`river-flow`: the level of the Mississippi and its tributaries in two days, at eight places: eight objectives.

Source: RF1 of the Mulan collection (Spyromitros-Xioufis, Tsoumakas, Groves, Vlahavas, Multi-target regression via input
space expansion, Machine Learning 104, 2016). FMOL's third experiment, with eight objectives.
"""

import logging
import math
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from federation.tasks import DataError, DataSource, Pool
from federation.tasks.published import Regression
from federation.tasks.published_files import lines

FILE = Path("rf1") / "rf1.arff"
PLACES = ("chsi2", "nasi2", "eadm7", "sclm7", "clkm7", "vali2", "napm7", "dldi4")
_FEATURES = 64
_LEVELS = 8

# The flow at nasi2 is 3.53 an hour before and 3.54 an hour after this value, 84 standard deviations above the mean. The
# value is a target in one row, and a feature in the rows of 48 hours later and of each lag after that.
_CORRUPT_ROW, _CORRUPT_FLOW = 4782, 78.9  # the row from 0, the flow at nasi2
_HORIZON = 48  # hours
_LAGS = (0, 6, 12, 18, 24, 36, 48, 60)  # hours, in the order of the features

_log = logging.getLogger(__name__)

Table = NDArray[np.float64]


class RiverFlow(Regression):
    """Predict the flow at eight gauges 48 hours ahead. `--data DIR` reads DIR/rf1/rf1.arff, which may be .gz.

    Rows are hourly and in order of time: neighbours share most of their values, so that a loss on samples held back at
    random tells how well the model fits, not how well it would forecast.

    One measurement of the published file is corrupt: in row 4782 (from 0) the target nasi2 is 78.9 between 3.53 and
    3.54. That row is left out, and the same value is missing among the features of eight later rows.

    Attributes:
        keep_corrupt: if true, the file is used unchanged.
    """

    objectives = PLACES
    keep_corrupt: ClassVar[bool] = False
    network = "river_mlp"
    files = str(FILE)

    def pool(self, source: DataSource) -> Pool:
        """Standardised flows: 64 features, float32 (n, 64), and the eight targets, float32 (n, 8).

        The features are the flows at the eight places now and 6, 12, 18, 24, 36, 48 and 60 hours ago; a missing one is
        the mean of its column. The corrupt measurement is left out unless `keep_corrupt`. Then each column has mean 0
        and standard deviation 1, so that a loss of 1 is that of always predicting the mean. Shards and Dirichlet deal
        by how high the rivers will stand: the octile of the mean of a row's targets.
        """
        import torch  # noqa: PLC0415

        path = self.directory(source) / FILE
        table = _read(path)
        if not self.keep_corrupt and _is_corrupt(table):
            table = _without_corrupt(table)
            _log.warning(
                "%s: row %d (from 0) is left out: its flow at nasi2, %s, is corrupt; river-flow-whole keeps it",
                path,
                _CORRUPT_ROW,
                _CORRUPT_FLOW,
            )
        table = _standardised(table)
        ranks = table[:, _FEATURES:].mean(axis=1).argsort(kind="stable").argsort(kind="stable")
        values = torch.from_numpy(table.astype(np.float32))
        return Pool(
            values[:, :_FEATURES].contiguous(), values[:, _FEATURES:].contiguous(), labels=ranks * _LEVELS // len(ranks)
        )


class RiverFlowWhole(RiverFlow):
    """`river-flow` with the corrupt measurement, as the file was published."""

    keep_corrupt = True


def _is_corrupt(table: Table) -> bool:
    """True for the published file, in which one flow is corrupt."""
    return len(table) > _CORRUPT_ROW and bool(table[_CORRUPT_ROW, _FEATURES + PLACES.index("nasi2")] == _CORRUPT_FLOW)


def _without_corrupt(table: Table) -> Table:
    """The table without the row whose target is corrupt, (n - 1, 72); NaN where the same value is a feature."""
    cleaned = table.copy()
    for index, lag in enumerate(_LAGS):
        row, column = _CORRUPT_ROW + _HORIZON + lag, index * len(PLACES) + PLACES.index("nasi2")
        if row < len(table) and table[row, column] == _CORRUPT_FLOW:
            cleaned[row, column] = np.nan
    return np.delete(cleaned, _CORRUPT_ROW, axis=0)


def _standardised(table: Table) -> Table:
    """Missing values, NaN, become the mean of their column; then mean 0 and deviation 1, where a column has any."""
    mean = np.nanmean(table, axis=0)
    centred = np.where(np.isnan(table), 0.0, table - mean)
    deviation = centred.std(axis=0)
    scaled: Table = centred / np.where(deviation > 0, deviation, 1.0)
    return scaled


def _read(path: Path) -> Table:
    """(n, 72) the flows in an ARFF file, NaN where one is missing."""
    wanted = f"expected Mulan's RF1, an ARFF file with {_FEATURES} features and {len(PLACES)} targets, all numeric"
    columns = _FEATURES + len(PLACES)
    names: list[str] = []
    rows: list[list[float]] | None = None
    for number, line in lines(path, wanted):
        text = line.strip()
        if not text or text.startswith("%"):
            continue
        if rows is not None:
            rows.append(_row(text, columns, f"{path}, line {number}", wanted))
        elif text.lower().startswith("@attribute"):
            names.append(text[10:].strip().partition(" ")[0].strip("'\"").lower())
        elif text.lower() == "@data":
            rows = []
    if not rows or len(names) != columns or tuple(name.partition("_")[0] for name in names[_FEATURES:]) != PLACES:
        raise DataError(f"{path} names {len(names)} columns and has {len(rows or ())} rows; {wanted}")
    table = np.array(rows)
    if (empty := np.isnan(table).all(axis=0)).any():
        raise DataError(f"{path}: nothing is known of {names[int(empty.argmax())]}; {wanted}")
    return table


def _row(text: str, columns: int, where: str, wanted: str) -> list[float]:
    try:
        values = [math.nan if value.strip() == "?" else float(value) for value in text.split(",")]
    except ValueError as error:
        raise DataError(f"{where}: {error}; {wanted}") from error
    if len(values) != columns or any(map(math.isinf, values)) or any(map(math.isnan, values[_FEATURES:])):
        raise DataError(f"{where}: not {columns} finite numbers, of which a feature may be missing (?); {wanted}")
    return values
