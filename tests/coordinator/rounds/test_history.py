"""Updates of earlier rounds in the steps of later ones: recalled, recorded, kept as long as they count."""

import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest

from federation.digests import digest
from fedpareto.offline_aggregation import aggregate
from storage.records import canonical
from storage.retention import collect
from storage.states import RoundState, RunState
from tests.coordinator.rounds.scene import lose
from tests.federation.aggregation.scene import coefficients_of
from tests.few import few_of
from tests.stage import MODEL, Player, Stage, answer, spec, vector
from tests.storage.scene import blob_file, stored

NAMES = ("ann", "ben", "cleo", "dan", "eve")
ROUNDS = 5
SPECS = {
    "fedfv": "algorithm.alpha = 0.3\nalgorithm.tau = 2",
    "dual-cone": 'algorithm.tau = 2\nalgorithm.pre = ["normalize"]',
}


def begin(stage: Stage, rule: str, names: Sequence[str] = NAMES) -> tuple[str, list[Player]]:
    """A run of rounds with two of five clients each."""
    more = f'selection = {{ method = "count", count = 2, minimum = 5 }}\n{SPECS[rule]}'
    return stage.begin(*names, rounds=ROUNDS, algorithm=rule, more=more)


def models(stage: Stage, run: str) -> list[str | None]:
    return [round_.result_model for round_ in stage.rounds(run)]


def stepped(stage: Stage, run: str, players: list[Player], number: int) -> None:
    """Plays all rounds before this one, which has begun, and whose orders are kept for later."""
    stage.play(run, *players, until=lambda: len(stage.rounds(run)) > number, rounds=number)


def entries(stage: Stage, run: str) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = stage.run(run).state_data["rule"]["history"]
    return found


def undisturbed(stage: Stage, rule: str) -> list[str | None]:
    """The models of a run when nothing happens."""
    run, players = begin(stage, rule)
    stage.play(run, *players)
    return models(stage, run)


@pytest.mark.parametrize("rule", few_of(SPECS, "dual-cone"))
@pytest.mark.full
def test_steps_are_made_and_recorded_with_the_absent_of_the_last_rounds(stage: Stage, rule: str) -> None:
    run, players = begin(stage, rule)
    stage.play(run, *players)
    latest: dict[str, tuple[int, np.ndarray, str]] = {}
    looked_back = 0
    for round_ in stage.rounds(run):
        t, updates = round_.number, stage.replies(run, round_.number)
        names = sorted(updates)
        orders = stage.orders(run, t)
        U = {name: vector(name, orders[name]) for name in names}
        reach = 2 if rule == "dual-cone" or t >= 2 else 0
        absent = sorted((r, name) for name, (r, _, _) in latest.items() if name not in U and t - r <= reach)
        rows = [*U.values(), *(latest[name][1] for _, name in absent)]
        losses = [updates[name].losses["loss"] for name in names] + [0.0] * len(absent)
        ages = [0] * len(names) + [t - r for r, _ in absent]
        keys: dict[str, Any] = {"alpha": 0.3} if rule == "fedfv" else {"pre": ["normalize"]}
        expected = coefficients_of(aggregate(rule, rows, losses=losses, ages=ages, tau=2, **keys))
        manifest = stage.step(run, t)
        np.testing.assert_allclose(manifest.coefficients, expected, rtol=1e-12, atol=1e-15)
        signed = [updates[name].envelope_digest for name in names]
        assert list(manifest.replies) == signed + [latest[name][2] for _, name in absent]
        told = np.array([updates[name].coefficient for name in names], dtype=np.float64)
        np.testing.assert_allclose(told, expected[: len(names)], rtol=1e-12, atol=1e-15)
        latest |= {name: (t, U[name], updates[name].envelope_digest) for name in names}
        looked_back += len(absent)
    assert looked_back >= 4


@pytest.mark.full
def test_a_restart_between_any_two_rounds_changes_no_byte(stage: Stage) -> None:
    run, players = begin(stage, "fedfv")
    for number in range(1, ROUNDS):
        stepped(stage, run, players, number)
        stage.restart()
    stage.play(run, *players)
    assert models(stage, run) == undisturbed(stage, "fedfv")


def spared_rounds(stage: Stage, run: str) -> set[int]:
    """The first and the best round, which no collection touches."""
    rounds = stage.rounds(run)
    return {0, max(rounds, key=lambda round_: round_.metrics.get("accuracy/mean", -1.0)).number}


