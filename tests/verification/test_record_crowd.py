"""Rounds of too few clients, and members that were selected and revoked: what a record shows of who was asked."""

from collections.abc import Collection
from functools import partial
from pathlib import Path

import pytest

from coordinator.rounds import conversation
from coordinator.rounds.fleets.base import Question
from coordinator.rounds.fleets.remote import RemoteFleet
from federation.record.merkle import ranges_around, root_from
from federation.record.metric_definitions import Basis, basis
from federation.v1.common_pb2 import AssignmentManifest, CheckpointManifest
from federation.v1.record_pb2 import LogNode, LogRecord, RoundRecord
from tests.stage import Stage, spec
from tests.verification.record_vectors import change, vector
from tests.verification.scene import Edited, checked, command, exported, leaf
from verification.errors import VerificationError


def hide(log: LogRecord, actions: Collection[str], subjects: Collection[str] = ()) -> None:
    """Hides entries of these actions, or about these subjects, in nodes, as everybody can: no signature changes."""
    known = {(node.start, node.stop): node.hash for node in log.nodes}
    known |= {(entry.number, entry.number + 1): leaf(entry) for entry in log.entries}
    shown = [entry for entry in log.entries if entry.action not in actions and entry.subject not in subjects]
    assert len(shown) < len(log.entries)
    sizes = [CheckpointManifest.FromString(one.manifest).size for one in log.checkpoints]
    places = sorted(ranges_around([entry.number for entry in shown], sizes))
    nodes = [LogNode(start=start, stop=stop, hash=root_from(known, start, stop)) for start, stop in places]
    kept = LogRecord(key=log.key, checkpoints=log.checkpoints, entries=shown, nodes=nodes)
    log.CopyFrom(kept)


@pytest.mark.full
def test_a_client_that_was_revoked_after_its_selection_is_no_reason_to_refuse_a_round(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, issue, late = stage.task(), RemoteFleet._issue, f"ned-{stage.count}"
    players = stage.cast(task, "ann", "ben", late)
    revoked: list[str] = []

    def later(fleet: RemoteFleet, question: Question) -> int:
        if not revoked:
            revoked.append(late)
            stage.revoke(late, "left")
        return issue(fleet, question)

    monkeypatch.setattr(RemoteFleet, "_issue", later)
    run = stage.submit(spec(f"crowd-{stage.count}", task, algorithm="fedavg", more="selection.minimum = 3"))
    stage.complete(run, *players[:2])
    record = Edited.of(exported(stage, run, tmp_path / "run.fedpareto"))
    assert len(checked(record, tmp_path)) == 1
    with pytest.raises(VerificationError, match=r"2 clients were asked; by selection\.minimum = 3, at least 3 are"):
        checked(record.with_log(lambda log: hide(log, ["client.revoked"])), tmp_path)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("selection.quorum = 1.0", "1 of 2 members replied to train; the quorum of the specification is at least 2"),
        (
            'selection = { required = ["ben"], quorum = 0.1 }',
            "the reply of ben to train does not count, and selection.required names it",
        ),
    ],
)
def test_a_coordinator_that_is_content_with_fewer_clients_is_named(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str, says: str
) -> None:
    monkeypatch.setattr(conversation, "replies_needed", lambda *_: 1)
    monkeypatch.setattr(conversation, "_check_has", lambda *_: None)
    run, (ann, ben) = stage.begin("ann", "ben", algorithm="fedavg", more=more)
    ann.reply(ann.order())
    ben.decline(ben.order(), "no-data")
    stage.complete(run, ann, ben)
    with pytest.raises(VerificationError, match=says):
        checked(Edited.of(exported(stage, run, tmp_path / "run.fedpareto")), tmp_path)


