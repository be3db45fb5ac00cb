"""Tells an owner who has pinned a roster that the coordinator may ask for updates in the clear, and that it does.

A worker whose policy decides about runs keeps their specifications, which say whether rounds are private. Without them
and without `secure.required`, nothing but the coordinator's word makes a round private.
"""

from collections.abc import Collection

from federation.monitoring.events import Events
from federation.text import escaped
from federation.work.base import Shows
from federation.work.site import Site
from worker.site.assignment_checks import CheckedAssignment

MAX_TOLD = 1000  # runs; when further ones have been told, the oldest are told again
_ADVICE = (
    "To prevent it, set secure.required = true in policy.toml; or decide about runs (approve, algorithms or "
    "submitters), so that their specifications are kept here and hold"
)


class ClearAnswers:
    """Warns when a worker starts, and once for each run that it answers in the clear.

    Args:
        site: the owner's rules for private rounds.
        offers: the tasks that the worker offers.
        decides: True if the policy decides about each run.
        events: for the owner.
    """

    def __init__(self, site: Site, offers: Collection[str], *, decides: bool, events: Events) -> None:
        self._events = events
        self._told: dict[tuple[str, str], None] = {}  # runs and their tasks, the oldest first
        # Section 3, rule 4: with kept specifications, or `required`, the worker declines by itself.
        pinned = bool(site.roster) and not decides
        self._tasks = frozenset(name for name in offers if pinned and not site.policy(name).required)
        if self._tasks:
            names = ", ".join(sorted(self._tasks))
            events.warn(
                "policy",
                f"a roster is pinned, and the coordinator may ask for updates of {names} in the clear, also in a run "
                f"that was submitted as private. {_ADVICE}",
            )

    def note(self, order: CheckedAssignment) -> None:
        """Warns if an order that was taken shows an update or a gradient, unless its run has been told before.

        One thread at a time may call.
        """
        run = order.manifest.run_id, order.manifest.task
        # Section 7: without a kept specification it is not declined, since open runs are normal; so the owner has to
        # see it.
        if order.work.shows is not Shows.UPDATE or order.manifest.task not in self._tasks or run in self._told:
            return
        if len(self._told) >= MAX_TOLD:
            del self._told[next(iter(self._told))]
        self._told[run] = None
        self._events.warn(
            "in-the-clear",
            f"run {escaped(order.manifest.run_id)}: the result of {order.work.name!r} for {order.manifest.task} leaves "
            f"this site in the clear. {_ADVICE}",
            run_id=order.manifest.run_id,
            task=order.manifest.task,
        )
