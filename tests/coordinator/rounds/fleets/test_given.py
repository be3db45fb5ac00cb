"""Assignments that a coordinator has given: known on the stream that they were sent on, until they have ended."""

import asyncio
from datetime import UTC, datetime

import pytest
from sqlalchemy.orm import Session

from coordinator.rounds.fleets.deliveries import open_assignments_of
from coordinator.rounds.fleets.presence import Assigned, AttendanceStream, Cancelled, Presence
from coordinator.services import federation
from federation.v1.common_pb2 import AssignmentManifest, Input, SignedEnvelope
from tests.running import refused
from tests.stage import Stage

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)


def assigned(name: str, base: str = "base", *inputs: str) -> Assigned:
    order = AssignmentManifest(assignment_id=name, base_model=base, inputs=[Input(digest=one) for one in inputs])
    return Assigned(name, SignedEnvelope(manifest=order.SerializeToString()).SerializeToString())


def stream(client: str) -> AttendanceStream:
    return AttendanceStream(
        client_id=client, tasks={}, objectives={}, loop=asyncio.new_event_loop(), last_seen=NOON, outbox=asyncio.Queue()
    )


def test_an_assignment_and_its_blobs_are_known_to_its_client_alone_until_it_has_ended() -> None:
    presence, ann, ben = Presence(), stream("ann"), stream("ben")
    presence.join(ann)
    presence.join(ben)
    for name in ("one", "two", "three"):
        presence.say("ann", assigned(name, f"base of {name}", f"input of {name}"))
    assert [presence.offering("ann", f"{kind} of one") for kind in ("base", "input")] == ["one", "one"]
    assert presence.offering("ann", "another") == presence.offering("ben", "base of one") == ""
    known = presence.given("ann", "one")
    assert known is not None
    assert known.base_model == "base of one"
    assert presence.given("ben", "one") is None
    presence.say("ann", Cancelled("one", "deadline"))
    presence.forget("ann", "two")
    presence.forget("nobody", "three")
    assert [presence.given("ann", name) is None for name in ("one", "two", "three")] == [True, True, False]
    presence.join(stream("ann"))  # a newer stream: it gets what is open by the record
    assert presence.given("ann", "three") is None
    assert presence.offering("ann", "base of three") == ""


def test_what_ends_while_a_stream_begins_is_not_known_though_it_was_open_when_it_was_read() -> None:
    presence, ann = Presence(), stream("ann")
    presence.join(ann)
    read = [assigned(name) for name in ("answered", "cancelled", "open", "later")]
    presence.forget("ann", "answered")
    presence.say("ann", Cancelled("cancelled", "deadline"))
    ann.note_open(read)
    assert sorted(ann.orders) == ["later", "open"]
    presence.forget("ann", "later")
    assert list(ann.orders) == ["open"]


def test_what_is_answered_while_its_client_comes_back_is_forgotten(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (ann, ben) = stage.begin("ann", "ben", more="selection.minimum = 2\nevaluate.every = 0")
    order = ann.order()
    read: list[list[Assigned]] = []

    def answered_meanwhile(session: Session, client_id: str) -> list[Assigned]:
        read.append(open_assignments_of(session, client_id))
        assert ann.submit(order).accepted
        return read[-1]

    monkeypatch.setattr(federation, "open_assignments_of", answered_meanwhile)
    ann.leave()
    ann._seen.clear()
    ann.attend(**{order.task: 10})
    assert ann.order() == order  # it is sent again, and its client knows that it has answered
    assert [[one.assignment_id for one in found] for found in read] == [[order.assignment_id]]
    assert stage.parts.presence.given("ann", order.assignment_id) is None
    ben.reply(ben.order())


def test_what_has_ended_is_forgotten_and_a_late_reply_is_refused_before_its_payload(stage: Stage) -> None:
    run, (ann, ben) = stage.begin("ann", "ben", more="selection.minimum = 2\nevaluate.every = 0")
    orders = {player: player.order() for player in (ann, ben)}
    known = {player: stage.parts.presence.given(player.name, order.assignment_id) for player, order in orders.items()}
    assert known == orders
    ann.reply(orders[ann])
    assert stage.parts.presence.given("ann", orders[ann].assignment_id) is None
    assert ann.submit(orders[ann]).accepted  # the stored receipt of the same reply
    stage.stop_run(run)
    stage.wait_outcome(run, "ben", "CANCELLED")
    assert stage.parts.presence.given("ben", orders[ben].assignment_id) is None
    with refused("FAILED_PRECONDITION", "assignment-closed"):
        ben.submit(orders[ben])
