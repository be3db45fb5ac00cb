"""What 0.1.0 does not know: its members are not asked for it, and those of a later version do it without them."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.paths import OWNERS_CODE
from tests.releases.scene import MEMBERS, NEWER, OLDER, OPEN, POLICY, Together
from tests.releases.versions import Version

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
TASK = "scaled_task:Scaled"
KINDS = ("statistics", "evaluate", "fixed")
TOLD = "statistics.open = true\n" + POLICY.replace('["afl"', '["evaluate", "statistics", "afl"')
SPECS = {
    "statistics": 'kind = "statistics"\n[statistics]\nopen = true\nbins = 4\n',
    "evaluate": 'kind = "evaluate"\nevaluate.splits = ["test"]\n',
    "fixed": 'rounds = 2\nseed = 7\nalgorithm.name = "afl"\ntrain = { steps = 2, batch_size = 10 }\n',
}


def least(members: int) -> str:
    """The key of a run that waits until so many members have accepted it."""
    return f"selection.minimum = {members}\n"


class Asking(Together):
    """A federation whose workers offer two tasks: one of the model has a layer that 0.1.0 lacks."""

    def part(self, name: str) -> list[str]:
        return [*super().part(name), "--task", TASK, "--code", str(OWNERS_CODE)]

    def allow(self, *names: str) -> None:
        """The owners of these members allow the new kinds of runs; a worker of 0.1.0 would not start with this."""
        for name in names:
            (self.directory / name / "policy.toml").write_text(TOLD)

    def options(self, kind: str, made: str, members: int) -> list[str]:
        """The words after `submit` of a run of this kind, under a name with this word, for so many members."""
        path = self.directory / f"{kind}-{made}.toml"
        task = TASK if kind == "fixed" else "digits"
        path.write_text(f'name = "{path.stem}"\ntask = "{task}"\n{least(members)}{SPECS[kind]}')
        more = {"statistics": [], "evaluate": ["--model-of", "before"], "fixed": ["--statistics", f"scale-{made}"]}
        return ["submit", str(path), *more[kind], "--code", str(OWNERS_CODE)]

    def taken_part(self, run: str) -> dict[str, set[str]]:
        """The states of the assignments of each member in a run."""
        found: dict[str, set[str]] = {}
        query = (
            "SELECT client_id, assignments.state FROM assignments JOIN phases USING (phase_id) "
            "JOIN rounds USING (round_id) WHERE run_id = ?"
        )
        with closing(sqlite3.connect(f"{(self.home / 'coordinator.db').as_uri()}?mode=ro", uri=True)) as connection:
            for name, state in connection.execute(query, [run]):
                found.setdefault(name, set()).add(state)
        return found

    def made(self, kind: str, made: str, members: int) -> tuple[str, dict[str, Any]]:
        """A completed run of a kind, and what its dry run has told."""
        if kind == "fixed":
            path = self.directory / f"scale-{made}.toml"
            path.write_text(f'name = "{path.stem}"\ntask = "{TASK}"\n{least(members)}{SPECS["statistics"]}')
            self.ended(self.admin("submit", str(path), "--code", str(OWNERS_CODE))["run"]["run_id"])
        words = self.options(kind, made, members)
        foretold = self.admin(*words, "--dry-run")
        run = str(self.admin(*words)["run"]["run_id"])
        self.ended(run)
        return run, foretold


@pytest.fixture(scope="module")
def asking(old: Version, later: Version, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asking]:
    with Asking(tmp_path_factory.mktemp("asking"), later, data / "crashing.py") as scene:
        scene.found_of(old, later)
        scene.end(*NEWER)
        scene.allow(*NEWER)
        scene.attend(*NEWER)
        scene.ended(scene.send("before", OPEN))
        yield scene


@pytest.mark.parametrize("kind", KINDS)
def test_members_of_the_release_are_not_asked_and_serve_the_next_run_that_trains(asking: Asking, kind: str) -> None:
    run, foretold = asking.made(kind, "new", 2)
    assert asking.taken_part(run) == {name: {"FULFILLED"} for name in NEWER}
    others = {one["client_id"]: (one["reason"], one["message"]) for one in foretold["others"]}
    assert set(others) == set(OLDER), others
    assert {reason for reason, _ in others.values()} == {"old"}
    assert all("needs a newer release" in message for _, message in others.values())
    assert foretold["members"] == [*NEWER]
    absent = {one["client_id"]: one["reason"] for one in asking.admin("round", run, "0")["not_asked"]}
    assert absent == {name: f"cannot take part: {message}" for name, (_, message) in others.items()}
    for name in OLDER:
        assert run not in asking.workers[name].text, "nor is its owner"
    if kind == "fixed":
        scaled(asking, run, "scale-new")
    after = asking.send(f"after-{kind}", OPEN)
    asking.ended(after)
    assert asking.taken_part(after) == {name: {"FULFILLED"} for name in MEMBERS}


def scaled(asking: Asking, run: str, statistics: str) -> None:
    """The newest model of a run has the means that a result shows."""
    out = asking.directory / f"{run}.safetensors"
    asking.fedpareto("admin", "export", run, "--out", str(out), "--home", str(asking.home / "admin"))
    tensors = load_file(out)
    means = [column["mean"] for column in asking.admin("statistics", statistics)["columns"][:64]]
    shown = [number for number, mean in enumerate(means) if mean is not None]
    assert len(shown) > 32
    assert np.allclose(tensors["Standardise0.mean"][shown], [means[number] for number in shown], atol=1e-6)


def test_a_home_of_the_release_whose_worker_is_upgraded_takes_part_in_all_of_it(asking: Asking, later: Version) -> None:
    waiting = str(asking.admin(*asking.options("statistics", "waiting", 3))["run"]["run_id"])
    said = "ann cannot take part: its worker does not know runs of the kind 'statistics': it needs a newer release"
    asking.wait(lambda: said in asking.run(waiting)["reason"], "the reason why the run waits", pause=0.2)
    asking.end("ann")
    asking.versions["ann"] = later
    asking.allow("ann")
    asking.attend("ann")
    asking.ended(waiting)
    assert asking.taken_part(waiting) == {name: {"FULFILLED"} for name in ("ann", *NEWER)}
    for kind in KINDS:
        run, foretold = asking.made(kind, "upgraded", 3)
        assert asking.taken_part(run) == {name: {"FULFILLED"} for name in ("ann", *NEWER)}, kind
        assert [one["client_id"] for one in foretold["others"]] == [*OLDER[1:]]


def test_the_release_does_not_start_in_the_home_of_a_later_version_and_so_trains_nothing_that_this_one_was_given(
    asking: Asking, old: Version
) -> None:
    asking.end("dan")
    run = ["-m", "fedpareto", "worker", "run", "--home", str(asking.directory / "dan"), *asking.part("dan")]
    (asking.directory / "dan" / "policy.toml").write_text(POLICY)
    assert "a newer version of fedpareto made it" in old.python(*run, cwd=asking.directory, code=1)
    asking.allow("dan")
    asking.attend("dan")
