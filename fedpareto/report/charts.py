"""Charts as inline SVG. Colours are classes of the page's style sheet; details are tooltips."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fedpareto.report.html import Html, join, points, tag
from fedpareto.report.marks import fill, fill_key, line_key, mark
from fedpareto.series import known, mean

WIDTH, HEIGHT = 760.0, 262.0
LEFT, RIGHT, TOP, BOTTOM = 60.0, 14.0, 26.0, 38.0
COLOURS = 6  # that the page has
_INNER = WIDTH - LEFT - RIGHT
_MARKERS = 80  # points of a line of which each gets a mark with a tooltip; of more, and of a dashed line, some do
_SPARSE = 14  # marks of such a line
_COLUMNS = 360  # of a heat map; of more rounds, several are averaged
_SHADES = 12
_LAYERS = (0, 2, 3)  # how the bars of each layer are filled
_MINOR_DECADES = 6  # of a log axis that has small ticks between its ticks
LARGEST = 1e100  # a larger value is a client's false claim, and would flatten the other values

Format = Callable[[float], str]


def general(value: float) -> str:
    """A number in four digits."""
    return f"{value:.4g}"


@dataclass(frozen=True)
class Series:
    """A line, or a layer of bars, in one of the colours 0 to 5; NaN where a value is missing."""

    name: str
    values: Sequence[float]
    colour: int
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """An axis.

    Attributes:
        name: of the quantity, with its unit.
        format: writes a value.
        low: the axis begins here or below; None leaves it to the values.
        high: the axis ends here or above, likewise.
        log: logarithmic; values that are not positive are left out.
        bounded: the axis is from `low` to `high` exactly.
    """

    name: str
    format: Format
    low: float | None = None
    high: float | None = None
    log: bool = False
    bounded: bool = False


ACCURACY = Axis("accuracy", lambda value: f"{100 * value:.0f} %", low=0.0, high=1.0, bounded=True)
COSINE = Axis("cosine", lambda value: f"{value:.1f}", low=-1.0, high=1.0, bounded=True)


class Scale:
    """From values to places along an axis that is drawn from `start` to `end`."""

    def __init__(self, axis: Axis, values: Iterable[float], start: float = HEIGHT - BOTTOM, end: float = TOP) -> None:
        self._log, self._bounded, self._start, self._end = axis.log, axis.bounded, start, end
        shown = [value for value in values if self.known(value)]
        shown += [value for value in (axis.low, axis.high) if value is not None]
        low, high = (min(shown), max(shown)) if shown else (0.1, 1.0)
        if axis.bounded and axis.low is not None and axis.high is not None:
            low, high = axis.low, axis.high
        self.ticks = decades(low, high) if axis.log else steps(low, high)
        self.small_ticks = between(self.ticks) if axis.log else []
        self._low, self._high = self._of(self.ticks[0]), self._of(self.ticks[-1])

    def _of(self, value: float) -> float:
        return math.log10(value) if self._log else value

    def known(self, value: float) -> bool:
        """True if a value can be drawn."""
        return abs(value) <= LARGEST and (value > 0 or not self._log)

    def at(self, value: float) -> float:
        """The place of a value."""
        share = (self._of(value) - self._low) / (self._high - self._low)
        if self._bounded:
            share = min(max(share, 0.0), 1.0)
        return self._start + share * (self._end - self._start)


def steps(low: float, high: float) -> list[float]:
    """About five round numbers that enclose the values."""
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        low, high = (low - 0.5 * abs(low), high + 0.5 * abs(high)) if low else (0.0, 1.0)
    raw = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * i for i in range(first, max(last, first + 1) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten that enclose the values, or a finer series where the values are close to each other."""
    even = steps(low, high)
    if high < 3 * low and even[0] > 0:
        return even
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    fine = [factor * 10.0**i for i in range(first - 1, last + 2) for factor in (1, 2, 5)]
    above = next(i for i, tick in enumerate(fine) if tick >= high * (1 - 1e-9))
    below = max(i for i, tick in enumerate(fine) if tick <= low * (1 + 1e-9))
    if above - below <= 6:
        return fine[below : max(above, below + 1) + 1]
    step = max(1, math.ceil((last - first) / 6))
    return [10.0**i for i in range(first, last + step, step)]


def between(ticks: Sequence[float]) -> list[float]:
    """The multiples 2 to 9 of powers of ten that lie between ticks which are at most a decade apart."""
    first, last = math.floor(math.log10(ticks[0])), math.ceil(math.log10(ticks[-1]))
    if any(b > 10.1 * a for a, b in pairwise(ticks)) or last - first > _MINOR_DECADES:
        return []
    multiples = [factor * 10.0**i for i in range(first, last) for factor in range(2, 10)]
    return [value for value in multiples if ticks[0] < value < ticks[-1]]


