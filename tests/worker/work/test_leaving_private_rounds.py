"""Members leave within private rounds, with real workers: each round ends, and its record is verified."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import wait_for
from tests.worker.work.scene import STAGES, Members, scene, specification

MEMBERS = 7  # two of them leave, and five are left, which a private round needs
REPLIED = (
    "select 1 from replies join assignments using (assignment_id) join phases using (phase_id) "
    "join rounds using (round_id) where accepted and run_id = :run and phases.number = :number"
)


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    with scene(tmp_path, MEMBERS) as made:
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


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "meanwhile"),
    [*((number, "") for number in range(len(STAGES))), (1, "run paused"), (1, "coordinator away")],
    ids=[*STAGES, "run-paused", "coordinator-away"],
)
def test_members_leave_between_the_phases_of_a_private_round(
    members: Members, tmp_path: Path, number: int, meanwhile: str
) -> None:
    """One leaves when the round is over for it; one leaves at once, and is lost to the round."""
    fed, (ends, drops, holds) = members.fed, members.clients[:3]
    fed.workers[holds].stop()
    dying = members.work(holds, crash=f"reply-{number + 1}")
    fed.attending(*members.clients)
    run = fed.submit("leaving", specification(5, {"name": "fedavg-n"}, {"secure": "sum"}, seed=number))
    dying.wait_killed()
    wait_for(lambda: len(fed.query(REPLIED, run=run, number=number)) == MEMBERS - 1, "the others to reply")
    if meanwhile == "run paused":
        fed.admin("pause", run)
    elif meanwhile == "coordinator away":
        fed.serving.stop()
    leave(members, ends)
    leave(members, drops, "--now")
    if meanwhile == "coordinator away":
        fed.workers[drops].wait_for_text("has not left")
        fed.serve()
    wait_for(lambda: has_left(members, drops), "the member to leave at once")
    last = STAGES[number] == STAGES[-1]  # then its part is done
    if not last:
        fed.workers[ends].wait_for_text("once the work that it has begun has ended")
        assert not has_left(members, ends)
    if meanwhile == "run paused":
        fed.admin("resume", run)
    members.work(holds)
    fed.wait_completed(run)
    wait_for(lambda: has_left(members, ends), "the other one to leave")
    phases = fed.admin("round", run, "0")["phases"][: len(STAGES)]
    missing = [index for index, phase in enumerate(phases) if phase["asked"] - phase["replied"]]
    assert missing == ([] if last else [number + 1]), "afterwards, the others are asked"
    # What the one had sent before it left stays in the round: its masked vector is in the sum.
    lost = [drops] if STAGES[number] in STAGES[:3] else []
    assert list(members.step(run).secure[0].survivors) == [name for name in members.clients if name not in lost]
    check_record(members, run, tmp_path)
