"""Whatever enters a step is what was signed: a row that was edited in between pauses the run and is named."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.rounds.replies.evidence import SignatureMemory
from federation.digests import digest
from federation.refusals import Refusal
from federation.trust.envelope import sign
from federation.v1.common_pb2 import AssignmentManifest, ReplyManifest
from federation.vectors import to_bytes, update_layout
from storage import models
from storage.models import Run
from storage.states import RunState
from tests.coordinator.rounds.replies.scene import edit
from tests.stage import LAYOUT, MODEL, Player, Stage, answer, reply

CLIENTS = ("ann", "ben", "cleo")


@dataclass(frozen=True)
class Rows:
    """The rows of ann and ben, as they are before anybody edits one."""

    assignments: dict[str, models.Assignment]
    updates: dict[str, models.Reply]
    run: Run


def other_payload(stage: Stage) -> dict[str, Any]:
    payload = to_bytes(update_layout([("loss", LAYOUT.size)]), np.ones(LAYOUT.size, np.float32))
    return {"payload": stage.blobs.put(payload)}


def others_reply(_: Stage, rows: Rows) -> dict[str, Any]:
    names = ("envelope", "envelope_digest", "receipt", "payload", "samples", "metrics")
    return {name: getattr(rows.updates["ben"], name) for name in names}


def other_key(*_: object) -> dict[str, Any]:
    return {"signing_key": Ed25519PrivateKey.generate().public_key().public_bytes_raw()}


REPLY, ASSIGNMENT, CLIENT, RUN = models.Reply, models.Assignment, models.Client, models.Run
Edit = Callable[[Stage, Rows], dict[str, Any]]
# What is edited in which row, and how the reason goes on after the row's name. Ann's row, where a client has one.
EDITS: dict[str, tuple[type[models.Base], Edit, str]] = {
    "samples": (REPLY, lambda *_: {"samples": 99_999}, "samples: the record says 99999, signed is 10"),
    "losses": (REPLY, lambda *_: {"losses": {"loss": 1e6}}, "losses: the record says {'loss': 1000000.0}"),
    "metrics": (REPLY, lambda *_: {"metrics": {"train/accuracy": 0.0}}, "metrics: the record says"),
    "payload with its digest": (REPLY, lambda stage, _: other_payload(stage), "payload: the record says 'blake3"),
    "the envelope of another client": (REPLY, others_reply, "envelope: the key"),
    "the receipt of another reply": (
        REPLY, lambda _, rows: {"receipt": rows.updates["ben"].receipt}, "receipt (envelope): the record says"
    ),
    "an envelope that is none": (REPLY, lambda *_: {"envelope": b"\xff\xff"}, "envelope: it is no signed"),
    "whose it is": (REPLY, lambda *_: {"client_id": "ben"}, "client_id: the record says 'ben', signed is 'ann'"),
    "a reply that counts no more": (REPLY, lambda *_: {"accepted": False}, ""),
    "the objectives of an assignment": (
        ASSIGNMENT, lambda *_: {"objectives": ["other"]}, "objectives: the record says ['other'], signed is ['loss']"
    ),
    "the envelope of an assignment": (
        ASSIGNMENT, lambda _, rows: {"envelope": rows.assignments["ben"].envelope}, "assignment_id: the record says"
    ),
    "the end of an assignment": (ASSIGNMENT, lambda *_: {"state": "EXPIRED"}, ""),
    "the key of a client": (CLIENT, other_key, ""),
    "what the run remembers": (RUN, lambda *_: {"state_data": {"rule": {"x": 1}}}, "state_data: the record says"),
    "the specification": (RUN, lambda _, rows: {"spec": rows.run.spec + b"\n"}, "spec: its digest is not"),
}  # fmt: skip


def ready(stage: Stage, name: str) -> tuple[str, list[Player]]:
    """A run that is paused when all of its updates have been accepted, and none has been used."""
    run, players = stage.begin(
        *CLIENTS, name=name, algorithm="q-fedavg", more="selection = { minimum = 3, quorum = 1.0 }"
    )
    orders = [player.order() for player in players]
    stage.pause(run)
    reply(dict(zip(players, orders, strict=True)))
    return run, players


def test_a_row_that_differs_from_what_was_signed_pauses_the_run_and_is_named_until_it_is_restored(stage: Stage) -> None:
    run, players = ready(stage, f"edited-{stage.count}")
    rows = Rows(stage.assignments(run), stage.replies(run), stage.run(run))
    keys: dict[type[models.Base], tuple[str, object, object]] = {
        models.Reply: ("replies", rows.updates["ann"].reply_id, rows.updates["ann"]),
        models.Assignment: ("assignments", rows.assignments["ann"].assignment_id, rows.assignments["ann"]),
        models.Client: ("clients", "ann", stage.look(lambda session: session.get_one(models.Client, "ann"))),
        models.Run: ("runs", run, rows.run),
    }
    for name, (kind, change, words) in EDITS.items():
        table, key, row = keys[kind]
        values = change(stage, rows)
        before = {field: getattr(row, field) for field in values}
        edit(stage, kind, key, values)
        stage.resume(run)
        reason = stage.wait_state(run, RunState.PAUSED).reason
        assert reason.startswith("record: "), (name, reason)
        assert "differs from what was signed: restore it, then resume" in reason, (name, reason)
        if words:
            assert reason.startswith(f"record: {table} {key}: {words}"), (name, reason)
        edit(stage, kind, key, before)
    stage.resume(run, *players)
    # Nothing of it is left: the step is that of a run that nobody touched.
    again, players = ready(stage, f"untouched-{stage.count}")
    stage.resume(again, *players)
    assert stage.run(run).model == stage.run(again).model != digest(MODEL)


def test_an_evaluation_counts_as_it_was_signed(stage: Stage) -> None:
    run, (ann, ben) = stage.begin("ann", "ben", algorithm="fedavg", more="selection.minimum = 2")
    answer(ann, ben)
    orders = {player: player.order() for player in (ann, ben)}
    ann.reply(orders[ann])
    scored = stage.replies(run, 0, 1)["ann"]
    edit(stage, models.Reply, scored.reply_id, {"metrics": {**scored.metrics, "test/accuracy": 1.0}})
    ben.reply(orders[ben])
    reason = stage.wait_state(run, RunState.PAUSED).reason
    assert reason.startswith(f"record: replies {scored.reply_id}: metrics: the record says")
    edit(stage, models.Reply, scored.reply_id, {"metrics": scored.metrics})
    stage.resume(run, ann, ben)
    assert stage.evaluations(run)["ann", "test"].accuracy == scored.metrics["test/accuracy"]


def test_a_round_begins_from_the_model_of_the_last_signed_step(stage: Stage) -> None:
    run, (ann,) = stage.begin("ann", rounds=2, algorithm="fedavg", more="evaluate.every = 1")
    ann.answer()
    evaluation = ann.order()
    made = stage.run(run).model
    edit(stage, models.Run, run, {"model": digest(MODEL)})  # as if there had been no step
    ann.reply(evaluation)
    reason = stage.wait_state(run, RunState.PAUSED).reason
    assert reason.startswith(f"record: runs {run}: model: the record says '{digest(MODEL)}', signed is '{made}'")
    assert len(stage.rounds(run)) == 1  # nobody was asked to work from it
    edit(stage, models.Run, run, {"model": made})
    stage.resume(run, ann)
    assert stage.rounds(run)[1].base_model == made


def test_a_signature_is_verified_once() -> None:
    key, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    memory = SignatureMemory(capacity=2)
    envelopes = [sign(ReplyManifest(round=number), key) for number in range(3)]
    for number, envelope in enumerate(envelopes):
        assert memory.open(envelope, ReplyManifest, key.public_key()).round == number
    forged = sign(ReplyManifest(round=9), key)
    forged.signature = bytes(64)
    with pytest.raises(Refusal, match="signature"):
        memory.open(forged, ReplyManifest, key.public_key())
    memory.note(forged, ReplyManifest, key.public_key())  # from here on it is not looked at again
    assert memory.open(forged, ReplyManifest, key.public_key()).round == 9
    with pytest.raises(Refusal, match="key-unknown"):
        memory.open(forged, ReplyManifest, other.public_key())
    with pytest.raises(Refusal, match="signature"):
        memory.open(forged, AssignmentManifest, key.public_key())
    for envelope in envelopes:  # more than it remembers
        memory.open(envelope, ReplyManifest, key.public_key())
    with pytest.raises(Refusal, match="signature"):
        memory.open(forged, ReplyManifest, key.public_key())
