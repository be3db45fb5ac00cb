"""A run: the verdict, the course of each member, who is left behind, and what happened round by round."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.v1 import admin_pb2 as v1
from federation.v1.common_pb2 import RunState
from fedpareto import formatting
from fedpareto.admin_messages import epsilon_of_clients
from fedpareto.run_names import ENDED
from fedpareto.run_table import OUTCOMES, MemberNumber, Outcome, RoundLine, RunTable
from fedpareto.series import equals
from fedpareto.web.console.federation_reader import HeldRun, Reader
from fedpareto.web.console.screens import wording
from fedpareto.web.console.view import PageRequest, PageView, Screen
from fedpareto.web.pages.alert_list import alert_list, lines_of
from fedpareto.web.pages.dumbbells import Dumbbell, dumbbells
from fedpareto.web.pages.heat import COLUMNS, column, heat
from fedpareto.web.pages.html import Html
from fedpareto.web.pages.scales import ACCURACY, Axis
from fedpareto.web.sections.shown_run import Scored

ROUNDS = 50  # entries of the list, on a page
SHOWN = 20  # members; the others are unfolded by the reader
POINTS = 200  # of a line; of more rounds, several are averaged
_OUTLIER = 10.0  # times the median

HEATS: Mapping[str, str] = MappingProxyType(
    {"weight": "Weight", "cosine": "Against the step", "loss": "Loss", "status": "Failures"}
)
_HEAT_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "weight": "The darker, the more the member's update weighed in the step.",
        "cosine": "The darker, the more the member's update pointed against the step: 1 less the cosine.",
        "loss": "The darker, the larger the loss that the member reported of the model before the round.",
        "status": "Dark where the member declined, was refused or did not reply; light where it replied.",
    }
)


def _view(reader: Reader, asked: PageRequest) -> PageView:
    held = reader.run(asked.parameters["run"])
    run, table = held.run, held.table
    measure = asked.choice("heat", HEATS)
    kind = held.shown().scored
    bins = Bins.of(run.rounds_total, table.stop, POINTS)
    return PageView(
        reader.names.named(run.run_id, run.name),
        "run.html",
        {
            "run": run,
            "verdict": held.shown().verdict,
            "progress": wording.rounds_done(run),
            "left": wording.time_left(held),
            "waits": wording.waiting(held),
            "state_look": wording.state_look(run),
            "loading": not held.complete and not held.over and not table.lines,
            "partial": not held.complete and bool(run.rounds_done),
            "alerts": alert_list(lines_of(run.alerts, reader.names.named)) if run.alerts else Html(""),
            "kind": kind,
            "measured": bool(table.scored),
            "tail": json.dumps(_tail(held, bins, measure), separators=(",", ":")),
            "heats": HEATS,
            "heat": measure,
            "heat_words": _HEAT_WORDS[measure],
            "heat_figure": lambda: _heat(held, measure),
            "left_behind": _left_behind(held, kind),
            "rows": _rows(held, kind),
            "shown": SHOWN,
            **_feed(held, asked),
            "privacy": epsilon_of_clients(run),
            "spec": held.spec,
            "commands": _commands(run, reader.names.argument(run)),
            "argument": reader.names.argument(run),
        },
    )


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


@dataclass(frozen=True)
class Bins:
    """Rounds put together: `together` rounds make a point; there are `count` points so far."""

    together: int
    count: int

    @classmethod
    def of(cls, planned: int, stop: int, most: int) -> "Bins":
        """The bins of `stop` rounds of `planned`, so that there are at most `most` at the end."""
        together = max(1, -(-max(planned, stop) // most))
        return cls(together, -(-stop // together))

    def means(self, values: NDArray[np.floating[Any]], first: int = 0) -> NDArray[np.float64]:
        """The means over the rounds of each bin from `first` on, (members, bins); NaN where none is known."""
        part = values[:, first * self.together : self.count * self.together].astype(np.float64)
        missing = (self.count - first) * self.together - part.shape[1]
        padded = np.pad(part, ((0, 0), (0, missing)), constant_values=np.nan)
        grouped = padded.reshape(len(part), self.count - first, self.together)
        finite = np.isfinite(grouped)
        counts = finite.sum(axis=2)
        sums = np.where(finite, grouped, 0.0).sum(axis=2)
        means: NDArray[np.float64] = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
        return means

    def rounds(self, first: int = 0) -> list[int]:
        """The last round of each bin from `first` on."""
        return [(at + 1) * self.together - 1 for at in range(first, self.count)]


def series(reader: Reader, asked: PageRequest) -> dict[str, Any]:
    """The lines of the chart, for the script of the page: of each member, the mean and the worst."""
    held = reader.run(asked.parameters["run"])
    table = held.table
    first = asked.number("from", default=0)
    stop = min(asked.number("to", default=table.stop), table.stop)
    if first or stop < table.stop:
        return _part(held, first, max(first, stop))
    bins = Bins.of(held.run.rounds_total, table.stop, POINTS)
    return _lines(held, bins, 0) | {"together": bins.together, "names": table.names}


def _part(held: HeldRun, first: int, stop: int) -> dict[str, Any]:
    """Some rounds in detail, for a reader who has marked them."""
    bins = Bins.of(stop - first, stop - first, POINTS)
    document = _lines(held, bins, 0, offset=first)
    return document | {"together": bins.together, "names": held.table.names}


def _lines(held: HeldRun, bins: Bins, first: int, offset: int = 0) -> dict[str, Any]:
    table = held.table
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


def _tail(held: HeldRun, bins: Bins, measure: str) -> dict[str, Any]:
    """The last point of each line and the last column of the heat map, which a new round changes."""
    table, run = held.table, held.run
    kind = held.shown().scored
    document: dict[str, Any] = {
        "stop": table.stop, "together": bins.together, "members": len(table.members), "share": kind.share,
        "complete": held.complete,
    }  # fmt: skip
    if not table.stop:
        return document
    document |= _lines(held, bins, bins.count - 1)
    columns = Bins.of(run.rounds_total, table.stop, COLUMNS)
    values = _heat_values(table, measure)
    shades = columns.means(values[:, : table.stop], columns.count - 1)
    document["column"] = columns.count - 1
    document["shades"] = column([float(value) for value in shades[:, 0]], columns.count - 1, _largest(held, measure))
    return document


# --- the heat map


def _heat_values(table: RunTable, measure: str) -> NDArray[np.floating[Any]]:
    """(members, rounds), in the order of the members' names; NaN is blank."""
    order = table.order
    if measure == "status":
        codes = table.outcomes()[order]
        failed = np.isin(codes, [OUTCOMES.index(o) for o in (Outcome.DECLINED, Outcome.REFUSED, Outcome.MISSING)])
        return np.where(codes == 0, np.nan, failed.astype(np.float64))
    values = table.values(MemberNumber(measure))[order].astype(np.float64)
    return 1.0 - values if measure == "cosine" else values


