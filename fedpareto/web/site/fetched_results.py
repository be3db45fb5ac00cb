"""What `worker model` has kept of the runs whose model it fetched last."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedpareto.formatting import UNKNOWN, number

PAGE = 20  # runs; each is a table of its own
_LARGEST = 1 << 20  # bytes of a file
_NUMBERS = ("own", "mean", "worst")


@dataclass(frozen=True)
class Score:
    """A metric on a split; the numbers are texts."""

    split: str
    metric: str
    own: str
    mean: str
    worst: str


@dataclass(frozen=True)
class FetchedResult:
    """What a member was told of the model of a run; `read` is False if its file cannot be used.

    Texts are as the coordinator gave them: not escaped.
    """

    name: str
    fetched: str
    read: bool = True
    state: str = ""
    round: str = ""
    words: str = ""
    scores: Sequence[Score] = ()


@dataclass(frozen=True)
class ResultsPage:
    """Some results, the last fetched first; `more` is True if there are older ones."""

    results: list[FetchedResult]
    more: bool


def read_results(directory: Path, page: int) -> ResultsPage:
    """A page of the files in `models/` of a home, counted from 0. Raises OSError if it cannot be listed."""
    files = sorted(directory.glob("*.json"), key=_modified, reverse=True) if directory.is_dir() else []
    shown = files[page * PAGE : (page + 1) * PAGE]
    return ResultsPage([_result(path) for path in shown], (page + 1) * PAGE < len(files))


def _result(path: Path) -> FetchedResult:
    fetched = datetime.fromtimestamp(_modified(path), UTC).astimezone().strftime("%Y-%m-%d %H:%M")
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_LARGEST))
        return FetchedResult(
            str(found["name"]),
            fetched,
            state=str(found["state"]).lower(),
            round=str(found["round"]),
            words=str(found["compared"]["words"]),
            scores=[
                Score(str(score["split"]), str(score["metric"]), *(_told(score[name]) for name in _NUMBERS))
                for score in found["scores"]
            ],
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return FetchedResult(path.stem, fetched, read=False)


def _told(value: Any) -> str:
    return UNKNOWN if value is None else number(float(value))


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
