"""Faults at members' sites, with real processes: what the operator sees, and how a site is back."""

import resource
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from coordinator.home import CoordinatorHome, server_certificate
from federation.trust.certificates import pem
from tests.harness import Federation, federation, wait_for
from tests.paths import DOCS, OWNERS_CODE, PROGRAMS

pytestmark = pytest.mark.full
CLIENTS = ("behind", "nan", "memory", "slow", "disk", "ahead")
PAGE = DOCS / "member/your-site.md"
HOUR = timedelta(hours=1)
CLOCKS = {"behind": -HOUR, "ahead": HOUR}
Ended = tuple[dict[str, Any], dict[str, Any]]
CLOCK = "this machine's clock and the coordinator's differ by {:.0f} s"
FULL = ("[Errno 27] File too large", "[Errno 28] No space left on device")  # here, and on a disk that is full
DISK_BYTES = 10_000  # a file on a full disk; half of a model
TASK = "faulty_task:Faulty"
SPEC = f"""\
task = "{TASK}"
rounds = 3
algorithm.name = "fedavg-n"
selection = {{ pool = "POOL", minimum = 4, quorum = 0.3, grace_seconds = 5.0 }}
train = {{ steps = 40, batch_size = 20, deadline_seconds = DEADLINE }}
evaluate = {{ every = 0, splits = ["test"] }}
"""


class Scene:
    """Six sites, each with data of its own in a directory, where a file names what goes wrong."""

    def __init__(self, fed: Federation) -> None:
        self.fed = fed

    def data(self, client: str) -> Path:
        return self.fed.directory / f"data-{client}"

    def fault(self, client: str, what: str) -> None:
        (self.data(client) / "fault").write_text(what)

    def fill_disk(self, client: str, *, full: bool = True) -> None:
        """From now on the kernel refuses what the worker writes, as a full disk does; or no longer."""
        worker = self.fed.workers[client].popen.pid
        _, hard = resource.prlimit(worker, resource.RLIMIT_FSIZE)
        resource.prlimit(worker, resource.RLIMIT_FSIZE, (DISK_BYTES if full else hard, hard))

    def work(self, client: str) -> None:
        part = f"{CLIENTS.index(client) + 1}/{len(CLIENTS)}"
        ahead = CLOCKS.get(client)
        program = [str(PROGRAMS / "wrong_clock.py"), str(ahead.total_seconds())] if ahead else ()
        options = ("--data", str(self.data(client)), "--set", f"part={part}", "--code", str(OWNERS_CODE))
        self.fed.work(client, *options, task=TASK, program=program)

    def submit(self, name: str, deadline: float, pool: str = "attending") -> str:
        spec = SPEC.replace("DEADLINE", str(deadline)).replace("POOL", pool)
        return self.fed.submit(name, spec, "--code", str(OWNERS_CODE))

    def ended(self, run: str, round_: int = -1) -> Ended:
        """A run after its end, and the parts in a round by client."""
        self.fed.wait_completed(run)
        record = self.fed.admin("round", run, str(round_))
        return record["run"], {part["client_id"]: part for part in record["participations"]}

    def outcomes(self, run: str, client: str) -> list[Any]:
        """Kind of work and reason of each assignment of a member, in their order."""
        query = (
            "select p.kind, a.reason from assignments a join phases p on p.phase_id = a.phase_id "
            "join rounds r on r.round_id = p.round_id where r.run_id = :run and a.client_id = :client "
            "order by r.number, p.number"
        )
        return [tuple(row) for row in self.fed.query(query, run=run, client=client)]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with federation(tmp_path_factory.mktemp("faulty")) as fed:
        # The processes' TLS has the true time: a certificate that is made an hour later finds it an hour behind.
        home, later = CoordinatorHome.load(fed.home), datetime.now(UTC) + HOUR
        shown = server_certificate(home.authority, home.server_key, home.signing_key, home.settings.names, later)
        (fed.home / "server.pem").write_bytes(pem(shown))
        fed.serve()
        made = Scene(fed)
        for client in CLIENTS:
            made.data(client).mkdir()
            made.fault(client, "")
            fed.join(client)
            made.work(client)
        fed.attending(*CLIENTS)
        yield made


