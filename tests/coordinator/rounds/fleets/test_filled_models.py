"""Runs whose model is filled from a signed result of statistics: what is taken, who is asked, what verifies."""

import json
import re
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from federation.digests import digest
from federation.record import bundle
from federation.spec.computation import Ability
from federation.statistics.scale import scale_of
from federation.transport.channels import refusal_from_rpc_error
from federation.trust.envelope import envelope_digest, sign
from federation.v1.common_pb2 import ResultManifest, SignedEnvelope
from federation.v1.record_pb2 import DescribedData
from federation.vectors import Vector, to_bytes
from storage.states import RunState
from tests.filled import LAYER, described, filled, keys
from tests.harness import Attending
from tests.stage import LAYOUT, Stage, answer, spec
from tests.verification.scene import Edited, refusal, verified


def fixed(stage: Stage, model: str | None) -> Vector:
    return stage.parameters(model)[-4:]


def test_each_model_of_a_run_keeps_what_was_filled_in_and_its_record_verifies(stage: Stage, tmp_path: Path) -> None:
    task, players = stage.crew("ada", "ben", "cleo")
    result, told = described(stage, task, players)
    name, model = envelope_digest(result), filled(told)
    run = stage.submit(spec("filled", task, 2, **keys(name, 'server.optimizer = "momentum"\n')), model=model)
    for _ in range(2):
        orders = {player: player.order() for player in players}
        assert {sum(row.length for row in order.rows) for order in orders.values()} == {LAYOUT.size}
        assert {(*order.unshared.fixed, order.unshared.statistics) for order in orders.values()} == {("scale.*", name)}
        # What a member compares its model with.
        assert SignedEnvelope.FromString(players[0].fetch(name)) == result
        assert players[0].fetch(digest(told)) == told
        assert players[0].fetch(digest(told), 10) == told[10:]
        for player, order in orders.items():
            player.reply(order)
        answer(*players)  # the evaluation
    stage.wait_state(run, RunState.COMPLETED)
    expected = np.concatenate([*scale_of(told, LAYER.columns).of(LAYER).values()])
    for row in stage.rounds(run):
        assert np.array_equal(fixed(stage, row.result_model), expected)
    assert len(verified(stage, run, tmp_path)) == 2
    with pytest.raises(grpc.RpcError) as error:  # the run has ended
        players[0].fetch(name)
    assert refusal_from_rpc_error(error.value).reason == "blob-not-offered"

    file, key = Edited.of(tmp_path / "run.fedpareto"), stage.served.home.signing_key

    def having(document: bytes, signed: Any = key) -> Edited:
        manifest = ResultManifest.FromString(result.manifest)
        manifest.document, manifest.document_bytes = digest(document), len(document)
        data = DescribedData(result=sign(manifest, signed), document=document)
        return file.having({bundle.STATISTICS: data.SerializeToString()})

    other = told.replace(b'"mean":', b'"mean":1', 1)
    for edited, words in (
        (file.having({bundle.STATISTICS: None}), "lacks the result"),
        (having(other), "lacks the result"),
        (
            file.having({bundle.STATISTICS: DescribedData(result=result, document=other).SerializeToString()}),
            "not the one",
        ),
        (file.having({bundle.STATISTICS: b""}), "statistics.pb is empty"),
    ):
        assert re.search(words, said := refusal(edited, tmp_path)), said


def test_a_model_that_was_changed_after_it_was_filled_does_not_verify(stage: Stage, tmp_path: Path) -> None:
    task, players = stage.crew("ada", "ben")
    result, told = described(stage, task, players)
    run = stage.submit(spec("filled", task, **keys(envelope_digest(result))), model=filled(told))
    answer(*players)
    answer(*players)
    stage.wait_state(run, RunState.COMPLETED)
    verified(stage, run, tmp_path)
    file = Edited.of(tmp_path / "run.fedpareto")
    record = file.round(0)
    (row,) = stage.rounds(run)
    before = row.result_model or ""
    model = bytearray(file.entries[bundle.blob_entry(before)])
    model[-4:] = np.float32(3).tobytes()
    forged = digest(bytes(model))
    said = refusal(stage_forged(stage, file, record, before, forged, bytes(model)), tmp_path)
    assert "the fixed tensors: number" in said


def stage_forged(stage: Stage, file: Edited, record: Any, before: str, after: str, model: bytes) -> Edited:
    """The coordinator signs a step to another model."""
    from federation.v1.common_pb2 import StepManifest

    step = StepManifest.FromString(record.step.manifest)
    step.result_model = after
    record.step.CopyFrom(sign(step, stage.served.home.signing_key))
    entries = {bundle.round_entry(0): record.SerializeToString(), bundle.blob_entry(before): None}
    return file.having({**entries, bundle.blob_entry(after): model})


def test_a_model_of_other_numbers_and_a_result_that_nobody_signed_are_refused(stage: Stage) -> None:
    task, players = stage.crew("ada", "ben")
    result, told = described(stage, task, players)
    name, other = envelope_digest(result), digest(b"other")

    def said(document: bytes, model: bytes) -> tuple[str, str]:
        with pytest.raises(grpc.RpcError) as error:
            stage.submit(document, model=model)
        found = refusal_from_rpc_error(error.value)
        return found.reason, found.message

    reason, message = said(spec("x", task, **keys(name)), filled(told, 1e-3))
    assert (reason, "number 2 of 'scale.mean' is " in message) == ("scale", True), message
    reason, message = said(spec("x", task, **keys(other)), filled(told))
    assert (reason, f"has the result {other}" in message) == ("scale", True), message
    for wrong in (digest(told), digest(result.manifest)):  # of the document, of the bytes that are signed
        assert said(spec("x", task, **keys(wrong)), filled(told))[0] == "scale"
    unsuitable = to_bytes(LAYOUT, np.ones(LAYOUT.size, dtype=np.float32))
    reason, message = said(spec("x", task, **keys(name)), unsuitable)
    assert "parameters.fixed: a model is needed whose last tensors" in message
    assert json.loads(told)["columns"][0]["name"] == "age"
    with pytest.raises(grpc.RpcError):  # no run names it
        players[0].fetch(name)


def test_members_whose_workers_do_not_know_fixed_tensors_are_not_asked(stage: Stage) -> None:
    task, (player, old) = stage.crew("ada", "old")
    result, told = described(stage, task, [player, old])
    old.leave()
    able = [ability for ability in Ability if ability is not Ability.FIXED]
    old.stream = Attending(old.member, {task: 10}, abilities=able)
    old.stream.next()
    asked = spec("x", task, **keys(envelope_digest(result)))
    outlook = stage.dry_run(asked, size=len(filled(told)))
    assert [(one.client_id, one.reason) for one in outlook.others] == [("old", "old")]
    assert "does not know runs with fixed tensors" in outlook.others[0].message
    run = stage.submit(asked, model=filled(told))
    answer(player)
    answer(player)
    stage.wait_state(run, RunState.COMPLETED)
    assert stage.rounds(run)[0].selected == ["ada"]
