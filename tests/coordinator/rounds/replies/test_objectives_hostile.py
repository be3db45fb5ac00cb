"""What clients send in rounds over several objectives that they should not."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from federation.v1.common_pb2 import AssignmentManifest, Row
from federation.vectors import Layout, Tensor, to_bytes
from storage.states import RoundState
from tests.coordinator.rounds.scene import EXACT, answer, begin, weights_of
from tests.few import few_of
from tests.running import refused
from tests.stage import LONG, Player, Stage


def jacobian_phase(
    stage: Stage, name: str, more: str = EXACT, rounds: int = 1
) -> tuple[str, dict[str, Player], Player, AssignmentManifest, int]:
    """A run that asks for gradients; of this client the player, its order, and how many numbers it is to send."""
    run, players = begin(stage, "fedcmoo", more, rounds=rounds)
    order = players[name].order()
    return run, players, players[name], order, sum(row.length for row in order.rows)


def test_sketches_that_are_not_what_was_asked_are_refused_and_harm_nobody_else(stage: Stage) -> None:
    run, players, ann, order, size = jacobian_phase(stage, "ann")
    values = np.ones(size, np.float32)
    # These leave the assignment open: somebody else may have sent them.
    wrong: list[tuple[str, str, dict[str, Any]]] = [
        ("INVALID_ARGUMENT", "mismatch:rows", {"rows": [("sums", size)]}),
        ("INVALID_ARGUMENT", "mismatch:rows", {"rows": [("jacobian", size - 1)]}),
        ("INVALID_ARGUMENT", "mismatch:phase", {"phase": 1}),
        ("INVALID_ARGUMENT", "mismatch:round", {"round": 1}),
        ("RESOURCE_EXHAUSTED", "limit:payload", {"payload_bytes": order.max_payload_bytes + 1}),
    ]
    for status, reason, changes in wrong:
        with refused(status, reason):
            forged(ann, order, values, **changes)
    assert stage.outcomes(run)["ann"] == ("OPEN", "")
    values[size // 2] = np.nan
    with refused("INVALID_ARGUMENT", "non-finite"):  # the client's own word: for good
        ann.submit(order, values)
    assert stage.outcomes(run)["ann"] == ("REFUSED", "non-finite")
    with refused("FAILED_PRECONDITION", "assignment-closed"):
        ann.submit(order)
    stage.play(run, *players.values())
    assert set(stage.outcomes(run, 0, 1)) == {"ben", "cleo"}
    assert stage.rounds(run)[0].objectives["left_out"] == {}
    assert len(stage.step(run).consulted) == 2


def forged(player: Player, order: AssignmentManifest, values: NDArray[np.float32], **changes: Any) -> None:
    """Hands in a well-formed payload of these values under a manifest of which some fields are changed."""
    changed, rows = AssignmentManifest(), changes.pop("rows", None)
    changed.CopyFrom(order)
    if rows is not None:
        del changed.rows[:]
        changed.rows.extend(Row(name=name, dtype="F32", length=length) for name, length in rows)
    player.submit(changed, values[: sum(row.length for row in changed.rows)], **changes)


def test_a_payload_with_other_tensors_than_the_signed_rows_say_is_refused_for_good(stage: Stage) -> None:
    run, players, ann, order, size = jacobian_phase(stage, "ann")
    payload = to_bytes(Layout((Tensor("jacobiam", (size,)),)), np.ones(size, np.float32))
    manifest = ann.member.manifest(order, payload)
    with refused("INVALID_ARGUMENT", "layout"):
        ann.member.submit(ann.member.sign(manifest), payload)
    assert stage.outcomes(run)["ann"] == ("REFUSED", "layout")
    stage.play(run, *players.values())


def test_gradients_may_be_zero_an_update_may_not(stage: Stage) -> None:
    run, players, ann, order, size = jacobian_phase(stage, "ann")
    ann.reply(order, np.zeros(size, np.float32))
    answer(players, "ben", "cleo")
    ann.submit_zeros(ann.order())
    stage.play(run, *players.values())


def test_a_reply_counts_in_its_own_phase_and_round_alone(stage: Stage) -> None:
    run, players, ben, first, size = jacobian_phase(stage, "ben", rounds=2)
    values = np.ones(size, np.float32)
    payload = to_bytes(Layout((Tensor("jacobian", (size,)),)), values)
    envelope = ben.member.sign(ben.member.manifest(first, payload))
    assert ben.member.submit(envelope, payload).accepted
    answer(players, "ann", "cleo")
    training = ben.order()
    # the very same reply again: the stored receipt, and nothing else happens
    assert ben.member.submit(envelope, payload).assignment_id == first.assignment_id
    assert stage.outcomes(run, 0, 1)["ben"] == ("OPEN", "")
    # the Jacobian under the name of the training
    with refused("INVALID_ARGUMENT", "mismatch:phase"):
        forged(ben, training, values, phase=first.phase, rows=[("jacobian", size)])
    with refused("INVALID_ARGUMENT", "mismatch:rows"):
        forged(ben, training, values, rows=[("jacobian", size)])
    with refused("INVALID_ARGUMENT", "layout"):  # it claims the rows of an update, and sends gradients
        ben.member.submit(ben.member.sign(ben.member.manifest(training, payload)), payload)
    assert stage.outcomes(run, 0, 1)["ben"] == ("REFUSED", "layout")
    answer(players, "ann", "cleo")
    again = ben.order()
    assert (again.round, again.phase) == (1, 0)
    assert ben.member.submit(envelope, payload).round == 0
    with refused("INVALID_ARGUMENT", "mismatch:round"):
        forged(ben, again, values, round=0)
    with refused("ALREADY_EXISTS", "assignment-fulfilled"):
        ben.submit(first, values * 2)
    assert stage.outcomes(run, 1)["ben"] == ("OPEN", "")
    ben.reply(again)
    stage.play(run, *players.values())
    assert len(stage.step(run, 1).consulted) == 3


@pytest.mark.parametrize("sketch", few_of(["count", "svd", "svd-two-way", "top-k", "gram"], "svd-two-way"))
def test_gradients_of_absurd_size_end_no_run(stage: Stage, sketch: str) -> None:
    run, players = begin(stage, "fedcmoo", f'algorithm.sketch = "{sketch}"\nlimits.skipped_rounds = 5', rounds=2)

    def absurd(size: int) -> NDArray[np.float32]:
        return np.random.default_rng(1).choice(np.array([3e38, -3e38, 0.0], np.float32), size)

    def act() -> None:
        for player in players.values():
            for _, order in player.orders():
                gradients = order.kind in ("jacobian", "residual") and order.round == 0
                size = sum(row.length for row in order.rows)
                player.reply(order, absurd(size) if gradients and player.name == "ann" else None)

    stage.play(run, until=act)
    assert stage.rounds(run)[1].state is RoundState.COMPLETED
    assert sum(weights_of(stage, run, 1).values()) == pytest.approx(1.0)


@pytest.mark.parametrize("algorithm", few_of(["fedcmoo", "fedcmoo-pref", "fsmgda"], "fedcmoo"))
def test_absurd_losses_end_no_run(stage: Stage, algorithm: str) -> None:
    more = EXACT if algorithm.startswith("fedcmoo") else ""
    run, players = begin(stage, algorithm, more, rounds=2, serves={})
    absurd = {
        "ann": {"left": 1.7e308, "mid": 1.7e308, "right": -1.7e308},
        "ben": {"left": 1.7e308, "mid": 0.0, "right": -1.7e308},
        "cleo": {"left": 1.7e308, "loss": 1.7e308, "gibberish": 1.0},
    }
    for name, losses in absurd.items():
        players[name].losses = losses
    stage.play(run, *players.values())
    for round_ in stage.rounds(run):
        assert round_.state in (RoundState.COMPLETED, RoundState.SKIPPED), round_.reason
        assert np.isfinite(list(round_.metrics.values())).all()
    assert stage.rounds(run)[1].state is RoundState.COMPLETED or algorithm == "fedcmoo-pref"


def test_a_preference_without_losses_skips_the_round_and_says_so(stage: Stage) -> None:
    run, players = begin(stage, "fedcmoo-pref", EXACT, serves={})
    for player in players.values():
        player.losses = {"left": 1.0}
    answer(players, *players)
    assert stage.wait_round(run, 0).reason == "aggregation: no client reported a loss of mid, right"


def test_a_late_word_of_a_phase_that_is_over_moves_nothing(stage: Stage) -> None:
    run, players = begin(stage, "fedcmoo", EXACT)
    late = players["ben"].order()
    answer(players, "ann", "cleo")
    stage.clock.ahead += LONG
    with refused("FAILED_PRECONDITION", "deadline"):  # even before the conductor has looked
        players["ben"].submit(late)
    stage.nudge()
    stage.wait_outcome(run, "ben", "EXPIRED")
    stage.play(run, *players.values())
