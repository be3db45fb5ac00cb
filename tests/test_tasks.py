"""Tasks: found by name, data in disjoint parts, files that are missing or wrong, the papers' models."""

import gzip
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from federation.tasks import (
    DataError,
    Dataset,
    DataSource,
    Part,
    PartError,
    Pool,
    Splits,
    Task,
    TaskError,
    available,
    initial_model,
    task,
)
from federation.tasks import parameters as flat
from federation.tasks.digits import Digits, write_parts
from federation.tasks.models import LocalResponseNorm, cifar_cnn
from federation.tasks.partition import partition, split
from federation.tasks.vision import Cifar10

ROOT = Path(__file__).parents[1]
PUBLIC_DATA = ROOT.parent / "shared" / "data"
SCHEMES = ("iid", "shards:1", "shards:3", "dirichlet:0.05", "dirichlet:0.3", "dirichlet:100")


# ---- by name


def test_listing_and_making_a_task_imports_neither_torch_nor_numpy_nor_sklearn() -> None:
    code = (
        "import sys; from federation.tasks import available, Part; print([t.name for t in available()]);"
        "assert not {'torch', 'numpy', 'sklearn'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {"digits", "mnist", "fashion-mnist", "cifar10"} <= set(eval(done.stdout))


def test_every_built_in_task_loads_and_bears_the_name_it_was_asked_by() -> None:
    for name in ("digits", "mnist", "fashion-mnist", "cifar10"):
        assert task(name).name == name


def test_a_class_of_ones_own_is_named_as_module_and_class() -> None:
    loaded = task("federation.tasks.digits:Digits")
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
        ("federation.tasks:Task", "cannot be made"),
    ],
)
def test_a_task_that_cannot_be_used_is_refused_with_its_name(name: str, says: str) -> None:
    with pytest.raises(TaskError, match=says):
        task(name)


def test_a_package_cannot_take_the_name_of_a_built_in_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "intruder-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: intruder\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[fedpareto.tasks]\ndigits = intruder:Bad\nown = federation.tasks.digits:Digits\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    offers = {offer.name: offer for offer in available()}
    assert offers["digits"].package == "fedpareto"
    assert offers["own"].package == "intruder"
    assert type(task("digits")) is Digits
    assert type(task("own")) is Digits


# ---- parts


def _pool(labels: np.ndarray) -> Pool:
    """Samples that are their own numbers."""
    return Pool(torch.arange(len(labels)), torch.from_numpy(labels))


def _labels(labels: np.ndarray, scheme: str) -> list[np.ndarray]:
    """The labels that each of ten clients holds."""
    return [labels[own] for own in partition(_pool(labels), Part(0, 10, scheme))]


@settings(max_examples=60, deadline=None)
@given(
    scheme=st.sampled_from(SCHEMES),
    count=st.integers(1, 12),
    size=st.integers(36, 300),
    classes=st.integers(1, 10),
    seed=st.integers(0, 3),
)
def test_the_parts_of_every_scheme_are_disjoint_complete_and_level(
    scheme: str, count: int, size: int, classes: int, seed: int
) -> None:
    labels = np.random.default_rng(seed).integers(0, classes, size)
    parts = partition(_pool(labels), Part(0, count, scheme, seed))
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(size))
    sizes = [len(part) for part in parts]
    shards = int(scheme.partition(":")[2]) if scheme.startswith("shards") else 1
    assert max(sizes) - min(sizes) <= shards


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_part_depends_on_its_seed_alone(scheme: str) -> None:
    labels = np.arange(500) % 10
    one, again, other = (partition(_pool(labels), Part(0, 8, scheme, seed))[2] for seed in (4, 4, 5))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


def test_two_shards_hold_few_labels_and_iid_parts_hold_all() -> None:
    labels = np.repeat(np.arange(10), 100)
    for few, all_ in zip(_labels(labels, "shards:2"), _labels(labels, "iid"), strict=True):
        assert len(np.unique(few)) <= 2
        assert len(np.unique(all_)) == 10


def test_a_small_dirichlet_alpha_skews_and_a_large_one_levels() -> None:
    labels = np.repeat(np.arange(10), 200)

    def largest_share(alpha: str) -> float:
        parts = _labels(labels, f"dirichlet:{alpha}")
        return float(np.mean([np.bincount(part).max() / len(part) for part in parts]))

    assert largest_share("0.05") > 0.5
    assert largest_share("1000") < 0.2


