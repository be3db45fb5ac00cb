"""A run: the sections that its report has, kept up to date, and what only a live page can have.

A script draws the lines of the members, and takes their numbers from `series`. It lays the newest column over the heat
map. The list of rounds leads to the page of each.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.v1 import admin_pb2 as v1
from federation.v1.common_pb2 import RunState
from fedpareto.run_names import ENDED
from fedpareto.run_table import MemberNumber, RunTable
from fedpareto.web.console.federation_reader import HeldRun, Reader
from fedpareto.web.console.screens import wording
from fedpareto.web.console.view import PageRequest, PageView, Screen
from fedpareto.web.sections import run_words
from fedpareto.web.sections.bins import POINTS, Bins
from fedpareto.web.sections.heat_maps import ABSENT, HEATS, WORDS, heat_map, last_column
from fedpareto.web.sections.page_sections import SECTIONS, Pace
from fedpareto.web.sections.shown_run import ShownRun

ROUNDS = 50  # entries of the list, on a page
_GROWTH = 1.1  # of the rounds, after which the figures are drawn again
_EACH = 10  # rounds of which each draws them again


def _view(reader: Reader, asked: PageRequest) -> PageView:
    held = reader.run(asked.parameters["run"])
    measure = asked.choice("heat", HEATS)
    members = {client.client_id: client for client in reader.lists.clients} if reader.lists else {}
    data = held.shown(members, reader.names.origin(held.run.run_id, held.run.name))
    run, table = data.run, data.table
    bins = Bins.of(run.rounds_total, table.stop, POINTS)
    always = {section.anchor: section.html(data) for section in SECTIONS if section.pace is Pace.ALWAYS}
    parts = {**always, **_seldom(held, data)}
    return PageView(
        reader.names.named(run.run_id, run.name),
        "run.html",
        {
            "run": run,
            "verdict": data.verdict,
            "progress": wording.rounds_done(run),
            "left": wording.time_left(held),
            "waits": wording.waiting(held),
            "state_look": run_words.state_look(run),
            "partial": not held.complete and bool(run.rounds_done),
            "cards": run_words.cards(data) if table.lines else "",
            "kind": data.scored,
            "tail": json.dumps(_tail(data, bins, measure), separators=(",", ":")),
            "sections": SECTIONS,
            "Pace": Pace,
            "shown": [section for section in SECTIONS if parts.get(section.anchor, True)],
            "data": data,
            "heats": HEATS,
            "heat": measure,
            "heat_words": WORDS[measure],
            "heat_absent": ABSENT,
            "heat_figure": lambda: heat_map(data, measure),
            **_feed(table, asked),
            "commands": _commands(run, reader.names.argument(run)),
            "argument": reader.names.argument(run),
        },
        parts,
    )


def _seldom(held: HeldRun, data: ShownRun) -> Mapping[str, str]:
    """The figures. They are many: those of a long run are made again with a tenth more rounds, and at its end."""
    count = len(data.table.whole)
    state = count if count < _EACH else int(math.log(count, _GROWTH)), data.over
    before, made = held.seldom
    if not made or (data.complete and before != state):
        made = {section.anchor: section.html(data) for section in SECTIONS if section.pace is Pace.SELDOM}
        held.seldom = state, made
    return made


def _version(reader: Reader, asked: PageRequest) -> object:
    held = reader.known(asked.parameters["run"])
    return reader.version if held is None or not held.over or not held.complete else held.table.version


def _commands(run: v1.Run, name: str) -> list[str]:
    """The commands that can be given now, without the beginning that all have; `name` stands for the run."""
    if run.state == RunState.RUN_STATE_COMPLETED:
        return [f"run {name}", f"export {name} --out {name}.safetensors"]
    if run.state in ENDED:
        return [f"run {name}"]
    held = run.state == RunState.RUN_STATE_PAUSED
    return [f"watch {name}", f"resume {name}" if held else f"pause {name}", f"stop {name}"]


# --- lines over rounds


def series(reader: Reader, asked: PageRequest) -> dict[str, Any]:
    """The lines of the chart, for the script of the page: of each member, the mean and the worst."""
    held = reader.run(asked.parameters["run"])
    table = held.table.snapshot()
    first = asked.number("from", default=0)
    stop = min(asked.number("to", default=table.stop), table.stop)
    if first or stop < table.stop:
        return _part(table, first, max(first, stop))
    bins = Bins.of(held.run.rounds_total, table.stop, POINTS)
    return _lines(table, bins, 0) | {"together": bins.together, "names": table.names}


def _part(table: RunTable, first: int, stop: int) -> dict[str, Any]:
    """Some rounds in detail, for a reader who has marked them."""
    bins = Bins.of(stop - first, stop - first, POINTS)
    document = _lines(table, bins, 0, offset=first)
    return document | {"together": bins.together, "names": table.names}


def _lines(table: RunTable, bins: Bins, first: int, offset: int = 0) -> dict[str, Any]:
    scores = table.values(MemberNumber.SCORE)[table.order][:, offset:]
    means = np.array(
        [[_of_line(table, n, "mean") for n in range(offset, table.stop)],
         [_of_line(table, n, "worst") for n in range(offset, table.stop)]]
    ).reshape(2, -1)  # fmt: skip
    summary = bins.means(means, first)
    return {
        "first": first,
        "rounds": [number + offset for number in bins.rounds(first)],
        "mean": _compact(summary[0]),
        "worst": _compact(summary[1]),
        "values": [_compact(row) for row in bins.means(scores, first)],
    }


def _of_line(table: RunTable, number: int, name: str) -> float:
    line = table.lines.get(number)
    return math.nan if line is None else getattr(line, name)


def _compact(values: Sequence[float] | NDArray[np.float64]) -> list[float | None]:
    return [round(float(value), 4) if math.isfinite(value) else None for value in values]


def _tail(data: ShownRun, bins: Bins, measure: str) -> dict[str, Any]:
    """The last point of each line and the last column of the heat map, which a new round changes."""
    table = data.table
    document: dict[str, Any] = {
        "stop": table.stop, "together": bins.together, "members": len(table.members), "share": data.scored.share,
        "complete": data.complete,
    }  # fmt: skip
    if not table.stop:
        return document
    document |= _lines(table, bins, bins.count - 1)
    document["column"], document["shades"] = last_column(data, measure)
    return document


# --- the rounds


def _feed(table: RunTable, asked: PageRequest) -> dict[str, Any]:
    failed = asked.choice("rounds", {"all": "", "failed": ""}) == "failed"
    before = asked.number("before", default=0)
    numbers = [
        number
        for number in sorted(table.lines, reverse=True)
        if (not before or number < before) and (not failed or table.lines[number].has_failed)
    ]
    entries = run_words.feed([table.lines[number] for number in numbers])
    return {
        "feed": entries[:ROUNDS],
        "failed_only": failed,
        "older": entries[ROUNDS - 1].first if len(entries) > ROUNDS else None,
        "before": before,
    }


SCREEN = Screen(_view, _version, "/")
