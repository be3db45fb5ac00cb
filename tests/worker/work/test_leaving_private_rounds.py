"""Members leave within private rounds, with real workers: each round ends, and its record is verified."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import wait_for
from tests.worker.work.scene import STAGES, Members, scene, specification
from verification.run import verify

EVALUATED = "select 1 from runs where run_id = :run and state = 'COMPLETED'"
REPLIED = (
    "select 1 from replies join assignments using (assignment_id) join phases using (phase_id) "
    "join rounds using (round_id) where accepted and run_id = :run and phases.number = :number"
)


@pytest.fixture(scope="module")
def seven(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Members]:
    with scene(tmp_path_factory.mktemp("leaving"), 7) as made:
        yield made


def leave(members: Members, name: str, *options: str) -> None:
    members.fed.fedpareto("worker", "leave", "--home", str(members.fed.directory / name), *options)


def has_left(members: Members, name: str) -> bool:
    return bool(members.fed.query("select 1 from clients where client_id = :name and state = 'LEFT'", name=name))


def check_record(members: Members, run: str, path: Path) -> None:
    """`verify` and `admin audit verify` find nothing."""
    bundle = str(path / f"{run}.fedpareto")
    members.fed.admin("bundle", run, "--payloads", "--yes", "--out", bundle)
    members.fed.fedpareto("verify", bundle)
    assert members.fed.admin("audit", "verify")["problems"] == []


@pytest.mark.parametrize("number", [1])
def test_members_leave_between_the_phases_of_a_private_round(seven: Members, tmp_path: Path, number: int) -> None:
    fed, (ends, drops, holds) = seven.fed, seven.clients[:3]
    fed.workers[holds].stop()
    dying = seven.work(holds, crash=f"reply-{number + 1}")
    fed.attending(*seven.clients)
    run = fed.submit("leaving", specification(5, {"name": "fedavg-n"}, {"secure": "sum"}, seed=number))
    dying.wait_killed()
    wait_for(lambda: len(fed.query(REPLIED, run=run, number=number)) == 6, "the others to reply")
    leave(seven, ends)
    leave(seven, drops, "--now")
    fed.workers[ends].wait_for_text("once the work that it has begun has ended")
    wait_for(lambda: has_left(seven, drops), "the member to leave at once")
    assert not has_left(seven, ends)
    seven.work(holds)
    fed.wait_completed(run)
    wait_for(lambda: has_left(seven, ends), "the other one to leave")
    print(fed.workers[ends].text, fed.admin("round", run, "0"))
    assert list(seven.step(run).secure[0].survivors) == [name for name in seven.clients if name != drops]
    check_record(seven, run, tmp_path)
