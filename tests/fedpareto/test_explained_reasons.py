"""`fedpareto explain` says what the page of the reasons says: what each means, who says it, and what to do."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fedpareto.cli.reasons import known_reasons
from tests.command_lines import completed
from tests.harness import here
from tests.paths import ROOT

WORKER = known_reasons.by_table()["worker"][0].said_by
# The literal reasons with which the code of a worker declines.
DECLINED = re.compile(r'\bDeclined\(\s*"([a-z][\w:-]*)"|\bWorkError\([^()]*reason=f?"([a-z][\w:-]*)')
STAND_INS = {"non-finite", "zero"}  # errors of a private round in which READY takes another vector


def explained(tmp_path: Path, *arguments: str, code: int = 0) -> str:
    done = here("explain", *arguments, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


def test_a_reason_is_explained_for_each_party_that_says_it(tmp_path: Path) -> None:
    text = explained(tmp_path, "deadline")
    assert re.findall(r"^deadline(?: \((\w+)\))?$", text, re.MULTILINE) == ["FAILED_PRECONDITION", "EXPIRED", ""]
    assert "Said by the coordinator, which refuses a request.\n    The reply came after the deadline" in text
    assert "What to do: Give the phase more time in the run specification, or the worker less work" in text
    rows = json.loads(explained(tmp_path, "deadline", "--json"))
    assert [row["status"] for row in rows] == ["FAILED_PRECONDITION", "EXPIRED", ""]


@pytest.mark.parametrize(
    ("given", "first"),
    [
        ("mismatch:base_model", "mismatch (INVALID_ARGUMENT)"),
        ("limit:rate: 5 calls a second", "limit:rate (RESOURCE_EXHAUSTED)"),
        ("bad-share:clinic-a", "bad-share:<client>"),
        ("ability", "ability:weights, ability:gradients, "),
    ],
)
def test_a_reason_may_have_a_suffix_and_a_message_or_lack_its_suffix(tmp_path: Path, given: str, first: str) -> None:
    assert explained(tmp_path, given).startswith(first)


def test_an_unknown_reason_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    assert "there is no reason 'deadlin'; did you mean 'deadline'?" in explained(tmp_path, "deadlin", code=2)
    assert "`fedpareto explain` lists them" in explained(tmp_path, "\x1b[2J", code=2)
    assert "not both" in explained(tmp_path, "deadline", "--all", code=2)


def test_all_reasons_are_listed_without_one_and_completed_and_explained_without_links(tmp_path: Path) -> None:
    listed, every = explained(tmp_path), explained(tmp_path, "--all")
    names = known_reasons.names()
    assert len(names) > 150
    assert {name for name in names if name not in listed.replace(",", "").split()} == set()
    assert "](" not in every
    assert every.count("Said by") == len(list(known_reasons.known()))
    assert completed(tmp_path, "explain run-e") == ["run-exists", "run-ended"]


def test_each_reason_for_which_a_worker_declines_is_explained() -> None:
    sources = (path for package in ("worker", "federation") for path in (ROOT / package).rglob("*.py"))
    found = {found for path in sources for pair in DECLINED.findall(path.read_text()) for found in pair if found}
    assert len(found) > 20

    def is_explained(reason: Any) -> bool:
        return any(row.said_by == WORKER for row in known_reasons.meanings(reason))

    assert {reason for reason in found if not is_explained(reason)} == STAND_INS
