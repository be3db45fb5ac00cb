"""An rpc under way, which can be ended with a refusal."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from coordinator.members.access.known_members import KnownMember
from federation.refusals import Refusal
from federation.trust.identity import PeerIdentity


@dataclass(eq=False)
class Call:
    """An rpc under way.

    Attributes:
        task: serves it.
        streams: True if it streams to its caller.
        action: the rpc.
        identity: the caller's; None without a certificate.
        member: the caller as the record has it, if it is a member.
        doom: the refusal with which it must end; None while it may go on.
        expiry: ends it with its caller's certificate, or, without one, when it has streamed too long.
    """

    task: "asyncio.Task[Any]"
    streams: bool
    action: str = ""
    identity: PeerIdentity | None = None
    member: KnownMember | None = None
    doom: Refusal | None = None
    expiry: asyncio.TimerHandle | None = None

    def end(self, refusal: Refusal) -> None:
        """Ends the call, unless it is ending already."""
        if self.doom is None:
            self.doom = refusal
            self.task.cancel()

    async def settle(self, refusal: Refusal) -> None:
        """Protects the call from being ended from now on, because its answer would not arrive."""
        if self.doom is None:
            self.doom = refusal
            return
        with suppress(asyncio.CancelledError):  # it was ended at this very moment
            await asyncio.sleep(0)
        self.task.uncancel()
