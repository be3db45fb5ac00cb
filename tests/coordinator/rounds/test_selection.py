"""Who is asked, and how many must answer."""

from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from coordinator.rounds import selection
from federation.spec.client_sections import SelectionSpec
from federation.spec.run_sections import replies_needed


@pytest.mark.parametrize(
    ("fraction", "pool", "expected"),
    [(0.1, 100, 10), (0.1, 30, 3), (0.1, 5, 1), (0.25, 10, 3), (1.0, 7, 7), (0.001, 1, 1)],
)
def test_a_fraction_is_rounded_up_and_never_below_one(fraction: float, pool: int, expected: int) -> None:
    assert SelectionSpec(method="fraction", fraction=fraction).wanted(pool) == expected


def test_a_count_is_at_most_the_pool_and_over_selection_asks_more_clients_than_it_wants() -> None:
    spec = SelectionSpec(method="count", count=5, over_selection=1.5)
    assert (spec.wanted(3), spec.wanted(100)) == (3, 5)
    assert (spec.asked(6), spec.asked(100)) == (6, 8)


def test_a_quorum_is_at_least_one_reply_and_a_majority_more_than_half_and_so_at_least_two_of_two() -> None:
    assert [replies_needed(quorum, want) for quorum, want in ((0.0, 10), (0.5, 5), (1.0, 5))] == [1, 3, 5]
    assert [replies_needed("majority", want) for want in range(1, 7)] == [1, 2, 2, 3, 3, 4]


@given(seed=st.integers(0, 2**63 - 1), number=st.integers(0, 1000), size=st.integers(1, 50))
def test_the_choice_depends_on_seed_and_round_and_not_on_the_order_of_the_pool(
    seed: int, number: int, size: int
) -> None:
    spec = SelectionSpec(method="fraction", fraction=0.3)
    pool = {f"client-{i:02}": 10 for i in range(size)}
    chosen = selection.select(spec, pool, seed=seed, round_number=number)
    backwards = dict(reversed(pool.items()))
    assert selection.select(spec, backwards, seed=seed, round_number=number) == chosen
    assert chosen == sorted(set(chosen))
    assert len(chosen) == spec.wanted(size)


def test_every_client_has_its_turn() -> None:
    spec = SelectionSpec(method="count", count=2)
    pool = {f"client-{i}": 10 for i in range(10)}
    counts = dict.fromkeys(pool, 0)
    for number in range(500):
        for client in selection.select(spec, pool, seed=1, round_number=number):
            counts[client] += 1
    assert min(counts.values()) > 60  # expected 100 each, standard deviation 9


@given(
    seed=st.integers(0, 1000),
    pool=st.sets(st.sampled_from("abcdef")),
    always=st.sets(st.sampled_from("abcdef")),
    count=st.integers(1, 6),
    by=st.sampled_from(["uniform", "samples"]),
)
@example(seed=0, pool={"a", "b"}, always={"a", "b"}, count=1, by="samples")
@example(seed=0, pool=set(), always={"a"}, count=1, by="samples")
def test_of_any_pool_those_who_are_named_are_asked_and_others_up_to_the_number_wanted(
    seed: int, pool: set[str], always: set[str], count: int, by: Literal["uniform", "samples"]
) -> None:
    spec = SelectionSpec(method="count", count=count, by=by, always=tuple(sorted(always)))
    chosen = selection.select(spec, dict.fromkeys(pool, 10), seed=seed, round_number=0)
    assert pool & always <= set(chosen) <= pool
    assert len(chosen) == max(min(count, len(pool)), len(pool & always))


def test_selection_by_samples_prefers_large_clients() -> None:
    spec = SelectionSpec(method="count", count=1, by="samples")
    pool = {"large": 900, "small": 100}
    large = sum(selection.select(spec, pool, seed=2, round_number=n) == ["large"] for n in range(1000))
    assert abs(large - 900) < 5 * np.sqrt(1000 * 0.9 * 0.1)


def test_a_client_without_samples_is_never_asked() -> None:
    assert selection.select(SelectionSpec(), {"empty": 0, "full": 3}, seed=0, round_number=0) == ["full"]


@pytest.mark.parametrize(
    ("spec", "client", "tags", "admitted"),
    [
        (SelectionSpec(), "a", (), True),
        (SelectionSpec(members=("a",)), "a", (), True),
        (SelectionSpec(members=("a",)), "b", (), False),
        (SelectionSpec(exclude=("a",)), "a", (), False),
        (SelectionSpec(tags=("north", "west")), "a", ("west",), True),
        (SelectionSpec(tags=("north",)), "a", ("south",), False),
        (SelectionSpec(tags=("north",), required=("a",)), "a", (), True),
        (SelectionSpec(tags=("north",), members=("b",)), "a", ("north",), False),
    ],
)
def test_who_may_be_asked(spec: SelectionSpec, client: str, tags: tuple[str, ...], admitted: bool) -> None:
    assert spec.admits(client, tags) is admitted


def test_required_clients_are_asked_in_every_round() -> None:
    spec = SelectionSpec(method="count", count=2, required=("client-7",))
    pool = {f"client-{i}": 10 for i in range(10)}
    for number in range(20):
        chosen = selection.select(spec, pool, seed=1, round_number=number)
        assert "client-7" in chosen
        assert len(chosen) == 2


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"required": ("a",), "exclude": ("a",)}, "exclude and required both name 'a'"),
        ({"members": ("a",), "exclude": ("a",)}, "exclude and members both name 'a'"),
        ({"always": ("a",), "exclude": ("a",)}, "exclude and always both name 'a'"),
        ({"required": ("a",), "members": ("b",)}, "required names 'a', and members does not"),
        ({"members": ("a",), "minimum": 2}, "minimum = 2, and members names 1 clients"),
        ({"patience_seconds": 9.0}, "patience_seconds is for required clients"),
    ],
)
def test_a_selection_that_contradicts_itself_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        SelectionSpec(**keys)
