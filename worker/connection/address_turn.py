"""The turn through the coordinators' addresses: which one is tried next, and why the others did not work."""

from collections.abc import Sequence

from federation.text import escaped
from federation.transport.addresses import each_problem
from federation.transport.channels import RpcRefusal

_AWAY = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "OK")


class AddressTurn:
    """One turn through the addresses. It begins anew when all have failed, and after a stream that was welcomed."""

    def __init__(self) -> None:
        self._problems = dict[str, str]()  # by address, of this turn

    def next(self, addresses: Sequence[str]) -> str:
        """The first address that has not failed in this turn; empty if all have."""
        return next((address for address in addresses if address not in self._problems), "")

    def ended(self, address: str, refusal: RpcRefusal, *, welcomed: bool) -> bool:
        """Notes why the stream to an address ended. True if the coordinator there is away: another one is tried now.

        A stream that broke begins a new turn, at the same address, unless the coordinator there is stopping.
        """
        if welcomed:
            self._problems.clear()
        fails = not welcomed or refusal.reason == "stopping"
        if fails:
            self._problems[address] = escaped(refusal.message) or refusal.status
        return fails and refusal.status in _AWAY

    def problems(self) -> str:
        """Why the addresses of this turn did not work; empty if none has failed."""
        return each_problem(self._problems)

    def begin(self) -> None:
        """Begins a new turn."""
        self._problems.clear()
