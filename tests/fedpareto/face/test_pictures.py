"""What a history shows and gives in a notebook: a picture, curves, a model, and other runs beside it."""

import asyncio
import html
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch

import fedpareto
from federation.tasks.digits import Digits
from fedpareto.processes.forked import completed

SPEC: dict[str, Any] = {
    "name": "first",
    "rounds": 3,
    "algorithm": {"name": "fedmgda+"},
    "simulation": {"clients": 3},
    "train": {"steps": 2},
}


class Wide(Digits):
    """Digits with another model."""

    def model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 10))


@pytest.fixture(scope="module")
def history() -> fedpareto.History:
    """A run of a class, simulated where an event loop runs, as in a notebook."""

    async def cell() -> fedpareto.History:
        return fedpareto.simulate(SPEC, task=Digits, threads=1, progress=lambda _: None)

    return asyncio.run(cell())


def test_the_picture_of_a_history_is_the_reports_and_loads_nothing(history: fedpareto.History) -> None:
    picture = history._repr_html_()
    assert picture is not None
    assert picture.startswith('<iframe sandbox="" srcdoc="')
    page = html.unescape(html.unescape(picture))
    for part in ('class="verdict"', "How each member fares", "Members", "client-000", "client-002"):
        assert part in page
    assert "default-src 'none'" in page
    assert "<script" not in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")


def test_a_history_that_was_pickled_has_the_same_picture(history: fedpareto.History) -> None:
    assert pickle.loads(pickle.dumps(history))._repr_html_() == history._repr_html_()


@pytest.mark.full
def test_a_run_that_failed_has_a_picture_and_leaves_no_log_in_the_cell() -> None:
    code = """
import fedpareto
spec = dict(name="bad", task="digits", rounds=3, algorithm=dict(name="fedavg"), simulation=dict(clients=3))
history = fedpareto.simulate({**spec, "train": {"learning_rate": 1e30, "steps": 2}}, threads=1)
print(history.state, "no member" in history._repr_html_())
"""
    done = completed(["-c", code])
    assert (done.stdout, done.stderr) == ("FAILED True\n", "")


def test_the_module_has_the_last_values_and_predicts(history: fedpareto.History) -> None:
    state, module = history.state_dict(), history.module()
    assert not module.training
    assert np.array_equal(np.concatenate([tensor.numpy().ravel() for tensor in state.values()]), history.model)
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    state["hidden.bias"][:] = 7
    assert not (history.model == 7).any(), "the tensors are copies"
    assert module(torch.zeros(1, 64)).shape == (1, 10)
    with pytest.raises(
        fedpareto.Error, match=r"the model of first has hidden.weight \(64, 64\).*give the task of the run"
    ):
        history.module(Wide)


def test_the_module_of_a_run_with_buffers_has_them() -> None:
    spec = {**SPEC, "parameters": {"buffers": "averaged"}}
    history = fedpareto.simulate(spec, task=Wide, threads=1, progress=lambda _: None)
    module: Any = history.module()
    assert torch.equal(module[0].running_mean, history.state_dict()["0.running_mean"])
    assert module[0].running_mean.abs().sum() > 0


def test_curves_are_drawn_into_the_axes_of_another_run_and_an_unknown_number_is_named(
    history: fedpareto.History,
) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    axes = history.plot()
    assert history.plot("loss/train", axes=axes) is axes
    assert [line.get_label() for line in axes.get_lines()] == [
        *("first: accuracy/mean", "first: accuracy/worst", "first: loss/train")
    ]
    assert np.asarray(axes.get_lines()[2].get_ydata()).tolist() == [
        record["loss/train"] for record in history.round_records
    ]
    with pytest.raises(fedpareto.Error, match="no round has the number 'auc'; there are: accuracy/best"):
        history.plot("auc")


def test_without_matplotlib_the_curves_say_what_to_install(
    history: fedpareto.History, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    monkeypatch.delitem(sys.modules, "matplotlib", raising=False)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(fedpareto.Error, match=r"plot\(\) needs matplotlib, not installed here: install fedpareto\["):
        history.plot()


def test_runs_of_the_same_task_stand_beside_each_other(history: fedpareto.History) -> None:
    table = history.compare(history)
    assert list(table.columns) == ["first (1)", "first (2)"]
    assert table.loc["algorithm", "first (1)"] == "fedmgda+"
    assert table.loc["accuracy/mean", "first (2)"] == history.round_records[-1]["accuracy/mean"]
    other = fedpareto.simulate(
        {**SPEC, "name": "wide", "rounds": 1, "parameters": {"buffers": "averaged"}},
        task=Wide,
        threads=1,
        progress=lambda _: None,
    )
    with pytest.raises(fedpareto.Error, match="only runs of the same task compare"):
        history.compare(other)
    with pytest.raises(fedpareto.Error, match=r"compare\(\) takes runs, such as simulate\(\) returns, not int"):
        history.compare(7)  # type: ignore[arg-type]
