"""Cosines as a heat map on a terminal: numbers, and colours from blue to red."""

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from fedpareto.cli.show.tables import NAME_WIDTH, WIDTH


def heat_map(names: Sequence[str], cosines: Sequence[float]) -> RenderableType:
    """Cosines (m, m), row after row, with as many digits as fit, and a legend of the colours."""
    m = len(names)
    if not m or len(cosines) != m * m:
        return Text(f"{len(cosines)} cosines are not those of {m} rows")
    label = min(max(len(name) for name in names), NAME_WIDTH)
    cell = next((width for width in (6, 4, 2) if label + 5 + width * m <= WIDTH), 0)
    if cell == 0:
        return Text(f"{m} x {m} cosines do not fit a terminal; see them with --json")
    lines = [Text(" " * (label + 5) + "".join(f"{j + 1:>{cell}}" if cell > 2 else "" for j in range(m)))]
    for i, name in enumerate(names):
        line = Text(f"{i + 1:>3}  {name[:label]:<{label}}")
        for j in range(m):
            value = cosines[i * m + j]
            line.append(_number_in(value, cell), style=heat(value))
        lines.append(line)
    legend = Text("blue: against each other  ")
    for value in (-1.0, 0.0, 1.0):
        legend.append(f"{value:^6g}", style=heat(value))
    return Group(*lines, Text(), legend.append("  red: together"))


def _number_in(value: float, cell: int) -> str:
    if cell == 2 or not math.isfinite(value):
        return " " * cell
    if cell == 4:
        return f"{round(100 * value):>4d}"
    return f"{value:>6.2f}"


def heat(value: float) -> str:
    """Blue for -1, white for 0, red for 1; black on it."""
    if not math.isfinite(value):
        return "default"
    fade = round(255 * (1 - min(abs(value), 1.0) * 0.8))
    red, green, blue = (255, fade, fade) if value >= 0 else (fade, fade, 255)
    return f"#000000 on #{red:02x}{green:02x}{blue:02x}"
