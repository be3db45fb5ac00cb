"""Two to six runs beside each other: each member's last score, and the numbers of the last evaluated rounds."""

import math
from collections.abc import Sequence

from federation.text import counted
from federation.v1 import admin_pb2 as v1
from fedpareto import formatting
from fedpareto.formatting import natural, recorded, some
from fedpareto.series import mean
from fedpareto.web.console.federation_reader import PageError, Reader
from fedpareto.web.console.view import PageRequest, PageView, Screen
from fedpareto.web.pages.dumbbells import Dumbbell, dumbbells
from fedpareto.web.pages.html import Html, join
from fedpareto.web.sections import run_words
from fedpareto.web.sections.layout import folded
from fedpareto.web.sections.measured_models import models
from fedpareto.web.sections.shown_run import Scored, ShownRun

LEAST, MOST = 2, 6
_METRICS = ("accuracy/mean", "accuracy/worst5", "accuracy/std", "loss/train", "improved", "bytes/up", "bytes/down")
_NEAR = 0.005  # of a share: no difference that a sentence tells


def _view(reader: Reader, asked: PageRequest) -> PageView:
    chosen = list(dict.fromkeys(asked.query.getlist("run")))
    lists = reader.lists
    values = {
        "runs": lists.runs if lists else (),
        "chosen": chosen,
        "held": [],
        "figures": [],
        "sentences": [],
        "table": [],
        "models": [],
    }
    if not chosen:
        return PageView("Compare runs", "compare.html", values)
    if not LEAST <= len(chosen) <= MOST:
        raise PageError(400, f"Choose {LEAST} to {MOST} runs to compare; {counted(len(chosen), 'run')} is chosen.")
    runs = [reader.run(name).shown() for name in chosen]
    names = [reader.names.named(shown.run.run_id, shown.run.name) for shown in runs]
    values |= {
        "chosen": [shown.run.run_id for shown in runs],
        "held": runs,
        "sentences": _sentences(runs, names),
        "models": [(name, models(shown)) for name, shown in zip(names, runs, strict=True) if shown.evaluates],
        "figures": _figures(runs, names),
        "names": names,
        "table": _table(runs),
    }
    return PageView(f"Compare {some(names, run_words.NAMED)}", "compare.html", values)


def _lasts(runs: Sequence[ShownRun]) -> list[dict[str, float]]:
    return [shown.table.first_and_last()[1] for shown in runs]


def _sentences(runs: Sequence[ShownRun], names: Sequence[str]) -> list[str]:
    """For each run after the first: whom it helps most against the first, and whom it costs most."""
    first, *others = _lasts(runs)
    kind = runs[0].scored
    sentences = []
    for shown, run_name, last in zip(runs[1:], names[1:], others, strict=True):
        both = sorted(set(first) & set(last), key=natural)
        if not both or shown.scored != kind:
            sentences.append(f"{run_name} and {names[0]} have no scores in common.")
            continue
        gains = {name: (last[name] - first[name]) * (1 if kind.higher else -1) for name in both}
        best, worst = max(both, key=lambda name: gains[name]), min(both, key=lambda name: gains[name])
        told = []
        if gains[best] > _NEAR:
            told.append(f"{best} gains most, {_by(kind, first[best], last[best])}")
        if gains[worst] < -_NEAR:
            told.append(f"{worst} loses most, {_by(kind, first[worst], last[worst])}")
        if gains[best] < -gains[worst]:
            told.reverse()
        told.append(f"the mean is {kind.text(mean(last.values()))} instead of {kind.text(mean(first.values()))}")
        sentences.append(f"{run_name} against {names[0]}: {'; '.join(told)}.")
    return sentences


def _by(kind: Scored, before: float, after: float) -> str:
    return f"from {kind.text(before)} to {kind.text(after)}"


def _figures(runs: Sequence[ShownRun], run_names: Sequence[str]) -> list[tuple[str, Html, Html]]:
    """A dumbbell for each member, the largest difference first: title, the first members, and the others."""
    first, *others = _lasts(runs)
    kind = runs[0].scored
    figures: list[tuple[str, Html, Html]] = []
    for run_name, last in zip(run_names[1:], others, strict=True):
        both = set(first) & set(last)
        names = sorted(set(first) | set(last), key=natural)
        names.sort(key=lambda name: -abs(last[name] - first[name]) if name in both else 0.0)
        rows = [Dumbbell(name, first.get(name, math.nan), last.get(name, math.nan)) for name in names]
        drawn = [
            dumbbells(
                part,
                kind.axis,
                names=(run_names[0], run_name),
                alt=f"{kind.title} of {len(part)} members after {run_names[0]} and after {run_name}",
            )
            for part in folded(rows)
        ]
        if rows:
            figures.append((f"{run_names[0]} and {run_name}", drawn[0], join(drawn[1:])))
    return figures


def _table(runs: Sequence[ShownRun]) -> list[tuple[str, list[str]]]:
    rows = [
        ("algorithm", [shown.run.algorithm for shown in runs]),
        ("task", [shown.run.task for shown in runs]),
        ("rounds", [f"{shown.run.rounds_done} of {shown.run.rounds_total}" for shown in runs]),
        ("time", [_time(shown.run) for shown in runs]),
    ]
    for name in _METRICS:
        cells = [recorded(name, shown.run.latest.metrics, shown.run.latest.undisclosed) for shown in runs]
        if any(cell != formatting.UNKNOWN for cell in cells):
            rows.append((_TITLES.get(name, name), cells))
    return rows


_TITLES = {
    "accuracy/mean": "mean accuracy",
    "accuracy/worst5": "worst 5 %",
    "accuracy/std": "spread (standard deviation)",
    "loss/train": "mean training loss",
    "improved": "improved in the last round",
    "bytes/up": "received in the last round",
    "bytes/down": "sent in the last round",
}


def _time(run: v1.Run) -> str:
    if not run.HasField("started"):
        return formatting.UNKNOWN
    end = run.ended if run.HasField("ended") else None
    return formatting.span((end.ToNanoseconds() - run.started.ToNanoseconds()) / 1e9) if end else "goes on"


def _version(reader: Reader, asked: PageRequest) -> object:
    runs = [reader.known(name) for name in asked.query.getlist("run")]
    return tuple((held.table.version, held.run.state) if held else None for held in runs)


SCREEN = Screen(_view, _version, "/compare")
