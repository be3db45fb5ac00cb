"""What goes wrong at the worst moment: a stop between two looks, a database that fails, a client revoked in between.

Moments are found in the statements that a conductor sends to its database; nothing is left to chance.
"""

import errno
import logging
import os
import threading
from contextlib import suppress

import grpc
import numpy as np
import pytest
from sqlalchemy import select, text

from coordinator.members.membership import CLIENT_REVOKED
from federation.digests import digest
from federation.record.log_entries import ACCEPTED
from federation.vectors import to_bytes
from storage.models import Assignment, AuditEntry, Client, Model, Phase, Round
from storage.states import AssignmentState, ClientState, RoundState, RunState
from tests.coordinator.rounds.scene import at, fail, once, wait_rest
from tests.coordinator.scene import begun
from tests.few import few
from tests.running import refused, wait_for
from tests.stage import LAYOUT, MODEL, Player, Stage, reply, vector
from tests.storage.scene import blob_file


def begin(stage: Stage) -> tuple[str, list[Player]]:
    """A paused run of ann and ben, whose models no other run makes."""
    more = "selection.minimum = 2"
    return stage.begin("ann", "ben", paused=True, seed=stage.count, algorithm="fedavg", more=more)


def blocked(stage: Stage) -> bool:
    """Whether somebody waits for a lock. SQLite cannot be asked: there everybody waits for the one writer."""
    if stage.served.database.url.startswith("sqlite"):
        return True
    waiting = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    return bool(stage.look(lambda session: session.scalar(waiting)))


def states(stage: Stage, run: str) -> set[str]:
    """The states of all rounds, phases and assignments of a run."""
    parts = (select(Round.state), select(Phase.state).join(Round), select(Assignment.state).join(Phase).join(Round))
    with stage.served.database.read() as session:
        return {str(state) for part in parts for state in session.scalars(part.where(Round.run_id == run))}


# What a conductor reads outside of its own transactions: the beginning of the statement, how many such ones come
# before it, and what the clients do.
LOOKS = {
    "before the first phase": ("SELECT clients", 3, "reply"),
    "while clients train": ("SELECT phases", 2, "reply"),
    "when enough replies are read": ("SELECT replies", 0, "reply"),
    "when too few replies are read": ("SELECT replies", 0, "decline"),
    "when the evaluation is read": ("SELECT replies", 3, "reply"),
}


@pytest.mark.parametrize("word", ["stop", pytest.param("pause", marks=pytest.mark.full)])
@few("before the first phase", "while clients train", "when too few replies are read")
@pytest.mark.parametrize("look", LOOKS)
def test_a_word_between_two_looks_of_the_conductor_is_heard(
    stage: Stage, caplog: pytest.LogCaptureFixture, word: str, look: str
) -> None:
    run, players = begin(stage)
    statement, before, reaction = LOOKS[look]
    speak = stage.stop_run if word == "stop" else stage.pause
    spoken = threading.Event()
    looks = []

    def look_up() -> None:
        looks.append(statement)
        if len(looks) == before + 1:
            speak(run)
            spoken.set()

    def moment() -> bool:
        for player in players:
            for _, order in player.orders():
                if reaction == "decline":
                    player.decline(order, "busy")
                    continue
                with suppress(grpc.RpcError):  # the run was stopped in between
                    player.reply(order)
        return spoken.is_set()

    with caplog.at_level(logging.ERROR), at(f"run-{run}", statement, look_up):
        stage.resume(run)
        wait_for(moment, "the moment")
        wait_rest(run)
    # Alerts about the runs of earlier tests may come late.
    assert [record.message for record in caplog.records if record.name != "coordinator.alerts.maker"] == []
    if word == "stop":
        assert stage.run(run).state is RunState.STOPPED
        assert not states(stage, run) & {"OPEN", "STEPPED"}
    else:
        assert stage.run(run).state is RunState.PAUSED
        assert stage.rounds(run)[:1] == [] or stage.rounds(run)[0].ended is None
        stage.resume(run, *players)


