"""Changes of runs: they wake the conductor and the watchers of a run, here and at other coordinators."""

import threading

from coordinator.cluster.announcements import Announcement, AnnouncementKind, Announcements
from coordinator.listeners import Listeners
from coordinator.rounds.bell import Bell
from coordinator.rounds.fleets.presence import Presence
from coordinator.rounds.transitions import UNDER_WAY, run_ids
from storage.database import Database
from storage.models import Run


class RunChanges:
    """The bells of conductors, and the watchers of runs. Every method is callable from any thread.

    Args:
        announcements: tell other coordinators of changes here, and this one of theirs.
        presence: when a client comes or goes, every conductor looks again.
        database: the record, with the runs that are under way.

    Attributes:
        watchers: those who are told of each change of a run, by its id.
        courses: those who are told of each change but a further reply: the run's course, its state.
    """

    def __init__(self, announcements: Announcements, presence: Presence, database: Database) -> None:
        self._announcements = announcements
        self._database = database
        self._lock = threading.Lock()
        self._bells: dict[str, Bell] = {}
        self.watchers: Listeners[[str]] = Listeners()
        self.courses: Listeners[[str]] = Listeners()
        announcements.heard.listen(self._hear)
        presence.changed.listen(self.wake_all)

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

    def notify(self, run_id: str) -> None:
        """Tells the run's conductor and its watchers, here and elsewhere, that something changed."""
        self.bell(run_id).ring()
        self.tell_watchers(run_id)

    def count_reply(self, run_id: str) -> None:
        """Tells the conductor and the watchers, here and elsewhere, that a reply was recorded."""
        self.bell(run_id).count_reply()
        self._announcements.announce(AnnouncementKind.REPLY, run_id)
        self.watchers.tell(run_id)

    def tell_watchers(self, run_id: str) -> None:
        """Tells the watchers without the conductor here: what changed does not matter to it."""
        self._announcements.announce(AnnouncementKind.RUN, run_id)
        self._tell(run_id)

    def _hear(self, announcement: Announcement | None) -> None:
        """Takes in what another coordinator announced; None says that something was lost."""
        if announcement is None:
            self.wake_all()
            with self._database.read() as session:
                runs = run_ids(session, Run.state.in_(UNDER_WAY))
            for run_id in runs:
                self._tell(run_id)
        elif announcement.kind in (AnnouncementKind.RUN, AnnouncementKind.REPLY):
            with self._lock:
                bell = self._bells.get(announcement.subject)
            if announcement.kind is AnnouncementKind.REPLY:
                if bell is not None:
                    bell.count_reply(announcement.times)
                self.watchers.tell(announcement.subject)
                return
            if bell is not None:
                bell.ring()
            self._tell(announcement.subject)

    def _tell(self, run_id: str) -> None:
        self.courses.tell(run_id)
        self.watchers.tell(run_id)
