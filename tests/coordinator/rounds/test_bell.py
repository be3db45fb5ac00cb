"""The bell of a run: what wakes its conductor, and what does not."""

import threading

from coordinator.rounds.bell import Bell

SECONDS = 60.0


def waiting(bell: Bell, replies: int) -> threading.Event:
    """Waits in a thread for this number of replies; the event says that the wait is over."""
    over = threading.Event()

    def wait() -> None:
        bell.wait(None, replies)
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    return over


def test_enough_replies_wake_a_conductor_and_so_does_a_ring_before_they_have_come() -> None:
    for wakes in (Bell.count_reply, Bell.ring):
        bell = Bell()
        over = waiting(bell, 2 if wakes is Bell.count_reply else 3)
        bell.count_reply()
        assert not over.wait(0.05)
        wakes(bell)
        assert over.wait(SECONDS)


def test_what_comes_before_a_wait_ends_it_and_each_wait_counts_anew() -> None:
    bell = Bell()
    bell.count_reply()
    bell.count_reply()
    bell.wait(None, 2)
    over = waiting(bell, 1)
    assert not over.wait(0.05)
    bell.count_reply()
    assert over.wait(SECONDS)
    bell.ring()
    bell.wait(None, 1)
    bell.wait(0.0, 1)
