"""What is edited behind the coordinator's back is found and named: entries of the log, the record, and blobs."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import text
from sqlalchemy.orm import Session

from coordinator.audit.checkpoints import LogKey
from federation.record import log_entries
from federation.trust.envelope import sign, verify
from federation.v1.common_pb2 import AssignmentManifest, SignedEnvelope
from storage import audit
from storage.blob_directory import DirectoryStore
from storage.blobs import BlobStore
from storage.models import Assignment, Checkpoint, Phase, Run
from tests.compared_metrics import check_exact, watched
from tests.coordinator.audit.scene import Edit, Recorded, chain_anew, changed, cut, forge, logged, shift
from tests.few import every
from tests.running import wait_for
from tests.stage import Stage, spec
from tests.storage.scene import blob_file


@pytest.fixture(scope="module")
def recorded(_module_stage: Stage) -> Recorded:
    return Recorded(_module_stage)


REMOVED = "delete from audit_log where number = 5"


OF_THE_LOG: dict[str, tuple[Sequence[Edit], str]] = {
    "time": ([changed("at", "'2026-01-01 00:00:00'")], "entry 5 was changed"),
    **{
        name: ([changed(name)], "entry 5 was changed")
        for name in ("actor", "action", "subject", "outcome", "detail", "digest")
    },
    "times": ([changed("times", 77)], "entry 5 was changed"),
    "id": ([changed("entry_id", 77777)], "entry 5 was changed"),
    "changed, with its leaf": ([changed("detail"), chain_anew(5)], "an entry from 0 to .* was changed"),
    "first entry": ([changed("detail", number=0)], "entry 0 was changed"),
    "removed": ([REMOVED], "entry 5 was removed"),
    "several removed": (["delete from audit_log where number in (5, 6, 7)"], "entries 5 to 7 were removed"),
    "removed and closed up": ([REMOVED, *shift(6, -1)], "entry 5 was changed or moved"),
    "removed and chained anew": (
        [REMOVED, *shift(6, -1), chain_anew(5)],
        "was changed, removed, inserted or moved: the checkpoint of",
    ),
    "inserted": ([*shift(5, 1), forge(5)], "entry 5 was changed or moved"),
    "inserted at the end": ([lambda recorded, session: session.execute(text(forge(audit.size(session))))], "inserted"),
    "reordered": (
        [changed("number", -1), changed("number", 5, 6), changed("number", 6, -1)],
        "entry 5 was changed or moved",
    ),
    "truncated": (["delete from audit_log where number >= 8"], "entries 8 to .* were removed: the newest checkpoint"),
    "truncated with its checkpoints": (cut(8), "entries 8 to .* were removed: the newest checkpoint"),
    "leaf": ([changed("leaf", "(select leaf from audit_log where number = 1)")], "entry 5"),
    "no leaf": ([changed("leaf", "null")], "entry 5 was changed"),
}


@pytest.mark.parametrize("name", every(3, OF_THE_LOG))
def test_an_edited_log_is_found_and_the_entry_named(recorded: Recorded, name: str) -> None:
    edits, expected = OF_THE_LOG[name]
    found = [problem for problem in recorded.problems(*edits) if not problem.startswith(("client", "round", "run"))]
    assert re.search(expected, "\n".join(found[:2])), found


def test_what_nobody_edited_is_right(recorded: Recorded) -> None:
    assert recorded.problems() == []


def test_a_changed_entry_with_its_own_leaf_is_found_by_its_tag_and_at_the_next_one(recorded: Recorded) -> None:
    def own_leaf(_: Recorded, session: Session) -> None:
        before, one = audit.chained(session, 4, 2)
        audit.chain(session, [(one.entry.entry_id, 5, replace(one.entry, detail="x").leaf(before.leaf))])

    found = recorded.problems(changed("detail"), own_leaf)
    assert found[0] == "entry 5 was changed: its MAC is not that of what it tells"
    assert found[1].startswith("entry 6 was changed or moved, or the entry before it was")


def test_a_row_that_cannot_be_read_is_named_and_the_others_are_verified(recorded: Recorded) -> None:
    if recorded.stage.served.database.engine.dialect.name != "sqlite":
        pytest.skip("PostgreSQL takes no such values")
    found = recorded.problems(changed("at", "'noon'"), changed("detail", number=9))
    assert [problem[:19] for problem in found] == ["entry 5 was changed", "entry 9 was changed"]


def test_checkpoints_of_another_key_or_size_are_named(recorded: Recorded) -> None:
    key = recorded.stage.served.home.log_key
    other = LogKey(federation_id=key.federation_id, key=Ed25519PrivateKey.generate())
    now = recorded.stage.clock()

    def exchange(signed: SignedEnvelope) -> Edit:
        return lambda _, session: session.add(Checkpoint(size=3, envelope=signed.SerializeToString()))

    [found] = recorded.problems(exchange(other.sign(3, bytes(32), now)))
    assert found.startswith("the checkpoint of 3 entries: a checkpoint is not signed by the log's key")
    found = recorded.problems(exchange(key.sign(4, bytes(32), now)))[0]
    assert found == "the checkpoint of 3 entries: it was signed over 4 entries"


def another_step(recorded: Recorded, session: Session) -> None:
    """The step of the first round, signed by another key."""
    recorded.sign_step(session, Ed25519PrivateKey.generate())


def same_step_again(recorded: Recorded, session: Session) -> None:
    """The step of the first round, signed again by the coordinator's key at another time."""
    recorded.sign_step(session, recorded.stage.served.home.signing_key, recorded.stage.clock())