# --- the database fails


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO phases",
        *(
            pytest.param(statement, marks=pytest.mark.full)
            for statement in ("UPDATE rounds", "SELECT runs", "INSERT INTO rounds", "SELECT phases", "UPDATE phases")
        ),
    ],
)
def test_a_database_that_fails_for_a_moment_fails_no_run(stage: Stage, statement: str) -> None:
    run, players = begin(stage)
    with at(f"run-{run}", statement, once(fail)) as seen:
        stage.resume(run, *players)
    assert seen
    assert stage.rounds(run)[0].state is RoundState.COMPLETED
    assert len(stage.evaluations(run)) == 4


@pytest.mark.parametrize(
    "statement",
    ["UPDATE rounds", *(pytest.param(one, marks=pytest.mark.full) for one in ("INSERT INTO rounds", "SELECT phases"))],
)
def test_descriptors_that_run_out_for_a_moment_neither_pause_nor_fail_a_run(
    stage: Stage, statement: str, caplog: pytest.LogCaptureFixture
) -> None:
    run, players = begin(stage)

    def exhaust() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with caplog.at_level(logging.ERROR), at(f"run-{run}", statement, once(exhaust)) as seen:
        stage.resume(run, *players)
    assert len(seen) > 1
    assert [record.message for record in caplog.records if record.exc_info] == []
    assert stage.served.entries(subject=run, action="run.paused") == []


def test_a_database_that_fails_while_a_failure_is_recorded_leaves_no_run_without_a_conductor(stage: Stage) -> None:
    run, orders = begun(stage, seed=stage.count)
    blob_file(stage.blobs, digest(MODEL)).rename(stage.served.home.directory / "lost")
    with at(f"run-{run}", "INSERT INTO audit_log", once(fail)) as seen:
        reply(orders)
        assert digest(MODEL) in stage.wait_state(run, RunState.PAUSED).reason
    assert seen
    (stage.served.home.directory / "lost").rename(stage.blobs.root / "blake3" / digest(MODEL)[7:9] / digest(MODEL)[9:])
    stage.resume(run, *orders)


def test_a_coordinator_stops_while_its_database_fails(stage: Stage) -> None:
    run, players = begin(stage)
    with at(f"run-{run}", "INSERT INTO rounds", fail) as seen:
        stage.resume(run)
        wait_for(lambda: seen, "the failure")
        stage.stop()
    stage.start()
    stage.come_back()
    stage.play(run, *players)


def test_a_watcher_that_breaks_harms_no_run(stage: Stage) -> None:
    def broken(run_id: str) -> None:
        raise RuntimeError("broken")

    unwatch = stage.parts.changes.watchers.listen(broken)
    run, players = begin(stage)
    stage.resume(run, *players)
    unwatch()


# --- two at once


def test_an_update_that_is_accepted_while_its_run_is_stopped_stays_accepted(stage: Stage) -> None:
    run, _ = begun(stage, seed=stage.count)
    stopped = threading.Thread(target=stage.stop_run, args=(run,))
    with stage.served.database.begin() as session:  # as the intake does it
        held = select(Assignment).where(Assignment.assignment_id == stage.assignments(run)["ann"].assignment_id)
        ann = session.scalars(held.with_for_update()).one()
        ann.state = AssignmentState.FULFILLED
        session.flush()
        stopped.start()
        wait_for(lambda: blocked(stage), "the stop to wait")
    stopped.join()
    assert stage.outcomes(run) == {"ann": ("FULFILLED", ""), "ben": ("CANCELLED", "run-ended")}


def test_a_client_that_is_revoked_while_a_phase_is_opened_is_not_waited_for(stage: Stage) -> None:
    leaver, more = f"leaver-{stage.count}", "selection.minimum = 2\nevaluate.every = 0"
    run, (ann, gone) = stage.begin("ann", leaver, more=more, paused=True)
    revoked = threading.Thread(target=stage.revoke, args=(gone.name,))

    def revoke() -> None:
        revoked.start()
        wait_for(lambda: not revoked.is_alive() or blocked(stage), "the revocation")

    with at(f"run-{run}", "INSERT INTO assignments", once(revoke)):
        stage.resume(run)
        order = ann.order()
    revoked.join()
    stage.wait_outcome(run, gone.name, "CANCELLED")
    ann.reply(order)
    stage.play(run, ann)