def _largest(held: HeldRun, measure: str) -> float:
    """The value of the darkest shade, which the rounds to come should not change."""
    if measure in ("status", "cosine"):
        return {"status": 1.0, "cosine": 2.0}[measure]
    values = _heat_values(held.table, measure)
    finite = values[np.isfinite(values)]
    return float(np.quantile(finite, 0.995)) if finite.size else 0.0


def _heat(held: HeldRun, measure: str) -> Html:
    table, run = held.table, held.run
    values = _heat_values(table, measure)
    if not np.isfinite(values).any():
        return Html("")
    columns = Bins.of(run.rounds_total, table.stop, COLUMNS)
    planned = max(run.rounds_total, table.stop) if not held.over else table.stop
    width = -(-planned // columns.together)
    means = columns.means(values)
    padded = np.pad(means, ((0, 0), (0, max(0, width - means.shape[1]))), constant_values=np.nan)
    rounds = [at * columns.together for at in range(width)]
    alt = f"{HEATS[measure]} of {len(table.members)} members in {table.stop} rounds"
    format_: Callable[[float], str] = formatting.number if measure != "status" else formatting.percent
    return heat(
        rounds, table.names, padded.tolist(), format_, alt=alt, largest=_largest(held, measure),
        together=columns.together,
    )  # fmt: skip


# --- the members


def _left_behind(held: HeldRun, kind: Scored) -> list[Html]:
    """The worst off, and the others: a dumbbell for each member, from its first score to its last."""
    first, last = held.table.first_and_last()
    if not last:
        return []
    names = sorted(last, key=lambda name: (last[name] if kind.higher else -last[name], formatting.natural(name)))
    middle = math.fsum(last.values()) / len(last)
    marked = set(names[: max(1, len(names) // 20)]) if len(names) > 1 else set()
    bounded = Axis(kind.title, ACCURACY.format, low=0.0, high=1.0, bounded=True)
    axis = bounded if kind.share else Axis(kind.title, formatting.number)
    parts = [names] if len(names) <= 3 * SHOWN // 2 else [names[:SHOWN], names[SHOWN:]]
    return [
        dumbbells(
            [Dumbbell(name, first[name], last[name], marked=name in marked) for name in part],
            axis,
            names=("first", "last"),
            alt=f"First and last {kind.title} of {len(part)} members, the worst first",
            line=(f"mean {kind.text(middle)}", middle),
        )
        for part in parts
    ]


@dataclass(frozen=True)
class _Row:
    """A member in the table, with numbers as text; `remark` names what stands out."""

    name: str
    score: str
    weight: str
    pull: str
    norm: str
    cosine: str
    failures: str
    remark: str


def _rows(held: HeldRun, kind: Scored) -> list[_Row]:
    table = held.table
    norms, losses = _over_median(table, MemberNumber.NORM), _over_median(table, MemberNumber.LOSS)
    pulls = _pulls(table)
    codes = table.outcomes()
    rows = []
    for at in table.order:
        name = table.members[at]
        asked = int((codes[at] > 0).sum())
        counts = [
            int((codes[at] == OUTCOMES.index(o)).sum()) for o in (Outcome.DECLINED, Outcome.REFUSED, Outcome.MISSING)
        ]
        remarks = [
            f"{what} {ratio[at]:.0f} times the median"
            for what, ratio in (("norm", norms), ("loss", losses))
            if ratio[at] > _OUTLIER
        ]
        shown = {
            measure: formatting.number(table.newest(measure, name))
            for measure in (MemberNumber.WEIGHT, MemberNumber.COSINE)
        }
        texts = {
            "score": kind.text(table.newest(MemberNumber.SCORE, name)),
            "weight": shown[MemberNumber.WEIGHT],
            "pull": formatting.percent(float(pulls[at])),
            "update_norm": f"{norms[at]:.2f}" if math.isfinite(norms[at]) else formatting.UNKNOWN,
            "cosine": shown[MemberNumber.COSINE],
        }
        hidden = {key: formatting.of_member(text, key, table.undisclosed) for key, text in texts.items()}
        rows.append(
            _Row(
                name, hidden["score"], hidden["weight"], hidden["pull"], hidden["update_norm"], hidden["cosine"],
                f"{sum(counts)} of {asked}" if sum(counts) else "0", "; ".join(remarks),
            )
        )  # fmt: skip
    return rows


def _over_median(table: RunTable, measure: MemberNumber) -> NDArray[np.float64]:
    """Each member's last number over the median of its round's, (members,); NaN if unknown."""
    values = table.values(measure).astype(np.float64)
    ratios = np.full(len(table.members), np.nan)
    for at, row in enumerate(values):
        places = np.flatnonzero(np.isfinite(row))
        if places.size:
            others = values[:, places[-1]]
            middle = float(np.median(others[np.isfinite(others)]))
            ratios[at] = row[places[-1]] / middle if middle > 0 else np.nan
    return ratios


def _pulls(table: RunTable) -> NDArray[np.float64]:
    """Each member's share of the last step: its coefficient times its norm, over the sum of all; NaN if unknown."""
    lengths = np.abs(table.values(MemberNumber.COEFFICIENT).astype(np.float64) * table.values(MemberNumber.NORM))
    places = np.flatnonzero(np.isfinite(lengths).any(axis=0))
    none: NDArray[np.float64] = np.full(len(table.members), np.nan)
    if not places.size:
        return none
    newest = lengths[:, places[-1]]
    total = float(np.nansum(newest))
    shares: NDArray[np.float64] = newest / total if total > 0 else none
    return shares


# --- the rounds


def _feed(held: HeldRun, asked: PageRequest) -> dict[str, Any]:
    table = held.table
    failed = asked.choice("rounds", {"all": "", "failed": ""}) == "failed"
    before = asked.number("before", default=0)
    numbers = [
        number
        for number in sorted(table.lines, reverse=True)
        if (not before or number < before) and (not failed or table.lines[number].has_failed)
    ]
    lines = [table.lines[number] for number in numbers]
    # Equal failures are one entry; rounds without a failure stay apart.
    told = {line.number: (wording.of_round(line), -1 if line.has_failed else line.number) for line in lines}
    groups = equals(lines, lambda line: line.number, lambda line: told[line.number])
    return {
        "feed": [_FeedEntry(group.said[0], group.rounds, group.first, group.items) for group in groups[:ROUNDS]],
        "failed_only": failed,
        "older": groups[ROUNDS - 1].first if len(groups) > ROUNDS else None,
        "before": before,
    }


@dataclass(frozen=True)
class _FeedEntry:
    """An entry of the list of rounds: what is told of one round, or equally of several."""

    told: str
    rounds: str
    first: int
    lines: Sequence[RoundLine]


SCREEN = Screen(_view, _version, "/")