def other_payload(recorded: Recorded, session: Session) -> None:
    """An assignment of the first round lets its member send a byte more, signed again by the coordinator's key."""
    phase = session.query(Phase).filter_by(round_id=recorded.first_round(session).round_id, number=0).one()
    row = session.query(Assignment).filter_by(phase_id=phase.phase_id, client_id="ann").one()
    key = recorded.stage.served.home.signing_key
    order = verify(SignedEnvelope.FromString(row.envelope), AssignmentManifest, key.public_key())
    order.max_payload_bytes += 1
    row.envelope = sign(order, key).SerializeToString()


def other_spec(recorded: Recorded, session: Session) -> None:
    session.get_one(Run, recorded.run).spec += b"\n"


ROUND = "(select round_id from rounds where run_id = 'RUN' and number = 0)"
ASSIGNED = f"select assignment_id from assignments join phases using (phase_id) where round_id = {ROUND}"
ACCEPTED = f"accepted and assignment_id in ({ASSIGNED})"
REPLY = f"(select min(reply_id) from replies where {ACCEPTED})"
ADDED = """insert into audit_log (at, actor, action, subject, outcome, detail, digest, times)
select at, actor, '{}', '{}', '', '', digest, 1 from audit_log where number = 1"""

OF_THE_RECORD: dict[str, tuple[Sequence[Edit], str]] = {
    "samples": ([f"update replies set samples = 9 where reply_id = {REPLY}"], "round .*/0: the reply of .*samples"),
    "refused": ([f"update replies set accepted = (1 = 0) where reply_id = {REPLY}"], "round .*/0: the .*: mismatch"),
    "reply removed": ([f"delete from replies where reply_id = {REPLY}"], "accepted reply to assignment .* not in the"),
    "step by another key": ([another_step], "round .*/0: the step: key-unknown"),
    "step signed again": ([same_step_again], "round .*/0: the step: no entry of the log tells of it"),
    "no step": ([f"update rounds set step = null where round_id = {ROUND}"], "round .*/0: the log tells of its step"),
    "model": ([f"update rounds set gram = 'x' where round_id = {ROUND}"], "round .*/0: the step: mismatch:gram"),
    "work that the rows do not need": ([other_payload], "round .*/0: ann may send 253 bytes; the rows have 252"),
    "specification": ([other_spec], "run .*: its specification is not the one"),
    "objectives of the run": (
        ["""update runs set objectives = '["another"]' where run_id = 'RUN'"""],
        "round .*/0: ann was asked for loss, which the record does not name",
    ),
    "metrics of the run": (
        ["""update runs set metrics = '[{"name": "auc", "better": "lower", "largest": 1}]' where run_id = 'RUN'"""],
        "round .*/0: ann was asked for other measurements than those of the run",
    ),
    "state of the run": (
        ["update runs set state = 'STOPPED' where run_id = 'RUN'"],
        "run .*: it is STOPPED, and the log",
    ),
    "key": (["update clients set signing_key = key_id::bytea where client_id = 'ann'"], "client ann: its signing key"),
    "client's state": (["update clients set state = 'REVOKED' where client_id = 'ann'"], "client ann: it is REVOKED"),
    "forgotten": (
        ["update clients set forgotten = enrolled where client_id = 'ann'"],
        "client ann: the log does not tell that it was forgotten",
    ),
    "revocation removed": ([logged("client.revoked", "ben")], "client ben: it is ACTIVE, and the log tells"),
    "decline removed": (
        ["update assignments set state = 'EXPIRED', reason = 'deadline', decline = null where reason = 'no-data'"],
        "decline of assignment .*: the log tells of it",
    ),
    "reason of a decline": (
        ["update assignments set reason = 'disk' where reason = 'no-data'"],
        "the decline of cleo .*mismatch:reason",
    ),
    "forged reply": (
        [ADDED.format(log_entries.ACCEPTED, "f" * 32)],
        f"reply to assignment {'f' * 32}: the log tells of it",
    ),
    "forged step": ([ADDED.format(log_entries.STEPPED, "abc/7")], "step of round abc/7: the log tells of it"),
    "forged run": ([ADDED.format(log_entries.SUBMITTED, "abc")], "run abc: the log tells of it"),
    "administrator": (
        [
            "insert into certificates (serial, subject, certificate, not_before, not_after) select 'abc',"
            " 'fedpareto://test/admin/eve', key_id::bytea, enrolled, enrolled from clients where client_id = 'ann'"
        ],
        "administrator eve: no entry of the log tells of the certificate abc",
    ),
    "roles of an administrator": (
        ["""update administrators set roles = '["operator"]' where name = 'admin'"""],
        "administrator admin: no entry of the log tells of its signing key with these roles",
    ),
    "revocation of an administrator removed": (
        [logged("admin.revoked", "admin")],
        "administrator admin: the log tells of its revocation, and the record says otherwise",
    ),
}


