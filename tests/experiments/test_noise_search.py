"""What a coordinator reaches with noise of its choice that `fedpareto verify` cannot tell from honest noise."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from federation.spec.noise_rows import noise_defect
from federation.vectors import to_bytes, update_layout, update_rows
from tests.experiments.noise_search import Search


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("clients", "rounds"), [(10, 1), pytest.param(100, 10, marks=pytest.mark.full)], ids=["1-round", "10-rounds"]
)
def test_noise_that_passes_the_check_gives_the_coordinator_the_model_that_it_wants(
    tmp_path: Path, clients: int, rounds: int
) -> None:
    wrong, backdoor = Search(clients, 1.0), Search(clients, 1.0)
    assert wrong.play(rounds, wrong.next_digit)[-1].next > 0.9
    reached = backdoor.play(rounds, backdoor.marked_as_zero)[-1]
    assert (reached.right > 0.8, reached.marked > 0.9) == (True, True)
    assert Search(clients, 1.0).play(rounds, None)[-1].marked < 0.3
    for search in (wrong, backdoor):
        path = tmp_path / "noise"
        path.write_bytes(to_bytes(update_layout([("noise", len(search.noise))]), search.noise.numpy()))
        assert noise_defect(update_rows(path).values()) == ""
