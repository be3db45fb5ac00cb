"""A newcomer's own task: what `new` writes, run by `local` with real processes and by `simulate` without."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load
from sqlalchemy import select

from coordinator.home import CoordinatorHome
from federation.spec.run_spec import RunSpec
from federation.tasks import DataSource, task
from fedpareto import simulate
from fedpareto.cli.failure import USAGE, CommandFailure
from fedpareto.cli.research.member_option import members_of
from fedpareto.processes.federation_directory import fresh_directory
from fedpareto.processes.forked import Forked
from fedpareto.starter.made_data import SITES
from fedpareto.starter.starter_files import STARTERS
from storage.models import Run
from tests.harness import fedpareto, here, wait_for
from tests.paths import ROOT
from tests.running import command

SECONDS = 120.0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task of each kind."""
    directory = tmp_path_factory.mktemp("made")
    for kind in STARTERS:
        command("new", directory / kind, "--kind", kind)
    return directory


def arguments(directory: Path, **members: str) -> list[str]:
    """The members of a task, and its code."""
    named = members or {site: site for site in SITES}
    sites = [word for name, site in named.items() for word in ("--member", f"{name}={directory / 'data' / site}")]
    return [*sites, "--code", str(directory)]


def filled(directory: Path) -> list[str]:
    """The specification of the run that fills the model."""
    return ["--statistics", str(directory / "held.toml")]


def shortened(directory: Path, target: Path, rounds: int) -> Path:
    """Its specification with this number of rounds."""
    text = (directory / "run.toml").read_text()
    target.write_text(re.sub(r"rounds = \d+", f"rounds = {rounds}", text))
    return target


def model(home: Path) -> dict[str, Any]:
    """The tensors of the model of the newest run of a coordinator that does not run."""
    loaded = CoordinatorHome.load(home)
    with closing(loaded.open_database()) as database, database.read() as session:
        digest = session.scalars(select(Run).order_by(Run.created.desc())).all()[0].model
        with loaded.open_blobs(database).open_range(digest) as file:
            return load(file.read())


@pytest.mark.parametrize("kind", STARTERS)
def test_new_writes_a_task_of_25_lines_whose_splits_all_have_both_classes(
    made: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, starter = made / kind, STARTERS[kind]
    lines = (directory / f"{starter.module}.py").read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 30
    spec = RunSpec.parse((directory / "run.toml").read_bytes())
    assert (spec.task, spec.selection.minimum) == (f"{starter.module}:{starter.name}", len(SITES))
    assert (spec.algorithm.name, spec.server.learning_rate) == ("fedmgda+", "auto")
    monkeypatch.syspath_prepend(str(directory))
    own = task(spec.task)
    for site in SITES:
        source = DataSource(directory / "data" / site)
        pool = own.pool(source)
        assert pool.groups is not None
        assert pool.stratify
        assert all(set(split.y.tolist()) == {0, 1} for split in own.load(source))


@pytest.mark.parametrize(
    ("kind", "seeds"), [("tabular", 1), *(pytest.param(kind, 3, marks=pytest.mark.full) for kind in STARTERS)]
)
@pytest.mark.full
def test_at_the_end_of_the_run_that_new_writes_the_loss_stays_near_its_least(
    made: Path, kind: str, seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(made / kind))
    members = {site: made / kind / "data" / site for site in SITES}
    held = simulate(made / kind / "held.toml", members=members, threads=1) if STARTERS[kind].describes else None
    for seed in range(seeds):
        text = (made / kind / "run.toml").read_text().replace("[algorithm]", f"seed = {seed}\n\n[algorithm]")
        history = simulate(text, members=members, statistics=held, threads=1)
        assert [round_["state"] for round_ in history.round_records] == ["COMPLETED"] * 20
        assert not [reply for reply in history.reply_records if not reply["accepted"]]
        losses = history.rounds["loss/train"]
        assert losses.iloc[-5:].max() <= 1.3 * losses.min()
        assert losses.iloc[-1] < losses.iloc[0]


@pytest.mark.full
@pytest.mark.parametrize("kind", STARTERS)
def test_the_test_that_new_writes_passes(made: Path, kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(made / kind)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        cwd=made,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout


def test_new_touches_no_directory_that_holds_something(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("four years")
    done = fedpareto("new", tmp_path, code=USAGE)
    assert "is there already: name a new directory; nothing was touched" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.full
def test_local_and_simulate_give_the_same_model_of_the_same_members(made: Path, tmp_path: Path) -> None:
    directory = made / "tabular"
    spec, members = shortened(directory, tmp_path / "run.toml", 2), arguments(directory)
    members += filled(directory)
    done = command("local", spec, *members, "--device", "cpu", "--dir", tmp_path / "real", "--json")
    document = json.loads(done.stdout)
    assert (document["run"]["state"], document["failures"]) == ("COMPLETED", [])
    assert document["values"].keys() == SITES.keys()
    for words in ("a federation, with its certificate", "3 members joined", "their workers attend", "2 of 2 rounds"):
        assert words in done.stderr
    fedpareto("simulate", spec, *members, "--home", tmp_path / "simulated", "--json")
    real, simulated = (model(tmp_path / home) for home in ("real/coordinator", "simulated"))
    assert real.keys() == simulated.keys()
    assert real["0.mean"].min() > 90, "of the measurements as they are"
    for name, values in real.items():
        np.testing.assert_allclose(values, simulated[name], atol=1e-5)


@pytest.mark.full
def test_a_member_with_wrong_data_ends_local_with_the_reason_of_its_worker(made: Path, tmp_path: Path) -> None:
    members = arguments(made / "tabular", **{"site-a": "site-a", "site-b": "../../text/data/site-b"})
    done = here("local", *map(str, (made / "tabular" / "run.toml", *members, "--dir", tmp_path / "real")), cwd=tmp_path)
    assert done.returncode == 1
    assert "site-b ended with exit code" in done.stderr
    assert "site-b/visits.csv: a header, then patient, 6 numbers, 0 or 1" in done.stderr


@pytest.mark.full
def test_local_tries_the_smallest_minibatch_of_the_run_before_it_begins(made: Path, tmp_path: Path) -> None:
    """The small form is in `federation/training/test_batch_statistics.py`: the same trial at the start of a worker."""
    (tmp_path / "own.py").write_text(
        "from torch.nn import BatchNorm1d, Linear, Sequential\nfrom visits import MEASUREMENTS, Standardise, Visits\n\n"
        "class Own(Visits):\n    def model(self):\n"
        "        return Sequential(Standardise(MEASUREMENTS), Linear(6, 8), BatchNorm1d(8), Linear(8, 2))\n"
    )
    text = (made / "tabular" / "run.toml").read_text().replace("visits:Visits", "own:Own")
    spec = tmp_path / "run.toml"
    spec.write_text(f'{text.replace("batch_size = 10", "batch_size = 1")}\n[parameters]\nbuffers = "averaged"\n')
    done = fedpareto(
        "local", spec, *arguments(made / "tabular"), "--code", tmp_path, "--dir", tmp_path / "real", code=1
    )
    assert "ended with exit code" in done.stderr
    assert "a minibatch would have one sample (" in done.stderr
    assert "use another train.batch_size, more samples, or a model with GroupNorm or LayerNorm" in done.stderr


@pytest.mark.parametrize(
    ("members", "says"),
    [
        (["east"], "--member east: write NAME=DIR"),
        (["East=."], "--member East=.: write NAME=DIR, with a name of lower-case letters"),
        (["east=.", "east=.."], "--member east=..: east is named already"),
        (["east=nowhere"], "--member east=nowhere: nowhere is not a directory"),
        (["east="], "--member east=: an empty text is not a directory"),
    ],
)
def test_a_member_that_cannot_be_is_refused_with_what_to_write(members: list[str], says: str) -> None:
    with pytest.raises(CommandFailure, match=re.escape(says)) as refused:
        members_of(members)
    assert refused.value.code == USAGE


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["local"], "name the run specification"),
        (["local", "run.toml"], "name the members: --member NAME=DIR"),
        (["local", "nowhere.toml", "--member", "east=."], "nowhere.toml: No such file"),
        (["simulate", "run.toml", "--member", "east=.", "--data", "."], "--data or --member"),
    ],
)
def test_wrong_words_are_refused_before_anything_starts(words: list[str], says: str, tmp_path: Path) -> None:
    assert says in fedpareto(*words, code=USAGE, cwd=tmp_path).stderr
    assert list(tmp_path.iterdir()) == []


