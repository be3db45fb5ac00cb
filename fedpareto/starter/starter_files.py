"""Writes the files of a new task: the task, its test, its data, a specification and a README."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from fedpareto.starter import made_data


@dataclass(frozen=True)
class Starter:
    """A kind of task: its module here, its class, the learning rate that was tried on its data, and more keys.

    If it `describes`, a run of kind = "statistics" fills the first layer of its model.
    """

    module: str
    name: str
    rate: float
    more: str = ""
    describes: bool = False


_BUFFERS = '\n[parameters]\nbuffers = "averaged"  # the running statistics of BatchNorm\n'
STARTERS: Mapping[str, Starter] = {
    "tabular": Starter("visits", "Visits", 0.02, describes=True),
    "images": Starter("scans", "Scans", 0.05, _BUFFERS),
    "text": Starter("notes", "Notes", 0.5),
}

_SPEC = """\
name = "{module}"
task = "{module}:{name}"
rounds = 20

[algorithm]
name = "fedmgda+"  # gives more weight to the members that would gain least; "fedavg" is the plain average

[server]
learning_rate = "auto"  # no step is longer than the updates of most members

[train]
epochs = 1
batch_size = 10
learning_rate = {rate}  # tried on the data of this directory; try others on yours
round_schedule = "cosine"  # the learning rate falls towards 0 until the last round

[selection]
minimum = {minimum}  # a round waits until all members attend
{more}"""
_HELD = """\
name = "{module}-held"
task = "{module}:{name}"
kind = "statistics"

[statistics]
open = true  # the coordinator reads the numbers of each member; the owner of each has to allow it in policy.toml
bins = 4  # a member needs ten samples for each

[selection]
minimum = {minimum}
"""
_TEST = '''\
"""Tests of the task {name}: python -m pytest this-directory."""

from pathlib import Path

import pytest
from {module} import {name}

import fedpareto

HERE = Path(__file__).parent
SITES = {{path.name: path for path in sorted((HERE / "data").iterdir())}}


@pytest.mark.parametrize("site", SITES)
def test_each_split_of_a_site_has_both_classes(site: str) -> None:
    splits = {name}().load(fedpareto.DataSource(SITES[site]))
    assert [sorted(set(split.y.tolist())) for split in splits] == [[0, 1]] * 3


def test_training_lowers_the_loss() -> None:
    {history}
    losses = history.rounds["loss/train"].dropna()
    assert history.state == "COMPLETED"
    assert losses.iloc[-1] < losses.iloc[0]
'''
_PLAIN = 'history = fedpareto.simulate(HERE / "run.toml", members=SITES, threads=1)'
_SCALED = """held = fedpareto.simulate(HERE / "held.toml", members=SITES, threads=1)
    history = fedpareto.simulate(HERE / "run.toml", members=SITES, statistics=held, threads=1)"""
_ABOUT = """\
`held.toml` specifies a run before that, which asks the members for the mean and the deviation of each measurement. The
first layer of the model, `Standardise`, is filled with them, and makes 0, the mean, of a missing value. So every member
can leave its numbers as they are.

"""
_README = """\
# {name}

`{module}.py` is the task: the model, how a member's data is read, and the loss (by default, that of classification).
`run.toml` specifies the run. `data/` has invented data of three sites; a patient has several rows, which stay together
(`groups`), and each split keeps the shares of the classes (`stratify`).

    python -m pytest {where}
    {local}

{held}The second command starts a coordinator and three workers as processes on this machine, and opens the console.
Ctrl-C stops everything. `fedpareto simulate` with the same arguments gives the same models, without processes.

Next: put your own data into a directory for each member, and change `model` and `pool` to suit it.
"""


def write(kind: str, directory: Path, local: str) -> list[Path]:
    """Writes the files of a kind of `STARTERS`; returns their paths, those of data as directories.

    `local` is the command that starts the members, for the README.
    """
    starter, minimum = STARTERS[kind], len(made_data.SITES)
    facts = {"module": starter.module, "name": starter.name, "rate": starter.rate}
    history = _SCALED if starter.describes else _PLAIN
    texts = {
        f"{starter.module}.py": (files("fedpareto.starter") / f"{starter.module}.py").read_text(encoding="utf-8"),
        f"test_{starter.module}.py": _TEST.format(**facts, history=history),
        "run.toml": _SPEC.format(**facts, minimum=minimum, more=starter.more),
        "README.md": _README.format(**facts, where=directory, local=local, held=_ABOUT if starter.describes else ""),
    }
    if starter.describes:
        texts["held.toml"] = _HELD.format(**facts, minimum=minimum)
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
    return [*(directory / name for name in texts), *made_data.write(kind, directory / "data")]
