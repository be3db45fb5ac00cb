"""Checks the signed envelopes on record whenever they are shown: the record that would be exported, opened.

An envelope is verified if its signer's key has signed it, if it belongs to the envelope that it answers, and if the
columns beside it repeat what was signed. Bytes that are not an envelope are a failed check, not an error.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.rounds.export import exchange_of, in_order, newest_step, parsed, recorded_phases, round_record
from coordinator.rounds.replies import signed_columns
from coordinator.rounds.runs.disclosure import parsed_spec
from coordinator.rounds.transitions import SIMULATOR
from coordinator.signing_keys import member_keys, rotations_of
from federation.record.exchange import (
    Mismatch,
    Opened,
    OpenedAnswer,
    OpenedExchange,
    Signers,
    open_consent,
    open_exchange,
)
from federation.record.rounds import OpenedRound, RecordReader
from federation.record.withdrawals import open_withdrawal
from federation.refusals import Refusal
from federation.spec.run_facts import run_facts
from federation.spec.run_spec import SpecError
from federation.trust.key_chain import KeyChain, whole_chain
from federation.trust.proofs import UNSIGNED
from federation.v1 import admin_pb2 as messages
from federation.v1.common_pb2 import SignedEnvelope
from federation.v1.record_pb2 import RoundRecord
from storage import models

_MAX_VALUE = 100  # characters of a value in a message


@dataclass(frozen=True)
class CheckedEnvelope:
    """An envelope of a round with its check.

    Attributes:
        client_id: the client that was asked.
        reply: the digest of the reply that it is, or that it is the receipt for; "" for an assignment or a decline.
        check: its result.
    """

    client_id: str
    reply: str
    check: messages.EnvelopeCheck


@dataclass(frozen=True)
class CheckedRound:
    """The checks of a round.

    Attributes:
        record: the round; a simulated one has no phases here.
        opened: the same, opened.
        envelopes: by phase and client: assignment, decline, then each reply with its receipt.
        step: the check of the step; None without one.
    """

    record: RoundRecord
    opened: OpenedRound
    envelopes: tuple[CheckedEnvelope, ...]
    step: messages.EnvelopeCheck | None


@dataclass(frozen=True)
class EnvelopeChecks:
    """Checks envelopes of one federation; the coordinator signs assignments, receipts and steps."""

    federation_id: str
    coordinator: KeyChain

    def keys(self, session: Session, client: models.Client) -> KeyChain:
        """The keys of a client, whose rotations on record are verified. Raises Refusal if they do not fit."""
        try:
            present = Ed25519PublicKey.from_public_bytes(client.signing_key)
        except ValueError as error:
            raise Refusal("signing-key", str(error)) from None
        return whole_chain(
            rotations_of(session, client.client_id),
            present,
            federation_id=self.federation_id,
            client_id=client.client_id,
            coordinator=self.coordinator,
        )

    def consent(self, session: Session, row: models.Consent, spec: str) -> messages.EnvelopeCheck:
        """Checks the answer of a client to a run whose specification has this digest."""
        expected = {"federation_id": self.federation_id, "run_id": row.run_id, "spec": spec}
        envelope = parsed(row.envelope) or SignedEnvelope()
        opened = open_consent(envelope, row.client_id, self.signers(session), expected, row.at)
        return _check(opened, 0, row.envelope, row, signed_columns.of_consent(opened.manifest))

    def withdrawal(self, session: Session, row: models.Withdrawal) -> Iterator[str]:
        """Describes what a row says otherwise than the signed withdrawal in it."""
        envelope = parsed(row.envelope) or SignedEnvelope()
        opened = open_withdrawal(envelope, row.client_id, self.signers(session), self.federation_id)
        check = _check(opened, 0, row.envelope, row, {"digest": opened.digest, "forget": opened.manifest.forget})
        if not check.verified:
            yield f"its withdrawal: {check.reason}: {check.message}"

    def reply(self, session: Session, row: models.Reply) -> list[messages.EnvelopeCheck]:
        """Checks a reply and its receipt."""
        assignment, phase = row.assignment, row.assignment.phase
        client = session.get(models.Client, assignment.client_id)
        if client is not None and client.signing_key == UNSIGNED:
            return [_unsigned(phase.number)]
        position = {"round": phase.round.number, "phase": phase.number, "attempt": phase.attempt, "kind": phase.kind}
        expected = {
            **_known(assignment),
            **self._facts(phase.round.run),
            **position,
            "base_model": assignment.base_model,
        }
        opened = open_exchange(exchange_of(assignment, [row]), self.signers(session), expected)
        return list(_answer_checks(opened.answers[0], row, phase.number))

    def of_round(self, session: Session, row: models.Round) -> CheckedRound:
        """Checks all envelopes of a round."""
        simulated = row.run.submitted_by == SIMULATOR
        phases = recorded_phases(session, row.round_id)
        reader = RecordReader(self.signers(session), self._facts(row.run))
        known = {phase.number: [_known(assignment) for assignment in phase.assignments] for phase in phases}
        record = round_record(row, [] if simulated else phases)
        opened = reader.read(
            record,
            row.base_model,
            newest_step(session, row.run_id, before=row.number),
            known,
        )
        envelopes: list[CheckedEnvelope] = []
        for number, phase in enumerate(phases):
            for index, assignment in enumerate(phase.assignments):
                if simulated:
                    envelopes += (
                        CheckedEnvelope(assignment.client_id, reply.envelope_digest, _unsigned(phase.number))
                        for reply in in_order(assignment.replies)
                    )
                else:
                    envelopes += _exchange_checks(opened.phases[number].exchanges[index], assignment, phase.number)
        step = None if opened.step is None else self._step(session, row, opened.step)
        return CheckedRound(record, opened, tuple(envelopes), step)

    def _step(self, session: Session, row: models.Round, step: Opened[Any]) -> messages.EnvelopeCheck:
        """The check of a step, which also names no reply that is not on record."""
        check = _check(step, 0, row.step or b"", row, signed_columns.of_step(step.manifest))
        named = {*step.manifest.replies, *step.manifest.consulted}
        known = (
            select(models.Reply.envelope_digest)
            .join(models.Assignment)
            .join(models.Phase)
            .join(models.Round)
            .where(models.Round.run_id == row.run_id, models.Reply.envelope_digest.in_(named))
        )
        if check.verified and (missing := named - set(session.scalars(known))):
            check.verified, check.reason = False, "mismatch:replies"
            check.message = f"it names the reply {min(missing)}, which is not on record"
        return check

    def _facts(self, run: models.Run) -> dict[str, object]:
        """The fields that all assignments of a run repeat, as far as its specification can be read."""
        facts: dict[str, object] = {"federation_id": self.federation_id, "run_id": run.run_id}
        facts["submitted_by"] = run.submitted_by.rpartition("/")[2]
        try:
            return facts | run_facts(self.federation_id, run.run_id, run.spec, parsed_spec(run.spec))
        except SpecError:
            return facts | {"spec": run.spec_digest}

    def signers(self, session: Session) -> Signers:
        """The keys that may sign what is on record."""
        known: dict[tuple[str, bytes], KeyChain] = {}

        def client(client_id: str, envelope: SignedEnvelope) -> KeyChain:
            if (client_id, envelope.key_id) in known:
                return known[client_id, envelope.key_id]
            row = session.get(models.Client, client_id)
            try:
                keys = known[client_id, envelope.key_id] = member_keys(
                    session,
                    client_id,
                    b"" if row is None else row.signing_key,
                    envelope,
                    federation_id=self.federation_id,
                    coordinator=self.coordinator,
                )
            except ValueError:  # of the present key, which was edited
                raise Refusal("key-unknown", f"the record has no signing key of {client_id}") from None
            return keys

        return Signers(coordinator=self.coordinator, client=client)


def _known(assignment: models.Assignment) -> dict[str, object]:
    return {"assignment_id": assignment.assignment_id, "client_id": assignment.client_id}


def _exchange_checks(opened: OpenedExchange, row: models.Assignment, phase: int) -> Iterator[CheckedEnvelope]:
    signed = signed_columns.of_assignment(opened.assignment.manifest)
    yield CheckedEnvelope(row.client_id, "", _check(opened.assignment, phase, row.envelope, row, signed))
    if opened.decline is not None:
        declined = signed_columns.of_decline(opened.decline.manifest)
        yield CheckedEnvelope(row.client_id, "", _check(opened.decline, phase, row.decline or b"", row, declined))
    for answer, reply in zip(opened.answers, in_order(row.replies), strict=True):
        for check in _answer_checks(answer, reply, phase):
            yield CheckedEnvelope(row.client_id, reply.envelope_digest, check)


def _answer_checks(answer: OpenedAnswer, row: models.Reply, phase: int) -> Iterator[messages.EnvelopeCheck]:
    signed = {"envelope_digest": answer.reply.digest}
    counted = row.accepted or answer.receipt is not None
    signed |= signed_columns.of_reply(answer.reply.manifest, stored=row.accepted, counted=counted)
    yield _check(answer.reply, phase, row.envelope, row, signed)
    if answer.receipt is not None:
        yield _check(answer.receipt, phase, row.receipt, row, signed_columns.of_receipt(answer.receipt.manifest))
    elif row.accepted:
        yield messages.EnvelopeCheck(kind="receipt", phase=phase, reason="key-unknown", message="there is no receipt")


def _check(
    opened: Opened[Any], phase: int, data: bytes, row: models.Base, signed: Mapping[str, object]
) -> messages.EnvelopeCheck:
    """The check of an envelope; `signed` are the columns of a row that repeat what it says."""
    check = messages.EnvelopeCheck(kind=opened.kind, phase=phase)
    if parsed(data) is None:
        check.reason, check.message = "manifest", "the recorded bytes are not a signed envelope"
        return check
    check.key_id = opened.envelope.key_id.hex()
    problem = opened.problem
    if problem is None:
        differs = (name for name, value in signed.items() if getattr(row, name) != value)
        problem = next((Mismatch(name, signed[name], getattr(row, name)) for name in differs), None)
    if problem is None:
        check.verified = True
    else:
        check.reason, check.message = problem.reason, _message(problem)
    return check


def _message(problem: Refusal) -> str:
    if isinstance(problem, Mismatch):
        return f"the record says {_short(problem.expected)}, signed is {_short(problem.found)}"
    if problem.reason == "signature":
        return "the signature does not fit the recorded bytes"
    return problem.message


def _unsigned(phase: int) -> messages.EnvelopeCheck:
    message = "its client is simulated, and signs nothing"
    return messages.EnvelopeCheck(kind="reply", phase=phase, reason="unsigned", message=message)


def _short(value: object) -> str:
    text = str(value) or "nothing"
    return text if len(text) <= _MAX_VALUE else text[: _MAX_VALUE - 1] + "…"
