"""An owner pauses its site: no new work begins, begun work is finished, and the pause outlives a restart."""

import json
import os
import re
import threading
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from federation.findings import CheckOutcome
from federation.v1.federation_pb2 import Heartbeat, Hello
from federation.work.closing import SiteClosing
from tests.fedpareto.web.site.scene import Site, served_site
from tests.harness import wait_for
from tests.scripted import FEDERATION
from tests.worker.scene import Running, Scene, command
from worker.doctor import check_pause
from worker.event_counts import OPEN
from worker.home import MEMBER_FILE, WorkerHome
from worker.site.leaving import Leave, write_leave
from worker.site.pause import Pause, closing_now, read_pause, write_pause
from worker.site.policy_file import OpenHours

NOON = datetime(2026, 1, 5, 12, tzinfo=UTC)
DAYTIME = OpenHours(begin="08:00", end="17:00")
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
UNTIL_RESUMED = SiteClosing(None, paused=True)


def at(hour: int, day: int = 5) -> datetime:
    return NOON.replace(day=day, hour=hour)


@pytest.mark.parametrize(
    ("pause", "now", "closing"),
    [
        (None, at(12), None),
        (None, at(18), SiteClosing(at(8, 6))),
        (Pause(None), at(12), UNTIL_RESUMED),
        (Pause(None), at(18), UNTIL_RESUMED),
        (Pause(at(14)), at(12), SiteClosing(at(14), paused=True)),
        (Pause(at(14)), at(14), None),  # it ends by itself
        (Pause(at(20)), at(12), SiteClosing(at(8, 6), paused=True)),  # the site is closed when the pause ends
        (Pause(at(20)), at(18), SiteClosing(at(8, 6))),  # and would have been closed without it
        (Pause(at(9, 6)), at(18), SiteClosing(at(9, 6), paused=True)),
    ],
)
def test_a_site_begins_no_work_until_its_pause_has_ended_and_its_hours_have_begun(
    pause: Pause | None, now: datetime, closing: SiteClosing | None
) -> None:
    assert closing_now(pause, DAYTIME, now) == closing


# --- a worker


def later(*_: float) -> float:
    """The pause before a worker tries again, which takes more CPU time than the rest."""
    return 0.3


def owner(scene: Scene, *arguments: str, code: int = 0) -> str:
    """Runs a command in the home, beside the worker if there is one."""
    return command(arguments[0], "--home", scene.joined(), *arguments[1:], code=code)


def told(scene: Scene) -> Hello | Heartbeat:
    """What the coordinator was told last."""
    beats = scene.coordinator.heartbeats
    return beats[-1] if beats else scene.coordinator.hellos[-1]


def wait_paused(scene: Scene, *, paused: bool) -> None:
    wait_for(lambda: scene.coordinator.heartbeats and told(scene).paused is paused, f"paused to be {paused}")


def restarted(scene: Scene, running: Running) -> Running:
    running.stop()
    scene.coordinator.hellos.clear()
    scene.coordinator.heartbeats.clear()
    return scene.attending()


def test_a_paused_site_says_so_without_a_date_and_declines_at_once_over_restarts_until_its_owner_resumes(
    scene: Scene,
) -> None:
    assert "paused until you resume it" in owner(scene, "pause")
    running = scene.attending()
    for _ in range(2):
        (hello,) = scene.coordinator.hellos
        assert hello.paused
        assert not hello.HasField("closed_until")
        wait_paused(scene, paused=True)
        assert not told(scene).HasField("closed_until")
        assert running.events("paused")[0]["message"] == "the site is paused, and begins no new work"
        running = restarted(scene, running)
    # As a coordinator of version 0.1.0 does, which does not know the field.
    scene.assign()
    assert scene.declined() == ("assignment-0", "paused", "this site is paused")
    assert scene.models() == []
    scene.coordinator.open.clear()
    assert owner(scene, "resume") == "The pause has ended.\n"
    wait_paused(scene, paused=False)
    scene.receipts(1, 1)
    assert owner(scene, "resume") == "This site was not paused.\n"