@pytest.fixture(scope="module")
def faulty(scene: Scene) -> Ended:
    """A run in which four of six sites fail in each of three rounds, and the others have wrong clocks."""
    for client in ("nan", "memory", "slow"):
        scene.fault(client, client)
    scene.fill_disk("disk")
    return scene.ended(scene.submit("faulty", deadline=10.0))


def reason(part: dict[str, Any]) -> str:
    return str(part.get("reason", "")).partition(":")[0]


def fulfilled(parts: dict[str, Any]) -> set[str]:
    return {client for client, part in parts.items() if part["state"].endswith("FULFILLED")}


def test_nan_a_full_gpu_and_a_full_disk_are_declined_with_their_reasons_and_a_slow_site_is_not_waited_for(
    faulty: Ended,
) -> None:
    run, parts = faulty
    assert run["rounds_done"] == 3
    assert {client: reason(part) for client, part in parts.items() if reason(part)} == {
        "nan": "training-diverged",
        "memory": "memory",
        "slow": "deadline",
        "disk": "disk",
    }
    assert fulfilled(parts) == {"ahead", "behind"}


def test_a_gpu_without_memory_declines_training_and_evaluation_and_the_others_are_evaluated(
    scene: Scene, faulty: Ended
) -> None:
    run, parts = faulty
    assert scene.outcomes(run["run_id"], "memory") == [("train", "memory")] * 3 + [("evaluate", "memory")]
    assert {client for client, part in parts.items() if part.get("answered")} == {"ahead", "behind", "nan", "slow"}


def test_the_operator_is_warned_of_each_failing_member_by_name(scene: Scene, faulty: Ended) -> None:
    run = scene.fed.admin("run", faulty[0]["run_id"])["run"]
    failing = {one["client_id"] for one in run["alerts"] if one["kind"].endswith("MEMBER_FAILS")}
    assert failing == {"nan", "memory", "slow", "disk"}


def test_clocks_that_are_an_hour_ahead_or_behind_are_reported_and_do_no_harm(scene: Scene, faulty: Ended) -> None:
    for client, ahead in CLOCKS.items():
        scene.fed.workers[client].wait_for_text(CLOCK.format(-ahead.total_seconds()))
        assert faulty[1][client]["state"].endswith("FULFILLED")


def test_the_page_for_operators_shows_the_lines_that_they_see(faulty: Ended) -> None:
    seen = [f"\nsite-a: {part['reason'].replace(*FULL)}\n" for part in faulty[1].values() if reason(part)]
    text = PAGE.read_text()
    assert len(seen) == 4
    assert [line for line in [*seen, CLOCK.format(-HOUR.total_seconds())] if line not in text] == []


def test_sites_that_are_healthy_again_count_and_nobody_waits_for_one_that_is_away(scene: Scene) -> None:
    scene.fed.workers["behind"].stop()
    for client in CLIENTS:
        scene.fault(client, "")
    scene.fill_disk("disk", full=False)
    run, parts = scene.ended(scene.submit("away", deadline=60.0))
    assert run["rounds_done"] == 3
    assert fulfilled(parts) == set(CLIENTS) - {"behind"}
    scene.work("behind")
    scene.fed.attending("behind")


def test_a_site_that_vanishes_while_it_trains_counts_again_once_it_is_back_and_does_not_do_what_has_ended(
    scene: Scene,
) -> None:
    scene.fault("behind", "slow")
    before = len(scene.fed.workers["behind"].text)
    run = scene.submit("vanished", deadline=60.0, pool="enrolled")
    wait_for(lambda: "round 0: training\n" in scene.fed.workers["behind"].text[before:], "the training to begin")
    scene.fed.workers["behind"].kill()
    wait_for(lambda: ("train", "absent") in scene.outcomes(run, "behind"), "the end of what it was asked")
    scene.fault("behind", "")
    before = len(scene.fed.workers["behind"].text)
    scene.work("behind")
    _, parts = scene.ended(run, 1)
    assert fulfilled(parts) == set(CLIENTS)
    assert scene.outcomes(run, "behind") == [("train", "absent"), ("train", ""), ("train", ""), ("evaluate", "")]
    back = scene.fed.workers["behind"].text[before:]
    assert ("round 0: training\n" in back, "round 1: training\n" in back) == (False, True)
