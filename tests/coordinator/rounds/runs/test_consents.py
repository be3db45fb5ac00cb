"""The coordinator's side of runs that members answer, and of sites that are closed."""

import re
import threading
from collections.abc import Callable
from datetime import UTC, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import ColumnElement

from coordinator.members.access import control
from coordinator.members.access.call_limits import CONSENT, RATES, Buckets, Rate
from coordinator.rounds.run_commands import RunCommands
from federation.digests import digest
from federation.record.bundle import CONSENTS, BundleReader
from federation.trust.envelope import sign
from federation.v1 import admin_pb2 as admin
from federation.v1.federation_pb2 import FetchBlobRequest, Heartbeat
from federation.v1.record_pb2 import Consents
from storage.models import AuditEntry, Consent
from storage.states import Answer
from tests.coordinator.rounds.runs.scene import answer, asked, attends, say
from tests.harness import refused
from tests.running import SECONDS, wait_for
from tests.stage import MODEL, Player, Stage, spec, submission
from tests.verification.scene import Edited, exported
from verification.errors import VerificationError, Verified
from verification.run import OpenedRun


def command(stage: Stage, *arguments: str) -> str:
    """What an administrator's command prints."""
    return " ".join(stage.served.command(*arguments, columns=300).split())


def fetched(player: Player, name: str) -> bytes:
    return b"".join(part.chunk for part in player.member.stub.FetchBlob(FetchBlobRequest(digest=name), timeout=SECONDS))


def test_a_client_that_answers_runs_is_told_of_each_and_gets_work_of_those_that_it_has_accepted(stage: Stage) -> None:
    task, (ann, ben) = stage.crew("ann", "ben")
    stream = attends(ann, task)
    document = spec(f"consents-{stage.count}", task, 2)
    run = stage.submit(document)
    told = asked(ann, stream)
    assert (told.run_id, told.spec, told.task) == (run, digest(document), task)
    assert stage.run(run).submitted_by.endswith(f"/admin/{told.submitted_by}")
    assert fetched(ann, told.spec) == document
    with refused("PERMISSION_DENIED", "blob-not-offered"):
        fetched(ben, told.spec)
    say(ann, stream, answer(ann, told, "waiting", reason="owner"))
    train = ben.order()
    assert (train.round, train.base_model) == (0, told.initial_model)
    asking = admin.GetRunRequest(run=run)
    shown = wait_for(lambda: stage._admin.GetRun(asking, timeout=SECONDS).run.consents, "the answer")
    assert [(one.client_id, one.answer, one.check.verified) for one in shown] == [("ann", "waiting", True)]
    assert f"owner must approve: consents-{stage.count}" in command(stage, "clients")
    assert re.search(r"ann +waiting .* [0-9a-f]{8} ✓ +owner", command(stage, "run", run))
    not_asked = "not asked ann (has not answered the run yet|waits for the approval of its owner)"
    assert re.search(not_asked, command(stage, "round", run, "0"))
    say(ann, stream, answer(ann, told, "accepted"))
    wait_for(lambda: stage.look(lambda session: session.get_one(Consent, (run, "ann")).answer) is Answer.ACCEPTED, "it")
    ben.reply(train)
    order = ann.member.open(stream.assignment())
    assert (order.round, order.kind) == (0, "evaluate")
    ann.reply(order)
    ben.answer()
    assert ann.member.open(stream.assignment()).round == 1
    found = stage._admin.GetRound(admin.GetRoundRequest(run=run, round=0), timeout=SECONDS)
    assert [one.client_id for one in found.not_asked] == ["ann"]
    assert stage.rounds(run)[1].not_asked == {}
    again = attends(ann, task)
    assert asked(ann, again) == told
    stage.stop_run(run)
    again.close()
    with refused("PERMISSION_DENIED", "blob-not-offered"):
        fetched(ann, told.spec)