@pytest.mark.full
def test_collection_keeps_what_the_window_needs_and_removes_what_has_left_it(stage: Stage) -> None:
    run, players = begin(stage, "dual-cone")
    stepped(stage, run, players, ROUNDS - 1)
    old = (datetime.now(UTC) - timedelta(days=2)).timestamp()
    for blob in stored(stage.blobs):
        os.utime(blob_file(stage.blobs, blob), (old, old))
    collect(stage.served.database, stage.blobs, now=datetime.now(UTC), grace_seconds=60, keep_rounds=0)
    window = {str(entry["payload"]) for entry in entries(stage, run).values()}
    assert {entry["round"] for entry in entries(stage, run).values()} == {ROUNDS - 3, ROUNDS - 2}
    spared = spared_rounds(stage, run)
    assert set(range(ROUNDS - 3)) - spared  # some have left the window, and nothing spares them
    for number in range(ROUNDS - 1):
        for update in stage.replies(run, number).values():
            assert stage.blobs.exists(update.payload) == (update.payload in window or number in spared)
    stage.play(run, *players)
    assert models(stage, run) == undisturbed(stage, "dual-cone")
    assert len(entries(stage, run)) > 2
    later = datetime.now(UTC) + timedelta(days=1)
    collect(stage.served.database, stage.blobs, now=later, grace_seconds=60, keep_rounds=0)
    spared = spared_rounds(stage, run)
    gone = [str(entry["payload"]) for entry in entries(stage, run).values() if entry["round"] not in spared]
    assert gone
    assert not any(stage.blobs.exists(payload) for payload in gone)


@pytest.mark.full
def test_an_earlier_update_that_is_lost_holds_the_run_until_it_is_back(stage: Stage) -> None:
    run, players = begin(stage, "dual-cone")
    stepped(stage, run, players, 1)
    (asked,) = (set(round_.selected) for round_ in stage.rounds(run)[1:])
    lost = next(str(entry["payload"]) for client, entry in entries(stage, run).items() if client not in asked)
    repair = lose(blob_file(stage.blobs, lost))
    answer(*(player for player in players if player.name in asked))
    assert stage.wait_state(run, RunState.PAUSED).reason.startswith(f"storage: there is no blob {lost} ")
    assert stage.rounds(run)[1].state is RoundState.OPEN
    repair()
    stage.resume(run, *players)
    assert models(stage, run) == undisturbed(stage, "dual-cone")


@pytest.mark.parametrize("rule", few_of(SPECS, "fedfv"))
def test_what_a_revoked_client_sent_before_enters_no_later_step_and_is_forgotten(stage: Stage, rule: str) -> None:
    run, players = begin(stage, rule, [f"{name}-{rule}" for name in NAMES])  # a revoked name is never given again
    stepped(stage, run, players, 2)
    (asked,) = (set(round_.selected) for round_ in stage.rounds(run)[2:])
    before = entries(stage, run)
    gone, *others = sorted(before.keys() - asked)
    stage.revoke(gone)
    playing = [player for player in players if player.name != gone]
    stage.play(run, *playing, until=lambda: stage.rounds(run)[2].stepped is not None)
    manifest = stage.step(run, 2)
    updates = stage.replies(run, 2)
    assert list(manifest.forgotten) == [gone]
    absent = sorted(others, key=lambda name: (before[name]["round"], name))
    signed = [updates[name].envelope_digest for name in sorted(updates)]
    assert list(manifest.replies) == signed + [before[name]["envelope"] for name in absent]
    kept = {name: entry for name, entry in before.items() if name in others and entry["round"] == 1}
    kept |= {
        name: {"round": 2, "envelope": update.envelope_digest, "payload": update.payload}
        for name, update in updates.items()
    }
    assert entries(stage, run) == kept
    state = stage.run(run).state_data
    assert manifest.state_after == digest(canonical(state).encode())


def test_a_skipped_round_leaves_the_history_as_it_was(stage: Stage) -> None:
    run, players = begin(stage, "fedfv")
    stepped(stage, run, players, 1)
    before = entries(stage, run)
    for player in players:
        if player.name in stage.rounds(run)[1].selected:
            player.decline(player.order(), "busy")
    assert stage.wait_round(run, 1).state is RoundState.SKIPPED
    assert entries(stage, run) == before


def test_a_specification_cannot_mix_with_earlier_updates(stage: Stage) -> None:
    document = spec("mixed", "any", algorithm="fedfv", more='algorithm.tau = 1\nalgorithm.pre = ["nnm"]')
    with pytest.raises(Exception, match=r'algorithm\.tau: not together with the stage "nnm"'):
        stage.submit(document, model=MODEL)
