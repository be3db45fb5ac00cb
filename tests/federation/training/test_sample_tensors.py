"""Samples as people have them become tensors, or are refused in words."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from torch import nn

from federation.tasks import DataError, Dataset, DataSource, Pool, Splits, Task, TaskError
from federation.tasks.classification import check_labels, cross_entropy, right_samples
from federation.tasks.partition import deal
from federation.training.sample_tensors import as_tensor
from federation.training.torch_trainer import TorchTrainer

NUMBERS = np.arange(6).reshape(3, 2)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (NUMBERS.astype(np.float64), torch.float32),
        (NUMBERS.astype(np.float32), torch.float32),
        (NUMBERS.astype(">f8"), torch.float32),
        (NUMBERS.astype(np.longdouble), torch.float32),
        (NUMBERS.astype(np.float16), torch.float16),
        (NUMBERS.astype(np.uint8), torch.uint8),
        (NUMBERS.astype(np.uint16), torch.int32),
        (NUMBERS.astype(np.uint64), torch.int64),
        (NUMBERS[:, ::-1][:, ::-1], torch.int64),
        (pd.DataFrame(NUMBERS), torch.int64),
        (pd.DataFrame({"a": [0, 2, 4], "b": [1.0, 3.0, 5.0]}), torch.float32),
        (pd.DataFrame({"a": pd.array([0, 2, 4], "Int64"), "b": [1, 3, 5]}), torch.float32),
    ],
    ids=lambda value: str(getattr(value, "dtype", type(value).__name__)),
)
def test_an_array_becomes_a_tensor_of_the_same_numbers(values: Any, dtype: torch.dtype) -> None:
    tensor = as_tensor(values, "x")
    assert tensor.dtype in (dtype, torch.int64)
    assert tensor.tolist() == NUMBERS.tolist()


def test_a_missing_value_of_pandas_is_nan_and_a_column_of_bool_stays_bool() -> None:
    column = as_tensor(pd.Series(pd.array([1, None], "Int64")), "y")
    assert column.isnan().tolist() == [False, True]
    assert as_tensor(pd.Series([True, False]), "y").tolist() == [True, False]
    mixed = as_tensor(pd.DataFrame({"a": [1.5, 2.5], "b": [True, False]}), "x")
    assert mixed.tolist() == [[1.5, 1.0], [2.5, 0.0]]


def test_a_tensor_stays_as_it_is() -> None:
    for tensor in (torch.zeros(2, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.uint8)):
        assert as_tensor(tensor, "x") is tensor


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.array(["no", "yes"]), r"y is an array \(2,\) of str, such as 'no'; needed: numbers\. Number the classes"),
        (pd.Series(["no", "yes"]), r"y is a Series \(2,\) of \w+, such as 'no'; needed: numbers\. Number the classes"),
        (np.array([None, 1]), r"y is an array \(2,\) of object, such as 'None'; needed: numbers$"),
        (np.array(["2026-01-01"], "M8[D]"), r"y is an array \(1,\) of datetime64\[D\], such as '2026-01-01'; needed"),
        (
            pd.DataFrame({"age": [40, 50], "sex": ["m", "f"]}),
            r"a DataFrame \(2, 2\) with columns .*: sex \(\w+\)\. Leave",
        ),
        (np.ma.array([1, 2], mask=[True, False]), r"y is a masked array, whose mask would be lost"),
        (scipy.sparse.eye_array(3).tocsr(), r"y is sparse, a csr_array \(3, 3\) of float64; needed: .* toarray\(\)"),
        (torch.eye(3).to_sparse(), r"y is a sparse tensor; needed: a dense one"),
        ([0, 1], r"y is a list of an int and an int; needed: a tensor, or an array"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_array_of_numbers_is_refused_in_words(values: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        as_tensor(values, "y")


@pytest.mark.parametrize(
    ("x", "words"),
    [
        ({"ids": NUMBERS, "mask": NUMBERS}, r"x is a dict with 'ids' and 'mask'; needed: one tensor or array"),
        ((NUMBERS, NUMBERS), r"x is a tuple of an array \(3, 2\) of int64 and an array .*; needed: one tensor"),
        (scipy.sparse.eye_array(3).tocsr(), r"x is a csr_array \(3, 3\) of float64, which is sparse; needed"),
        (3, r"x is an int; needed: a tensor or an array"),
    ],
    ids=["dict", "tuple", "sparse", "int"],
)
def test_several_parts_in_place_of_one_array_are_refused_in_words(x: Any, words: str) -> None:
    for kind in (Pool, Dataset):
        with pytest.raises(DataError, match=words):
            kind(x, np.zeros(3))


def test_tables_are_dealt_as_tables_for_trainers_that_want_them() -> None:
    splits = deal(Pool(pd.DataFrame({"a": range(20)}), pd.Series(range(20))), None)
    assert [len(split) for split in splits] == [16, 2, 2]
    for split in splits:
        assert split.x["a"].tolist() == split.y.tolist()


def test_owners_and_labels_may_be_lists_or_columns_of_whole_numbers() -> None:
    pool = Pool(NUMBERS, [0, 1, 1], labels=pd.Series([2, 3, 3]), owners=("ann", "ben"), owner=[0, 0, 1])  # type: ignore[arg-type]
    assert pool.owner is not None
    assert pool.labels is not None
    assert [pool.owner.tolist(), pool.labels.tolist()] == [[0, 0, 1], [2, 3, 3]]
    with pytest.raises(DataError, match=r"owner of a pool is an array \(3,\) of str; needed: a whole number for each"):
        Pool(NUMBERS, [0, 1, 1], owners=("ann", "ben"), owner=["ann", "ann", "ben"])  # type: ignore[arg-type]


class Flat(Task):
    def model(self) -> nn.Module:
        return nn.Linear(2, 3)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16])
def test_the_default_loss_and_accuracy_take_labels_of_bool_and_of_all_integers(dtype: torch.dtype) -> None:
    output, labels = torch.tensor([[3.0, 1.0], [0.0, 2.0], [1.0, 0.0]]), torch.tensor([0, 1, 1])
    losses = Flat().losses(output, labels.to(dtype))
    assert torch.equal(losses["loss"], nn.functional.cross_entropy(output, labels))
    right = Flat().correct(output, labels.to(dtype))
    assert isinstance(right, torch.Tensor)
    assert right.tolist() == [True, True, False]


def test_the_default_accuracy_of_pixels_is_the_share_of_those_that_count() -> None:
    output = torch.zeros(2, 3, 2, 2).index_fill_(1, torch.tensor([1]), 1.0)
    y = torch.tensor([[[1, 1], [1, 0]], [[1, 2], [-100, -100]]])
    assert right_samples("t", output, y).tolist() == [0.75, 0.5]
    check_labels("t", output, y)


@pytest.mark.parametrize(
    ("output", "y", "words"),
    [
        (
            torch.zeros(4, 2),
            torch.zeros(4, 2).long(),
            r"y is a Tensor \(4, 2\) of int64, .*: of one-hot labels y\.argmax\(1\)",
        ),
        (torch.zeros(4, 2), torch.zeros(4, 1).long(), r"y is a Tensor \(4, 1\) of int64, .*: y\.squeeze\(1\)"),
        (torch.zeros(4, 2), torch.zeros(4), r"y is a Tensor \(4,\) of float32, .*: y\.long\(\)"),
        (torch.zeros(4, 2, 3, 3), torch.zeros(4).long(), r"classes, \(4, 3, 3\) whole numbers .*: give one class"),
        (torch.zeros(4), torch.zeros(4).long(), r"needs logits, .*; the model's output is a Tensor \(4,\) of float32"),
        ({"logits": 0}, torch.zeros(4), r"the model's output is a dict with 'logits': return its logits"),
        ((1, 2), torch.zeros(4), r"the model's output is a tuple of an int and an int: return them in the model's"),
    ],
    ids=["one-hot", "column", "float", "pixels", "one number", "dict", "tuple"],
)
def test_what_the_default_loss_cannot_take_is_named_in_words(output: Any, y: torch.Tensor, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        cross_entropy("t", output, y)
    with pytest.raises(TaskError):
        right_samples("t", output, y)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([1, 2], r"the label 2 is none of the classes 0 to 1 .*; the labels are 1 to 2: y - 1 numbers them from 0"),
        ([-1, 1], r"the label -1 is none .*: give the model more outputs, or labels that do not count the number -100"),
        ([0, 255], r"the label 255 is none .*: give the model more outputs"),
    ],
)
def test_labels_without_a_logit_are_named_in_words(labels: list[int], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        check_labels("t", torch.zeros(2, 2), torch.tensor(labels))


class Table(Task):
    """Arrays in the form that the trainer gets."""

    def model(self) -> nn.Module:
        return nn.Linear(2, 2)


def trained(x: Any, y: Any) -> Mapping[str, float]:
    split = Dataset(x, y)
    trainer = TorchTrainer(Table(), Splits(split, split, split), threads=1)
    trainer.try_out()
    return trainer.measure(trainer.vector(trainer.task.initial(0)), ("train",))


def test_arrays_and_tables_have_the_results_of_the_same_tensors() -> None:
    x, y = NUMBERS / 7, np.array([0, 1, 1])
    expected = trained(torch.from_numpy(x).float(), torch.from_numpy(y))
    assert trained(x, y.astype(np.int32)) == expected
    assert trained(pd.DataFrame(x), pd.Series(y == 1)) == expected


class Items(torch.utils.data.Dataset[Any]):
    def __init__(self, item: Any) -> None:
        self.item = item

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return self.item


def stored(item: Any) -> TorchTrainer:
    none = Dataset(torch.empty(0, 2), torch.empty(0))
    return TorchTrainer(Table(), Splits(Items(item), none, none), threads=1)


def test_samples_that_are_read_one_by_one_are_converted_and_refused_likewise() -> None:
    x, y = stored((np.array([0.5, 1.5]), 1)).data.train.take(torch.tensor([0, 1]))
    assert (x.dtype, y.tolist()) == (torch.float32, [1, 1])
    for item, words in (
        ({"image": 1, "label": 2}, "sample 0 of the train split is a dict with 'image' and 'label'; needed: a pair"),
        ((1, 2, 3), "sample 0 of the train split is a tuple of 3; needed: a pair"),
        ((np.zeros(2), "yes"), "sample 0 of the train split: its label is a str; needed: a tensor"),
        ((np.array(["a", "b"]), 1), "sample 0 of the train split: its features is an array (2,) of str, such as 'a'"),
    ):
        with pytest.raises(DataError, match=re.escape(words)):
            stored(item)


def test_what_pool_and_load_return_instead_is_refused_in_words() -> None:
    class Pairs(Table):
        def pool(self, source: DataSource) -> Pool:
            return NUMBERS, NUMBERS  # type: ignore[return-value]

    class Loads(Table):
        def load(self, source: DataSource) -> Splits:
            return NUMBERS, NUMBERS  # type: ignore[return-value]

    with pytest.raises(TaskError, match=r"pool\(\) returned a tuple of an array .*; needed: Pool\(x, y\)"):
        TorchTrainer.load(Pairs(), DataSource())
    with pytest.raises(DataError, match=r"load\(\) returned a tuple of an array .*; needed: Splits\("):
        TorchTrainer.load(Loads(), DataSource())