def test_a_revocation_waits_for_a_reply_that_is_being_recorded_so_that_no_reply_is_accepted_after_it(
    stage: Stage,
) -> None:
    leaver = f"leaver-{stage.count}"
    run, (ann, gone) = stage.begin("ann", leaver, more="selection.minimum = 2\nevaluate.every = 0")
    mine, last = ann.order(), gone.order()
    revoked = threading.Thread(target=stage.revoke, args=(gone.name,))

    def revoke() -> None:
        revoked.start()
        wait_for(lambda: not revoked.is_alive() or blocked(stage), "the revocation to wait")

    # The revocation may end the call before its receipt is sent.
    with at("", "INSERT INTO replies", once(revoke)), suppress(grpc.RpcError):
        gone.reply(last)
    revoked.join()
    told = select(AuditEntry.action).where(
        AuditEntry.subject.in_([last.assignment_id, leaver]), AuditEntry.action.in_([ACCEPTED, CLIENT_REVOKED])
    )
    entries = stage.look(lambda session: session.scalars(told.order_by(AuditEntry.entry_id)).all())
    assert entries == [ACCEPTED, CLIENT_REVOKED]
    ann.reply(mine)
    stage.play(run, ann)


def test_assignments_that_a_failed_revocation_left_open_are_cancelled_by_the_housekeeper(stage: Stage) -> None:
    leaver = f"leaver-{stage.count}"
    more = "selection.minimum = 2\nselection.quorum = 0.5\nevaluate.every = 0"
    run, (ann, gone) = stage.begin("ann", leaver, more=more)
    mine, _ = ann.order(), gone.order()
    with at("", "UPDATE assignments", once(fail)) as seen, refused("UNAVAILABLE", "database"):
        stage.revoke(leaver)
    assert seen
    assert stage.look(lambda session: session.get_one(Client, leaver).state) is ClientState.REVOKED
    ann.reply(mine)
    keeper = stage.parts.housekeeper
    keeper.tidy()
    assert stage.outcomes(run) == {"ann": ("FULFILLED", ""), leaver: ("CANCELLED", "client-revoked")}
    ended = stage.assignments(run)[leaver].ended
    stage.play(run, ann)
    keeper.tidy()
    assert stage.assignments(run)[leaver].ended == ended


def test_a_model_that_two_runs_make_at_the_same_time_is_recorded_once(stage: Stage) -> None:
    run, orders = begun(stage, seed=stage.count)
    base = np.frombuffer(MODEL[-4 * LAYOUT.size :], np.float32).astype(np.float64)
    step = np.array([0.5, 0.5]) @ np.array([vector(p.name, o) for p, o in orders.items()], dtype=np.float64)
    made = digest(to_bytes(LAYOUT, (base - step).astype(np.float32)))
    with at(f"run-{run}", "INSERT INTO models", lambda: None) as inserting:
        with stage.served.database.begin() as session:
            session.add(Model(digest=made, size=1, parameters=LAYOUT.size, created=stage.clock()))
            session.flush()
            if stage.served.database.url.startswith("postgresql"):  # with SQLite nobody replies in between
                reply(orders)
                wait_for(lambda: inserting and blocked(stage), "the run to make it too")
        if not inserting:
            reply(orders)
        stage.play(run, *orders)
    assert stage.run(run).model == made


def test_an_evaluation_waits_for_those_who_come_back_after_a_restart(stage: Stage) -> None:
    run, orders = begun(stage, seed=stage.count)
    with at(f"run-{run}", "INSERT INTO phases", fail) as seen:
        reply(orders)
        wait_for(lambda: seen, "the evaluation to be opened, in vain")
        stage.stop()
    stage.start()
    stage.come_back()
    stage.play(run, *orders)
    assert {client for client, _ in stage.evaluations(run)} == {"ann", "ben"}
