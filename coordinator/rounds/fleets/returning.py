"""The members that are expected back: they attended shortly before a coordinator stopped, and connect again."""

from collections.abc import Callable
from datetime import datetime, timedelta

from sqlalchemy import select

from coordinator.rounds.fleets.presence import Presence
from storage.database import Database
from storage.models import Client
from storage.states import ClientState

# After a restart, a round waits this long for clients that attended shortly before.
RECONNECT_GRACE = timedelta(seconds=30)
RECENTLY = timedelta(seconds=60)


class ReturningMembers:
    """Whom the rounds wait for a while after the start of this coordinator, or the end of another one."""

    def __init__(self, database: Database, presence: Presence, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._presence = presence
        self._clock = clock
        self._expected: frozenset[str] = frozenset()
        self._grace_ends = clock()

    def expect(self) -> None:
        """From now on rounds wait a while for the members that have attended shortly before."""
        self._expected = self._recently_attending()
        self._grace_ends = self._clock() + RECONNECT_GRACE

    def are_back(self) -> bool:
        """True if no round needs to wait any longer."""
        left = self._grace_ends - self._clock()
        # More than the whole grace is left if the clock was set back; then no round waits.
        waiting = timedelta(0) < left <= RECONNECT_GRACE
        return not waiting or self._expected <= self._presence.attending().keys()

    def _recently_attending(self) -> frozenset[str]:
        active = select(Client.client_id, Client.last_seen).where(Client.state == ClientState.ACTIVE)
        now = self._clock()
        with self._database.read() as session:
            # A time to come was noted while the clock was wrong; beside it, all others would have been away for long.
            seen = {name: at for name, at in session.execute(active) if at is not None and at - now <= RECENTLY}
        latest = max(seen.values(), default=now)
        if now - latest > RECENTLY * 10:
            return frozenset()  # after a long stop no client is expected
        return frozenset(client_id for client_id, at in seen.items() if latest - at <= RECENTLY)
