"""Windows of uploads: they grow with the line, within a budget, and places among the uploads are given out fairly."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest

from coordinator.ownership import CoordinatorHomeError
from coordinator.services import transfers
from coordinator.services.transfers import FIRST_WINDOW, HELD_UP_SECONDS, LARGEST_WINDOW, Transfer, Transfers
from coordinator.settings import SMALLEST_WINDOW, Settings
from federation.monitoring.tally import Tally
from federation.refusals import Refusal

CHUNK = 1 << 18


def everything(wanted: int) -> int:
    return wanted


def upload(transfer: Transfer, size: int, wait: Callable[[bool], float]) -> list[int]:
    """Plays an upload; `wait` gives the seconds until a chunk comes, from whether it is the first beyond a limit.

    Returns the window after each chunk.
    """
    windows, limits = [], [0]
    for place in range(0, size, CHUNK):
        if transfer.allow(place):
            limits.append(transfer.limit)
        assert place + CHUNK <= transfer.limit
        transfer.note(place, wait(place in limits), CHUNK)
        windows.append(transfer.window)
    return windows


def far(held_up: bool) -> float:
    """The waits of a long line that is fast."""
    return 0.2 if held_up else 0.01


def test_the_window_of_a_long_fast_line_grows_to_the_largest() -> None:
    windows = upload(Transfer(everything), 100 << 20, far)
    assert windows[-1] == LARGEST_WINDOW
    assert windows == sorted(windows)


def test_the_second_chunk_tells_how_much_a_long_line_holds() -> None:
    windows = upload(Transfer(everything), 2 * CHUNK, lambda held_up: 0.21 if held_up else 0.01)
    assert windows == [SMALLEST_WINDOW, 2 * 20 * CHUNK]


def test_a_long_line_that_is_slow_needs_no_large_window() -> None:
    windows = upload(Transfer(everything), 2 * CHUNK, lambda held_up: 0.3 if held_up else 0.1)
    assert windows == [SMALLEST_WINDOW] * 2


def test_the_window_grows_where_it_holds_the_line_up_although_the_first_chunks_came_together() -> None:
    transfer = Transfer(everything)
    transfer.allow(0)
    for place, wait in ((0, 0.01), (CHUNK, 0.0)):
        transfer.note(place, wait, CHUNK)
    assert transfer.window == SMALLEST_WINDOW
    limit = transfer.limit
    for place in (2 * CHUNK, 3 * CHUNK):
        transfer.allow(place)
        transfer.note(place, 0.01, CHUNK)
    transfer.note(limit, 0.2, CHUNK)
    assert transfer.window == 4 * SMALLEST_WINDOW


@pytest.mark.parametrize("seconds", [0.0, HELD_UP_SECONDS / 2, 0.25], ids=["loopback", "short line", "slow line"])
def test_the_window_of_a_line_that_it_does_not_hold_up_stays_the_smallest(seconds: float) -> None:
    assert set(upload(Transfer(everything), 100 << 20, lambda held_up: seconds)) == {SMALLEST_WINDOW}


def test_an_upload_that_goes_on_has_a_window_from_where_it_is() -> None:
    transfer = Transfer(everything)
    begin = 50 << 20
    assert transfer.allow(begin)
    assert transfer.limit == begin + SMALLEST_WINDOW
    transfer.note(begin, 10.0, CHUNK)  # the first chunk comes a round trip later on any line
    assert transfer.window == SMALLEST_WINDOW
    assert not transfer.allow(begin + CHUNK)
    assert transfer.allow(begin + 2 * CHUNK)
    assert transfer.limit == begin + 2 * CHUNK + SMALLEST_WINDOW


def ended(refusal: Refusal) -> None:
    raise AssertionError(refusal)


def test_windows_share_the_budget_and_give_it_back() -> None:
    async def play() -> None:
        made = Transfers(12 * SMALLEST_WINDOW, 4, Tally())
        async with AsyncExitStack() as stack:
            grown = [await stack.enter_async_context(made.place(name, ended)) for name in "abcd"]
            for transfer in grown:
                upload(transfer, 100 << 20, far)
            assert sum(transfer.window for transfer in grown) == 12 * SMALLEST_WINDOW
            assert min(transfer.window for transfer in grown) < 2 * SMALLEST_WINDOW
        async with made.place("e", ended) as alone:
            assert upload(alone, 100 << 20, far)[-1] == 9 * SMALLEST_WINDOW

    asyncio.run(play())


def test_the_first_window_is_larger_where_the_budget_has_plenty_of_room() -> None:
    async def play() -> None:
        made = Transfers(50 * SMALLEST_WINDOW, 2, Tally())
        async with made.place("a", ended) as first, made.place("b", ended) as second:
            assert (first.window, second.window) == (FIRST_WINDOW, FIRST_WINDOW)
        made = Transfers(10 * SMALLEST_WINDOW, 2, Tally())
        async with made.place("a", ended) as first, made.place("b", ended) as second:
            assert first.window == 2 * SMALLEST_WINDOW
            assert SMALLEST_WINDOW < second.window < first.window
        assert made._spare == 8 * SMALLEST_WINDOW

    asyncio.run(play())


def test_places_go_to_the_member_with_the_fewest_uploads_and_then_to_the_first() -> None:
    async def play() -> None:
        made = Transfers(2 * SMALLEST_WINDOW, 2, Tally())
        got: list[str] = []
        leave = {name: asyncio.Event() for name in ("greedy-1", "greedy-2", "greedy-3", "greedy-4", "modest", "late")}

        async def use(name: str) -> None:
            async with made.place(name.partition("-")[0], ended):
                got.append(name)
                await leave[name].wait()

        tasks = []
        for name in leave:
            tasks.append(asyncio.create_task(use(name)))
            await asyncio.sleep(0)
        assert got == ["greedy-1", "greedy-2"]
        tasks[3].cancel()  # one that waits goes away
        for name in ("greedy-1", "modest", "greedy-2", "late", "greedy-3"):
            leave[name].set()
            for _ in range(5):
                await asyncio.sleep(0)
        assert got == ["greedy-1", "greedy-2", "modest", "late", "greedy-3"]
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (made._free, made._under_way, made._waiting) == (2, {}, [])

    asyncio.run(play())


def test_an_upload_that_neither_sends_nor_reads_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        monkeypatch.setattr(transfers, "IDLE_SECONDS", 0.01)
        made = Transfers(SMALLEST_WINDOW, 1, Tally())
        refusals: list[Refusal] = []
        async with made.place("deaf", refusals.append), made.place("patient", refusals.append):
            assert [refusal.reason for refusal in refusals][:1] == ["limit:idle"]
        assert made._free == 1

    asyncio.run(play())


def test_a_budget_that_is_too_small_for_its_transfers_is_refused() -> None:
    with pytest.raises(CoordinatorHomeError, match="transfer_bytes is 4194304: 5 transfers need 5242880"):
        Settings.check({"federation_id": "test", "transfers": 5, "transfer_bytes": 4 << 20}, "test")
