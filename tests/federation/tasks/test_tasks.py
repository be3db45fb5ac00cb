"""Tasks: found by name, data in disjoint parts, files that are missing or wrong, models as flat vectors."""

import pickle
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.utils import vector_to_parameters

from federation import tasks
from federation.tasks import parameters as flat
from federation.tasks.digits import Digits, write_parts
from fedpareto.processes.forked import completed
from tests.federation.tasks.scene import refused
from tests.harness import python
from tests.paths import DOCS, EXAMPLES, ROOT

BUILT_IN = {
    *("digits", "mnist", "fashion-mnist", "cifar10", "emnist", "femnist", "adult", "shakespeare"),
    *("fashion-mnist-3", "cifar10-fedfv", "mnist-fedfv", "mnist-fedfv-standardised"),
    "scanners",
    *("two-digits", "two-digits-scaled", "multi-mnist", "mnist-fashion", "cifar10-mnist"),
    *("multi-mnist-l1", "multi-mnist-fmol", "multi-mnist-fmol-256"),
    *("river-flow", "river-flow-whole", "celeba", "celeba-5", "qm9"),
}


# ---- by name


def test_listing_and_making_a_task_imports_neither_torch_nor_numpy_nor_sklearn() -> None:
    code = (
        "import sys; from federation.tasks import available, Part; print([t.name for t in available()]);"
        "assert not {'torch', 'numpy', 'sklearn'} & set(sys.modules)"
    )
    assert set(eval(python("-c", code).stdout)) >= BUILT_IN


def test_every_built_in_task_loads_and_bears_the_name_it_was_asked_by() -> None:
    for name in BUILT_IN:
        assert tasks.task(name).name == name


def test_the_page_of_tasks_and_the_package_name_the_built_in_tasks() -> None:
    listed = re.findall(r"^\| `([a-z0-9-]+)` \|", (DOCS / "research/tasks.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(BUILT_IN)
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["fedpareto.tasks"]
    assert points == {offer.name: offer.origin for offer in tasks.available() if offer.package == "fedpareto"}
    assert set(points) == BUILT_IN


def test_a_class_of_ones_own_is_named_as_module_and_class() -> None:
    loaded = tasks.task("federation.tasks.digits:Digits")
    assert isinstance(loaded, Digits)
    assert loaded.name == "federation.tasks.digits:Digits"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("digit", "digits"),
        ("no_such_module:Thing", "no_such_module"),
        ("federation.tasks.digits:Thing", "Thing"),
        ("federation.tasks.digits:FILE", "not a subclass"),
        (":Digits", ":Digits"),
        ("federation.tasks:Task", "federation.tasks:Task defines neither model nor initial$"),
    ],
)
def test_a_task_that_cannot_be_used_is_refused_with_its_name(name: str, says: str) -> None:
    with pytest.raises(tasks.TaskError, match=says):
        tasks.task(name)


def test_a_package_cannot_take_the_name_of_a_built_in_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "intruder-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: intruder\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[fedpareto.tasks]\ndigits = intruder:Bad\nown = federation.tasks.digits:Digits\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    offers = {offer.name: offer for offer in tasks.available()}
    assert offers["digits"].package == "fedpareto"
    assert offers["own"].package == "intruder"
    assert type(tasks.task("digits")) is Digits
    assert type(tasks.task("own")) is Digits


# ---- digits


def test_digits_needs_no_file_and_is_cut_80_10_10() -> None:
    splits = tasks.task("digits").load(tasks.DataSource())
    assert [len(cut) for cut in (splits.train, splits.validation, splits.test)] == [1437, 180, 180]
    assert splits.train.x.dtype == torch.float32
    assert splits.train.x.shape == (1437, 64)
    assert float(splits.train.x.min()) == 0
    assert float(splits.train.x.max()) == 1
    assert set(splits.train.y.tolist()) == set(range(10))


def test_written_parts_hold_the_same_samples_as_parts_of_the_bundled_set(tmp_path: Path) -> None:
    directories = [tmp_path / str(index) for index in range(8)]
    files = write_parts(directories, scheme="shards:2", seed=3)
    assert files == tuple(directory / "digits.npz" for directory in directories)
    held = [tasks.task("digits").load(tasks.DataSource(directory)) for directory in directories]
    assert sum(len(cut) for own in held for cut in (own.train, own.validation, own.test)) == 1797
    for index, own in enumerate(held):
        direct = tasks.task("digits").load(tasks.DataSource(part=tasks.Part(index, 8, "shards:2", 3)))
        assert _samples(own) == _samples(direct)


def _samples(splits: tasks.Splits) -> list[bytes]:
    return sorted(x.numpy().tobytes() for cut in (splits.train, splits.validation, splits.test) for x in cut.x)


def test_a_file_of_digits_can_be_shared_in_parts_too(tmp_path: Path) -> None:
    write_parts([tmp_path])
    splits = tasks.task("digits").load(tasks.DataSource(tmp_path, tasks.Part(0, 2)))
    assert len(splits.train) + len(splits.validation) + len(splits.test) == 899


def test_a_missing_file_of_digits_is_named_with_how_to_get_one(tmp_path: Path) -> None:
    assert str(tmp_path / "digits.npz") in refused("digits", tmp_path, "write_parts")


GOOD_X, GOOD_Y = np.zeros((4, 64)), np.zeros(4, dtype=int)


