"""The checks after a schedule: what must hold of the record, whatever went wrong."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from sqlalchemy import select
from sqlalchemy.orm import Session, selectinload

from coordinator.audit.log_verifier import log_problems
from coordinator.members.membership import CLIENT_REVOKED
from coordinator.rounds.replies.revoked import REVOKED
from coordinator.rounds.transitions import ROUND_ENDED
from federation.digests import digest
from federation.record import log_entries
from federation.record.exchange import Signers
from federation.record.joinings import LEFT
from federation.record.withdrawals import withdrawal_problems
from federation.trust.envelope import envelope_digest
from federation.trust.identity import client_uri
from federation.trust.key_chain import KeyChain
from federation.v1.common_pb2 import ReceiptManifest, ReplyManifest, SignedEnvelope, StepManifest
from storage.models import Assignment, AuditEntry, Client, Evaluation, Phase, Reply, Round, Run, Withdrawal
from storage.states import AssignmentState, ClientState, PhaseState, RoundState, RunState
from tests.simulated.faults import LOST
from tests.simulated.plans import FEDERATION
from tests.simulated.schedule import RUN, Schedule

_LOST = (AssignmentState.EXPIRED, "absent")
_UNUSUAL = (AssignmentState.EXPIRED, AssignmentState.CANCELLED, AssignmentState.DECLINED)


@dataclass(frozen=True)
class Result:
    """The result of a run: its state, the models after its rounds, and how members measured them."""

    state: str = ""
    models: tuple[str | None, ...] = ()
    measured: tuple[tuple[int, str, str, float | None], ...] = ()

    @classmethod
    def of(cls, session: Session) -> "Result":
        """Reads the result from the record."""
        rounds = session.scalars(select(Round).order_by(Round.number)).all()
        numbers = {one.round_id: one.number for one in rounds}
        measured = sorted(
            (numbers[row.round_id], row.client_id, row.split, row.loss) for row in session.scalars(select(Evaluation))
        )
        return cls(str(session.get_one(Run, RUN).state), tuple(one.result_model for one in rounds), tuple(measured))

    def fits(self, calm: "Result") -> bool:
        """True if this is the result of the calm run; members that did not attend have not measured a model."""
        same = (self.state, self.models) == (calm.state, calm.models)
        return same and set(self.measured) <= set(calm.measured)

    @property
    def text(self) -> str:
        """The result in short."""
        models = ", ".join(str(model)[7:15] for model in self.models)
        return f"{self.state} with the models {models} and {len(self.measured)} measurements"


def result(schedule: Schedule) -> Result:
    """The result of a schedule."""
    with schedule.reading() as session:
        return Result.of(session)


def problems(schedule: Schedule, calm: Result) -> list[str]:
    """Everything that is wrong with a schedule that was played; `calm` is the result without faults."""
    with schedule.reading() as session:
        record = _Record(session, schedule)
        found = [*record.of_result(calm)]
        for check in (
            record.of_receipts,
            record.of_assignments,
            record.of_revocations,
            record.of_rounds,
            record.of_measurements,
            record.of_steps,
            record.of_pauses,
            record.of_log,
            record.of_sessions,
            record.of_starts,
            record.of_departures,
        ):
            found += [f"{check.__name__}: {problem}" for problem in check()]
    return [*found, *_of_blobs(schedule)]


class _Record:
    """The record of a schedule."""

    def __init__(self, session: Session, schedule: Schedule) -> None:
        self._session = session
        self._schedule = schedule
        self._run = session.get_one(Run, RUN)
        self._rounds = session.scalars(select(Round).order_by(Round.number)).all()
        self._phases = session.scalars(
            select(Phase)
            .order_by(Phase.round_id, Phase.number)
            .options(selectinload(Phase.assignments).selectinload(Assignment.replies))
        ).all()
        self._entries = session.scalars(select(AuditEntry).order_by(AuditEntry.entry_id)).all()

    @cached_property
    def _assignments(self) -> Mapping[str, Assignment]:
        return {one.assignment_id: one for phase in self._phases for one in phase.assignments}

    @cached_property
    def _replies(self) -> Mapping[str, Reply]:
        return {reply.envelope_digest: reply for one in self._assignments.values() for reply in one.replies}

    def _logged(self, action: str) -> list[AuditEntry]:
        return [entry for entry in self._entries if entry.action == action]

    # --- the result

    def of_result(self, calm: Result) -> Iterator[str]:
        """The result of the calm run, or a stated reason for another one."""
        here = Result.of(self._session)
        if here.fits(calm):
            return
        stated = [self._run.reason, *(round_.reason for round_ in self._rounds if round_.state is RoundState.SKIPPED)]
        stated += [f"{one.client_id}: {one.reason}" for one in self._assignments.values() if one.state in _UNUSUAL]
        stated += [f"{one.client_id}: {REVOKED}" for one in self._assignments.values() if one.reason == REVOKED]
        stated += [void.reason for round_ in self._rounds for void in round_.voided]
        stated += [f"{entry.subject}: {LEFT}" for entry in self._logged(LEFT)]
        reasons = [reason for reason in stated if reason]
        # A round without a step may lack so many members that are away that it is skipped.
        may_lack = not self._schedule.stage.plan.makes_steps and self._schedule.world.counts[LOST]
        if not self._schedule.faults.harsh and not may_lack:
            yield f"the result is {here.text}; that of the calm run is {calm.text}; stated is {reasons[:5]}"
        elif not reasons:
            yield f"the result is {here.text}; that of the calm run is {calm.text}; nothing says why"
        elif self._run.state is RunState.FAILED and not all(
            round_.state is RoundState.SKIPPED for round_ in self._rounds[-1:]
        ):
            yield f"the run failed: {self._run.reason}"
        elif self._run.reason.startswith(("record:", "storage:", "error:")):
            yield f"the run was paused: {self._run.reason}"

    def of_starts(self) -> Iterator[str]:
        """No worker was taken for a copy: each home is the only one."""
        yield from (
            f"{member.name} was refused as a copy" for member in self._schedule.members if member.taken_for_copy
        )

    def of_departures(self) -> Iterator[str]:
        """Whoever was told that it has left is on record with its withdrawal, and nobody else has left."""
        stage = self._schedule.stage
        members = {member.name: member for member in self._schedule.members}
        signers = Signers(
            coordinator=stage.signing.chain, client=lambda name, _: KeyChain(members[name].key.public_key())
        )
        kept = self._session.scalars(select(Withdrawal.envelope)).all()
        withdrawals = [SignedEnvelope.FromString(envelope) for envelope in kept]
        yield from withdrawal_problems(self._entries, withdrawals, signers, FEDERATION)
        states = {client.client_id: client.state for client in self._session.scalars(select(Client))}
        left, revoked = (
            {name for name, state in states.items() if state is wanted}
            for wanted in (ClientState.LEFT, ClientState.REVOKED)
        )
        for member in members.values():
            if member.left and member.name not in left | revoked:
                yield f"{member.name} was told that it has left"
            if member.name in left and member.withdrawal is None:
                yield f"{member.name} has left, and does not know of it"

    # --- receipts and assignments

    def of_receipts(self) -> Iterator[str]:
        """Each receipt that a member holds is on record, with its reply."""
        for member in self._schedule.members:
            accepted: dict[str, set[str]] = {}
            for envelope, receipt in member.receipts:
                manifest = ReceiptManifest.FromString(receipt.manifest)
                reply = self._replies.get(envelope_digest(envelope))
                where = f"{member.name}, assignment {manifest.assignment_id}"
                if manifest.accepted:
                    accepted.setdefault(manifest.assignment_id, set()).add(manifest.envelope)
                if reply is None:
                    yield f"{where}: the reply of its receipt is not on record"
                elif SignedEnvelope.FromString(reply.receipt) != receipt or reply.accepted != manifest.accepted:
                    yield f"{where}: another receipt is on record"
            yield from (
                f"{member.name}, assignment {name}: {len(envelopes)} replies were accepted"
                for name, envelopes in accepted.items()
                if len(envelopes) > 1
            )

    def of_revocations(self) -> Iterator[str]:
        """No reply of a member is accepted after its revocation."""
        revoked = set[str]()
        for entry in self._entries:
            if entry.action == CLIENT_REVOKED:
                revoked.add(client_uri(FEDERATION, entry.subject))
            elif entry.action == log_entries.ACCEPTED and entry.actor in revoked:
                yield f"the reply to {entry.subject} of {entry.actor}, who was revoked before, was accepted"

    def of_assignments(self) -> Iterator[str]:
        """Nothing is fulfilled twice, and nothing is left open after the end of a run."""
        for one in self._assignments.values():
            accepted = sum(reply.accepted for reply in one.replies)
            if accepted != (one.state is AssignmentState.FULFILLED):
                yield f"{one.assignment_id} of {one.client_id} is {one.state}, and has {accepted} accepted replies"
            if one.state is AssignmentState.DECLINED and one.decline is None:
                yield f"{one.assignment_id} of {one.client_id} is declined without its envelope"
            digests = [reply.envelope_digest for reply in one.replies]
            if len(set(digests)) != len(digests):
                yield f"{one.assignment_id} of {one.client_id}: one reply is twice on record"
            for reply in one.replies:
                manifest = ReplyManifest.FromString(SignedEnvelope.FromString(reply.envelope).manifest)
                if manifest.assignment_id != one.assignment_id or manifest.client_id != one.client_id:
                    yield f"{one.assignment_id} of {one.client_id} has the reply to {manifest.assignment_id}"
        if self._run.state is RunState.PAUSED:
            return
        for phase in self._phases:
            if phase.state is not PhaseState.CLOSED:
                yield f"phase {phase.number} is {phase.state}"
            for one in phase.assignments:
                if one.state is AssignmentState.OPEN:
                    yield f"{one.assignment_id} of {one.client_id} is open"

    # --- rounds and steps

    def of_rounds(self) -> Iterator[str]:
        """Each round is counted once."""
        rounds, total = self._rounds, self._schedule.stage.plan.rounds
        if [round_.number for round_ in rounds] != list(range(len(rounds))):
            yield f"the rounds are {[round_.number for round_ in rounds]}"
        if self._run.state is RunState.COMPLETED and len(rounds) != total:
            yield f"the run has completed with {len(rounds)} of {total} rounds"
        if self._run.state is not RunState.PAUSED:
            yield from (f"round {one.number} is {one.state}" for one in rounds if one.state not in ROUND_ENDED)
        for round_ in rounds:
            numbers = [phase.number for phase in self._phases if phase.round_id == round_.round_id]
            if numbers != list(range(len(numbers))):
                yield f"round {round_.number} has the phases {numbers}"
        model, plan = self._run.initial_model, self._schedule.stage.plan
        measures = [digest(one) for one in plan.models]
        for round_ in rounds:
            begins = model if plan.makes_steps else measures[round_.number]
            if round_.base_model != begins:
                yield f"round {round_.number} begins with {round_.base_model}, and should with {begins}"
            model = round_.result_model or model
        if self._run.model != model:
            yield f"the run's model is {self._run.model}, and its newest step made {model}"
        measured = Counter((one.round_id, one.client_id) for one in self._session.scalars(select(Evaluation)))
        for round_ in rounds:
            if round_.state is not RoundState.COMPLETED or round_.reason.startswith("the run ended"):
                continue
            if self._schedule.stage.plan.evaluates_privately:
                if "evaluated" not in round_.metrics and not round_.reason:
                    yield f"round {round_.number} was completed without an evaluation, and nothing says why"
                continue
            measuring = [phase for phase in self._phases if phase.round_id == round_.round_id]
            if plan.kind == "statistics":
                continue
            if plan.makes_steps:
                measuring = measuring[-1:]
            if any(phase.kind != "evaluate" for phase in measuring):
                yield f"round {round_.number} was completed without an evaluation"
            asked = Counter(
                {
                    (round_.round_id, one.client_id): 2  # splits
                    for phase in measuring
                    for one in phase.assignments
                    if one.state is AssignmentState.FULFILLED and one.reason != REVOKED
                }
            )
            found = Counter({key: count for key, count in measured.items() if key[0] == round_.round_id})
            if found != asked:
                yield f"round {round_.number}: the measurements are {found}, and accepted were {asked}"

    def of_measurements(self) -> Iterator[str]:
        """In a round without a step, a lost member is asked once more, nobody a third time, and each counts once."""
        if self._schedule.stage.plan.makes_steps:
            return
        gone = {entry.subject for entry in self._entries if entry.action in ("client.revoked", LEFT)}
        for round_ in self._rounds:
            phases = [phase for phase in self._phases if phase.round_id == round_.round_id]
            where, counted = f"round {round_.number}", Counter[str]()
            if len(phases) > 2:
                yield f"{where} has asked {len(phases)} times"
            for phase in phases:
                ends = {one.client_id: (one.state, one.reason) for one in phase.assignments}
                counted.update(name for name, end in ends.items() if end == (AssignmentState.FULFILLED, ""))
            yield from (f"{where}: {name} counts {count} times" for name, count in counted.items() if count > 1)
            first, *later = [{one.client_id: one for one in phase.assignments} for phase in phases] or [{}]
            again = {name for one in later for name in one}
            lost = {name for name, one in first.items() if (one.state, one.reason) == _LOST}
            if others := (again & first.keys()) - lost:
                yield f"{where}: {sorted(others)} were asked twice, and were not lost"
            if round_.state is RoundState.COMPLETED and (forgotten := lost - again - gone):
                yield f"{where}: {sorted(forgotten)} were lost, and not asked once more"
            if round_.state is RoundState.COMPLETED and self._schedule.stage.plan.kind == "statistics":
                told = json.loads(round_.document or b"{}")
                if told.get("members") != sorted(counted):
                    yield f"{where}: the result is of {told.get('members')}, and {sorted(counted)} count"

    def of_steps(self) -> Iterator[str]:
        """Each step has the replies that count, and none of a member that was revoked before it."""
        for round_ in self._rounds:
            if round_.step is None:
                continue
            step = StepManifest.FromString(SignedEnvelope.FromString(round_.step).manifest)
            used = [self._replies.get(name) for name in step.replies]
            if None in used or not all(reply is not None and reply.accepted for reply in used):
                yield f"round {round_.number}: its step has a reply that was not accepted"
                continue
            names = [reply.client_id for reply in used if reply is not None]
            if names != sorted(set(names)):
                yield f"round {round_.number}: its step has the replies of {names}"
            phases = {reply.assignment.phase_id for reply in used if reply is not None}
            for phase in (phase for phase in self._phases if phase.phase_id in phases):
                counted = {
                    one.client_id
                    for one in phase.assignments
                    if one.state is AssignmentState.FULFILLED and one.reason != REVOKED
                }
                if counted != set(names) and not self._schedule.stage.plan.private:
                    yield f"round {round_.number}: its step has the replies of {names}, and {sorted(counted)} count"
                if phase.attempt != round_.attempt:
                    yield f"round {round_.number}: its step has replies of attempt {phase.attempt}"
            gone = self._revoked_before(f"{RUN}/{round_.number}")
            if both := gone & set(names):
                yield f"round {round_.number}: its step has replies of {sorted(both)}, revoked before it"

    def _revoked_before(self, subject: str) -> set[str]:
        """The clients that were revoked before the step of a round, by the log."""
        revoked: set[str] = set()
        for entry in self._entries:
            if entry.action == log_entries.STEPPED and entry.subject == subject:
                break
            if entry.action == "client.revoked":
                revoked.add(entry.subject)
        return revoked

    def of_pauses(self) -> Iterator[str]:
        """While a run is paused, no work is given out, and no step is made."""
        paused = False
        for entry in self._entries:
            if entry.action in ("run.paused", "run.resumed"):
                paused = entry.action == "run.paused"
            elif paused and entry.action in (log_entries.ISSUED, log_entries.STEPPED, log_entries.SKIPPED):
                stopped = entry.detail.startswith("the run ended")  # a run that is stopped skips its round
                yield from [] if stopped else [f"{entry.action} of {entry.subject} while the run was paused"]

    # --- the log

    def of_log(self) -> Iterator[str]:
        """The log verifies, and has one entry for each fact."""
        process = self._schedule.process
        assert process is not None
        key, newest = self._schedule.stage.log_key, process.sequencer.newest
        yield from (problem for problem in log_problems(self._session, key, newest) if isinstance(problem, str))
        accepted = [one for one in self._replies.values() if one.accepted]
        plan, ended = self._schedule.stage.plan, [one for one in self._rounds if one.state is RoundState.COMPLETED]
        facts: dict[str, Sequence[str]] = {
            log_entries.ISSUED: list(self._assignments),
            log_entries.ACCEPTED: [one.assignment_id for one in accepted],
            log_entries.STEPPED: [f"{RUN}/{one.number}" for one in self._rounds if one.step is not None],
            log_entries.SKIPPED: [f"{RUN}/{one.number}" for one in self._rounds if one.state is RoundState.SKIPPED],
            log_entries.MEASURED: [f"{RUN}/{one.number}" for one in ended if plan.kind == "evaluate"],
            log_entries.DESCRIBED: [f"{RUN}/{one.number}" for one in ended if plan.kind == "statistics"],
            log_entries.DECLINED: [
                one.assignment_id for one in self._assignments.values() if one.state is AssignmentState.DECLINED
            ],
        }
        for action, subjects in facts.items():
            logged = Counter(entry.subject for entry in self._logged(action))
            if logged != Counter(subjects):
                differing = (logged - Counter(subjects)) + (Counter(subjects) - logged)
                yield f"{action}: the log and the record differ in {dict(differing)}"

    def of_sessions(self) -> Iterator[str]:
        """No nonce of a private round is used in two attempts, and no session ends because its terms have changed."""
        for one in self._assignments.values():
            if one.reason == "session-over":
                yield f"{one.client_id}: the session of {one.assignment_id} is not the one in which it has answered"
        for member in self._schedule.members:
            for nonce, asked in member.nonces.items():
                if len(asked) > 1:
                    yield f"{member.name}: the nonce {nonce.hex()[:8]} was used in the attempts {sorted(asked)}"
            for name in member.asked_after:
                yield f"{member.name}: assignment {name} is of a session that it was told is over"


def _of_blobs(schedule: Schedule) -> Iterator[str]:
    """What the record names is stored, and nothing is left of uploads."""
    process = schedule.process
    assert process is not None
    with schedule.reading() as session:
        rounds = session.scalars(select(Round)).all()
        names = {name for one in rounds for name in (one.base_model, one.result_model, one.gram, one.combined)}
        names |= set(session.scalars(select(Reply.payload).where(Reply.accepted)))
    for name in names:
        if name:
            try:
                process.blobs.verify(name)
            except (LookupError, ValueError) as error:
                yield f"blobs: {error}"
    process.uploads.collect()
    with schedule.reading() as session:
        open_ones = session.scalars(
            select(Assignment.assignment_id).where(Assignment.state == AssignmentState.OPEN)
        ).all()
    left = [one.name for one in process.blobs.partial_uploads() if one.name.partition(".")[0] not in open_ones]
    if left:
        yield f"blobs: the uploads {left} are left"
    if count := len(list((process.blobs.root / "tmp").iterdir())):
        yield f"blobs: {count} temporary files are left"