def test_members_are_asked_about_a_run_also_if_the_call_that_submits_it_is_cut(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, (ann,) = stage.crew("ann")
    stream = attends(ann, task)
    begun, go, submit = threading.Event(), threading.Event(), RunCommands.submit

    def late(*arguments: Any, **more: Any) -> str:
        begun.set()
        assert go.wait(SECONDS)
        return submit(*arguments, **more)

    monkeypatch.setattr(RunCommands, "submit", late)
    call = stage._admin.SubmitRun.future(iter(submission(spec(f"consents-{stage.count}", task), MODEL)))
    assert begun.wait(SECONDS)
    call.cancel()
    stage._admin.ListRuns(admin.ListRunsRequest(), timeout=SECONDS)  # the end of the call has arrived before it
    go.set()
    assert asked(ann, stream).task == task


def test_a_client_that_keeps_changing_its_answer_is_told_to_wait_and_writes_no_more_entries(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "HOLD_SECONDS", 0.0)
    rates = {kind: Rate(1e9, 1e9) for kind in RATES} | {CONSENT: Rate(3, 0.01)}
    access = stage.served.coordinator.access
    monkeypatch.setattr(access, "_buckets", Buckets(rates))
    task, (ann,) = stage.crew("ann")
    stream = attends(ann, task)
    run = stage.submit(spec(f"consents-{stage.count}", task))
    told = asked(ann, stream)
    for _ in range(5):
        say(ann, stream, answer(ann, told, "waiting"))  # the first is no change, and the others are the same bytes
    for number in range(10):
        say(ann, stream, answer(ann, told, ("accepted", "waiting")[number % 2], message=str(number)))
    refusal = stream.end()
    assert (refusal.status, refusal.reason) == ("RESOURCE_EXHAUSTED", "limit:rate")
    assert 50 < refusal.retry_seconds <= 100
    for _ in range(3):  # each attendance repeats the refused change
        again = attends(ann, task)
        say(ann, again, answer(ann, told, "refused"))
        assert again.end().reason == "limit:rate"
    stage.served.run(access._record.finish())

    def entries(*conditions: ColumnElement[bool]) -> list[int]:
        return [entry.times for entry in stage.served.entries(AuditEntry.actor.endswith("/ann"), *conditions)]

    assert entries(AuditEntry.subject == f"{run}/ann") == [1] * 4
    assert entries(AuditEntry.outcome == "limit:rate") == [1, 3]
    stage.stop_run(run)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "key-unknown"),
        ({"client_id": "ben"}, "mismatch:client_id"),
        ({"federation_id": "other"}, "mismatch:federation_id"),
        ({"spec": digest(b"other")}, "mismatch:spec"),
        ({"answer": "perhaps"}, "mismatch:answer"),
        ({"message": "x" * 10_000}, "limit:manifest"),
    ],
)
def test_an_answer_that_its_client_has_not_signed_for_this_run_does_not_count(
    stage: Stage, changes: dict[str, str], reason: str
) -> None:
    task, [ann] = stage.crew("ann")
    stream = attends(ann, task)
    run = stage.submit(spec(f"consents-{stage.count}", task))
    told = asked(ann, stream)
    key = None if changes else Ed25519PrivateKey.generate()
    said = answer(ann, told, "accepted", **changes)
    say(ann, stream, said, key)
    ended = wait_for(stream.next, "the end of the stream")
    assert isinstance(ended, grpc.RpcError)
    assert reason in str(ended.trailing_metadata())
    assert stage.look(lambda session: session.get(Consent, (run, "ann"))) is None
    stage.stop_run(run)