@pytest.mark.parametrize(
    "arrays",
    [
        {"x": GOOD_X},
        {"x": GOOD_X[:, :63], "y": GOOD_Y},
        {"x": GOOD_X[:3], "y": GOOD_Y},
        {"x": GOOD_X + 17, "y": GOOD_Y},
        {"x": GOOD_X + 0.5, "y": GOOD_Y},
        {"x": GOOD_X + np.nan, "y": GOOD_Y},
        {"x": GOOD_X, "y": GOOD_Y + 10},
        {"x": GOOD_X, "y": GOOD_Y - 1},
        {"x": GOOD_X.astype(str), "y": GOOD_Y},
    ],
)
def test_a_file_that_does_not_hold_digits_is_refused_with_its_path(
    tmp_path: Path, arrays: dict[str, np.ndarray]
) -> None:
    np.savez(tmp_path / "digits.npz", allow_pickle=True, **arrays)
    refused("digits", tmp_path, r"digits\.npz")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a zip", b"x" * 1000, np.lib.format.magic(1, 0)])
def test_a_broken_file_of_digits_is_refused_with_its_path(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "digits.npz").write_bytes(content)
    refused("digits", tmp_path, r"digits\.npz")


class _Trap:
    """What runs code when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_pickle_in_the_place_of_digits_is_not_run(tmp_path: Path, wrapped: bool) -> None:
    sprung, file = tmp_path / "sprung", tmp_path / "digits.npz"
    trap = np.array([_Trap(str(sprung))], dtype=object)
    if wrapped:
        np.savez(file, x=trap, y=trap)
    else:
        file.write_bytes(pickle.dumps(_Trap(str(sprung))))
    refused("digits", tmp_path, r"digits\.npz")
    assert not sprung.exists()


# ---- models


def test_an_initial_model_depends_on_its_seed_alone_and_leaves_torchs_generator_as_it_was() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = tasks.initial_model(tasks.task("digits"), 5)[1]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert np.array_equal(one, tasks.initial_model(tasks.task("digits"), 5)[1])
    assert not np.array_equal(one, tasks.initial_model(tasks.task("digits"), 6)[1])


def _flat(model: nn.Module) -> NDArray[np.float32]:
    return np.concatenate([part.ravel() for part in flat.values(model).values()])


def test_a_vector_goes_into_a_model_and_comes_back() -> None:
    _, vector = tasks.initial_model(tasks.task("mnist"), 1)
    model = flat.build(tasks.task("mnist"))
    assert not np.array_equal(_flat(model), vector)
    vector_to_parameters(torch.from_numpy(vector.copy()), model.parameters())
    assert np.array_equal(_flat(model), vector)
    bias = dict(model.named_parameters())["conv1.bias"]
    assert np.array_equal(bias.detach().numpy(), vector[250:260])


class Made(tasks.Task):
    """A task around any model."""

    def __init__(self, model: nn.Module) -> None:
        self._made = model

    def model(self) -> nn.Module:
        return self._made

    def load(self, source: tasks.DataSource) -> tasks.Splits:
        raise NotImplementedError


def _with_constant() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("positions", torch.arange(3.0), persistent=False)
    model.register_buffer("count", torch.zeros(1, dtype=torch.int64))
    return model


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.Linear(2, 2).half(), "float16"),
        (nn.ReLU(), "no trainable"),
        (nn.Linear(2, 2).requires_grad_(False), "no trainable"),
        (nn.Sequential(nn.Linear(2, 2), nn.Embedding(0, 2)), "no elements"),
    ],
    ids=["half", "nothing", "frozen", "empty"],
)
def test_a_model_that_a_flat_vector_cannot_carry_is_refused(model: nn.Module, says: str) -> None:
    with pytest.raises(tasks.TaskError, match=says):
        tasks.initial_model(Made(model), 0)


def test_constants_and_group_norm_and_frozen_parts_are_welcome() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    layout, vector = tasks.initial_model(Made(nn.Sequential(frozen, _with_constant(), nn.GroupNorm(1, 2))), 0)
    assert [tensor.name for tensor in layout.tensors] == ["1.weight", "1.bias", "2.weight", "2.bias"]
    assert len(vector) == 10


def test_a_shared_parameter_counts_once() -> None:
    layer = nn.Linear(2, 2)
    assert tasks.initial_model(Made(nn.Sequential(layer, layer)), 0)[0].size == 6


def test_samples_and_labels_must_agree() -> None:
    with pytest.raises(tasks.DataError, match="3 samples but 2 labels"):
        tasks.Dataset(torch.zeros(3, 1), torch.zeros(2))


# ---- a task of one's own


def test_the_documented_example_reads_a_clinics_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    tumours = tasks.task("clinic:Tumours")
    bundled = tumours.load(tasks.DataSource())
    rows = torch.cat([bundled.test.x.expm1(), bundled.test.y[:, None]], dim=1).numpy()
    header = ",".join([*(f"m{number}" for number in range(30)), "benign"])
    np.savetxt(tmp_path / "tumours.csv", rows, delimiter=",", header=header, comments="")
    own = tumours.load(tasks.DataSource(tmp_path))
    assert [len(cut) for cut in (own.train, own.validation, own.test)] == [45, 6, 6]
    assert tasks.initial_model(tumours, 0)[0].size == 30 * 16 + 16 + 2 * 16 + 16 * 2 + 2
    with pytest.raises(tasks.DataError, match=r"tumours\.csv"):
        tumours.load(tasks.DataSource(tmp_path / "elsewhere"))
    (tmp_path / "tumours.csv").write_text("a,b\n1,2\n")
    with pytest.raises(tasks.DataError, match=r"tumours\.csv"):
        tumours.load(tasks.DataSource(tmp_path))


@pytest.mark.full
def test_the_documented_rehearsal_learns_at_every_member() -> None:
    done = completed([str(EXAMPLES / "rehearse.py"), "clinic:Tumours"])
    assert done.returncode == 0, done.stderr
    accuracies = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]
    assert len(accuracies) == 5
    assert np.mean(accuracies) > 0.8  # two patients in three are well: guessing gives 0.63