@pytest.mark.parametrize(
    ("samples", "clients", "scheme", "each"),
    [
        (50_000, 100, "shards:5", [400, 50, 50]),  # FedMGDA+: 500 shards of 100
        (50_000, 100, "shards:2", [400, 50, 50]),  # FedFV: 200 shards of 250
        (60_000, 200, "shards:2", [240, 30, 30]),  # FedFV: 400 shards of 150
    ],
)
def test_the_papers_recipes_give_every_client_as_many_samples_as_the_papers(
    samples: int, clients: int, scheme: str, each: list[int]
) -> None:
    labels = np.repeat(np.arange(10), samples // 10)
    for own in partition(_pool(labels), Part(0, clients, scheme)):
        assert [len(cut) for cut in split(len(own))] == each
        assert len(np.unique(labels[own])) <= int(scheme[-1])


@given(count=st.integers(0, 500), seed=st.integers(0, 5))
@settings(deadline=None)
def test_a_split_is_disjoint_complete_and_leaves_no_cut_empty_from_three_samples_on(count: int, seed: int) -> None:
    cuts = split(count, seed=seed)
    assert np.array_equal(np.sort(np.concatenate(cuts)), np.arange(count))
    assert count < 3 or all(len(cut) for cut in cuts)
    assert len(cuts[1]) == len(cuts[2])


@pytest.mark.parametrize(
    "scheme",
    [
        "",
        "iid:",
        "shards",
        "shards:0",
        "shards:x",
        "dirichlet:0",
        "dirichlet:-1",
        "dirichlet:nan",
        "random",
        "natural:",
    ],
)
def test_an_unknown_scheme_is_refused(scheme: str) -> None:
    with pytest.raises(PartError, match="scheme"):
        Part(0, 2, scheme)


@pytest.mark.parametrize("text", ["0/8", "9/8", "1/0", "3", "a/b", "-1/8", "3/8/2"])
def test_a_part_out_of_range_or_misspelt_is_refused(text: str) -> None:
    with pytest.raises(PartError):
        Part.parse(text)


def test_parts_are_written_from_one() -> None:
    assert Part.parse("3/8", "shards:2", 7) == Part(2, 8, "shards:2", 7)


def test_more_clients_than_samples_is_refused() -> None:
    with pytest.raises(PartError, match="5 samples"):
        partition(_pool(np.zeros(5, dtype=np.int64)), Part(0, 3, "shards:2"))
    with pytest.raises(DataError, match="1797 samples"):
        task("digits").load(DataSource(part=Part(0, 1000, "shards:2")))


# ---- digits


def test_digits_needs_no_file_and_is_cut_80_10_10() -> None:
    splits = task("digits").load(DataSource())
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
    held = [task("digits").load(DataSource(directory)) for directory in directories]
    assert sum(len(cut) for own in held for cut in (own.train, own.validation, own.test)) == 1797
    for index, own in enumerate(held):
        direct = task("digits").load(DataSource(part=Part(index, 8, "shards:2", 3)))
        assert _samples(own) == _samples(direct)


def _samples(splits: Splits) -> list[bytes]:
    return sorted(x.numpy().tobytes() for cut in (splits.train, splits.validation, splits.test) for x in cut.x)


def test_a_file_of_digits_can_be_shared_in_parts_too(tmp_path: Path) -> None:
    write_parts([tmp_path])
    splits = task("digits").load(DataSource(tmp_path, Part(0, 2)))
    assert len(splits.train) + len(splits.validation) + len(splits.test) == 899


def test_a_missing_file_of_digits_is_named_with_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="write_parts") as caught:
        task("digits").load(DataSource(tmp_path))
    assert str(tmp_path / "digits.npz") in str(caught.value)


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
    np.savez(tmp_path / "digits.npz", **arrays)
    with pytest.raises(DataError, match=r"digits\.npz"):
        task("digits").load(DataSource(tmp_path))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a zip", b"x" * 1000, np.lib.format.magic(1, 0)])
