"""`/metrics`, `worker status` and the member's page say the same of a site: open, closed, paused, leaving or left."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from tests.fedpareto.web.site.scene import Site, served_site
from tests.harness import wait_for
from tests.worker.scene import Running, Scene, command
from worker.event_counts import OPEN
from worker.site.leaving import Leave, write_leave

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


def by_metrics(running: Running) -> bool:
    """What `fedpareto_worker_open` says."""
    return dict(running.counts.tally.readings())[OPEN][()] == 1


def by_status(scene: Scene) -> str:
    """The state that `worker status --json` tells."""
    told = json.loads(command("status", "--home", scene.joined(), "--json"))
    if told["left"] is not None or told["leaving"]:
        return "leaving" if told["left"] is None else "left"
    return "open" if told["closing"] is None else "paused" if told["closing"]["paused"] else "closed"


def by_page(site: Site) -> str:
    """The first word of what the first screen says of the site."""
    words = site.page("/").partition("<dt>site</dt><dd>")[2].partition("</dd>")[0]
    return words.replace(",", "").split()[0]


def test_metrics_status_and_page_agree_on_a_site_that_is_open_closed_paused_leaving_or_left(scene: Scene) -> None:
    def agree(state: str, running: Running) -> None:
        wait_for(lambda: by_metrics(running) == (state == "open"), f"/metrics to say that the site is {state}")
        assert (by_status(scene), by_page(site)) == (state, state)

    def owner(*arguments: str) -> None:
        command(arguments[0], "--home", scene.joined(), *arguments[1:])

    scene.joined()
    running = scene.attending()
    with served_site(scene.home) as site:
        agree("open", running)
        owner("pause", "--until", "2h")
        agree("paused", running)
        owner("resume")
        agree("open", running)
        running.stop()
        scene.home.policy.write_text(f"open.days = {json.dumps(far_days())}\n")
        running = scene.attending()
        agree("closed", running)
        scene.coordinator.stop()
        write_leave(scene.home.leave, Leave(datetime.now(UTC)))
        running.wait_for("leaving")
        agree("leaving", running)
        scene.coordinator.start()
        running.thread.join(60)
        assert (by_status(scene), by_page(site)) == ("left", "left")


def far_days() -> Sequence[str]:
    """A day of the week on which the test does not run."""
    return [DAYS[(datetime.now(UTC) + timedelta(days=3)).weekday()]]
