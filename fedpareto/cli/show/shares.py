"""The samples of the clients of a partition: a table of at most 100 columns, a sentence, a chart."""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.text import Text

from federation.tasks.census import Census
from fedpareto.cli.show.heat_map import heat
from fedpareto.cli.show.tables import NAME_WIDTH, WIDTH, new_table

FIRST = 20  # clients that are shown one by one
_NAMED = 3  # clients whose splits lack a class that are named, and classes of each
_SHADES = "░▒▓█"
_GAP = 2


def table(census: Census, names: Sequence[str]) -> RenderableType:
    """A row for each of the first clients; after them, where there are more, the least, median and most of all.

    Classes have a column each, of numbers; where they would not fit, a character each, or a character for several.
    """
    all_counts = census.counts
    held = (all_counts > 0).sum(axis=1)
    heads = ["train", "validation", "test", *(["classes"] if len(census.classes) else [])]
    totals = np.column_stack([census.sizes, held]) if len(census.classes) else census.sizes
    room = WIDTH - min(max(map(len, [*names[:FIRST], "median"])), NAME_WIDTH) - _GAP
    room -= sum(max(len(head), len(str(most))) + _GAP for head, most in zip(heads, totals.max(axis=0), strict=True))
    width = max(len(str(label)) for label in [*census.classes, all_counts.max(initial=0)])
    numbers = len(census.classes) * (width + 1) <= room
    together = math.ceil(len(census.classes) / room)  # classes in a shaded cell
    grid = new_table("client", *(f">{head}" for head in heads))
    if len(census.classes):
        head = " ".join(f"{label:>{width}}" for label in census.classes) if numbers else _span(census.classes, together)
        grid.add_column(head, no_wrap=True)

    def row(name: str, sizes: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        cells = _numbers(counts, width) if numbers else _shades(counts, together)
        grid.add_row(name, *map(str, sizes), *([cells] if len(census.classes) else []))

    for name, sizes, counts in zip(names[:FIRST], totals, all_counts, strict=False):
        row(name, sizes, counts)
    if len(names) > FIRST:
        grid.add_row(f"… {len(names) - FIRST} more", style="dim")
        for name, pick in (("least", 0), ("median", (len(names) - 1) // 2), ("most", -1)):
            row(name, np.sort(totals, axis=0)[pick], np.sort(all_counts, axis=0)[pick])
    return grid if numbers or together == 1 else Group(grid, f"A character stands for {together} classes.")


def sentence(census: Census) -> str:
    """Sizes, classes per client, and how unlike the clients are."""
    totals = census.sizes.sum(axis=1)
    text = f"{_many(len(totals), 'client')}, {_many(int(totals.sum()), 'sample')}: {_range(totals)} each"
    if len(census.classes):
        held = (census.counts > 0).sum(axis=1)
        text += (
            f"; {_range(held)} of {_many(len(census.classes), 'class', 'classes')} each"
            f"; heterogeneity {census.heterogeneity:.3f} (mean total variation from the shares of all together)"
        )
    return text


def remarks(census: Census, names: Sequence[str]) -> Iterator[str]:
    """What is to know about the splits: the classes that they lack, and whether their rows count as independent."""
    lacking = {name: splits for name, splits in zip(names, census.lacking, strict=True) if splits}
    if lacking:
        shown = [f"{name}: {_lack(splits)}" for name, splits in list(lacking.items())[:_NAMED]]
        more = [f"{len(lacking) - _NAMED} more"] * (len(lacking) > _NAMED)
        hold = "holds" if len(lacking) == 1 else "hold"
        remedy = (
            "" if census.stratified else " Pool(stratify=True) gives each split a sample of each class if possible."
        )
        yield (
            f"{_many(len(lacking), 'client')} {hold} a class that a split lacks, so its metrics know nothing of it. "
            f"{'; '.join([*shown, *more])}.{remedy}"
        )
    if census.grouped is False:
        yield (
            "Rows count as independent: the pool names no groups. If a person has several rows, Pool(groups=...) keeps "
            "them in one split, and with one client."
        )


def _lack(splits: Mapping[str, NDArray[np.int64]]) -> str:
    """The classes that each split lacks."""
    return ", ".join(
        f"{name} lacks {' '.join(map(str, labels[:_NAMED]))}{' …' if len(labels) > _NAMED else ''}"
        for name, labels in splits.items()
    )


def _numbers(counts: NDArray[np.int64], width: int) -> Text:
    """Numbers on a shade of the client's share; a dot for none."""
    text = Text()
    for count in counts:
        text.append(f"{count or '·':>{width}}", heat(-count / counts.sum()) if count else "dim").append(" ")
    return text


def _shades(counts: NDArray[np.int64], together: int) -> Text:
    """A character for `together` classes, darker for more of the client's samples; a dot for none."""
    sums = np.add.reduceat(counts, range(0, len(counts), together))
    most = sums.max(initial=1)
    return Text("".join(_SHADES[math.ceil(len(_SHADES) * count / most) - 1] if count else "·" for count in sums))


def _span(labels: NDArray[np.int64], together: int) -> str:
    """The first and the last class above the characters that stand for all."""
    first, last = str(labels[0]), str(labels[-1])
    return first + last.rjust(max(math.ceil(len(labels) / together) - len(first), len(last) + 1))


def _many(count: int, singular: str, plural: str = "") -> str:
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def _range(values: NDArray[np.int64]) -> str:
    low, high = values.min(), values.max()
    return f"{low:,}" if low == high else f"{low:,} to {high:,} (median {np.median(values):,.10g})"


def document(census: Census, names: Sequence[str]) -> Iterator[dict[str, object]]:
    """The clients for JSON: names, sizes, and the classes that they hold."""
    labels, counts, lacking = list(map(str, census.classes.tolist())), census.counts, census.lacking
    for index, name in enumerate(names):
        yield {
            "client": name,
            **({"owner": census.owners[index]} if census.owners else {}),
            **dict(zip(("train", "validation", "test"), census.sizes[index].tolist(), strict=True)),
            "classes": {label: count for label, count in zip(labels, counts[index].tolist(), strict=True) if count},
            "lacking": {split: [str(label) for label in absent] for split, absent in lacking[index].items()},
        }