def test_local_leaves_the_directory_of_a_demo_alone(tmp_path: Path) -> None:
    with fresh_directory(tmp_path, "demo"):
        pass
    said = fedpareto("local", "--stop", "--dir", tmp_path, code=USAGE).stderr
    assert "is not the directory of fedpareto local" in said


@pytest.mark.full
@pytest.mark.parametrize("by", ["Ctrl-C", "--stop"])
def test_at_a_terminal_local_opens_the_console_and_goes_on_until_it_is_stopped(
    made: Path, tmp_path: Path, by: str
) -> None:
    directory, real = made / "tabular", tmp_path / "real"
    spec = shortened(directory, tmp_path / "run.toml", 1)
    ours, theirs = pty.openpty()
    members = [*arguments(directory), *filled(directory)]
    words = ["-m", "fedpareto", "local", str(spec), *members, "--device", "cpu", "--dir", str(real)]
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "DISPLAY")}
    process = Forked(words, Path(os.ttyname(theirs)), cwd=tmp_path, env=environment)
    printed = ""

    def read(text: str) -> None:
        nonlocal printed
        while text not in printed:
            printed += os.read(ours, 65536).decode()

    read("Ctrl-C stops it")
    assert re.search(r"http://127\.0\.0\.1:\d+/", printed)
    if by == "--stop":
        assert "has stopped" in fedpareto("local", "--stop", "--dir", real).stdout
    else:
        os.kill(process.pid, signal.SIGINT)
    code = process.wait(SECONDS)
    assert code == (0 if by == "Ctrl-C" else 128 + signal.SIGTERM), printed
    assert not processes_in(real)
    assert "has not been running" in fedpareto("local", "--stop", "--dir", real).stdout
    wait_for(lambda: not processes_in(real), "the end of its processes")


def processes_in(directory: Path) -> Any:
    """The processes that have a file of this directory open."""
    found = []
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            links = [os.readlink(link) for link in Path("/proc", number, "fd").iterdir()]
        except OSError:
            continue
        if any(link.startswith(str(directory)) for link in links) and int(number) != os.getpid():
            found.append(number)
    return found
