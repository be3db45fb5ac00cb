"""Planted bugs: small changes of the product's behaviour, each of which the checks must find."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select, true
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from coordinator.clock import SteadyClock
from coordinator.members import departures
from coordinator.members.access.known_members import KnownMember, KnownMembers
from coordinator.rounds import conductor, finish, opening, selection, signed_results
from coordinator.rounds.fleets import deliveries, remote
from coordinator.rounds.fleets.base import Fleet, RunFacts
from coordinator.rounds.fleets.remote import RemoteFleet
from coordinator.rounds.replies import intake
from coordinator.rounds.replies.evidence import Evidence
from coordinator.rounds.replies.group_commit import GroupCommit
from coordinator.rounds.replies.intake import Admission, Intake
from coordinator.rounds.replies.uploads import Upload
from coordinator.rounds.runs import private
from coordinator.rounds.runs.run_states import RunStates
from federation.aggregation.metrics.run_metrics import RunMetrics
from federation.aggregation.phases import PhaseReply, Replies
from federation.refusals import Refusal
from federation.spec.client_sections import SelectionSpec
from federation.v1.common_pb2 import SignedEnvelope
from storage import audit, models
from storage.models import Client, Reply, Round, Run
from storage.records import ConversationFacts, RunMemory
from storage.states import ClientState, RoundState
from tests.simulated import process
from worker.connection.starts import KnownStarts, Starts

Plant = Callable[[pytest.MonkeyPatch], None]


def a_receipt_before_its_commit(patch: pytest.MonkeyPatch) -> None:
    """The receipt of a reply is given first; the reply is recorded a second later."""
    record = Intake.record

    def early(self: Intake, admission: Admission, problem: Refusal | None) -> SignedEnvelope:
        _later(self._database, lambda: record(self, admission, problem))
        return self._receipt(admission, problem, self._clock())

    patch.setattr(Intake, "record", early)


def a_receipt_before_the_commit_of_its_group(patch: pytest.MonkeyPatch) -> None:
    """The receipts of a group are given when its replies are written; its transaction may fail afterwards."""
    commit = GroupCommit._commit_all

    def early(self: GroupCommit[Any, Any], own: Any) -> None:
        given: dict[Any, Any] = {}
        write = self._write

        def noted(session: Session, items: Sequence[Any]) -> Sequence[Any]:
            results = write(session, items)
            given.update(zip(map(id, items), results, strict=True))
            return results

        waiting = [*self._waiting]
        self._write = noted
        try:
            commit(self, own)
        finally:
            self._write = write
        for place in waiting:
            if place.error is not None and id(place.item) in given:
                place.error, place.result = None, given[id(place.item)]

    patch.setattr(GroupCommit, "_commit_all", early)


def a_refusal_that_ends_its_group(patch: pytest.MonkeyPatch) -> None:
    """If one reply of a group is refused, nothing of the group is recorded, and all get its refusal."""
    commit = GroupCommit._commit_all

    def together(self: GroupCommit[Any, Any], own: Any) -> None:
        write, waiting = self._write, [*self._waiting]

        def all_or_none(session: Session, items: Sequence[Any]) -> Sequence[Any]:
            results = write(session, items)
            refused = [result for result in results if isinstance(result, Refusal)]
            if not refused or len(items) == 1:
                return results
            session.rollback()
            return [refused[0]] * len(items)

        self._write = all_or_none
        try:
            commit(self, own)
        finally:
            self._write = write
        assert all(place.ended for place in waiting)

    patch.setattr(GroupCommit, "_commit_all", together)


def rights_past_a_revocation(patch: pytest.MonkeyPatch) -> None:
    """A member that is known stays known, its reply is recorded as if it were active, and its assignments end late."""
    standing, end_revoked = Intake._standing, RunStates.end_revoked

    def found(self: KnownMembers, serial: str) -> KnownMember | None:
        return self._memory[1].get(serial)

    def always(self: Intake, session: Session, locked: Any, *others: Any) -> Any:
        active = SimpleNamespace(**{**locked._mapping, "member": ClientState.ACTIVE})
        return standing(self, session, active, *others)  # type: ignore[arg-type]

    patch.setattr(KnownMembers, "find", found)
    patch.setattr(Intake, "_standing", always)
    patch.setattr(RunStates, "end_revoked", lambda self: _later(self._database, lambda: end_revoked(self)))


def a_reply_that_leaves_its_assignment_open(patch: pytest.MonkeyPatch) -> None:
    """An accepted reply is recorded, and its assignment stays open."""
    patch.setattr(intake, "end_open_assignments", lambda *_: None)


def a_sum_in_order_of_arrival(patch: pytest.MonkeyPatch) -> None:
    """Updates are summed in the order in which they were recorded."""

    class Unsorted(Replies):
        def __init__(self, replies: Sequence[PhaseReply], **others: Any) -> None:
            super().__init__(replies, **others)
            self._replies = tuple(replies)

    replies = Evidence.replies

    def arrived(self: Evidence, database: Any, *others: Any) -> list[PhaseReply]:
        with database.read() as session:
            order = session.scalars(select(Reply.envelope_digest).order_by(Reply.reply_id)).all()
        return sorted(replies(self, database, *others), key=lambda reply: order.index(reply.envelope))

    patch.setattr(remote, "Replies", Unsorted)
    patch.setattr(Evidence, "replies", arrived)


def a_round_counted_twice(patch: pytest.MonkeyPatch) -> None:
    """After a restart, a round that has made its step begins anew, under the next number."""
    _at_a_stepped_round(patch, lambda fleet, current: opening._begin_round(fleet, current.number + 1))


def an_evaluation_that_a_restart_skips(patch: pytest.MonkeyPatch) -> None:
    """After a restart, a round that has made its step is completed without its evaluation."""

    def completed(fleet: Fleet, current: Round) -> Round | None:
        finish.complete_round(fleet, current, finish.EvaluationFindings())
        return opening.open_round(fleet)

    _at_a_stepped_round(patch, completed)


def an_upload_accepted_twice(patch: pytest.MonkeyPatch) -> None:
    """A reply is recorded without another look at its assignment: the same upload may have come twice at once."""
    record, closed = Intake.record, Intake._closed

    def careless(self: Intake, admission: Admission, problem: Refusal | None) -> SignedEnvelope:
        patch.setattr(Intake, "_closed", lambda *_: None)
        try:
            return record(self, admission, problem)
        finally:
            patch.setattr(Intake, "_closed", closed)

    patch.setattr(Intake, "record", careless)
    patch.setattr(intake, "_stored_receipt", lambda *_: None)


def a_decline_that_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A decline is logged, and its assignment stays open."""
    patch.setattr(intake, "end_assignment", lambda *_: None)


