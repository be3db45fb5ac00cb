"""The page of algorithms lists what there is."""

import json
import re
from typing import Any

from federation.aggregation.hyperparameters import Hyperparameter, hyperparameters
from federation.aggregation.interface import Reads
from federation.aggregation.pre import STAGES
from federation.aggregation.registry import ALGORITHMS, common_hyperparameters
from tests.paths import DOCS, ROOT

ROW = re.compile(r"^\| `([a-z+-]+)` \| .+? \| (.*?) ?\| .+? \| .+? \|$", re.MULTILINE)
SETTING = re.compile(r"`(\w+) = ([^`]+)`")


def tables() -> list[dict[str, dict[str, Any]]]:
    """Of each table: its rows' names, with their hyper-parameters and defaults."""
    parts = re.split(r"^## ", (DOCS / "research/algorithms.md").read_text(), flags=re.MULTILINE)
    return [
        {name: {key: json.loads(value) for key, value in SETTING.findall(cell)} for name, cell in ROW.findall(part)}
        for part in parts
    ]


def defaults(fields: "tuple[Hyperparameter, ...]") -> dict[str, Any]:
    return {field.name: list(field.default) if field.default == () else field.default for field in fields}


def test_the_page_lists_every_algorithm_in_order_with_its_hyperparameters_and_defaults() -> None:
    there = tables()[0]
    assert there == {name: defaults(hyperparameters(kind)) for name, kind in ALGORITHMS.items()}
    assert list(there) == list(ALGORITHMS)


def test_the_page_lists_every_stage_with_its_hyperparameters_and_defaults() -> None:
    there = tables()[1]
    pre, *others = common_hyperparameters()
    assert list(there) == pre.help.rpartition(": ")[2].split(", ")
    expected: dict[str, dict[str, Any]] = {stage: {} for stage in there}
    for field in others:
        for stage in field.stages:
            expected[stage][field.name] = field.default
    assert there == expected


def test_the_page_says_what_each_rule_and_each_stage_reads_of_the_updates() -> None:
    text = (DOCS / "research/algorithms.md").read_text()
    cells = {
        reads: [set(re.findall(r"`([a-z+-]+)`", cell)) for cell in row.split("|")]
        for reads, row in zip(
            Reads, re.findall(r"^\| (?:nothing|their norms|K, .*?) \|(.+)\|$", text, re.MULTILINE), strict=True
        )
    }
    for reads, (rules, stages) in cells.items():
        said = {name for name, kind in ALGORITHMS.items() if getattr(kind, "reads", Reads.GRAM) is reads}
        assert rules == (set() if reads is Reads.GRAM else said)  # K: "the others"
        assert stages == {name for name, stage in STAGES.items() if stage.reads is reads}


def test_every_algorithm_says_in_one_line_what_it_does() -> None:
    for name, kind in ALGORITHMS.items():
        first = (kind.__doc__ or "").splitlines()[0]
        assert first.endswith((".", ":")), name
        assert all(field.help for field in hyperparameters(kind)), name


def test_the_readme_leads_to_the_page() -> None:
    assert "(docs/research/algorithms.md)" in (ROOT / "README.md").read_text()
