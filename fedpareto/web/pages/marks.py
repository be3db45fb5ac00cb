"""Marks that are told apart without their colours: shapes and dashes of lines, fills of bars."""

import math

from fedpareto.web.pages.html import Html, tag

GLYPHS = "●■▲◆▼★"  # the shapes in the order of the colours
HOLLOW = "○□△◇▽☆"  # the same for dashed lines
COLOURS = len(GLYPHS)


def outline(shape: int, x: float, y: float, size: float) -> list[tuple[float, float]]:
    """The corners of one of `GLYPHS`."""
    corners = {
        0: [(k * 30.0, 1.0) for k in range(12)],
        1: [(45.0 + k * 90, 1.2) for k in range(4)],
        2: [(-90.0 + k * 120, 1.3) for k in range(3)],
        3: [(k * 90.0, 1.3) for k in range(4)],
        4: [(90.0 + k * 120, 1.3) for k in range(3)],
        5: [(-90.0 + k * 36, 1.5 if k % 2 == 0 else 0.6) for k in range(10)],
    }[shape]
    turns = [(math.radians(angle), length * size) for angle, length in corners]
    return [(x + length * math.cos(angle), y + length * math.sin(angle)) for angle, length in turns]


def line_key(name: str, colour: int, *, dashed: bool) -> Html:
    """An entry of the legend of a chart of lines."""
    sample = f"┄{HOLLOW[colour]}┄" if dashed else f"─{GLYPHS[colour]}─"
    return tag("span", tag("span", sample, class_=f"g{colour}", aria_hidden="true"), f" {name}", class_="key-name")


def fill(colour: int, way: int) -> str:
    """The classes of a bar."""
    return f"f{colour} s{colour} q{way}"


def fill_key(name: str, colour: int, way: int) -> Html:
    """An entry of the legend of a chart of bars."""
    return tag("span", tag("i", class_=f"key b{colour} g{colour} q{way}"), f" {name}", class_="key-name")
