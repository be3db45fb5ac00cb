"""Diagrams of the documents in words, for pages on which no script draws them.

They are Mermaid's flowcharts and sequence diagrams, as far as the documents use them.
"""

import re

BLOCK = re.compile(r"```mermaid\n(.*)\n *```\n?", re.DOTALL)
NODE = re.compile(r"(\w+)(?:\[\(?\"(.+?)\"\)?\])?")
ARROW = re.compile(r" --(?: \"?([^-\"]+)\"? --)?> ")
MESSAGE = re.compile(r"(\w+)->>(\w+): (.+)")
PARTICIPANT = re.compile(r"participant (\w+) as (.+)")
SUBGRAPH = re.compile(r"subgraph \w+\[\"(.+)\"\]")


def in_words(block: str) -> str:
    """A block of code; of a diagram, a block with its text."""
    diagram = BLOCK.fullmatch(block)
    if diagram is None:
        return block
    kind, *lines = (line.strip() for line in diagram[1].splitlines())
    told = _sequence(lines) if kind == "sequenceDiagram" else _flowchart(lines)
    return "```text\n" + "\n".join(told) + "\n```\n"


def _sequence(lines: list[str]) -> list[str]:
    """Who tells whom what, in its order."""
    names = {found[1]: found[2] for line in lines if (found := PARTICIPANT.fullmatch(line))}
    told = []
    for sender, receiver, message in (found.groups() for line in lines if (found := MESSAGE.fullmatch(line))):
        who = names[sender] if sender == receiver else f"{names[sender]} → {names[receiver]}"
        told.append(f"{who}: {message}")
    return told


def _flowchart(lines: list[str]) -> list[str]:
    """What each part holds, and what leads where."""
    labels: dict[str, str] = {}
    parts: dict[str, list[str]] = {}
    part, arrows = "", list[str]()
    for line in lines:
        title = SUBGRAPH.fullmatch(line)
        if title or line == "end":
            part = title[1] if title else ""
            continue
        found = NODE.findall(ARROW.sub(" & ", line))
        labels |= {name: label for name, label in found if label or name not in labels}
        for _, label in found:
            if part and label:
                parts.setdefault(part, []).append(f"{_first(label)}{_rest(label)}")
        if ARROW.search(line):
            arrows.append(line)
    held = [f"{title}: {'; '.join(dict.fromkeys(names))}" for title, names in parts.items()]
    return held + [step for line in arrows for step in _steps(line, labels)]


def _steps(line: str, labels: dict[str, str]) -> list[str]:
    """The arrows of a line, one after the other."""
    sides, words = ARROW.split(line)[::2], ARROW.split(line)[1::2]
    named = [dict.fromkeys(_first(labels[name]) or name for name, _ in NODE.findall(side)) for side in sides]
    steps = zip(named, words, named[1:], strict=False)
    return [
        f"{', '.join(a)} → {', '.join(b)}" + (f": {word.strip().replace('<br/>', ' ')}" if word else "")
        for a, word, b in steps
    ]


def _first(label: str) -> str:
    return label.partition("<br/>")[0]


def _rest(label: str) -> str:
    rest = label.partition("<br/>")[2].replace("<br/>", " ")
    return f" ({rest})" if rest else ""
