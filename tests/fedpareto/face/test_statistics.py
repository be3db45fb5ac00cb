"""Runs that describe data, from Python: on simulated clients."""

import numpy as np
import pytest

import fedpareto
from federation.tasks import task
from federation.tasks.digits import bundled


def test_simulated_clients_describe_the_columns_of_their_data() -> None:
    spec = {
        "name": "held",
        "kind": "statistics",
        "task": "digits",
        "statistics": {"open": True, "bins": 5, "splits": ["train", "validation", "test"]},
        "simulation": {"clients": 8, "partition": "iid"},
    }
    history = fedpareto.simulate(spec, progress=lambda progress: None, threads=1)
    found = history.statistics
    assert history.state == "COMPLETED"
    assert found is not None
    x, y = bundled()
    assert (found["samples"], len(found["members"])) == (len(y), 8)
    assert [column["name"] for column in found["columns"]] == [column.name for column in task("digits").columns()]
    for column, values in zip(found["columns"], x.T / 16, strict=False):
        if column["mean"] is not None:
            assert column["mean"] == pytest.approx(values.mean(), abs=25 * values.std() / len(y))
    counts = np.bincount(y).tolist()
    told = found["columns"][-1]["counts"]
    assert [count for count in told if isinstance(count, int)] == [
        count for count, shown in zip(counts, told, strict=True) if isinstance(shown, int)
    ]
    assert "65 columns of 1,797 samples of 8 members" in repr(history)
