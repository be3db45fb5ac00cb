"""A member that is forgotten: what it has sent is removed, and what it has signed stays."""

from pathlib import Path

import numpy as np

from federation.v1 import admin_pb2 as admin
from federation.v1.common_pb2 import AssignmentManifest
from storage.records import RunMemory
from storage.retention import collect
from storage.states import RoundState
from tests.compared_metrics import differences
from tests.running import refused
from tests.stage import Player, Stage, reply
from tests.verification.scene import Edited, checked, exported


def forget(stage: Stage, client: str) -> dict[str, int]:
    """What the command says."""
    answer = stage.served.document("forget", client, "--yes")
    assert answer["client"]["forgotten"]
    return {name: int(answer[name]) for name in ("removed", "removed_bytes", "kept")}


def lead(stage: Stage, run: str, number: int, *players: Player) -> list[AssignmentManifest]:
    """Plays until each player is asked to train in a round, and returns what they are asked."""
    stage.play(run, *players, until=lambda: all(player.kept for player in players), rounds=number)
    return [player.order() for player in players]


def kept(stage: Stage, run: str, client: str, number: int) -> bool:
    """Whether the store has what a client sent in the first phase of a round."""
    return stage.blobs.exists(stage.replies(run, number)[client].payload)


def tidy(stage: Stage) -> None:
    """The housekeeper's work of the next day."""
    collect(stage.served.database, stage.blobs, now=stage.clock(), grace_seconds=0)


def test_payloads_are_removed_and_signed_messages_stay(stage: Stage, tmp_path: Path) -> None:
    run, (ann, ben) = stage.begin("ann", "ben", rounds=4)
    third = lead(stage, run, 2, ann, ben)
    ann.reply(third[0])
    envelopes = [stage.replies(run, number)["ann"].envelope for number in range(3)]
    size = stage.replies(run, 0)["ann"].payload_bytes
    assert forget(stage, "ann") == {"removed": 2, "removed_bytes": 2 * size, "kept": 1}
    assert [kept(stage, run, "ann", number) for number in range(3)] == [False, False, True]
    assert kept(stage, run, "ben", 0)
    tidy(stage)
    assert kept(stage, run, "ann", 2), "its round is open"
    ben.reply(third[1])
    stage.play(run, ann, ben)
    assert [stage.replies(run, number)["ann"].envelope for number in range(3)] == envelopes
    tidy(stage)
    assert [kept(stage, run, "ann", number) for number in range(4)] == [False, False, False, True]
    assert all(kept(stage, run, "ben", number) for number in range(4))
    assert [row.state for row in stage.rounds(run)] == [RoundState.COMPLETED] * 4
    assert forget(stage, "ann")["removed"] == 1
    entries = stage.served.entries(action="client.forgotten")
    assert [(entry.subject, entry.actor.rpartition("/")[2]) for entry in entries] == [("ann", "admin")] * 2
    found = checked(Edited.of(exported(stage, run, tmp_path / "run.fedpareto")), tmp_path)
    assert ["the rule's 2 coefficients" in one.words for one in found] == [True] * 4
    assert [len(one.missing) for one in found] == [1] * 4
    assert all(one.missing[0].endswith("is not in the bundle (forgotten: ann)") for one in found)
    assert differences(stage, run) == []


def test_what_the_algorithm_of_a_run_still_reads_is_kept_until_the_run_ends(stage: Stage) -> None:
    run, (ann, ben) = stage.begin("ann", "ben", rounds=3, algorithm="fedfv", more="algorithm.tau = 2")
    third = lead(stage, run, 2, ann, ben)
    remembered = RunMemory.decode(stage.run(run).state_data).blobs
    assert stage.replies(run, 1)["ann"].payload in remembered
    forget(stage, "ann")
    tidy(stage)
    assert kept(stage, run, "ann", 1)
    reply(dict(zip((ann, ben), third, strict=True)))
    stage.play(run, ann, ben)
    tidy(stage)
    assert not kept(stage, run, "ann", 1)


def test_the_same_bytes_of_another_member_stay(stage: Stage) -> None:
    run, (cleo, dan) = stage.begin("cleo", "dan")
    for player in (cleo, dan):
        order = player.order()
        player.reply(order, np.ones(sum(row.length for row in order.rows), dtype=np.float32))
    stage.play(run, cleo, dan)
    assert forget(stage, "cleo")["removed"] == 0
    assert kept(stage, run, "dan", 0)


def test_an_unknown_client_is_refused(stage: Stage) -> None:
    with refused("NOT_FOUND", "client-unknown"):
        stage._admin.ForgetClient(admin.ForgetClientRequest(client_id="somebody-else"))
