"""Faults at members' sites, with real processes: what the operator sees, and how a site is back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import TESTS, Federation, Process, federation

CLIENTS = ("healthy", "nan", "memory", "slow", "clock")
TASK = "faulty_task:Faulty"
SPEC = f"""\
task = "{TASK}"
rounds = 3
algorithm.name = "fedavg-n"
selection = {{ minimum = 4, quorum = 0.4, grace_seconds = 5.0 }}
train = {{ steps = 40, batch_size = 20, deadline_seconds = DEADLINE }}
evaluate = {{ every = 0, splits = ["test"] }}
"""


class Scene:
    """Five sites, each with data of its own in a directory, where a file names what goes wrong."""

    def __init__(self, fed: Federation) -> None:
        self.fed = fed
        self.workers: dict[str, Process] = {}

    def data(self, client: str) -> Path:
        return self.fed.directory / f"data-{client}"

    def fault(self, client: str, what: str) -> None:
        (self.data(client) / "fault").write_text(what)

    def work(self, client: str) -> None:
        part = f"{CLIENTS.index(client) + 1}/{len(CLIENTS)}"
        program = [str(TESTS / "wrong_clock.py")] if client == "clock" else ()
        options = ("--data", str(self.data(client)), "--part", part, "--code", str(TESTS))
        self.workers[client] = self.fed.work(client, *options, task=TASK, program=program)

    def run(self, name: str, deadline: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """A whole run; it, and the parts in its last round by client."""
        found = self.fed.submit(name, SPEC.replace("DEADLINE", str(deadline)), "--code", str(TESTS))
        self.fed.wait_completed(found)
        record = self.fed.admin("round", found, "-1")
        return record["run"], {part["client_id"]: part for part in record["participations"]}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with federation(tmp_path_factory.mktemp("faulty")) as fed:
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
def faulty(scene: Scene) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run in which three of five sites fail in each of three rounds, and a fourth has a wrong clock."""
    for client in ("nan", "memory", "slow"):
        scene.fault(client, client)
    return scene.run("faulty", deadline=10.0)


def reason(part: dict[str, Any]) -> str:
    return str(part.get("reason", "")).partition(":")[0]


def test_nan_and_a_full_gpu_are_declined_with_their_reasons_and_a_slow_site_is_not_waited_for(
    faulty: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    run, parts = faulty
    assert run["rounds_done"] == 3
    assert {client: reason(part) for client, part in parts.items() if reason(part)} == {
        "nan": "training-diverged",
        "memory": "memory",
        "slow": "deadline",
    }
    assert [client for client, part in sorted(parts.items()) if part["state"].endswith("FULFILLED")] == [
        "clock",
        "healthy",
    ]


def test_the_operator_is_warned_of_each_failing_member_by_name(
    scene: Scene, faulty: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    run = scene.fed.admin("run", faulty[0]["run_id"])["run"]
    failing = {one["client_id"] for one in run["warnings"] if one["kind"].endswith("MEMBER_FAILS")}
    assert failing == {"nan", "memory", "slow"}


def test_a_clock_that_is_an_hour_ahead_is_reported_and_does_no_harm(
    scene: Scene, faulty: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    scene.workers["clock"].wait_for_text("this machine's clock and the coordinator's differ by -3600 s")
    assert faulty[1]["clock"]["state"].endswith("FULFILLED")


def test_sites_that_are_healthy_again_count_and_so_does_one_that_was_away(
    scene: Scene, faulty: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    scene.workers["healthy"].stop()
    for client in CLIENTS:
        scene.fault(client, "")
    run, parts = scene.run("away", deadline=60.0)
    assert run["rounds_done"] == 3, "nobody waits for the member that is away"
    assert {client for client, part in parts.items() if part["state"].endswith("FULFILLED")} == set(CLIENTS) - {
        "healthy"
    }
    scene.work("healthy")
    scene.fed.attending("healthy")
    run, parts = scene.run("back", deadline=60.0)
    assert {client for client, part in parts.items() if part["state"].endswith("FULFILLED")} == set(CLIENTS)
