"""Runs whose model is filled from a signed result of statistics: what is taken, who is asked, what verifies."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from sqlalchemy import Engine, event
from sqlalchemy.orm import Session

from coordinator.rounds.fleets.filled_models import OfferedResults
from federation.digests import digest
from federation.record import bundle
from federation.record.bundle import BundleReader
from federation.spec.computation import Ability
from federation.spec.run_spec import RUN_KINDS, RunSpec, with_models
from federation.statistics.scale import scale_of
from federation.transport.channels import refusal_from_rpc_error
from federation.trust.envelope import envelope_digest, sign
from federation.v1.admin_pb2 import MeasuredModel
from federation.v1.common_pb2 import ResultManifest, SignedEnvelope
from federation.v1.record_pb2 import DescribedData
from federation.vectors import File, Vector, to_bytes
from storage.blob_directory import DirectoryStore
from storage.database import Database
from storage.states import RunState
from tests.filled import LAYER, described, filled, keys
from tests.harness import Attending
from tests.running import refused
from tests.stage import LAYOUT, Stage, answer, spec
from tests.verification.scene import Edited, checked, exported, refusal, verified
from verification.errors import VerificationError
from verification.model import check_filled
from verification.run import OpenedRun


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
        for wrong in ("", "blake3:0", name.upper(), "../blobs", digest(b"other")):
            with refused("PERMISSION_DENIED", "blob-not-offered"):
                players[0].fetch(wrong)
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


def test_only_the_result_that_is_asked_for_is_loaded_and_those_who_fetch_it_at_a_time_share_it(stage: Stage) -> None:
    task, players = stage.crew("ada", "ben")
    (first, _), (result, told) = described(stage, task, players), described(stage, task, players)
    name = envelope_digest(result)
    assert name != envelope_digest(first)
    results, statements = OfferedResults(), list[str]()

    def offered(client: str, name: str) -> Any:
        return stage.look(lambda session: results.offered(session, client, name))

    def note(*arguments: Any) -> None:
        statements.append(arguments[2])

    stage.submit(spec("filled", task, **keys(name)), model=filled(told))
    event.listen(Engine, "before_cursor_execute", note)
    try:
        shared = [offered(player.name, digest(told)) for player in players]
        loaded = [statement for statement in statements if "rounds.document" in statement]
        assert bytes(shared[0]) == told
        assert shared[0] is shared[1]
        assert ["rounds.round_id = " in statement for statement in loaded] == [True]
        statements.clear()
        assert offered("ada", name) == result.SerializeToString(deterministic=True)
        assert offered("ada", digest(b"other")) is None
        assert not any("rounds.result IS NOT NULL" in statement for statement in statements)  # its round is known
        assert not any("rounds.document" in statement for statement in statements)
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def test_a_model_is_opened_outside_of_transactions(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    task, (player,) = stage.crew("ada")
    result, told = described(stage, task, [player])
    opened = list[bool]()  # within a transaction or not
    within, read, local = threading.local(), Database.read, DirectoryStore.local

    @contextmanager
    def reading(self: Database) -> Iterator[Session]:
        with read(self) as session:
            within.session = session
            try:
                yield session
            finally:
                within.session = None

    def noted(self: DirectoryStore, name: str) -> File:
        opened.append(getattr(within, "session", None) is not None)
        return local(self, name)

    monkeypatch.setattr(Database, "read", reading)
    monkeypatch.setattr(DirectoryStore, "local", noted)
    run = stage.submit(spec("filled", task, **keys(envelope_digest(result))), model=filled(told))
    answer(player)
    answer(player)
    stage.wait_state(run, RunState.COMPLETED)
    assert opened
    assert not any(opened)


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


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ((), "its worker does not know runs with fixed tensors (parameters.fixed): it needs a newer release"),
        (RUN_KINDS, "the trainer of its worker cannot leave tensors as the run's model has them (parameters.fixed)"),
    ],
    ids=["0.1.0", "its trainer"],
)
def test_members_whose_workers_do_not_know_fixed_tensors_are_not_asked(
    stage: Stage, kinds: tuple[str, ...], words: str
) -> None:
    task, (player, old) = stage.crew("ada", "old")
    result, told = described(stage, task, [player, old])
    old.leave()
    able = [ability for ability in Ability if ability is not Ability.FIXED]
    old.stream = Attending(old.member, {task: 10}, run_kinds=kinds, abilities=able)
    old.stream.next()
    asked = spec("x", task, **keys(envelope_digest(result)))
    outlook = stage.dry_run(asked, size=len(filled(told)))
    assert [(one.client_id, one.reason) for one in outlook.others] == [("old", "old")]
    assert outlook.others[0].message == words
    run = stage.submit(asked, model=filled(told))
    answer(player)
    answer(player)
    stage.wait_state(run, RunState.COMPLETED)
    (row,) = stage.rounds(run)
    assert (row.selected, row.not_asked) == (["ada"], {"old": f"cannot take part: {words}"})


def test_a_signed_result_whose_document_is_another_or_none_is_refused(stage: Stage, tmp_path: Path) -> None:
    task, players = stage.crew("ada", "ben")
    result, told = described(stage, task, players)
    name = envelope_digest(result)
    run = stage.submit(spec("filled", task, **keys(name)), model=filled(told))
    file = Edited.of(exported(stage, run, tmp_path / "run", payloads=False))

    def check(given: bytes = told, **changes: Any) -> dict[str, str]:
        manifest = ResultManifest.FromString(result.manifest)
        for field, value in {"document": digest(given), "document_bytes": len(given), **changes}.items():
            setattr(manifest, field, value)
        signed = sign(manifest, stage.served.home.signing_key)
        data = DescribedData(result=signed, document=given).SerializeToString()
        with BundleReader(file.having({bundle.STATISTICS: data}).write(tmp_path / "edited")) as reader:
            opened = OpenedRun.of(reader)
            asked = opened.facts.document.replace(name.encode(), envelope_digest(signed).encode())
            return check_filled(replace(opened.facts, spec=RunSpec.parse(asked)), opened.keys.signers)

    assert check() == {digest(filled(told)): f"the scale of the model: {digest(filled(told))} is not in the bundle"}
    for named in ("", "md5:abc", "blake3:12", digest(b"other")):
        with pytest.raises(VerificationError, match="is not the one that was signed"):
            check(document=named)
    with pytest.raises(VerificationError, match="is not the one that was signed"):
        check(document_bytes=len(told) + 1)
    for other in (b"{", b"{}", b"[]", b""):  # also where the models are not there
        with pytest.raises(VerificationError, match="the document of statistics: the "):
            check(other)


def test_each_filled_model_that_a_bundle_lacks_is_named_also_where_members_only_measure_it(
    stage: Stage, tmp_path: Path
) -> None:
    task, players = stage.crew("ada", "ben")
    result, told = described(stage, task, players)
    models = [filled(told), filled(told, values=2.0)]
    names = [digest(model) for model in models]
    text = f'name = "held"\ntask = "{task}"\nkind = "evaluate"\nevaluate.splits = ["train"]\n'
    asked = with_models((text + keys(envelope_digest(result))["more"]).encode(), names)
    headers = [MeasuredModel(digest=name, size=len(model)) for name, model in zip(names, models, strict=True)]
    run = stage.submit(asked, model=models[0], models=headers, further=models[1:])
    stage.complete(run, *players)
    verified(stage, run, tmp_path)
    file = Edited.of(tmp_path / "run.fedpareto")
    for place, name in enumerate(names):
        lacking = [one.missing for one in checked(file.having({bundle.blob_entry(name): None}), tmp_path)]
        reason = f"the scale of the model: {name} is not in the bundle"
        assert lacking == [(reason,) if number == place else () for number in range(2)]