def lines(
    rounds: Sequence[int], series: Sequence[Series], axis: Axis, *, band: tuple[Series, Series] | None = None
) -> Html:
    """Lines over rounds; `band` is a shaded area between two more."""
    scale = Scale(axis, [value for line in [*series, *(band or ())] for value in line.values])
    x = _rounds_to_x(rounds)
    parts = [grid(scale, axis), _round_axis(rounds, x)]
    if band:
        edges = [
            (x[i], scale.at(low), scale.at(high))
            for i, (low, high) in enumerate(zip(band[0].values, band[1].values, strict=True))
            if scale.known(low) and scale.known(high)
        ]
        outline = [(at, high) for at, _, high in edges] + [(at, low) for at, low, _ in reversed(edges)]
        parts.append(tag("polygon", points=points(outline), class_=f"band f{band[0].colour}"))
    for index, line in enumerate(series):
        shown = [(i, value) for i, value in enumerate(line.values) if scale.known(value)]
        positions = [(x[i], scale.at(value)) for i, value in shown]
        dashed = " dashed" if line.dashed else ""
        parts.append(tag("polyline", points=points(positions), class_=f"line s{line.colour}{dashed}"))
        sparse = line.dashed or len(shown) > _MARKERS
        every = max(1, math.ceil(len(shown) / _SPARSE)) if sparse else 1
        first = min(index * every // len(series), max(len(shown) - 1, 0))  # so that marks of equal lines do not meet
        parts += [
            mark(
                line.colour, at, height, 3.6 if sparse else 2.8,
                f"round {rounds[i]}: {line.name} {axis.format(value)}", hollow=line.dashed,
            )
            for (i, value), (at, height) in list(zip(shown, positions, strict=True))[first::every]
        ]  # fmt: skip
    return join([legend(series), svg(axis.name, HEIGHT, parts)])


def stacked(rounds: Sequence[int], layers: Sequence[Series], axis: Axis) -> Html:
    """Bars over rounds, layer upon layer."""
    totals = [sum(values) for values in zip(*(layer.values for layer in layers), strict=True)]
    scale = Scale(axis, [0.0, *totals])
    x = _rounds_to_x(rounds)
    width = max(0.6, 0.8 * _INNER / max(len(rounds), 8))
    parts = [grid(scale, axis), _round_axis(rounds, x)]
    for i, number in enumerate(rounds):
        base = 0.0
        for way, layer in zip(_LAYERS, layers, strict=False):
            value = layer.values[i]
            if value > 0:
                top, title = scale.at(base + value), f"round {number}: {layer.name} {axis.format(value)}"
                look = fill(layer.colour, way)
                parts.append(box(x[i] - width / 2, top, width, scale.at(base) - top, look, title))
                base += value
    keys = (fill_key(layer.name, layer.colour, way) for way, layer in zip(_LAYERS, layers, strict=False))
    return join([tag("p", *keys, class_="legend"), svg(axis.name, HEIGHT, parts)])


def bars(names: Sequence[str], values: Sequence[float], axis: Axis, *, marked: int, line: Series) -> Html:
    """A bar for each name, in order, the first `marked` outlined in another colour; a line goes across at a value."""
    scale = Scale(axis, [0.0, *values, *line.values])
    slot = _INNER / max(len(names), 1)
    width = min(0.8 * slot, 40.0)
    parts = [grid(scale, axis)]
    labelled = len(names) <= 40
    height = HEIGHT + (min(max(map(len, names), default=0), 24) * 5.0 if labelled else 0.0)
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        middle = LEFT + (i + 0.5) * slot
        top, bottom = scale.at(max(value, 0.0)), scale.at(min(value, 0.0))
        look = fill(1, 1) if i < marked else fill(0, 0)
        parts.append(box(middle - width / 2, top, width, bottom - top, look, f"{name}: {axis.format(value)}"))
        if labelled:
            foot = HEIGHT - BOTTOM + 12
            turn = f"rotate(-50 {middle:.1f} {foot:.1f})"
            parts.append(tag("text", cut(name), x=middle, y=foot, text_anchor="end", transform=turn))
    across = scale.at(line.values[0])
    ends = {"x1": LEFT, "x2": WIDTH - RIGHT, "y1": across, "y2": across}
    parts.append(tag("line", tag("title", line.name), **ends, class_=f"line s{line.colour} dashed"))
    return svg(axis.name, height, parts)


def pairs(rows: Sequence[tuple[str, float, float]], names: tuple[str, str], format_: Format, *, alt: str) -> Html:
    """Two bars for each row, lying below each other, with their values beside them."""
    left, thick, slot = LEFT + 110, 13.0, 38.0
    largest = max(known(value for _, *values in rows for value in values), default=0.0) or 1.0
    parts = []
    for i, (name, *values) in enumerate(rows):
        top = 4.0 + i * slot
        parts.append(tag("text", cut(name), x=left - 6, y=top + thick + 4, text_anchor="end", class_="axis"))
        for k, value in enumerate(values):
            width = (WIDTH - left - 130) * (value if math.isfinite(value) else 0.0) / largest
            y = top + k * (thick + 1)
            parts.append(box(left, y, width, thick, fill(2 * k, k), f"{name}: {names[k]} {format_(value)}"))
            parts.append(tag("text", f"{names[k]} {format_(value)}", x=left + width + 5, y=y + thick - 3))
    keys = [fill_key(name, 2 * k, k) for k, name in enumerate(names)]
    return join([tag("p", *keys, class_="legend"), svg("", 4.0 + slot * len(rows), parts, alt)])


def heat(rounds: Sequence[int], names: Sequence[str], values: Sequence[Sequence[float]], format_: Format) -> Html:
    """Shades for `values` (a row for each name, a column for each round), from 0 to the largest; NaN is left blank."""
    together = -(-len(rounds) // _COLUMNS)
    rows = [[mean(row[i : i + together]) for i in range(0, len(row), together)] for row in values]
    largest = max(known(value for row in rows for value in row), default=0.0)
    columns = len(rows[0]) if rows else 1
    cell = (_INNER - 60) / columns, min(16.0, max(3.0, 560.0 / max(len(names), 1)))
    left, top = LEFT + 60, 4.0
    height = top + cell[1] * len(names)
    shades: dict[int, list[str]] = {}
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            if math.isfinite(value):
                shade = round(_SHADES * (max(value, 0.0) / largest)) if largest > 0 else 0
                shades.setdefault(shade, []).append(f"M{j} {i}h1v1h-1z")
    cells = [
        tag("path", d="".join(squares), class_="f0", fill_opacity=_shade(shade / _SHADES))
        for shade, squares in sorted(shades.items())
    ]
    frame = f"translate({left:.2f} {top:.2f}) scale({cell[0]:.4f} {cell[1]:.4f})"
    every = max(1, math.ceil(11 / cell[1]))
    labels = [
        tag("text", cut(name), x=left - 6, y=top + (i + 0.5) * cell[1] + 3.5, text_anchor="end")
        for i, name in enumerate(names)
        if i % every == 0
    ]
    ticks = [
        tag("text", str(rounds[i]), x=left + (i // together + 0.5) * cell[0], y=height + 16, text_anchor="middle")
        for i in _spread(len(rounds))
    ]
    keys = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        keys += [tag("i", class_="key b0", style=f"opacity:{_shade(share):.2f}"), f" {format_(largest * share)} "]
    averaged = f" (each column is the mean of {together} rounds)" if together > 1 else ""
    key = tag("p", *keys, averaged, class_="legend")
    drawing = [tag("g", *cells, transform=frame, shape_rendering="crispEdges"), *labels, *ticks]
    drawing.append(tag("text", "round", x=left + (_INNER - 60) / 2, y=height + 31, text_anchor="middle", class_="axis"))
    return join([key, svg("", height + 36, drawing)])


def _shade(share: float) -> float:
    """The opacity of a cell; the lightest one still differs from a blank."""
    return 0.05 + 0.95 * share


def box(x: float, y: float, width: float, height: float, look: str, title: str) -> Html:
    """A rectangle from its upper left corner, with a tooltip."""
    return tag("rect", tag("title", title), x=x, y=y, width=width, height=height, class_=look)


def svg(name: str, height: float, parts: Sequence[str], alt: str = "") -> Html:
    """A drawing of the usual width; `name` is written at its upper left, `alt` describes it to screen readers."""
    title = [tag("text", name, x=4.0, y=12.0, class_="axis")] if name else []
    label = alt or name or "weights"
    return tag("svg", *title, *parts, viewBox=f"0 0 {WIDTH:.0f} {height:.0f}", role="img", aria_label=label)


def legend(series: Sequence[Series]) -> Html:
    """The names of the lines with their marks."""
    return tag("p", *(line_key(line.name, line.colour, dashed=line.dashed) for line in series), class_="legend")


def grid(scale: Scale, axis: Axis) -> Html:
    """Horizontal lines at the ticks of a vertical axis, with their values."""
    parts = []
    for y, tick in ((scale.at(tick), tick) for tick in scale.ticks):
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
        parts.append(tag("text", axis.format(tick), x=LEFT - 6, y=y + 3.5, text_anchor="end"))
    for y in map(scale.at, scale.small_ticks):
        parts.append(tag("line", x1=LEFT, x2=LEFT + 5, y1=y, y2=y, class_="tick"))
    return join(parts)


def _round_axis(rounds: Sequence[int], x: Sequence[float]) -> Html:
    ticks = [
        tag("text", str(rounds[i]), x=x[i], y=HEIGHT - BOTTOM + 16, text_anchor="middle") for i in _spread(len(rounds))
    ]
    name = tag("text", "round", x=LEFT + _INNER / 2, y=HEIGHT - 4, text_anchor="middle", class_="axis")
    return join([*ticks, name])


def _rounds_to_x(rounds: Sequence[int]) -> list[float]:
    margin = _INNER / max(len(rounds), 8) / 2
    first, last = rounds[0], rounds[-1]
    span = max(last - first, 1)
    return [LEFT + margin + (number - first) / span * (_INNER - 2 * margin) for number in rounds]


def _spread(count: int) -> list[int]:
    """At most about ten indices, evenly apart."""
    step = next(step for power in range(9) for step in (10**power, 2 * 10**power, 5 * 10**power) if count <= 10 * step)
    return list(range(0, count, step))


def cut(name: str) -> str:
    """A name that fits beside a chart."""
    return name if len(name) <= 18 else f"{name[:17]}…"
