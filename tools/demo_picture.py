"""Writes the picture and the table of the demo that the README shows, from the demo's own results.

    fedpareto demo --seed 1
    python tools/demo_picture.py [fedpareto-demo/results.json]

It copies the results into docs/pictures/demo.json, draws docs/pictures/demo-light.svg and demo-dark.svg from them, and
replaces the table in README.md. Without an argument it starts from docs/pictures/demo.json.
"""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedpareto.demo.hospital_dumbbells import THEMES, panels, picture
from fedpareto.demo.hospitals import EIGHT, TWO
from fedpareto.demo.story import TITLES, HospitalAccuracies
from fedpareto.formatting import percent
from fedpareto.series import mean

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
TABLE = re.compile(r"\| accuracy after .*?\n\n", re.DOTALL)
_KEPT = ("rounds", "seed", "runs", "seconds")
_OF_A_RUN = ("name", "algorithm", "rounds_done", "accuracy", "cosine")


def main() -> None:
    """Reads the results, and writes the files."""
    if len(sys.argv) > 1:
        results = json.loads(Path(sys.argv[1]).read_text())
        kept = {name: results[name] for name in _KEPT}
        kept["runs"] = [{name: run[name] for name in _OF_A_RUN} for run in results["runs"]]
        (PICTURES / "demo.json").write_text(json.dumps(kept, indent=1) + "\n")
    for file, text in drawn().items():
        file.write_text(text)
    readme = ROOT / "README.md"
    readme.write_text(TABLE.sub(lambda _: table() + "\n", readme.read_text(), count=1))


def runs() -> Mapping[str, Any]:
    """The runs of the committed results, by name."""
    return {run["name"]: run for run in json.loads((PICTURES / "demo.json").read_text())["runs"]}


def drawn() -> dict[Path, str]:
    """The pictures, by file."""
    columns = [HospitalAccuracies(title, runs()[name]["accuracy"]) for name, title in TITLES.items()]
    return {PICTURES / f"demo-{theme}.svg": picture(panels(columns), theme) for theme in THEMES}


def table() -> str:
    """The table of the README."""
    found = runs()
    rounds = {name: found[name]["rounds_done"] for name in TITLES}
    lines = [
        f"| accuracy after {rounds['fedmgda']} rounds | " + " | ".join(TITLES.values()) + " |",
        "|---|---:|---:|---:|---:|",
    ]
    for words, names in (("the eight", EIGHT), ("the two", TWO), ("all ten", (*EIGHT, *TWO))):
        cells = [percent(mean(found[name]["accuracy"][hospital] for hospital in names)) for name in TITLES]
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