def a_lost_revocation(patch: pytest.MonkeyPatch) -> None:
    """The reply of a member that is revoked before the step counts."""
    patch.setattr(RemoteFleet, "_leave_out_revoked", lambda *_: None)
    patch.setattr(signed_results, "revoked_clients", lambda _: frozenset())


def a_secret_used_again(patch: pytest.MonkeyPatch) -> None:
    """The sessions of a later attempt at a private round have the nonces of the first."""
    settle = private._settle

    def same(fleet: Fleet, attempt: str, *others: Any) -> Any:
        return settle(fleet, attempt.rpartition("\0")[0], *others)

    patch.setattr(private, "_settle", same)


def a_reply_left_out_of_the_step(patch: pytest.MonkeyPatch) -> None:
    """The reply that was recorded last is not read."""
    replies = Evidence.replies

    def fewer(self: Evidence, *others: Any) -> list[PhaseReply]:
        found = replies(self, *others)
        return found[:-1] if len(found) > 2 else found

    patch.setattr(Evidence, "replies", fewer)


def a_memory_that_a_restart_loses(patch: pytest.MonkeyPatch) -> None:
    """What a run remembers of earlier rounds is kept by the process that has made the step."""
    memory, record = Fleet.memory, signed_results.record_step

    def kept(self: Fleet, session: Session, number: int, base_model: str | None) -> RunMemory:
        found = memory(self, session, number, base_model)
        return found if number in getattr(self.context.database, "steps", ()) else RunMemory()

    def noted(fleet: Fleet, metrics: RunMetrics, current: Round, *others: Any) -> None:
        record(fleet, metrics, current, *others)
        database: Any = fleet.context.database
        database.steps = {*getattr(database, "steps", ()), current.number + 1}

    patch.setattr(Fleet, "memory", kept)
    patch.setattr(conductor, "record_step", noted)


