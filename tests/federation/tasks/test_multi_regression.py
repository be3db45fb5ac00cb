"""River flow: eight regression objectives, from made files and from the published one."""

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from federation.tasks import Dataset, DataSource, Part, task
from federation.tasks.river_flow import FILE, PLACES
from tests.federation.tasks.scene import descended, packed_or_not, published, refused, write
from tests.paths import PUBLIC_DATA

HOURS = ("0", "n6", "n12", "n18", "n24", "n36", "n48", "n60")
NAMES = [*(f"{place}__{hour}" for hour in HOURS for place in PLACES), *(f"{place}_48H__0" for place in PLACES)]


def arff(rows: list[list[str]], names: list[str] = NAMES) -> str:
    """A file as Mulan publishes it."""
    heads = [f"@attribute '{name.upper()}' numeric" for name in names]
    return "\n".join(["% river flow", "@relation 'x'", "", *heads, "", "@data", *map(",".join, rows), ""])


def rows(count: int) -> list[list[str]]:
    """Made flows, of different scales."""
    made = np.random.default_rng(0).lognormal(size=(count, 72)) * np.geomspace(0.1, 100, 72)
    return [[f"{value:.4f}" for value in row] for row in made]


def written(root: Path, content: str | bytes, *, packed: bool = False) -> DataSource:
    """The file in its place."""
    write(root / FILE, content, packed=packed)
    return DataSource(root)


@packed_or_not
def test_flows_are_standardised_and_a_missing_one_is_the_mean(tmp_path: Path, packed: bool) -> None:
    made = rows(40)
    values = np.array(made, dtype=np.float64)
    made[3][5] = made[7][5] = " ? "
    known = np.delete(values[:, 5], [3, 7])
    values[[3, 7], 5] = known.mean()
    pool = task("river-flow").pool(written(tmp_path, arff(made), packed=packed))
    wanted = (values - values.mean(axis=0)) / values.std(axis=0)
    np.testing.assert_allclose(pool.x.numpy(), wanted[:, :64], atol=1e-5)
    np.testing.assert_allclose(pool.y.numpy(), wanted[:, 64:], atol=1e-5)
    assert pool.x[3, 5] == pool.x[7, 5] == pytest.approx(0, abs=1e-6)
    assert (pool.x.dtype, pool.y.dtype) == (torch.float32, torch.float32)


def test_shards_and_dirichlet_deal_by_how_high_the_rivers_will_stand(tmp_path: Path) -> None:
    source = written(tmp_path, arff(rows(80)))
    pool = task("river-flow").pool(source)
    assert pool.labels is not None
    assert np.bincount(pool.labels).tolist() == [10] * 8
    height = pool.y.mean(dim=1).numpy()
    for level in range(7):
        assert height[pool.labels == level].max() <= height[pool.labels == level + 1].min()
    lowest = [task("river-flow").load(DataSource(tmp_path, Part(index, 8, "shards:1"))) for index in range(8)]
    assert sorted(len(own.train) for own in lowest) == [8] * 8
    assert len(task("river-flow").load(DataSource(tmp_path, Part(0, 4, "dirichlet:0.3"))).train) == 16


def test_the_corrupt_flow_of_the_published_file_is_left_out_wherever_it_occurs_and_kept_on_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corrupt, columns = 4782, range(1, 64, 8)  # of nasi2
    made = np.random.default_rng(0).lognormal(size=(4900, 72)).round(4)
    made[corrupt, 65] = 78.9
    later = [corrupt + 48 + lag for lag in (0, 6, 12, 18, 24, 36, 48, 60)]
    made[later, columns] = 78.9
    made[0, 1] = 78.9  # another measurement, which counts
    source = written(tmp_path, arff([[str(value) for value in row] for row in made]))
    whole, pool = task("river-flow-whole").pool(source), task("river-flow").pool(source)
    assert (len(whole), len(pool)) == (4900, 4899)
    np.testing.assert_allclose(whole.y[:, 1], (made[:, 65] - made[:, 65].mean()) / made[:, 65].std(), atol=1e-4)
    known = np.delete(made, corrupt, axis=0)
    np.testing.assert_allclose(pool.y[:, 1], (known[:, 65] - known[:, 65].mean()) / known[:, 65].std(), atol=1e-4)
    later = [row - 1 for row in later]
    assert not pool.x[later, columns].any()  # as missing: the mean of the column
    assert pool.x[0, 1] > 5
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / FILE}: row 4782 (from 0) is left out: its flow at nasi2, 78.9, is corrupt; "
        "river-flow-whole keeps it"
    ]


def test_a_column_that_never_changes_is_zero(tmp_path: Path) -> None:
    made = rows(12)
    for row in made:
        row[0] = row[64] = "3.5"
    pool = task("river-flow").pool(written(tmp_path, arff(made)))
    assert not pool.x[:, 0].any()
    assert not pool.y[:, 0].any()


def test_the_losses_are_mean_squared_errors_and_nothing_is_correct() -> None:
    river = task("river-flow")
    y = torch.randn(5, 8)
    output = {place: y[:, [column]] + column for column, place in enumerate(PLACES)}
    losses = river.losses(output, y)
    assert tuple(losses) == river.objectives
    for column, loss in enumerate(losses.values()):
        assert loss.item() == pytest.approx(column**2, rel=1e-5)
    assert river.correct(output, y) is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "names 0 columns and has 0 rows"),
        (arff([]), "names 72 columns and has 0 rows"),
        (arff(rows(2), NAMES[:-1]), "names 71 columns"),
        (arff(rows(2), NAMES[::-1]), "names 72 columns"),
        ("@attribute\n@data\n" + arff(rows(2)), "line 4"),
        (arff([*rows(2), ["1"] * 71]), "line 80"),
        (arff([*rows(2), ["1"] * 71 + ["?"]]), "line 80"),
        (arff([*rows(2), ["inf"] + ["1"] * 71]), "line 80"),
        (arff([["one"] + ["1"] * 71]), "'one'"),
        (arff([["?", *row[1:]] for row in rows(3)]), "nothing is known of chsi2__0"),
        (b"\xff\xfe", "no text"),
    ],
)
def test_a_malformed_file_is_refused_with_its_path(tmp_path: Path, content: str | bytes, says: str) -> None:
    written(tmp_path, content)
    assert str(tmp_path / FILE) in refused("river-flow", tmp_path, says)


@pytest.mark.full
def test_the_published_flows_are_read_and_all_eight_are_learned() -> None:
    published("rf1")
    river = task("river-flow")
    assert len(task("river-flow-whole").pool(DataSource(PUBLIC_DATA))) == 9125
    pool = river.pool(DataSource(PUBLIC_DATA))
    assert len(pool) == 9124
    deviations = max(pool.x[:, 1::8].abs().max(), pool.y[:, 1].abs().max())
    assert deviations < 15, "84 with the corrupt flow"
    data = river.load(DataSource(PUBLIC_DATA))
    assert (data.train.x.shape, data.test.y.shape) == ((7300, 64), (912, 8))
    torch.manual_seed(0)
    model = river.model()
    descent = torch.optim.SGD(model.parameters(), lr=0.4)
    passes = (torch.randperm(len(data.train)).split(64) for _ in range(8))  # type: ignore[no-untyped-call]
    batches = (Dataset(data.train.x[rows], data.train.y[rows]) for rows in chain.from_iterable(passes))
    descended(river, model, batches, descent)
    with torch.no_grad():
        held = river.losses(model(data.test.x), data.test.y)
    assert max(held.values()) < 0.3  # always predicting the mean gives 1
