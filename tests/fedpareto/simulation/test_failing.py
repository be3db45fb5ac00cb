"""Simulated clients answer a failed computation of a private round as workers do."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from federation.v1.common_pb2 import ReplyManifest, SignedEnvelope
from fedpareto.face.simulated import simulate
from tests.fedpareto.simulation.scene import spec
from tests.paths import OWNERS_CODE

PRIVATE = '\n[privacy]\nsecure = "sum"\n'


def test_trainings_that_diverge_are_answered_with_random_directions_and_without_a_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = spec(clients=5, rounds=1, algorithm="fedavg-n", every=0) + PRIVATE
    history = simulate(text.replace("learning_rate = 0.1", "learning_rate = 1e30"), home=tmp_path / "home")
    (path,) = (tmp_path / "home").glob("*.db")
    with closing(sqlite3.connect(path)) as database:
        envelopes = [SignedEnvelope.FromString(row) for (row,) in database.execute("SELECT envelope FROM replies")]
    assert {ReplyManifest.FromString(envelope.manifest).seconds for envelope in envelopes} == {0.0}
    assert history.state == "COMPLETED"
    assert {record["accepted"] for record in history.reply_records} == {True}
    assert "failed in a private round: training diverged" in caplog.text


def test_evaluations_that_fail_are_answered_with_the_worst_values(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(str(OWNERS_CODE))
    text = spec(clients=5, rounds=1, algorithm="fedavg-n").replace("every = 1", 'every = 1\nsplits = ["test"]')
    history = simulate(f"{text}{PRIVATE}evaluation_noise = 0.0\n", trainer="torn_trainer:Torn")
    assert "trainer has no 'loss'" in caplog.text
    (record,) = history.round_records
    assert (record["loss/test"], record["accuracy/mean"], record["evaluated"]) == (10.0, 0.0, 5.0)
