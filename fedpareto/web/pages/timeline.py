"""A timeline: a lane for each round or member, with spans of time from a common beginning."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedpareto.series import known
from fedpareto.web.pages import drawing
from fedpareto.web.pages.html import Html, join, share, tag
from fedpareto.web.pages.marks import fill, fill_key
from fedpareto.web.pages.scales import cut, general, steps

_LANE, _BAR = 20.0, 12.0  # pixels
_LEAST = 0.004  # the width of a span, as a share


@dataclass(frozen=True)
class TimelineSpan:
    """Something that lasted from `began` to `ended`, in seconds after the beginning of the lane.

    `name` is its entry in the legend, `title` its tooltip; `way` is 0 to 3: solid, outlined, half, dashed.
    """

    name: str
    title: str
    began: float
    ended: float
    colour: int
    way: int = 0


@dataclass(frozen=True)
class TimelineLane:
    """A lane with its name on the left and `words` on the right; it ends after `seconds`, NaN while it lasts."""

    name: str
    words: str
    spans: Sequence[TimelineSpan]
    seconds: float = math.nan


def timeline(
    lanes: Sequence[TimelineLane], *, alt: str, words: str = "", axis: str = "seconds since the round began"
) -> Html:
    """Lanes one below the other; `alt` and `words` are as for `drawing.plot`."""
    ends = [span.ended for lane in lanes for span in lane.spans] + [lane.seconds for lane in lanes]
    ticks = steps(0.0, max(known(ends), default=1.0))
    foot = _LANE * len(lanes)
    parts = []
    for tick in ticks:
        at = share(tick / ticks[-1])
        parts.append(tag("line", x1=at, x2=at, y1=0, y2=foot, class_="grid"))
        parts.append(tag("text", general(tick), x=at, y=foot + 18, text_anchor="middle"))
    parts.append(tag("text", axis, x="50%", y=foot + 36, text_anchor="middle", class_="axis"))
    kinds: dict[str, tuple[int, int]] = {}
    for row, lane in enumerate(lanes):
        top = row * _LANE + (_LANE - _BAR) / 2
        parts.append(tag("text", cut(lane.name), x=0, dx=-8, y=top + _BAR - 2, text_anchor="end", class_="name"))
        for span in lane.spans:
            kinds[span.name] = span.colour, span.way
            width = max((span.ended - span.began) / ticks[-1], _LEAST)
            look = fill(span.colour, span.way)
            parts.append(drawing.box(span.began / ticks[-1], top, width, _BAR, look, span.title))
        if lane.spans and math.isfinite(lane.seconds):
            end = share(lane.seconds / ticks[-1])
            parts.append(tag("line", x1=end, x2=end, y1=top - 2, y2=top + _BAR + 2, class_="guide"))
        parts.append(tag("text", lane.words, x="100%", dx=8, y=top + _BAR - 2))
    keys = (fill_key(name, *look) for name, look in kinds.items())
    return join([drawing.legend(keys), drawing.plot(foot, parts, alt=alt, words=words, look="lanes")])