def an_assignment_sent_only_once(patch: pytest.MonkeyPatch) -> None:
    """A member that comes back does not get its open assignments again."""
    patch.setattr(process, "open_assignments_of", lambda *_: [])


def a_log_entry_after_the_commit(patch: pytest.MonkeyPatch) -> None:
    """The log tells of a reply in a later transaction than the one that records it."""
    record_group = Intake._record_group

    def noting(self: Intake, session: Session, replies: Any) -> Any:
        session.info["database"] = self._database
        return record_group(self, session, replies)

    def later(session: Session, events: Sequence[audit.LogEvent]) -> None:
        database = session.info["database"]

        def write() -> None:
            with database.begin() as another:
                audit.record_all(another, events)

        _later(database, write)

    patch.setattr(Intake, "_record_group", noting)
    patch.setattr(intake, "audit", SimpleNamespace(**{**vars(audit), "record_all": later}))


def a_payload_that_is_not_stored(patch: pytest.MonkeyPatch) -> None:
    """The payload of a reply is recorded, and now and then its file is not stored, as by a cache that was lost."""
    honest = Upload.store

    def store(self: Upload) -> None:
        writer: Any = self._writer
        if writer._directory._process.world.random.random() < 0.9:
            honest(self)

    patch.setattr(Upload, "store", store)


def a_step_evaluated_on_the_old_model(patch: pytest.MonkeyPatch) -> None:
    """After the step, members measure the model before it."""
    evaluate = finish.evaluate

    def old(fleet: Fleet, algorithm: Any, current: models.Round, model: str, *others: Any) -> Any:
        return evaluate(fleet, algorithm, current, current.base_model, *others)

    patch.setattr(finish, "evaluate", old)


def a_lease_that_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A coordinator that slept past its lease goes on writing, as if it had it still."""
    patch.setattr(RunFacts, "locked", lambda self, session: session.get_one(Run, self.run_id, with_for_update=True))


def a_choice_from_nobody(patch: pytest.MonkeyPatch) -> None:
    """Others are drawn in proportion to their samples, also if everybody in the pool is named."""
    select = selection.select

    def careless(spec: SelectionSpec, samples: Mapping[str, int], **others: Any) -> list[str]:
        if spec.by == "samples" and len(samples) > spec.asked(len(samples)) and set(samples) <= {*spec.always}:
            np.random.default_rng(0).choice(0, size=0, replace=False, p=np.zeros(0))
        return select(spec, samples, **others)

    patch.setattr(selection, "select", careless)


def facts_of_the_present(patch: pytest.MonkeyPatch) -> None:
    """After a restart, the terms of a session are made of the pool of that moment."""
    patch.setattr(ConversationFacts, "decode", classmethod(lambda cls, data: None))


def a_clock_that_is_followed(patch: pytest.MonkeyPatch) -> None:
    """The coordinator's time is that of its machine's clock, also when somebody sets it."""
    patch.setattr(SteadyClock, "__call__", lambda self: self.machine())


def a_start_that_is_told_before_it_is_kept(patch: pytest.MonkeyPatch) -> None:
    """A worker writes its start to the disk only when it was welcomed."""
    write, welcomed = Starts._write, Starts.welcomed
    patch.setattr(Starts, "_write", lambda self, known: setattr(self, "_known", known))

    def late(self: Starts) -> None:
        known, self._known = self._known, KnownStarts()
        write(self, known)
        welcomed(self)

    patch.setattr(Starts, "welcomed", late)


def a_reply_that_goes_with_its_member(patch: pytest.MonkeyPatch) -> None:
    """An accepted reply is not read once its member has left the federation."""
    replies = Evidence.replies

    def of_members(self: Evidence, database: Any, *others: Any) -> list[PhaseReply]:
        found = replies(self, database, *others)
        with database.read() as session:
            left = set(session.scalars(select(Client.client_id).where(Client.state == ClientState.LEFT)))
        return [reply for reply in found if reply.client_id not in left]

    patch.setattr(Evidence, "replies", of_members)


def a_withdrawal_that_ends_no_assignment(patch: pytest.MonkeyPatch) -> None:
    """The assignments of a member that leaves stay open."""
    patch.setattr(departures, "open_assignments", lambda *_: [])


def a_session_called_over_too_early(patch: pytest.MonkeyPatch) -> None:
    """Members are told after each phase of a private round that it is over."""
    ask = RemoteFleet.ask

    def told(self: RemoteFleet, question: Any) -> Replies:
        found = ask(self, question)
        self.tell_ended(question.current, question.current.attempt)
        return found

    patch.setattr(RemoteFleet, "ask", told)
    patch.setattr(deliveries, "_OVER", true())


def a_lost_member_that_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Nobody is asked once more in a round that makes no step."""
    patch.setattr(RemoteFleet, "back", lambda *_: [])