def test_a_closed_site_is_not_asked_and_the_run_says_when_it_opens(stage: Stage) -> None:
    task, [ann] = stage.crew("ann")
    beat = Heartbeat()
    opens = stage.clock().astimezone(UTC) + timedelta(hours=3)
    beat.closed_until.FromDatetime(opens)
    ann.say(heartbeat=beat)

    def closed() -> bool:
        clients = stage._admin.ListClients(admin.ListClientsRequest(), timeout=SECONDS).clients
        return any(one.client_id == "ann" and one.HasField("closed_until") for one in clients)

    wait_for(closed, "the site to be closed")
    run = stage.submit(spec(f"consents-{stage.count}", task))
    words = f"0 of 1 are ready for {task}; ann is closed until {opens:%Y-%m-%d %H:%M} UTC"
    wait_for(lambda: words in stage.run(run).reason, words)
    assert ann.orders() == []
    assert f"closed until {opens:%Y-%m-%d %H:%M}" in command(stage, "clients")
    assert words in command(stage, "run", run)
    ann.say(heartbeat=Heartbeat())
    stage.complete(run, ann)


def test_a_paused_site_is_not_asked_and_everybody_sees_that_it_is_paused_and_no_date(stage: Stage) -> None:
    task, [ann, ben] = stage.crew("ann", "ben")
    ann.say(heartbeat=Heartbeat(paused=True))

    def paused() -> bool:
        clients = stage._admin.ListClients(admin.ListClientsRequest(), timeout=SECONDS).clients
        return any(one.client_id == "ann" and one.paused and not one.HasField("closed_until") for one in clients)

    wait_for(paused, "the site to be paused")
    both = stage.submit(spec(f"consents-{stage.count}", task, more="[selection]\nminimum = 2"))
    words = f"1 of 2 are ready for {task}; ann is paused"
    wait_for(lambda: words in stage.run(both).reason, words)
    assert "paused by its owner" in command(stage, "clients")
    members = {member["client_id"]: member for member in stage.served.document("status")["members"]}
    assert (members["ann"]["state"], members["ann"]["since"]) == ("paused", "by its owner")
    stage.stop_run(both)
    one = stage.submit(spec(f"consents-{stage.count}", task))
    stage.complete(one, ben)
    assert ann.orders() == []
    assert stage.rounds(one)[0].not_asked == {"ann": "is paused"}
    ann.say(heartbeat=Heartbeat())
    wait_for(lambda: not paused(), "the site to be open")


def test_answers_are_in_the_bundle_and_an_edited_one_is_named(stage: Stage, tmp_path: Path) -> None:
    task, (ann, ben, cleo) = stage.crew("ann", "ben", "cleo")
    streams = {player: attends(player, task) for player in (ann, ben)}
    run = stage.submit(spec(f"consents-{stage.count}", task))
    told = {player: asked(player, stream) for player, stream in streams.items()}
    for player, said in ((ann, "waiting"), (ben, "refused")):
        say(player, streams[player], answer(player, told[player], said, reason="owner"))
    stage.complete(run, cleo)
    whole = Edited.of(exported(stage, run, tmp_path / "run.fedpareto"))

    def verified(edited: Edited) -> list[Verified]:
        with BundleReader(edited.write(tmp_path / "edited")) as bundle:
            return list(OpenedRun.of(bundle).verify())

    def changed(change: Callable[[Consents], object]) -> Edited:
        consents = Consents.FromString(whole.entries[CONSENTS])
        change(consents)
        return whole.having({CONSENTS: consents.SerializeToString()})

    def accepted(consents: Consents) -> None:
        consents.consents[0].CopyFrom(sign(answer(ann, told[ann], "accepted"), ann.member.files.signing_key))

    assert [one.missing for one in verified(whole)] == [()]
    for edited, words in (
        (whole.having({CONSENTS: None}), "of the answer .*, which is not in the record"),
        (changed(lambda consents: consents.consents.pop()), "of the answer .*/ben, which is not in the record"),
        (changed(lambda consents: setattr(consents.consents[0], "signature", bytes(64))), "'ann' .*signature"),
        (changed(accepted), "the answer of 'ann' to the run: the audit log tells of another"),
        (changed(lambda consents: consents.consents.append(consents.consents[0])), "'ann' .* tells of none"),
    ):
        with pytest.raises(VerificationError, match=words):
            verified(edited)