def test_a_broken_file_of_digits_is_refused_with_its_path(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "digits.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"digits\.npz"):
        task("digits").load(DataSource(tmp_path))


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
    with pytest.raises(DataError, match=r"digits\.npz"):
        task("digits").load(DataSource(tmp_path))
    assert not sprung.exists()


# ---- torchvision's data sets


def _write_idx(root: Path, dataset: str, *, packed: bool, count: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """A tiny data set in the published format; torchvision wants to see all four files."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
    labels = (np.arange(count) % 10).astype(np.uint8)
    raw = root / dataset / "raw"
    raw.mkdir(parents=True)
    for name, array in (("images-idx3", images), ("labels-idx1", labels)):
        content = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()
        for half in ("train", "t10k"):
            file = raw / f"{half}-{name}-ubyte{'.gz' if packed else ''}"
            file.write_bytes(gzip.compress(content) if packed else content)
    return images, labels


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize(("name", "dataset"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_idx_files_are_read_packed_or_not_and_nothing_is_written(
    tmp_path: Path, name: str, dataset: str, packed: bool
) -> None:
    images, labels = _write_idx(tmp_path, dataset, packed=packed)
    before = sorted(tmp_path.rglob("*"))
    splits = task(name).load(DataSource(tmp_path))
    assert sorted(tmp_path.rglob("*")) == before
    train = split(len(labels))[0]
    assert np.array_equal(splits.train.x.numpy(), images[train][:, None])
    assert np.array_equal(splits.train.y.numpy(), labels[train])


@pytest.mark.parametrize("damage", ["cut", "length", "kind", "not gzip"])
def test_a_damaged_idx_file_is_refused_with_its_place(tmp_path: Path, damage: str) -> None:
    _write_idx(tmp_path, "MNIST", packed=True)
    file = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte.gz"
    content = gzip.decompress(file.read_bytes())
    file.write_bytes(
        {
            "cut": gzip.compress(content)[:-400],
            "length": gzip.compress(content[:-1]),
            "kind": gzip.compress(b"\0\0\x0d\x03" + content[4:]),
            "not gzip": content,
        }[damage]
    )
    with pytest.raises(DataError, match="MNIST"):
        task("mnist").load(DataSource(tmp_path))


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_a_missing_data_set_is_named_with_how_to_get_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="--download") as caught:
        task(name).load(DataSource(tmp_path))
    assert str(tmp_path) in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="--data DIR"):
        task(name).load(DataSource())


def test_colour_images_come_channels_first() -> None:
    images = np.arange(2 * 32 * 32 * 3, dtype=np.uint64).astype(np.uint8).reshape(2, 32, 32, 3)
    x, y = Cifar10()._arrays(images, [3, 7])
    assert x.shape == (2, 3, 32, 32)
    assert np.array_equal(x[1, 2], images[1, :, :, 2])
    assert y.dtype == np.int64


@pytest.mark.parametrize(
    ("name", "dataset", "first"),
    [
        ("mnist", "MNIST", [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]),
        ("fashion-mnist", "FashionMNIST", [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]),
    ],
)
def test_the_published_files_are_read(name: str, dataset: str, first: list[int]) -> None:
    if not (PUBLIC_DATA / dataset).is_dir():
        pytest.skip(f"no published {dataset} files beside the project, in {PUBLIC_DATA}")
    x, y = task(name)._pool(PUBLIC_DATA, download=False)  # type: ignore[attr-defined]
    assert x.shape == (60000, 1, 28, 28)
    assert y[:10].tolist() == first
    mean, deviation = task(name).mean, task(name).deviation  # type: ignore[attr-defined]
    assert (float(x.mean() / 255), float(x.std() / 255)) == pytest.approx((mean, deviation), abs=1e-4)
    own = task(name).load(DataSource(PUBLIC_DATA, Part(99, 100, "shards:5")))
    assert [len(cut) for cut in (own.train, own.validation, own.test)] == [480, 60, 60]


# ---- models


@pytest.mark.parametrize(
    ("name", "parameters", "shape"),
    [
        ("digits", 4810, (64,)),
        ("mnist", 21_840, (1, 28, 28)),
        ("fashion-mnist", 21_840, (1, 28, 28)),
        ("cifar10", 797_962, (3, 32, 32)),
    ],
)
def test_the_models_have_the_papers_sizes(name: str, parameters: int, shape: tuple[int, ...]) -> None:
    layout, vector = initial_model(task(name), seed=0)
    assert layout.size == parameters
    assert vector.shape == (parameters,)
    assert vector.dtype == np.float32
    model = task(name).model()
    assert [tensor.name for tensor in layout.tensors] == [name for name, _ in model.named_parameters()]
    images = torch.zeros((2, *shape), dtype=torch.float32 if name == "digits" else torch.uint8)
    assert model(images).shape == (2, 10)


def test_the_layers_of_the_cifar_model_count_as_in_the_paper() -> None:
    counts = [sum(p.numel() for p in layer.parameters()) for layer in cifar_cnn().children()]
    assert [count for count in counts if count] == [4864, 102_464, 614_784, 73_920, 1930]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_our_local_response_norm_is_torchs(size: int) -> None:
    x = torch.randn(3, 7, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 50
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    mine, reference = LocalResponseNorm(size)(ours), nn.LocalResponseNorm(size)(theirs)
    torch.testing.assert_close(mine, reference)
    mine.square().sum().backward()
    reference.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_an_initial_model_depends_on_its_seed_alone_and_leaves_torchs_generator_as_it_was() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = initial_model(task("digits"), 5)[1]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert np.array_equal(one, initial_model(task("digits"), 5)[1])
    assert not np.array_equal(one, initial_model(task("digits"), 6)[1])


def test_a_vector_goes_into_a_model_and_comes_back() -> None:
    layout, vector = initial_model(task("mnist"), 1)
    model = flat.build(task("mnist"))
    assert not np.array_equal(flat.flatten(model), vector)
    flat.load(model, vector)
    assert np.array_equal(flat.flatten(model), vector)
    bias = dict(model.named_parameters())["conv1.bias"]
    assert np.array_equal(bias.detach().numpy(), vector[250:260])
    with pytest.raises(ValueError, match=str(layout.size)):
        flat.load(model, vector[:-1])


class Made(Task):
    """A task around any model."""

    def __init__(self, model: nn.Module) -> None:
        self._made = model

    def model(self) -> nn.Module:
        return self._made

    def load(self, source: DataSource) -> Splits:
        raise NotImplementedError


def _with_constant() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("positions", torch.arange(3.0), persistent=False)
    model.register_buffer("count", torch.zeros(1, dtype=torch.int64))
    return model


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "GroupNorm"),
        (nn.Linear(2, 2).half(), "float16"),
        (nn.ReLU(), "no trainable"),
        (nn.Linear(2, 2).requires_grad_(False), "no trainable"),
        (nn.Sequential(nn.Linear(2, 2), nn.Embedding(0, 2)), "no elements"),
    ],
    ids=["running statistics", "half", "nothing", "frozen", "empty"],
)
def test_a_model_that_a_flat_vector_cannot_carry_is_refused(model: nn.Module, says: str) -> None:
    with pytest.raises(TaskError, match=says):
        initial_model(Made(model), 0)


def test_constants_and_group_norm_and_frozen_parts_are_welcome() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    layout, vector = initial_model(Made(nn.Sequential(frozen, _with_constant(), nn.GroupNorm(1, 2))), 0)
    assert [tensor.name for tensor in layout.tensors] == ["1.weight", "1.bias", "2.weight", "2.bias"]
    assert len(vector) == 10


def test_a_shared_parameter_counts_once() -> None:
    layer = nn.Linear(2, 2)
    assert initial_model(Made(nn.Sequential(layer, layer)), 0)[0].size == 6


def test_samples_and_labels_must_agree() -> None:
    with pytest.raises(DataError, match="3 samples but 2 labels"):
        Dataset(torch.zeros(3, 1), torch.zeros(2))


# ---- a task of one's own


EXAMPLES = ROOT / "docs" / "examples"


def test_the_documented_example_reads_a_clinics_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    tumours = task("clinic:Tumours")
    bundled = tumours.load(DataSource())
    rows = torch.cat([bundled.test.x.expm1(), bundled.test.y[:, None]], dim=1).numpy()
    header = ",".join([*(f"m{number}" for number in range(30)), "benign"])
    np.savetxt(tmp_path / "tumours.csv", rows, delimiter=",", header=header, comments="")
    own = tumours.load(DataSource(tmp_path))
    assert [len(cut) for cut in (own.train, own.validation, own.test)] == [45, 6, 6]
    assert initial_model(tumours, 0)[0].size == 30 * 16 + 16 + 2 * 16 + 16 * 2 + 2
    with pytest.raises(DataError, match=r"tumours\.csv"):
        tumours.load(DataSource(tmp_path / "elsewhere"))
    (tmp_path / "tumours.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"tumours\.csv"):
        tumours.load(DataSource(tmp_path))


def test_the_documented_example_is_the_one_that_runs() -> None:
    source = (EXAMPLES / "clinic.py").read_text()
    assert source[source.index("import numpy") :] in (ROOT / "docs" / "your-own-task.md").read_text()


def test_the_documented_rehearsal_learns_at_every_member() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "rehearse.py"), "clinic:Tumours"],
        env={"PYTHONPATH": f"{ROOT}{os.pathsep}{EXAMPLES}", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    accuracies = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]
    assert len(accuracies) == 5
    assert np.mean(accuracies) > 0.8  # two patients in three are well: guessing gives 0.63
