"""The timeline of rounds: a row for each round, a bar for each of its phases."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedpareto.report.charts import WIDTH, box, general, steps, svg
from fedpareto.report.html import Html, join, tag
from fedpareto.report.marks import fill, fill_key
from fedpareto.series import known

_LEFT, _RIGHT, _TOP, _ROW = 66.0, 110.0, 6.0, 17.0
_BAR = 11.0
_LEAST = 1.5  # width of a bar


@dataclass(frozen=True)
class Bar:
    """A phase of a kind of work, from `began` to `ended` in seconds after the round's beginning.

    `words` stand beside the row, `title` is the tooltip; `way` is 0 to 3: solid, outlined, half, dashed.
    """

    name: str
    words: str
    title: str
    began: float
    ended: float
    colour: int
    way: int


def timeline(rounds: Sequence[tuple[int, float, Sequence[Bar]]], *, alt: str) -> Html:
    """Rounds below each other: number, seconds (NaN while it runs) and phases of each; `alt` is the text for it."""
    ends = [bar.ended for _, _, bars in rounds for bar in bars] + [seconds for _, seconds, _ in rounds]
    ticks = steps(0.0, max(known(ends), default=1.0))
    scale = (WIDTH - _LEFT - _RIGHT) / ticks[-1]
    foot = _TOP + _ROW * len(rounds)
    parts = []
    for tick in ticks:
        at = _LEFT + tick * scale
        parts.append(tag("line", x1=at, x2=at, y1=_TOP, y2=foot, class_="grid"))
        parts.append(tag("text", general(tick), x=at, y=foot + 15, text_anchor="middle"))
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    label = "seconds since the round began"
    parts.append(tag("text", label, x=middle, y=foot + 31, text_anchor="middle", class_="axis"))
    kinds: dict[str, tuple[int, int]] = {}
    for row, (number, seconds, bars) in enumerate(rounds):
        top = _TOP + row * _ROW + (_ROW - _BAR) / 2
        base = top + _BAR - 2
        parts.append(tag("text", f"round {number}", x=_LEFT - 6, y=base, text_anchor="end"))
        free = _LEFT
        for bar in bars:
            kinds[bar.name] = bar.colour, bar.way
            x, width = _LEFT + bar.began * scale, max((bar.ended - bar.began) * scale, _LEAST)
            parts.append(box(x, top, width, _BAR, fill(bar.colour, bar.way), bar.title))
            free = max(free, x + width)
        if bars and math.isfinite(seconds):
            end = _LEFT + seconds * scale
            parts.append(tag("line", x1=end, x2=end, y1=top - 2, y2=top + _BAR + 2, class_="guide"))
            free = max(free, end)
        parts.append(tag("text", " ".join(bar.words for bar in bars), x=free + 5, y=base))
    keys = (fill_key(name, *look) for name, look in kinds.items())
    return join([tag("p", *keys, class_="legend"), svg("", foot + 36, parts, alt)])
