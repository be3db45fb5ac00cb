"""The server's rate "auto": who has the record computes each rate again, to the bit."""

import io
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import select

from federation.v1.common_pb2 import ReplyManifest, SignedEnvelope, StepManifest
from federation.v1.record_pb2 import RoundRecord
from fedpareto.simulation.simulate import Simulation
from storage.models import Reply, Round
from storage.states import RunState
from tests.compared_metrics import differences
from tests.coordinator.rounds.runs.scene import PRIVATE
from tests.running import wait_for
from tests.stage import Player, Stage, spec, vector
from tests.verification import independent_metrics
from tests.verification.recorded import private
from tests.verification.scene import Edited, checked, refusal, signed_again, verified

AUTO = 'server.learning_rate = "auto"\n'


def played_short(stage: Stage, more: str, rounds: int = 2) -> str:
    """A run of four members whose updates are much shorter than 1."""
    task, players = stage.crew("ann", "ben", "cleo", "dan")
    more = f"selection.minimum = 4\n{AUTO}{more}"
    run = stage.submit(spec(f"short-{stage.count}", task, rounds, algorithm="fedmgda+", more=more))

    def reply(player: Player) -> None:
        for _, order in player.orders():
            player.reply(order, 0.01 * vector(player.name, order) if order.rows else None)

    def over() -> bool:
        for player in players:
            reply(player)
        return stage.run(run).state is RunState.COMPLETED

    wait_for(over, f"run {run} to be played")
    return run


@pytest.mark.full
def test_the_rate_of_each_step_is_verified_to_the_bit_and_so_is_its_metric(stage: Stage, tmp_path: Path) -> None:
    run = played_short(stage, "")
    assert [one.number for one in verified(stage, run, tmp_path)] == [0, 1]
    assert differences(stage, run) == []
    for round_ in stage.rounds(run):
        step = stage.step(run, round_.number)
        K = np.load(io.BytesIO(stage.blobs.read(step.gram)))
        c = np.array(step.coefficients)
        assert step.rate == pytest.approx(np.sort(np.sqrt(np.diag(K)))[1] / math.sqrt(c @ K @ c))
        assert step.rate == round_.metrics["step/rate"] < 0.2
    record, last = Edited.of(tmp_path / "run.fedpareto"), 1

    def signing(change: Callable[[StepManifest], object]) -> Edited:
        def edit(found: RoundRecord) -> None:
            signed_again(found.step, StepManifest, stage.served.home.signing_key, change)

        return record.with_round(last, edit)

    for other in (math.nextafter(step.rate, 0), math.nextafter(step.rate, 1), 1.0):
        said = refusal(signing(lambda found, rate=other: setattr(found, "rate", rate)), tmp_path)  # type: ignore[misc]
        assert said == f"round 1: the learning rate is {other!r}; the specification gives {step.rate!r}"
        told = record.with_round(last, lambda found, rate=other: found.metrics.update({"step/rate": rate}))  # type: ignore[misc]
        assert f"the record says step/rate = {other!r}" in refusal(told, tmp_path)
    few = signing(lambda found: found.coefficients.pop())
    assert "no learning rate follows from the replies: there are 3 coefficients for 4 rows" in refusal(few, tmp_path)
    K_entry = f"blobs/{step.gram.replace(':', '-')}"
    bare = record.having({K_entry: None})
    assert any("coefficients" in reason for reason in checked(bare, tmp_path)[last].missing)


def norms_of(manifests: list[ReplyManifest]) -> dict[str, float]:
    return {manifest.client_id: manifest.metrics["norm"] for manifest in manifests if "norm" in manifest.metrics}


def test_in_a_private_round_the_lengths_that_members_show_bound_the_step(tmp_path: Path) -> None:
    text = PRIVATE + f'privacy.disclose = ["norm"]\nevaluate.every = 0\n{AUTO}'
    with Simulation(text.encode(), tmp_path / "home", threads=1) as simulation:
        simulation.run()
        with simulation._database.read() as session:
            row = session.scalars(select(Round)).one()
            envelopes = session.scalars(select(Reply.envelope)).all()
    step = StepManifest.FromString(SignedEnvelope.FromString(row.step or b"").manifest)
    norms = norms_of([ReplyManifest.FromString(SignedEnvelope.FromString(data).manifest) for data in envelopes])
    assert len(norms) == 5
    assert step.rate == row.metrics["step/rate"] < 0.9
    assert step.rate == pytest.approx(sorted(norms.values())[2] / row.metrics["direction_norm"])


@pytest.mark.full
def test_the_rate_of_a_private_round_of_real_workers_is_verified_and_no_other_one(tmp_path: Path) -> None:
    recorded = private(tmp_path, f'privacy.disclose = ["norm"]\n{AUTO}')
    bundle = recorded.bundle
    (found,) = checked(bundle, tmp_path)
    assert (*found.missing, *found.absent) == ()
    assert independent_metrics.check(tmp_path / "edited") >= {"step/rate", "direction_norm", "private/blur"}
    step = StepManifest.FromString(bundle.round(0).step.manifest)
    assert 0 < step.rate < 1

    def said(change: Callable[[StepManifest], object]) -> str:
        """The refusal of the bundle after the coordinator has signed another step."""

        def edit(found: RoundRecord) -> None:
            signed_again(found.step, StepManifest, recorded.keys["coordinator"], change)

        return refusal(bundle.with_round(0, edit), tmp_path)

    assert "the learning rate is" in said(lambda step: setattr(step, "rate", math.nextafter(step.rate, 1)))
    for rows, lengths in (([0], [1.0] * 8), ([99], [math.nan]), ([0], []), ([], [1.0])):
        compared = StepManifest(gram_rows=rows, squared_norms=lengths)
        words = said(lambda step, compared=compared: step.MergeFrom(compared))  # type: ignore[misc]
        assert "a private step has one combined vector" in words
