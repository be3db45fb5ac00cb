"""The limits on calls of callers without a certificate."""

import asyncio

from coordinator.front.places import Places, network_of
from coordinator.members.access.calls import Call
from federation.refusals import Refusal

PER_ADDRESS = 32  # calls of one address that wait for their request
WAITING = 256  # such calls in all
AT_WORK = 512  # calls whose request has arrived
STREAMS_PER_ADDRESS = 8
STREAMS = 64
STREAM_SECONDS = 10.0


class Strangers:
    """The places of calls without a certificate.

    A new call always gets a place: when the places of its address are taken, or all places, an older call ends that has
    not sent its request yet, or that streams. So waiting calls cannot keep others out. Streams have places of their
    own, and end after a short time. A call whose request has arrived is never ended: it may have used a join string.
    """

    def __init__(self) -> None:
        self._waiting: Places[Call] = Places(PER_ADDRESS, WAITING)
        self._streams: Places[Call] = Places(STREAMS_PER_ADDRESS, STREAMS)
        self._at_work: set[Call] = set()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._streams) + len(self._at_work)

    def admit(self, call: Call, host: str) -> None:
        """Gives a call from an address its place; called on the event loop."""
        loser = (self._streams if call.streams else self._waiting).add(call, network_of(host))
        if loser is not None:
            loser.end(Refusal("limit:calls", "newer calls without a certificate replaced this one: try again"))
        if call.streams:
            over = f"a stream without a certificate ends after {STREAM_SECONDS:.0f} s: ask again, or ask for a check"
            later = asyncio.get_running_loop().call_later
            call.expiry = later(STREAM_SECONDS, call.end, Refusal("limit:stream", over))

    def few_wait(self, host: str) -> bool:
        """True if half of the places of an address, at least, are free."""
        return self._waiting.taken(network_of(host)) <= PER_ADDRESS // 2

    def heard(self, call: Call) -> None:
        """Notes that the request of a call has arrived, and that work on it begins.

        Raises:
            Refusal: `limit:calls`: too many are worked on.
        """
        if call in self._waiting:
            self._waiting.remove(call)
            if len(self._at_work) >= AT_WORK:
                raise Refusal("limit:calls", "too many callers without a certificate: try again in a minute")
            self._at_work.add(call)

    def discard(self, call: Call) -> None:
        """Frees the place of a call, if it has one."""
        self._waiting.remove(call)
        self._streams.remove(call)
        self._at_work.discard(call)