def test_a_pause_in_a_round_lets_begun_work_end_and_declines_what_waits(scene: Scene) -> None:
    release = threading.Event()

    def held(blob: bytes, offset: int) -> Iterator[bytes]:
        release.wait(60)
        yield blob[offset:]

    scene.coordinator.serve_blob = held
    running = scene.attending()
    scene.assign(0)
    wait_for(lambda: scene.coordinator.fetches, "the first assignment to begin")
    scene.assign(1)
    wait_for(lambda: len(running.worker._runner._jobs()) == 2, "the second one to wait")
    owner(scene, "pause")
    assert scene.declined() == ("assignment-1", "paused", "this site is paused")
    wait_paused(scene, paused=True)
    assert scene.coordinator.heartbeats[-1].assignment_id == "assignment-0"
    # The worker shows its status after it has declined.
    (work,) = wait_for(lambda: json.loads(owner(scene, "status", "--json"))["work"], "the work to be shown")
    assert (work["assignment_id"], work["doing"]) == ("assignment-0", "training")
    release.set()
    running.wait_for("receipt")
    assert [one.manifest.assignment_id for one in scene.coordinator.submissions] == ["assignment-0"]


def test_a_pause_until_a_time_ends_by_itself_and_work_with_a_later_deadline_waits_for_it(scene: Scene) -> None:
    shown = json.loads(owner(scene, "pause", "--until", "2h", "--json"))
    ends = datetime.fromisoformat(shown["closing"]["until"])
    late = timedelta(0)
    running = scene.attending(clock=lambda: datetime.now(UTC) + late)
    (hello,) = scene.coordinator.hellos
    assert hello.paused
    assert hello.closed_until.ToDatetime(UTC) == ends
    for number, hours in enumerate((5, 1)):
        asked = scene.order(number)
        asked.deadline.FromDatetime(datetime.now(UTC) + timedelta(hours=hours))
        scene.coordinator.assign(asked)
    message = f"this site is paused until {ends:%Y-%m-%d %H:%M} UTC, after the deadline"
    assert scene.declined() == ("assignment-1", "paused", message)
    assert not running.events("training")
    late = timedelta(hours=3)
    running.wait_for("receipt")
    wait_paused(scene, paused=False)
    assert scene.home.pause.exists()


def test_a_pause_that_is_made_while_the_coordinator_is_away_is_in_the_next_hello(scene: Scene) -> None:
    running = scene.attending(uniform=later)
    scene.coordinator.stop()
    running.wait_for("disconnected")
    owner(scene, "pause")
    running.wait_for("paused")
    wait_for(lambda: "not connected since" in owner(scene, "status").lower(), "the status")
    assert owner(scene, "status").startswith("Not connected since ")
    paused = "; paused until you resume it (`fedpareto worker resume`), and begins no new work.\n"
    assert owner(scene, "status").endswith(paused)
    scene.coordinator.hellos.clear()
    scene.coordinator.start()
    running.wait_for("attending", 2)
    assert scene.coordinator.hellos[-1].paused


def test_a_file_that_is_damaged_beside_a_worker_pauses_it(scene: Scene) -> None:
    running = scene.attending()
    scene.joined()
    scene.home.pause.write_text("{")
    assert "the site is paused" in running.wait_for("pause")[0]["message"]
    wait_paused(scene, paused=True)
    owner(scene, "resume")
    wait_paused(scene, paused=False)


# --- the commands


@pytest.fixture
def home(tmp_path: Path) -> WorkerHome:
    """The home of a member; the commands need none of its keys."""
    (tmp_path / MEMBER_FILE).touch()
    return WorkerHome(tmp_path)


def given(home: WorkerHome, *arguments: str, code: int = 0) -> str:
    return command(arguments[0], "--home", str(home.directory), *arguments[1:], code=code)


def status(home: WorkerHome) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(given(home, "status", "--json"))
    return document


def test_a_time_that_cannot_be_is_refused_and_pauses_nothing(home: WorkerHome) -> None:
    for until, message in {
        "2026-01-01T00:00": "--until 2026-01-01T00:00: 2026-01-01 00:00 is past; it is ",
        "0s": "is past",
        "soon": "--until soon: expected 90m, 12h, 7d, or a time as in 2026-05-04T12:00",
        "2026-13-01": "expected 90m",
        "9999-12-31T23:00-12:00": "expected 90m",
        "9999-06-01": "--until 9999-06-01: 9999-06-01 is too far away: the last year is 9000",
    }.items():
        assert message in given(home, "pause", "--until", until, code=1)
        assert not home.pause.exists()


