"""The pipes that flows borrow: how much of the user's pipe memory they take, and which are kept."""

import fcntl

from coordinator.front.flow import BYTES, LARGE, SMALL, SPARE, Holds, Pipe


def sizes(pipes: list[Pipe]) -> list[int]:
    return [fcntl.fcntl(pipe._write, fcntl.F_GETPIPE_SZ) for pipe in pipes]


def borrowed(holds: Holds, count: int) -> list[Pipe]:
    found = [holds.borrow() for _ in range(count)]
    return [pipe for pipe in found if isinstance(pipe, Pipe)]


def test_so_many_flows_get_large_pipes_and_further_ones_small_ones_again_after_others_have_ended() -> None:
    holds = Holds()
    pipes = borrowed(holds, LARGE + SPARE + 1)
    assert sizes(pipes) == [BYTES] * LARGE + [SMALL] * (SPARE + 1)
    large, small = pipes[:LARGE], pipes[LARGE:]
    for pipe in [*small, *large[:20]]:  # the small ones fill the places first
        holds.give_back(pipe, empty=True)
    for pipe in large[20:]:
        holds.give_back(pipe, empty=False)
    pipes = borrowed(holds, LARGE + 1)
    assert sizes(pipes) == [BYTES] * LARGE + [SMALL]  # as many as before, though some were kept and some thrown away
    for pipe in pipes:
        holds.give_back(pipe, empty=False)
    assert holds._large == 0
