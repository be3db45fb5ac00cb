"""What members hold, in the totals of a run that describes data: a line for each column, with its histogram."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from federation.text import counted
from fedpareto.formatting import UNKNOWN, number
from fedpareto.web.pages.drawing import ALONG
from fedpareto.web.pages.html import Html, table, tag
from fedpareto.web.sections.shown_run import ShownRun

HEADS = ("column", "count", "missing", "outside", "mean", "deviation", "5 %", "median", "95 %")
_MOST = 1000  # rows of a page
_HEIGHT = 28.0
_SHORT = {"fewer than 10": "< 10", "not shown": "hidden"}
_BLOCKS = "▁▂▃▄▅▆▇█"


def cells(column: Mapping[str, Any]) -> tuple[str, ...]:
    """A column of the document as words, in the order of `HEADS`."""
    shown = (column[name] for name in ("count", "missing", "outside"))
    counts = (f"{count:,}" if isinstance(count, int) else _SHORT.get(count, str(count)) for count in shown)
    measured = (column["mean"], column["deviation"], *(column["quantiles"].get(at) for at in ("0.05", "0.5", "0.95")))
    return (column["name"], *counts, *(UNKNOWN if value is None else number(value, 4) for value in measured))


def bars(column: Mapping[str, Any]) -> str:
    """The histogram, or the classes, as characters; a point for what is not shown."""
    counts = column["counts"]
    most = max((count for count in counts if isinstance(count, int)), default=0)
    return "".join(_BLOCKS[min(7, 8 * count // (most + 1))] if isinstance(count, int) else "·" for count in counts)


def sentence(document: Mapping[str, Any]) -> str:
    """How many members and samples were described, and what is not shown."""
    members, samples = counted(len(document["members"]), "member"), counted(document["samples"], "sample")
    splits = ", ".join(document["splits"])
    left_out = document["left_out"]
    told = f"{members} with {samples} ({splits})"
    if left_out:
        told += f"; left out, since no data can have their numbers: {', '.join(left_out)}"
    small = (
        "Values that 1 to 4 samples of a member have count as others"
        if document.get("private")
        else ("Members tell counts of 1 to 4 as 0")
    )
    return (
        f"{told}. No count below {document['fewest']} is shown, and no number from which it could be computed. "
        f"{small}, unless their owners have set another bound."
    )


def data(run: ShownRun) -> Html:
    """A line for each column, with its histogram; empty for a run that describes no data."""
    if not run.describes:
        return Html("")
    if not run.table.document:
        return tag("p", "No data have been described yet.", class_="soft")
    document = json.loads(run.table.document)
    columns: Sequence[Mapping[str, Any]] = document["columns"]
    rows = ((*cells(column)[:1], _drawn(column), *cells(column)[1:]) for column in columns[:_MOST])
    more = f" The first {_MOST} of {len(columns)} columns." if len(columns) > _MOST else ""
    heads = [HEADS[0], "histogram", *HEADS[1:]]
    return table(heads, rows, words=2, caption=sentence(document) + more)


def lines(document: Mapping[str, Any]) -> Iterator[list[str]]:
    """The document as the lines of a CSV file: a line for each count of each column."""
    yield ["column", "number", "from", "to", "value"]
    for column in document["columns"]:
        name = column["name"]
        for measure in ("values", "count", "missing", "outside", "mean", "deviation"):
            value = column[measure]
            yield [name, measure, "", "", "" if value is None else str(value)]
        for share, value in column["quantiles"].items():
            yield [name, f"quantile {share}", "", "", str(value)]
        low, high = column.get("range", ["", ""])
        ends = [low, *column["edges"], high]
        for at, count in enumerate(column["counts"]):
            begin, end = (at, at) if "classes" in column else (ends[at], ends[at + 1])
            yield [name, "class" if "classes" in column else "bin", str(begin), str(end), str(count)]


def _drawn(column: Mapping[str, Any]) -> Html:
    counts = column["counts"]
    most = max((count for count in counts if isinstance(count, int)), default=0) or 1
    width = ALONG / len(counts)
    parts = []
    for at, count in enumerate(counts):
        known = isinstance(count, int)
        height = max(1.0, _HEIGHT * count / most) if known else 2.0
        title = tag("title", f"{_place(column, at)}: {count}")
        parts.append(
            tag(
                "rect",
                title,
                x=f"{at * width:g}",
                y=f"{_HEIGHT - height:g}",
                width=f"{width * 0.9:g}",
                height=f"{height:g}",
                class_="f0" if known else "f5",
            )
        )
    alt = f"{column['name']}: {', '.join(f'{_place(column, at)} {count}' for at, count in enumerate(counts))}"
    box = f"0 0 {ALONG:g} {_HEIGHT:g}"
    return tag("svg", *parts, viewBox=box, preserveAspectRatio="none", class_="spark", role="img", aria_label=alt)


def _place(column: Mapping[str, Any], at: int) -> str:
    """What a count is of: a class, or the ends of a bin."""
    if "classes" in column:
        return f"class {at}"
    low, high = column.get("range", [None, None])
    begin, end = ([low, *column["edges"], high][at + step] for step in (0, 1))
    if begin is None or end is None:
        return f"below {number(end, 4)}" if begin is None and end is not None else f"from {number(begin, 4)}"
    return f"{number(begin, 4)} to {number(end, 4)}"
