"""Partitions: who holds which samples, by every scheme and with every sizes, and what each keeps back."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.tasks import DataError, DataSource, Part, PartError, Pool, Splits, Task, task
from federation.tasks.partition import LEAST, _draw, _turns, deal, deal_all, partition, quotas
from federation.tasks.splitting import split

SCHEMES = ("iid", "shards:1", "shards:3", "dirichlet:0.000000001", "dirichlet:0.05", "dirichlet:0.3", "dirichlet:100")


def _pool(labels: np.ndarray) -> Pool:
    """Samples that are their own numbers."""
    return Pool(torch.arange(len(labels)), torch.from_numpy(labels))


def _labels(labels: np.ndarray, scheme: str) -> list[np.ndarray]:
    """The labels that each of ten clients holds."""
    return [labels[own] for own in partition(_pool(labels), Part(0, 10, scheme))]


@settings(max_examples=60)
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


@given(count=st.integers(5, 12), size=st.integers(60, 300), seed=st.integers(0, 3))
@settings(max_examples=30)
def test_labels_are_dealt_so_that_no_client_has_more_than_it_may(count: int, size: int, seed: int) -> None:
    labels = np.random.default_rng(seed).choice(10, size, p=np.arange(1, 11) / 55)
    parts = partition(_pool(labels), Part(0, count, "labels:2", seed))
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(size))
    assert all(1 <= len(np.unique(labels[part])) <= 2 for part in parts)


def test_labels_apart_need_as_many_shards_as_classes() -> None:
    with pytest.raises(PartError, match=r"8 shards \(labels:2, 4 clients\) cannot hold 10 classes apart"):
        partition(_pool(np.arange(100) % 10), Part(0, 4, "labels:2"))


def test_a_small_dirichlet_alpha_skews_and_a_large_one_levels() -> None:
    labels = np.repeat(np.arange(10), 200)

    def largest_share(alpha: str) -> float:
        parts = _labels(labels, f"dirichlet:{alpha}")
        return float(np.mean([np.bincount(part).max() / len(part) for part in parts]))

    assert largest_share("0.05") > 0.5
    assert largest_share("1000") < 0.2


def test_dirichlet_draws_again_while_a_class_is_used_up() -> None:
    """What is drawn in blocks is what is drawn one by one, each from what is left then."""
    random = np.random.default_rng(0)
    left = np.array([900, 5, 2500, 1, 1594])
    shares = random.dirichlet(np.full(5, 0.1), size=7)
    shares[3] = [0, 1, 0, 0, 0]  # soon has no share in what is left
    shares[4] = [0, 0, 0, 5e-324, 1]  # the smallest number there is
    turns, points = random.integers(0, 7, left.sum()), random.random(left.sum())
    drawn = _draw(shares, turns, points, left)
    remaining = left.copy()
    for turn, client in enumerate(turns):
        open_ = np.where(remaining > 0, shares[client], 0)
        reach = np.cumsum(open_ if open_.any() else np.where(remaining > 0, left, 0))
        expected = int(np.flatnonzero((reach > points[turn] * reach[-1]) | (reach == reach[-1]))[0])
        assert drawn[turn] == expected
        remaining[expected] -= 1
    assert not remaining.any()


def test_a_client_with_little_quota_left_is_picked_as_often_as_the_others() -> None:
    random = np.random.default_rng(0)
    turns = np.array([_turns(np.array([1, 9, 2]), random) for _ in range(3000)])
    assert np.bincount(turns[:, 0]) / 3000 == pytest.approx([1 / 3] * 3, abs=0.03)
    assert (np.sort(turns) == np.repeat([0, 1, 2], [1, 9, 2])).all()


def test_dirichlet_deals_by_the_pools_own_labels() -> None:
    """Such as pairs of digits; here the label is told from the sample alone, and y would not do."""
    samples = torch.arange(1000)
    pool = Pool(samples, torch.rand(1000, 2), labels=samples.numpy() // 100)
    for scheme in ("dirichlet:0.001", "shards:1"):
        for own in deal_all(pool, Part(0, 10, scheme)):
            assert np.bincount(own.train.x.numpy() // 100).max() > 0.5 * len(own.train)
    with pytest.raises(DataError, match=r"\(n, 2\) of torch.float32 are no classes"):
        deal(replace(pool, labels=None), Part(0, 10, "shards:1"))
    assert len(deal(replace(pool, labels=None), Part(0, 10)).train) == 80


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
        "labels:0",
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


# ---- unequal sizes


@given(
    samples=st.integers(1, 5000),
    count=st.integers(1, 60),
    sigma=st.sampled_from(["0.000000001", "0.5", "2", "999999"]),
    seed=st.integers(0, 3),
)
def test_unequal_sizes_add_up_and_leave_everybody_the_least(samples: int, count: int, sigma: str, seed: int) -> None:
    part = Part(0, count, "iid", seed, f"lognormal:{sigma}")
    if samples < count:
        with pytest.raises(PartError, match=f"{samples} samples"):
            partition(_pool(np.zeros(samples, dtype=np.int64)), part)
        return
    sizes = quotas(samples, part)
    assert sizes.sum() == samples
    assert sizes.min() >= min(LEAST, samples // count)


@pytest.mark.parametrize("scheme", ["iid", "dirichlet:0.3"])
def test_clients_of_unequal_size_hold_everything_once(scheme: str) -> None:
    part = Part(0, 20, scheme, 1, "lognormal:1")
    parts = partition(_pool(np.arange(4000) % 10), part)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(4000))
    sizes = [len(own) for own in parts]
    assert sizes == quotas(4000, part).tolist()
    assert sizes != quotas(4000, replace(part, seed=2)).tolist()
    assert max(sizes) > 2 * np.median(sizes)


def test_the_logarithms_of_unequal_sizes_have_the_given_deviation() -> None:
    sizes = quotas(10_000_000, Part(0, 2000, "iid", 0, "lognormal:0.5")) - LEAST
    assert np.std(np.log(sizes)) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("sizes", ["", "equal:", "lognormal", "lognormal:0", "lognormal:-1", "lognormal:x", "normal:1"])
def test_unknown_sizes_are_refused(sizes: str) -> None:
    with pytest.raises(PartError, match="use equal or lognormal:SIGMA"):
        Part(0, 2, sizes=sizes)


@pytest.mark.parametrize("scheme", ["shards:2", "natural"])
def test_schemes_that_decide_the_sizes_are_given_none(scheme: str) -> None:
    with pytest.raises(PartError, match="sizes of its own"):
        Part(0, 2, scheme, sizes="lognormal:1")


# ---- natural owners


def _owned(owner: Sequence[int], names: tuple[str, ...] = ("eve", "bob", "ann", "dan"), first: int = 0) -> Pool:
    """Samples with consecutive numbers, whose label is their owner."""
    samples = torch.arange(first, first + len(owner))
    return Pool(samples, torch.tensor(owner), owners=names, owner=np.array(owner, dtype=np.int64))


def test_a_client_holds_what_its_owner_holds_in_the_order_of_their_names() -> None:
    pool = _owned([0, 1, 2, 0, 1, 0, 2, 0])  # dan holds nothing, and is no client
    assert [own.tolist() for own in partition(pool, Part(0, 3, "natural"))] == [[2, 6], [1, 4], [0, 3, 5, 7]]


def test_fewer_clients_than_owners_are_the_largest_owners() -> None:
    pool = _owned([0, 1, 2, 0, 1, 0, 2, 0, 3])
    assert [own.tolist() for own in partition(pool, Part(0, 2, "natural"))] == [[2, 6], [0, 3, 5, 7]]  # ann before bob


def test_more_clients_than_owners_is_refused_with_their_number() -> None:
    with pytest.raises(DataError, match="4 clients, but the data has 3 natural owners"):
        deal(_owned([0, 1, 2]), Part(0, 4, "natural"))
    with pytest.raises(DataError, match="no natural owners"):
        task("digits").load(DataSource(part=Part(0, 4, "natural")))


def test_the_official_test_part_goes_to_the_same_owners() -> None:
    official = _owned([1, 1, 0, 0, 0, 2], first=100)
    pool = replace(_owned([0] * 30 + [1] * 10 + [2] * 3), test=official)
    everybody = deal_all(pool, Part(0, 2, "natural"))
    assert [own.test.x.tolist() for own in everybody] == [[100, 101], [102, 103, 104]]
    assert [(len(own.train), len(own.validation)) for own in everybody] == [(9, 1), (27, 3)]
    for own, label in zip(everybody, (1, 0), strict=True):
        assert {*own.train.y.tolist(), *own.validation.y.tolist(), *own.test.y.tolist()} == {label}


def test_the_official_test_part_is_ones_own_without_a_part_and_left_out_by_other_schemes() -> None:
    pool = replace(_owned([0] * 50), test=_owned([0] * 7, first=100))
    alone, one = deal(pool, None), deal(pool, Part(0, 1))
    assert [len(cut) for cut in (alone.train, alone.validation, alone.test)] == [45, 5, 7]
    assert [len(cut) for cut in (one.train, one.validation, one.test)] == [40, 5, 5]
    assert max(one.test.x) < 50


def test_an_owner_of_one_sample_trains_on_it() -> None:
    (own,) = deal_all(_owned([2]), Part(0, 1, "natural"))
    assert [len(cut) for cut in (own.train, own.validation, own.test)] == [1, 0, 0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"x": torch.zeros(2)}, "2 samples but 3 labels"),
        ({"labels": np.zeros(4, np.int64)}, "4 labels to deal by but 3"),
        ({"owner": np.zeros(2, np.int64)}, "2 owners but 3"),
        ({"owner": np.array([0, 1, 4])}, "owner 0 or 4 of 4"),
        ({"owner": None}, "names each owner once"),
        ({"owners": ()}, "names each owner once"),
        ({"owners": ("a", "b", "c", "a")}, "names each owner once"),
        ({"test": _owned([0], ("a", "b"))}, "other owners"),
    ],
)
def test_a_pool_that_contradicts_itself_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        replace(_owned([0, 1, 2]), **changes)


# ---- everybody at once


@pytest.mark.parametrize(
    ("scheme", "sizes"),
    [
        ("iid", "equal"),
        ("iid", "lognormal:1"),
        ("shards:2", "equal"),
        ("dirichlet:0.3", "equal"),
        ("dirichlet:0.3", "lognormal:1"),
        ("natural", "equal"),
    ],
)
def test_dealing_to_everybody_gives_what_dealing_to_each_gives(scheme: str, sizes: str) -> None:
    pool = replace(_owned([0, 1, 2, 3, 3] * 40), test=_owned([0, 1, 2, 3] * 5, first=1000))
    everybody = deal_all(pool, Part(0, 4, scheme, 3, sizes))
    assert len(everybody) == 4
    for index, splits in enumerate(everybody):
        own = deal(pool, Part(index, 4, scheme, 3, sizes))
        for cut in ("train", "validation", "test"):
            assert torch.equal(getattr(splits, cut).x, getattr(own, cut).x)
            assert torch.equal(getattr(splits, cut).y, getattr(own, cut).y)


def test_a_task_may_say_how_it_is_loaded_alone() -> None:
    class Nothing(Task):
        def model(self) -> torch.nn.Module:
            raise AssertionError

    class Own(Nothing):
        def load(self, source: DataSource) -> Splits:
            return deal(_owned([0] * 10), source.part)

    assert len(Own().load(DataSource()).train) == 8
    with pytest.raises(NotImplementedError, match="Nothing defines neither pool nor load"):
        Nothing().load(DataSource())


def _grouped(size: int, groups: int, seed: int) -> Pool:
    """Samples of three classes; one of four is of the last class."""
    random = np.random.default_rng(seed)
    keys = np.array([f"patient {key}" for key in random.integers(0, groups, size)])
    return Pool(torch.arange(size), torch.from_numpy(random.integers(0, 4, size) % 3), groups=keys, stratify=True)


@settings(max_examples=40)
@given(
    scheme=st.sampled_from(SCHEMES),
    count=st.integers(1, 5),
    size=st.integers(60, 300),
    groups=st.integers(40, 300),
    seed=st.integers(0, 3),
    stratify=st.booleans(),
)
def test_the_samples_of_a_group_are_with_one_client_and_in_one_split(
    scheme: str, count: int, size: int, groups: int, seed: int, stratify: bool
) -> None:
    pool = replace(_grouped(size, groups, seed), stratify=stratify)
    assert pool.groups is not None
    places: dict[str, set[tuple[int, int]]] = {}
    dealt = deal_all(pool, Part(0, count, scheme, seed))
    for client, splits in enumerate(dealt):
        for place, split_ in enumerate(splits):
            for sample in split_.x.tolist():
                places.setdefault(pool.groups[sample], set()).add((client, place))
    assert all(len(found) == 1 for found in places.values())
    assert sorted(torch.cat([split_.x for splits in dealt for split_ in splits]).tolist()) == list(range(size))
    for splits in dealt:
        held = len({pool.groups[sample] for split_ in splits for sample in split_.x.tolist()})
        assert held < 3 or all(len(split_) for split_ in splits)


@pytest.mark.parametrize("groups", [None, np.arange(100)], ids=["samples", "groups of one"])
def test_a_rare_class_is_in_each_split_and_the_splits_keep_their_sizes(groups: np.ndarray | None) -> None:
    rare = np.arange(100) % 33 == 0  # four of a hundred
    for index in range(20):
        pool = Pool(np.arange(100), rare.astype(np.int64), groups=groups, stratify=True)
        splits = deal(pool, Part(index, 1 + index)) if index == 0 else None
        cut = split(100, index=index, labels=rare.astype(np.int64), groups=groups)
        assert [len(own) for own in cut] == [80, 10, 10]
        assert [int(rare[own].sum()) for own in cut] == [2, 1, 1]
        assert splits is None or [len(own) for own in splits] == [80, 10, 10]
    plain = [[int(rare[own].sum()) for own in split(100, index=index)] for index in range(20)]
    assert sum(0 in counts for counts in plain) > 10  # without it, most lack the class somewhere


def test_each_split_keeps_the_shares_of_the_classes() -> None:
    labels = np.random.default_rng(0).choice(5, 1000, p=[0.5, 0.2, 0.15, 0.1, 0.05])
    patients = np.random.default_rng(1).integers(0, 250, 1000)
    shares = np.bincount(labels) / 1000
    for groups, most in ((None, 0.0061), (patients, 0.05)):
        for own in split(1000, labels=labels, groups=groups):
            assert np.abs(np.bincount(labels[own], minlength=5) / len(own) - shares).max() < most


def test_large_groups_stand_in_training_and_each_split_has_one() -> None:
    patients = np.repeat([0, 1, 2, 3], [70, 10, 10, 10])
    train, validation, tested = split(100, groups=patients)
    assert set(patients[train]) >= {0}
    assert (len(validation), len(tested)) == (10, 10)


def test_groups_that_cannot_stay_together_are_refused_by_name() -> None:
    pool = replace(_grouped(4, 1, 0), owners=("east", "west"), owner=np.array([0, 0, 1, 1]))
    with pytest.raises(PartError, match="the group patient 0 has samples of two owners, east and west"):
        partition(pool, Part(0, 2, "natural"))
    with pytest.raises(PartError, match="1 groups of samples cannot be cut into 2 pieces"):
        partition(pool, Part(0, 2))
    with pytest.raises(DataError, match=r"1 of the pool's groups are in its official test part, too; .* 'patient 0'"):
        replace(pool, test=pool)
    with pytest.raises(DataError, match=r"stratify=True needs classes, and .*float32"):
        deal(Pool(torch.zeros(9), torch.zeros(9), stratify=True), None)


@pytest.mark.parametrize("keys", [np.array([1.0, np.nan]), np.array(["a", None]), np.zeros((2, 2))])
def test_keys_of_groups_are_integers_or_strings(keys: np.ndarray) -> None:
    with pytest.raises(DataError, match=r"needed: a key for each sample, \(n,\), integers or strings"):
        Pool(np.zeros(2), np.zeros(2), groups=keys)
