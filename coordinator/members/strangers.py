"""Calls of callers without a certificate: how many there may be, and which one ends when there are too many."""

import asyncio
from collections.abc import Callable, Hashable
from typing import Protocol

from coordinator.front.places import Places, network_of
from federation.refusals import Refusal

PER_ADDRESS = 32  # calls of one address that wait for their request
WAITING = 256  # such calls in all
AT_WORK = 512  # calls whose request is there
STREAMS_PER_ADDRESS = 8
STREAMS = 64
STREAM_SECONDS = 10.0


class Call(Hashable, Protocol):
    """An rpc under way."""

    def end(self, refusal: Refusal) -> None:
        """Ends it with a refusal."""


class Strangers:
    """The places of these calls.

    A newcomer always gets in: when the places of its address are taken, or those of all, an older call ends, which has
    not sent its request yet, or streams. So nobody keeps others out by waiting. Streams have places of their own, and
    end after a short time. A call whose request is there is never ended: a join string may have been used by then.
    """

    def __init__(self) -> None:
        self._waiting: Places[Call] = Places(PER_ADDRESS, WAITING)
        self._streams: Places[Call] = Places(STREAMS_PER_ADDRESS, STREAMS)
        self._at_work: set[Call] = set()
        self._ends: dict[Call, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._streams) + len(self._at_work)

    def admit(self, call: Call, host: str, *, streams: bool, later: Callable[..., asyncio.TimerHandle]) -> None:
        """Gives a call its place.

        Args:
            call: it.
            host: the caller's address.
            streams: whether it streams to its caller.
            later: calls a function after some seconds, as an event loop does.
        """
        loser = (self._streams if streams else self._waiting).add(call, network_of(host))
        if loser is not None:
            loser.end(Refusal("limit:calls", "newer calls without a certificate replaced this one: try again"))
        if streams:
            over = f"a stream without a certificate ends after {STREAM_SECONDS:.0f} s: ask again, or ask for a check"
            self._ends[call] = later(STREAM_SECONDS, call.end, Refusal("limit:stream", over))

    def heard(self, call: Call) -> None:
        """The request of a call is there, and it is worked on.

        Raises:
            Refusal: `limit:calls`: too many are worked on.
        """
        if call in self._waiting:
            self._waiting.remove(call)
            if len(self._at_work) >= AT_WORK:
                raise Refusal("limit:calls", "too many callers without a certificate: try again in a minute")
            self._at_work.add(call)

    def discard(self, call: Call) -> None:
        """A call is over, whoever made it."""
        self._waiting.remove(call)
        self._streams.remove(call)
        self._at_work.discard(call)
        end = self._ends.pop(call, None)
        if end is not None:
            end.cancel()