def test_each_metric_of_a_round_that_is_edited_is_found_and_the_round_named(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = watched(monkeypatch)
    assert recorded.problems() == []
    assert len(compared) == 2
    check_exact(compared)
    numbers = compared[0][1]
    for name, value in [("accuracy/mean", 1.0), ("stationarity", 0.0), ("entropy", 1.0), ("made-up", 1.0)]:

        def edit(recorded: Recorded, session: Session, changes: dict[str, float]) -> None:
            recorded.first_round(session).metrics = changes

        changed = {other: number for other, number in numbers.items() if other != "evaluated"} | {name: value}
        found = recorded.problems(partial(edit, changes=changed))
        assert len(found) == 1
        assert found[0].startswith(f"round {recorded.run}/0: the record ")


def test_without_blobs_what_follows_from_signed_numbers_is_verified_and_k_is_all_that_the_rule_needs(
    recorded: Recorded, tmp_path: Path
) -> None:
    empty, with_k = DirectoryStore(tmp_path / "empty"), DirectoryStore(tmp_path / "k")
    for row in recorded.stage.rounds(recorded.run):
        with_k.put(recorded.stage.blobs.read(row.gram or ""))
    assert recorded.problems(blobs=empty) == recorded.problems(blobs=with_k) == []

    def edited(name: str, blobs: BlobStore) -> bool:
        def edit(recorded: Recorded, session: Session) -> None:
            row = recorded.first_round(session)
            row.metrics = {**row.metrics, name: 0.5}

        return [f"the record says {name} = 0.5" in problem for problem in recorded.problems(edit, blobs=blobs)] == [
            True
        ]

    assert [edited(name, empty) for name in ("accuracy/mean", "entropy", "descent_min")] == [True, False, False]
    assert [edited(name, with_k) for name in ("accuracy/mean", "entropy", "descent_min")] == [True] * 3


@pytest.mark.parametrize("name", every(3, OF_THE_RECORD))
def test_an_edited_record_is_found_and_the_row_named(recorded: Recorded, name: str) -> None:
    edits, expected = OF_THE_RECORD[name]
    if recorded.stage.served.database.engine.dialect.name == "sqlite":
        edits = [one.replace("key_id::bytea", "cast(key_id as blob)") if isinstance(one, str) else one for one in edits]
    found = recorded.problems(*edits)
    assert any(re.search(expected, problem) for problem in found), found


def test_the_command_lists_entries_and_follows_them(recorded: Recorded) -> None:
    entries = [json.loads(line) for line in recorded.command("--json").splitlines()]
    assert [entry["number"] for entry in entries] == list(range(len(entries)))
    actions = {entry["action"] for entry in entries}
    assert actions >= {
        *("configuration.set", "key.set", "admin.issued", "Enroll", "run.submitted", "assignment.issued"),
        *("reply.accepted", "reply.refused", "assignment.declined", "round.stepped", "run.completed", "Submit"),
    }
    told = {"assignment.issued", "reply.accepted", "reply.refused", "round.stepped", "run.submitted", "Enroll"}
    assert all(entry["digest"].startswith("blake3:") for entry in entries if entry["action"] in told)
    lines = recorded.command("--actor", "ann", "--since", "1h").splitlines()
    assert lines
    assert all("fedpareto://test/client/ann" in line for line in lines)
    assert recorded.command("--since", "2030-01-01") == ""
    for never in ("soon", "999999d", "0001-01-01T00:00+14:00"):
        assert "expected 90m, 12h, 7d, or a time" in recorded.command("--since", never, code=1)


def test_the_command_verifies_what_a_daemon_serves_and_names_what_was_edited(recorded: Recorded) -> None:
    output = recorded.command("verify")
    assert re.search(r"\d+ entries, 2 rounds and \d+ blobs verified; the newest checkpoint covers \d+ entries", output)
    stage = recorded.stage
    model = stage.run(recorded.run).model
    path = blob_file(stage.blobs, model)
    whole = path.read_bytes()
    with stage.served.database.begin() as session:
        session.execute(text("update audit_log set detail = 'edited' where number = 2"))
        session.execute(text("update clients set state = 'REVOKED' where client_id = 'ben'"))
    path.write_bytes(bytes(len(whole)))
    try:
        output = recorded.command("verify", "--json", code=1)
        document = json.loads(output[: output.rindex("}") + 1])
        problems = "\n".join(document["problems"])
        assert "entry 2 was changed or moved" in problems
        assert "client ben: it is REVOKED, and the log does not tell of its revocation" in problems
        assert f"blob {model}: the bytes of blob" in problems
        assert len(document["problems"]) == 3
        assert "blob" not in recorded.command("verify", "--skip-blobs", code=1).replace("no blobs", "")
    finally:
        path.write_bytes(whole)
        with stage.served.database.begin() as session:
            session.execute(text("update clients set state = 'ACTIVE' where client_id = 'ben'"))


def test_entries_are_in_the_log_within_a_second_of_their_facts(recorded: Recorded) -> None:
    stage = recorded.stage
    before = stage.look(audit.size)
    stage.submit(spec("another", "nobody-offers-this"), paused=True)
    wait_for(lambda: stage.look(audit.size) > before, "the submission to be chained")


def test_each_wrong_round_of_each_run_is_named(recorded: Recorded) -> None:
    run, players = recorded.stage.begin("ann", "ben", rounds=2)
    recorded.stage.complete(run, *players)
    found = recorded.problems("update rounds set metrics = '{}' where state = 'COMPLETED'")
    found = [problem for problem in found if problem.startswith("round ")]  # a test before has left an edited log
    assert [problem.partition(": ")[0] for problem in found] == sorted(
        f"round {one}/{number}" for one in (run, recorded.run) for number in (0, 1)
    )
    assert all("the record lacks" in problem for problem in found)


def test_rounds_that_are_under_way_have_no_problems(recorded: Recorded) -> None:
    run, players = recorded.stage.begin("ann", "ben", more="selection.minimum = 2")
    for player in players:
        player.reply(player.order())
        assert recorded.of_rounds() == []  # one still trains; and then, there is a step that nobody has measured yet
    players[0].reply(players[0].order())
    assert recorded.of_rounds() == []
    recorded.stage.complete(run, *players)