def test_a_directory_without_a_membership_has_nothing_to_pause(tmp_path: Path) -> None:
    for name in ("pause", "resume", "status"):
        assert "holds no membership" in command(name, "--home", str(tmp_path), code=1)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_pause_counts_as_a_pause_and_its_owner_is_told(home: WorkerHome) -> None:
    documents = ("{}", '{"format": 2, "until": null}', '{"format": 1, "until": 5}')
    for text in ("", "[]", '{"format": 1}', '{"format": 1, "until": "2030-01-01T00:00"}', *documents):
        home.pause.write_text(text)
        shown = status(home)
        assert str(home.pause) in shown["sentence"]
        assert "until then, the site is paused; `fedpareto worker resume` removes it" in shown["sentence"]
        assert shown["closing"] == {"paused": True, "until": None}
        (finding,) = check_pause(home, NOON)
        assert finding.outcome is CheckOutcome.FAILED
        assert given(home, "resume") == "The pause has ended.\n"
        assert not home.pause.exists()


def test_a_second_pause_replaces_the_first_and_a_policy_that_cannot_be_read_prevents_none(home: WorkerHome) -> None:
    home.policy.write_text("nonsense =")
    given(home, "pause", "--until", "1h")
    given(home, "pause")
    assert read_pause(home.pause) == (Pause(None), "")
    home.policy.write_text('open = { begin = "00:00", end = "00:01", days = ["mon"] }')
    given(home, "resume")
    assert not status(home)["closing"]["paused"]
    assert "; closed, by the hours of policy.toml, until " in given(home, "status")


def test_a_worker_that_was_killed_is_not_taken_for_one_that_runs(home: WorkerHome) -> None:
    start = f"start it with `fedpareto worker run --home {home.directory}`"
    assert given(home, "status") == f"No worker runs: {start}.\n"
    home.status.write_text('{"format": 1, "connection": null, "work": []}')
    assert given(home, "status") == "The worker has started, and is not connected yet.\n"
    os.utime(home.status, (NOON.timestamp(), NOON.timestamp()))
    shown = status(home)
    assert shown["sentence"].startswith("no worker runs, the last one has given no sign of life since 2026-01-05 ")
    assert (shown["runs"], shown["last_sign"]) == (False, NOON.isoformat())
    home.status.write_text("{")
    assert "is damaged" in given(home, "status", code=1)


def test_the_doctor_warns_of_a_pause_as_long_as_it_lasts(home: WorkerHome) -> None:
    write_pause(home.pause, Pause(at(14)))
    (finding,) = check_pause(home, NOON)
    assert finding.outcome is CheckOutcome.WARNING
    assert finding.message.startswith("the site is paused until 2026-01-05 14:00 UTC")
    assert list(check_pause(home, at(14))) == []


def test_the_status_says_why_a_worker_is_not_connected(scene: Scene) -> None:
    scene.joined()
    scene.coordinator.federation_id = "another\x1b[31m"
    running = scene.start(uniform=later)
    wait_for(lambda: (status(scene.home)["connection"] or {}).get("problem"), "the problem")
    shown = given(scene.home, "status")
    assert re.match(r"Not connected since \d\d:\d\d: the coordinator there is of federation 'another", shown)
    assert "\x1b" not in shown
    scene.coordinator.federation_id = FEDERATION
    wait_for(lambda: status(scene.home)["connection"]["connected"], "the worker to connect")
    assert re.fullmatch(r"Connected since \d\d:\d\d\.\n", given(scene.home, "status"))
    running.stop()
    assert not scene.home.status.exists()


# --- what others show of it


def by_metrics(running: Running) -> bool:
    """What `fedpareto_worker_open` says."""
    return dict(running.counts.tally.readings())[OPEN][()] == 1


def by_status(scene: Scene) -> str:
    """The state that `worker status --json` tells."""
    told = json.loads(owner(scene, "status", "--json"))
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

    scene.joined()
    running = scene.attending()
    with served_site(scene.home) as site:
        agree("open", running)
        owner(scene, "pause", "--until", "2h")
        agree("paused", running)
        owner(scene, "resume")
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
