"""The splits that a run asks members to read."""

import pytest

from federation.statistics.data_columns import Column
from federation.vectors import Layout, Tensor
from federation.work.base import Shape, Work, WorkError
from federation.work.evaluate.work import Evaluate
from federation.work.statistics.work import Statistics

SHAPE = Shape(Layout((Tensor("w", (3,)),)), ("loss",), ("loss",))


def works(*splits: str) -> list[Work]:
    """Work of each kind that reads splits."""
    return [Evaluate(splits=splits), Statistics(columns=(Column(name="age"),), bins=4, splits=splits)]


@pytest.mark.parametrize("splits", [(), ("train", "holdout"), ("test", "test")], ids=["none", "unknown", "twice"])
def test_work_that_names_no_split_an_unknown_one_or_one_twice_is_refused(splits: tuple[str, ...]) -> None:
    for work in works(*splits):
        with pytest.raises(WorkError, match=r"cannot read the splits .*; there are train, validation, test"):
            work.rows(SHAPE)


def test_work_may_name_each_split_once() -> None:
    assert [len(work.rows(SHAPE)) for work in works("test", "train")] == [0, 1]