def a_member_that_is_asked_twice(patch: pytest.MonkeyPatch) -> None:
    """Where a member was lost, all members are asked once more, also those that have answered."""
    back = RemoteFleet.back
    patch.setattr(RemoteFleet, "back", lambda self, question: sorted(question.clients) if back(self, question) else [])


def a_result_without_a_member(patch: pytest.MonkeyPatch) -> None:
    """The result lacks the member whose reply to the second question came last."""
    described = finish.described
    patch.setattr(finish, "described", lambda run, replies: described(run, Replies(list(replies)[:-1])))


def a_model_that_is_measured_in_the_round_after(patch: pytest.MonkeyPatch) -> None:
    """After a restart within a round, the conductor begins with the next one."""
    opened = opening.open_round

    def careless(fleet: Fleet) -> Round | None:
        current = opened(fleet)
        if current is not None and current.started < fleet._began:  # type: ignore[attr-defined]
            finish.complete_round(fleet, current, finish.EvaluationFindings())
            return opened(fleet)
        return current

    patch.setattr(conductor, "open_round", careless)


def _at_a_stepped_round(patch: pytest.MonkeyPatch, instead: Callable[[Fleet, Round], Round | None]) -> None:
    """Where a conductor begins with a round that has made its step, something else happens."""

    def opened(fleet: Fleet) -> Round | None:
        current = opening.open_round(fleet)
        if current is not None and current.state is RoundState.STEPPED:
            return instead(fleet, current)
        return current

    patch.setattr(conductor, "open_round", opened)


def _later(database: Any, write: Callable[[], object]) -> None:
    """Lets the process of a database write something in a second, unless it is killed before."""
    running = database.process

    def due() -> None:
        if running.alive:
            with suppress(Refusal, SQLAlchemyError):
                write()

    running.world.after(1.0, due)


PLANTED: Mapping[str, tuple[Plant, Sequence[str]]] = MappingProxyType(
    {
        plant.__name__: (plant, plans)
        for plant, plans in (
            (a_receipt_before_its_commit, ("average",)),
            (a_receipt_before_the_commit_of_its_group, ("average",)),
            (a_refusal_that_ends_its_group, ("average",)),
            (rights_past_a_revocation, ("average",)),
            (a_reply_that_leaves_its_assignment_open, ("average",)),
            (a_sum_in_order_of_arrival, ("average",)),
            (a_round_counted_twice, ("average", "pareto")),
            (an_evaluation_that_a_restart_skips, ("average",)),
            (an_upload_accepted_twice, ("average",)),
            (a_decline_that_is_forgotten, ("average",)),
            (a_lost_revocation, ("average",)),
            (a_secret_used_again, ("private of six",)),
            (a_reply_left_out_of_the_step, ("average",)),
            (a_memory_that_a_restart_loses, ("pareto",)),
            (an_assignment_sent_only_once, ("average",)),
            (a_log_entry_after_the_commit, ("average",)),
            (a_payload_that_is_not_stored, ("average",)),
            (a_step_evaluated_on_the_old_model, ("average",)),
            (a_lease_that_is_not_compared, ("average",)),
            (a_choice_from_nobody, ("named",)),
            (facts_of_the_present, ("measured",)),
            (a_clock_that_is_followed, ("average",)),
            (a_start_that_is_told_before_it_is_kept, ("named",)),
            (a_reply_that_goes_with_its_member, ("leaving",)),
            (a_withdrawal_that_ends_no_assignment, ("leaving",)),
            (a_session_called_over_too_early, ("private",)),
            (a_lost_member_that_is_forgotten, ("evaluate", "describe")),
            (a_member_that_is_asked_twice, ("evaluate", "describe")),
            (a_result_without_a_member, ("describe",)),
            (a_model_that_is_measured_in_the_round_after, ("evaluate",)),
        )
    }
)
"""Each planted bug, with the plans whose schedules can show it."""
