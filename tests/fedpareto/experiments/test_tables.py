"""The pages of docs/results show the numbers of their `runs.jsonl`, whose runs experiments can make again.

Each table and figure of the papers has its experiment.
"""

import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpareto.cli.research.experiment_results import load
from fedpareto.experiments.comparison_tables import SKIPPED, UNKNOWN
from fedpareto.experiments.definition import Cell
from fedpareto.experiments.derived import derived
from fedpareto.experiments.loading import names
from fedpareto.experiments.result_store import RUNS, Job, RunResult, Store, difference
from tests.fedpareto.experiments.scene import catalogue
from tests.few import few_of
from tests.paths import DOCS

RESULTS = DOCS / "results"
DIRECTORIES = sorted(path.parent for path in RESULTS.glob(f"*/{RUNS}"))

SLOW = "cover-search"  # its runs take seconds to make again

Shown = tuple[str, str | None, str, str]  # method, condition (None if the page has none), title of the column, text


def shown(page: str) -> Iterator[Shown]:
    """The cells of a page with our numbers."""
    for section in re.split(r"\n(?=## )", page):
        title, header = section.partition("\n")[0].lstrip("# "), list[str]()
        for line in filter(lambda line: line.startswith("|"), section.splitlines()):
            method, *texts = [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if not header or method == "---":
                header = header or texts
                continue
            row = dict(zip(header, texts, strict=True))
            condition = row.pop("Condition", None)
            row = {name: text for name, text in row.items() if name not in ("Server rate", "published", "Δ") and text}
            if seeds := row.pop("Seeds", ""):
                yield method, condition, "Seeds", seeds
            for name, text in row.items():
                yield (method, condition, name, text) if seeds else (method, name, title, text)


def values(runs: list[RunResult], measure: str) -> list[float]:
    return [run.final[measure] for run in runs if np.isfinite(run.final.get(measure, np.nan))]


@pytest.mark.parametrize("directory", few_of(DIRECTORIES, *DIRECTORIES[::8]), ids=lambda path: path.name)
def test_the_numbers_of_a_page_are_those_of_its_runs(directory: Path) -> None:
    runs = list(Store(directory).runs().values())
    words = shlex.split(max(runs, key=lambda run: run.session.began).session.command)
    experiment = load(words[3], "--quick" in words, None)
    measures = {"Stationarity": "objective/stationarity"}  # an earlier title
    measures |= {column.title: column.measure for column in experiment.columns}
    runs = derived(experiment, runs)
    page = (directory / "table.md").read_text()
    assert f"; {len(runs)} of " in page
    seen = set[str]()
    for method, condition, title, text in shown(page):
        own = [run for run in runs if run.method == method and condition in (None, run.condition)]
        seen.update(run.name for run in own)
        if title == "Seeds":
            assert len(own) == int(text)
        elif text in (UNKNOWN, SKIPPED):
            assert own
            assert not values(own, measures[title])
        else:
            found = values(own, measures[title])
            numbers = [float(number) for number in text.split(" ± ")]
            # Pages were made of more digits than the six that these files have.
            assert numbers == pytest.approx([np.mean(found), np.std(found)][: len(numbers)], rel=1e-5, abs=0.0051)
    assert seen == {run.name for run in runs}


def computed(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A specification as it is written today, where runs of before said the same in other words."""
    if "server" not in spec:
        return dict(spec)
    server, algorithm = dict(spec["server"]), dict(spec.get("algorithm", {}))
    if spec["rounds"] <= server.get("decay_every", 100):
        server["decay"] = 0.0  # the rate has no time to fall
    if algorithm.get("bound") == "normalise":
        algorithm["bound"] = "normalize"
    return {**spec, "server": server, "algorithm": algorithm}


def test_each_directory_of_results_has_runs() -> None:
    assert sorted(path for path in RESULTS.iterdir() if path.is_dir()) == DIRECTORIES


@pytest.mark.parametrize(
    "directory",
    few_of(DIRECTORIES, *[path for path in DIRECTORIES[1::8] if path.name != SLOW]),
    ids=lambda path: path.name,
)
def test_each_run_of_results_is_one_that_an_experiment_of_that_name_makes(directory: Path) -> None:
    runs = list(Store(directory).runs().values())
    forms = [load(directory.name, quick, None) for quick in (False, True)]
    shorter = [form.with_rounds(rounds) for form in forms for rounds in {run.spec["rounds"] for run in runs}]
    cells = defaultdict[tuple[str, str], list[Cell]](list)
    for cell in (cell for form in (*forms, *shorter) for cell in form.cells()):
        cells[cell.key].append(cell)
    for run in runs:
        found = []
        for job in (Job(cell, run.seed) for cell in cells[run.method, run.condition]):
            found.append(difference(computed(run.spec), computed(job.document), computed(job.given)))
            if not found[-1]:
                break
        assert "" in found, f"{run.name}: {found or 'no such method and condition'}"


def of_papers() -> dict[str, str]:
    """The sources of the experiments that repeat one of a paper, by name."""
    sources = {name: one.source for name, one in catalogue().items() if "own comparison" not in one.source}
    return {name: source for name, source in sources.items() if re.search(r"(Hu|Askin|Yang|Wang) et al", source)}


def test_the_source_of_every_experiment_of_a_paper_names_the_table_or_figure() -> None:
    sources = of_papers()
    assert len(sources) > 30
    part = r"(table|figure|section|appendix)s? \w|indicator matrix|River Flow radar chart"
    assert [name for name, source in sources.items() if not re.search(part, source)] == []


def test_the_page_of_the_papers_names_every_experiment_of_a_paper_and_no_other_that_is_not_there() -> None:
    page = (DOCS / "research/papers.md").read_text()
    named = set(re.findall(r"`([a-z0-9-]+)`", "\n".join(re.findall(r"\|[^|\n]*\|\n", page))))
    assert of_papers().keys() <= named
    tasks = {"cifar10", "fashion-mnist", "femnist", "preferences"}
    assert named - tasks <= set(names())
