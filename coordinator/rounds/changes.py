"""Changes of runs: they wake the conductor and the watchers of a run, here and at other coordinators."""

import logging
import threading
from collections.abc import Callable, Sequence

from coordinator.cluster.announcements import Announcement, AnnouncementKind, Announcements
from coordinator.rounds.bell import Bell

log = logging.getLogger(__name__)

Watcher = Callable[[str], None]


class RunChanges:
    """The bells of conductors, and the watchers of runs. Every method is callable from any thread.

    Args:
        announcements: tell other coordinators of changes here, and this one of theirs.
        under_way: the runs that are under way, by id.
    """

    def __init__(self, announcements: Announcements, under_way: Callable[[], Sequence[str]]) -> None:
        self._announcements = announcements
        self._under_way = under_way
        self._lock = threading.Lock()
        self._bells: dict[str, Bell] = {}
        self._watchers: list[Watcher] = []
        announcements.listen(self._hear)

    @property
    def look_seconds(self) -> float | None:
        """How often a conductor looks at the record for changes by other coordinators; None if there are none."""
        return self._announcements.look_seconds

    def bell(self, run_id: str) -> Bell:
        """The bell of a run's conductor."""
        with self._lock:
            return self._bells.setdefault(run_id, Bell())

    def wake_all(self) -> None:
        """Rings every bell."""
        with self._lock:
            bells = list(self._bells.values())
        for bell in bells:
            bell.ring()

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """Calls `watcher` with the run's id after every change, from any thread. Returns a function that ends this."""
        with self._lock:
            self._watchers.append(watcher)

        def unwatch() -> None:
            with self._lock:
                self._watchers.remove(watcher)

        return unwatch

    def notify(self, run_id: str) -> None:
        """Tells the run's conductor and its watchers, here and elsewhere, that something changed."""
        self.bell(run_id).ring()
        self.tell_watchers(run_id)

    def count_reply(self, run_id: str) -> None:
        """Tells the conductor and the watchers, here and elsewhere, that a reply was recorded."""
        self.bell(run_id).count_reply()
        self._announcements.announce(AnnouncementKind.REPLY, run_id)
        self._tell_watchers_here(run_id)

    def tell_watchers(self, run_id: str) -> None:
        """Tells the watchers without the conductor here: what changed does not matter to it."""
        self._announcements.announce(AnnouncementKind.RUN, run_id)
        self._tell_watchers_here(run_id)

    def _hear(self, announcement: Announcement | None) -> None:
        """Takes in what another coordinator announced; None says that something was lost."""
        if announcement is None:
            self.wake_all()
            for run_id in self._under_way():
                self._tell_watchers_here(run_id)
        elif announcement.kind in (AnnouncementKind.RUN, AnnouncementKind.REPLY):
            with self._lock:
                bell = self._bells.get(announcement.subject)
            if bell is not None and announcement.kind is AnnouncementKind.REPLY:
                bell.count_reply(announcement.times)
            elif bell is not None:
                bell.ring()
            self._tell_watchers_here(announcement.subject)

    def _tell_watchers_here(self, run_id: str) -> None:
        with self._lock:
            watchers = list(self._watchers)
        for watcher in watchers:
            try:
                watcher(run_id)
            except Exception:
                log.exception("a watcher of run %s failed", run_id)  # the run goes on