def test_everybody_can_hide_a_message_that_nothing_else_names(tmp_path: Path) -> None:
    """As docs/reference/verify.md says under "What it cannot show"."""

    def without_declines(record: RoundRecord) -> None:
        for exchange in record.phases[0].exchanges:
            exchange.ClearField("decline")

    whole = Edited.of(vector("interrupted"))
    hidden = whole.with_round(0, without_declines).with_log(lambda log: hide(log, ["assignment.declined"]))
    assert len(checked(hidden, tmp_path)) == 2
    with pytest.raises(VerificationError, match="no entry of the audit log tells of it"):
        checked(whole.with_log(lambda log: hide(log, ["reply.accepted"])), tmp_path)
    with pytest.raises(VerificationError, match="the step: no entry of the audit log tells of it"):
        checked(whole.with_log(lambda log: hide(log, ["round.stepped"])), tmp_path)


@pytest.mark.parametrize("every", [1, 2, 0])
def test_each_round_whose_evaluation_was_removed_is_named_and_the_run_is_not_wholly_verified(
    stage: Stage, tmp_path: Path, every: int
) -> None:
    run, players = stage.begin("ann", "ben", rounds=3, algorithm="fedavg", more=f"evaluate.every = {every}")
    stage.complete(run, *players)
    whole = Edited.of(exported(stage, run, tmp_path / "run.fedpareto"))
    assert [one.absent for one in checked(whole, tmp_path)] == [()] * 3
    hidden = list[str]()

    def without_evaluation(record: RoundRecord) -> None:
        measuring = [phase for phase in record.phases if not phase.decides]
        for phase in measuring:
            orders = (AssignmentManifest.FromString(one.assignment.manifest) for one in phase.exchanges)
            hidden.extend(order.assignment_id for order in orders)
            phase.ClearField("exchanges")
        for name in list(record.metrics):
            if basis(name) is Basis.MODEL:
                del record.metrics[name]
        if measuring and every == 2:
            record.metrics["evaluated"] = 0.0  # as if nobody had been there
        elif measuring:
            del record.phases[-1]

    edited = whole
    for number in range(3):
        edited = edited.with_round(number, without_evaluation)
    edited = edited.with_log(lambda log: hide(log, (), hidden))
    due = [(bool(every) and number % every == 0) or number == 3 for number in (1, 2, 3)]
    assert [bool(one.absent) for one in checked(edited, tmp_path)] == due
    code, said = command("verify", str(edited.write(tmp_path / "edited")))
    assert (code, "everything" in said) == (3, False)
    named = [f"round {number}: the record lacks an evaluation" in said for number in range(3)]
    assert named == due


def test_hashes_of_the_log_have_32_bytes(tmp_path: Path) -> None:
    """Otherwise bytes could move from one part of what is hashed to the next, and the hash would stay the same."""

    def longer_node(log: LogRecord) -> None:
        log.nodes[0].hash += b"0"

    def shorter_node(log: LogRecord) -> None:
        log.nodes[-1].hash = log.nodes[-1].hash[:-1]

    def longer_previous(log: LogRecord) -> None:
        log.entries[0].previous += b"0"

    whole = Edited.of(vector("interrupted"))
    for edit in (longer_node, shorter_node, longer_previous):
        with pytest.raises(VerificationError, match=r"has a hash of 3[13] bytes; expected 32"):
            checked(whole.with_log(edit), tmp_path)


def test_a_run_that_its_measurements_have_stopped_is_complete(stage: Stage, tmp_path: Path) -> None:
    more = 'selection.minimum = 2\nstop = { metric = "loss", target = 1e9, split = "test" }'
    run, players = stage.begin("ann", "ben", rounds=3, algorithm="fedavg", more=more)
    stage.complete(run, *players)
    record = Edited.of(exported(stage, run, tmp_path / "run.fedpareto"))
    assert len(checked(record, tmp_path)) == 1
    for value in (1e10, float("nan")):
        other = record.with_round(0, partial(change, edit={"metrics": {"stop/value": value}}))
        with pytest.raises(VerificationError, match=r"the run is COMPLETED after 1 of 3 rounds|the record says"):
            checked(other, tmp_path)
