"""Planted bugs: small changes of the product's behaviour, each of which the checks must find."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.aggregation.phases import PhaseReply, Replies
from coordinator.rounds import conductor, conversation, finish, opening, signed_results, step
from coordinator.rounds.fleets import remote
from coordinator.rounds.fleets.base import Fleet
from coordinator.rounds.replies import intake as intakes
from coordinator.rounds.replies import uploads
from coordinator.rounds.replies.evidence import Evidence
from coordinator.rounds.replies.intake import Admission, Intake
from coordinator.rounds.runs import private
from coordinator.rounds.supervisor import Supervisor
from federation.refusals import Refusal
from federation.v1.common_pb2 import SignedEnvelope
from storage.models import Assignment, Reply, Round
from storage.states import AssignmentState, RoundState

Plant = Callable[[pytest.MonkeyPatch], None]


def receipt_before_its_commit(patch: pytest.MonkeyPatch) -> None:
    """The receipt of a reply is given first, and the reply is recorded a second later."""
    record = Intake.record

    def early(self: Intake, admission: Admission, problem: Refusal | None) -> SignedEnvelope:
        if problem is not None:
            return record(self, admission, problem)
        process = self._database.process  # type: ignore[attr-defined]

        def later() -> None:
            if process.alive:
                try:
                    record(self, admission, problem)
                except Refusal:
                    pass

        process.world.after(1.0, later)
        return self._receipt(admission, None, self._clock())

    patch.setattr(Intake, "record", early)


def reply_that_leaves_its_assignment_open(patch: pytest.MonkeyPatch) -> None:
    """An accepted reply is recorded, and its assignment stays open."""
    patch.setattr(intakes, "end_open_assignment", lambda *_: None)


def sum_in_order_of_arrival(patch: pytest.MonkeyPatch) -> None:
    """The replies to a phase are summed in the order in which they were recorded."""

    class Unsorted(Replies):
        def __init__(self, replies: Sequence[PhaseReply], **others: Any) -> None:
            super().__init__(replies, **others)
            self._replies = tuple(replies)

    patch.setattr(remote, "Replies", Unsorted)


def round_counted_twice(patch: pytest.MonkeyPatch) -> None:
    """A round that has its step begins anew after a restart."""
    unfinished = opening._begin_round

    def opened(fleet: Fleet) -> Round | None:
        with fleet.around.database.begin() as session:
            latest = select(Round).order_by(Round.number.desc()).limit(1)
            current = session.scalar(latest)
            if current is not None and current.state is RoundState.STEPPED:
                number = current.number + 1
                fleet.run.running(session)
            else:
                number = -1
        return unfinished(fleet, number) if number >= 0 else honest(fleet)

    honest = conductor.open_round
    patch.setattr(conductor, "open_round", opened)


def upload_accepted_twice(patch: pytest.MonkeyPatch) -> None:
    """A reply that comes again, in a new envelope or in the same one, is recorded again."""
    patch.setattr(intakes, "_stored_receipt", lambda *_: None)
    patch.setattr(Intake, "_closed", lambda *_: None)
    admit = Intake.admit

    def again(self: Intake, client_id: str, envelope: SignedEnvelope) -> Admission | SignedEnvelope:
        given = intakes._given
        try:
            intakes._given = _raising  # type: ignore[assignment]
            return admit(self, client_id, envelope)
        except _Given as found:
            return found.receipt
        finally:
            intakes._given = given

    del again


class _Given(Exception):
    receipt: SignedEnvelope


def _raising(*_: object, **__: object) -> SignedEnvelope:
    raise _Given


def decline_that_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A decline is logged, and its assignment stays open."""
    patch.setattr(intakes, "end_assignment", lambda *_: None)


def lost_revocation(patch: pytest.MonkeyPatch) -> None:
    """The replies of a member that is revoked after its reply count in the step."""
    patch.setattr(remote.RemoteFleet, "_leave_out_revoked", lambda *_: None)
    patch.setattr(signed_results, "revoked_clients", lambda session: frozenset())


def secret_used_again(patch: pytest.MonkeyPatch) -> None:
    """The next attempt at a private round has the nonce of the one before."""
    settle = private._settle

    def same(fleet: Fleet, attempt: str, *others: Any) -> Any:
        return settle(fleet, attempt.rpartition("\0")[0], *others)

    patch.setattr(private, "_settle", same)


def step_from_the_newest_model(patch: pytest.MonkeyPatch) -> None:
    """After a crash a step is made of the replies that came before it, and no more are waited for."""
    patch.setattr(remote, "fulfilled", lambda session, phase_id: 10**6)


def replies_read_from_all_phases(patch: pytest.MonkeyPatch) -> None:
    """A phase is issued again after a restart, to all clients, with other ids."""


def lost_reply(patch: pytest.MonkeyPatch) -> None:
    """The last reply of a phase is left out of the step."""
    replies = Evidence.replies

    def fewer(self: Evidence, *others: Any) -> list[PhaseReply]:
        found = replies(self, *others)
        return found[:-1] if len(found) > 2 else found

    patch.setattr(Evidence, "replies", fewer)


def commit_before_the_blob(patch: pytest.MonkeyPatch) -> None:
    """A payload is recorded before it is stored."""


def memory_from_the_row(patch: pytest.MonkeyPatch) -> None:
    """The optimiser's vectors begin anew after a restart."""


def log_entry_without_its_fact(patch: pytest.MonkeyPatch) -> None:
    """The entry of a reply in the log is a transaction of its own, before that of the reply."""


PLANTED: Mapping[str, Plant] = MappingProxyType({})
