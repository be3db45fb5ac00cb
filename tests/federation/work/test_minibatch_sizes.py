"""The sizes of minibatches, as torch.split makes them or with a small remainder evened out, and what work demands."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from federation.spec.computation import PrivateSgd
from federation.spec.train_section import LocalSgd
from federation.work.jacobian.work import Jacobian
from federation.work.minibatch_sizes import Cut, Forming, shares
from federation.work.train.work import Train
from federation.work.work_bounds import WorkBounds

SAMPLES, SIZES = st.integers(1, 300), st.integers(0, 40)


@given(SAMPLES, SIZES)
def test_without_evening_the_sizes_are_those_of_torch_split(samples: int, size: int) -> None:
    expected = [len(part) for part in torch.split(torch.arange(samples), size or samples)]
    assert Cut.of(samples, size).sizes == expected


@given(SAMPLES, SIZES)
def test_evening_keeps_all_samples_and_their_number_of_minibatches_and_leaves_none_below_half(
    samples: int, size: int
) -> None:
    plain, even = Cut.of(samples, size).sizes, Cut.of(samples, size, even=True).sizes
    assert (sum(even), len(even)) == (samples, len(plain))
    assert max(even) <= (size or samples)
    if len(plain) > 1:
        assert 2 * min(even) >= size
    if len(plain) == 1 or 2 * plain[-1] >= size:
        assert even == plain
    else:
        assert even[:-2] == plain[:-2]
        assert even[-2] - even[-1] in (0, 1)


@given(SAMPLES, SIZES, st.integers(1, 40), st.booleans())
def test_what_a_cut_says_of_its_first_pieces_is_what_its_sizes_say(
    samples: int, size: int, first: int, even: bool
) -> None:
    cut = Cut.of(samples, size, even=even)
    assert cut.sizes_among(first) == set(cut.sizes[:first])
    assert cut.samples_in(first) == sum(cut.sizes[:first])
    assert cut.smallest == min(cut.sizes)


@given(SAMPLES, st.integers(1, 9))
def test_no_process_gets_a_single_sample_of_an_evened_minibatch_that_has_two(samples: int, processes: int) -> None:
    plain, even = shares(samples, processes), shares(samples, processes, even=True)
    assert plain == tuple(map(len, torch.tensor_split(torch.arange(samples), processes)))
    assert (sum(even), len(even)) == (samples, processes)
    assert samples == 1 or 1 not in even
    assert even == tuple(sorted(even, reverse=True))


def test_a_training_forms_the_parts_of_its_minibatches_and_of_its_processes() -> None:
    forming = Forming(samples=51, batch_size=10, steps=6, micro_batch=4, processes=2)
    cuts = {size: [cut.sizes for cut in each] for size, each in forming.parts(even=True).items()}
    assert cuts == {10: [[3, 2], [3, 2]], 6: [[3], [3]], 5: [[3], [2]]}
    assert (forming.smallest_minibatch(even=True), forming.smallest_part(even=True)) == (5, 2)
    assert forming.smallest_part(even=False) == 1
    short = Forming(samples=51, batch_size=10, steps=4)  # the last two minibatches are never formed
    assert short.parts(even=True) == short.parts(even=False)


def train(sgd: LocalSgd, private: PrivateSgd | None = None) -> Train:
    return Train(sgd=sgd, targets={"loss": {"loss": 1.0}}, private=private)


@pytest.mark.parametrize(
    ("samples", "steps", "seen"),
    [(11, 1, 6), (11, 2, 11), (21, 2, 16), (21, 9, 21), (25, 1, 10), (3, 1, 3), (0, 1, 0), (2**53, 1, 10)],
)
def test_the_samples_that_an_owner_bounds_are_the_fewest_that_an_update_can_be_made_from(
    samples: int, steps: int, seen: int
) -> None:
    sgd = LocalSgd(steps=steps, batch_size=10, learning_rate=0.1)
    assert train(sgd).demand(samples).samples == seen
    assert train(sgd, PrivateSgd(noise=1.0, clip=1.0)).demand(samples).samples == min(samples, 10 * steps)
    if steps == 1:
        asked = Jacobian(sketch="count", budget=0.1, batch_size=10, objectives=("loss",))
        assert asked.demand(samples).samples == seen


def test_an_update_that_may_be_made_from_half_a_minibatch_is_declined_by_the_bound_on_samples() -> None:
    work = train(LocalSgd(steps=1, batch_size=10, learning_rate=0.1))
    problem = WorkBounds(samples=8).problem_of_work(work, samples=11, objectives=1)
    assert problem == ("limit:samples", "it would be made from 6 of 11 samples; this worker uses at least 8")
    assert WorkBounds(samples=8).problem_of_work(work, samples=15, objectives=1) is None
