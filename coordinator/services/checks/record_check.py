"""Compares the record with the audit log, and blobs with their digests: finds edited rows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from sqlalchemy import and_, or_, select
from sqlalchemy.orm import Session

from coordinator.members.administrators import CERTIFIED
from coordinator.members.logged_rights import LoggedRights
from coordinator.members.membership import FORGOTTEN
from coordinator.rounds.export import parsed
from coordinator.rounds.transitions import RUN_ENDED, SIMULATOR
from coordinator.services.checks.envelope_checks import EnvelopeChecks
from coordinator.services.checks.logged_facts import LoggedFacts, read_facts
from coordinator.services.checks.officers_check import request_problems
from coordinator.services.checks.verified_rounds import RoundsCheck
from federation.digests import digest
from federation.record import log_entries
from federation.record.joinings import LEFT
from federation.record.log_entries import Fact
from federation.record.noise_rows import noise_defect
from federation.record.rounds import OpenedRound
from federation.record.withdrawals import TELLING, withdrawal_problems
from federation.refusals import Refusal
from federation.trust.envelope import envelope_digest
from federation.trust.identity import client_uri
from federation.trust.proofs import UNSIGNED
from federation.vectors import update_rows
from storage import audit
from storage.blobs import BlobCorrupt, BlobMissing, BlobStore
from storage.models import (
    AuditEntry,
    Certificate,
    Client,
    Consent,
    Round,
    Run,
    Withdrawal,
)

_BLOBS_AT_A_TIME = 50
_RUNS_AT_A_TIME = 50
# The actions of entries about rounds, and their subjects.
_OF_ROUNDS = {
    log_entries.STEPPED: "step of round",
    log_entries.SKIPPED: "end of round",
    log_entries.MEASURED: "measurement of round",
    log_entries.DESCRIBED: "result of round",
    log_entries.ISSUED: "assignment",
    log_entries.DECLINED: "decline of assignment",
    log_entries.ACCEPTED: "accepted reply to assignment",
    log_entries.REFUSED: "refused reply to assignment",
    log_entries.EQUIVOCATED: "further reply to assignment",
}


@dataclass(frozen=True)
class LoggedDigests:
    """The digests in the log entries of one action, by subject, the newest last."""

    digests: Mapping[str, list[str]]

    @classmethod
    def read(cls, session: Session, action: str) -> "LoggedDigests":
        """Reads the entries of an action."""
        digests: dict[str, list[str]] = {}
        rows = select(AuditEntry.subject, AuditEntry.digest).where(AuditEntry.action == action)
        for subject, logged in session.execute(rows.order_by(AuditEntry.entry_id)):
            digests.setdefault(subject, []).append(logged)
        return cls(digests)

    def missing(self, subject: str, expected: str) -> bool:
        """True if no entry has this digest for a subject."""
        return expected not in self.digests.get(subject, ())


class _LoggedRounds:
    """The entries about rounds, compared with the envelopes on record."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._facts = LoggedFacts(read_facts(session, _OF_ROUNDS))
        steps = read_facts(session, [log_entries.STEPPED])
        self._stepped = LoggedFacts(replace(step, digest="") for step in steps)
        self._named: set[tuple[str, str]] = set()  # actions and subjects whose problem was reported already

    def problems(self, round_name: str, opened: OpenedRound) -> Iterator[str]:
        """Describes the envelopes of a round that have no entry in the log."""
        if opened.step is None and Fact(log_entries.STEPPED, round_name, "") in self._stepped:
            self._named.add((log_entries.STEPPED, round_name))
            yield f"round {round_name}: the log tells of its step, and it has none"
        facts = [(item.name, item.fact) for item in opened.envelopes if item.fact is not None]
        if opened.ended is not None:
            facts.append(("its end", opened.ended))
        for exchange in opened.exchanges:
            if exchange.assignment.fact is not None and any(item.reply.fact is None for item in exchange.answers):
                subject = exchange.assignment.fact.subject  # its receipt was reported
                self._named |= {(log_entries.ACCEPTED, subject), (log_entries.REFUSED, subject)}
        for name, fact in facts:
            if not self._facts.see(fact):
                self._named.add((fact.action, fact.subject))
                yield f"round {round_name}: {name}: no entry of the log tells of it"

    def further(self) -> Iterator[str]:
        """Describes the entries without an envelope in the record, after all rounds."""
        if self._facts.all_seen:
            return
        for fact in read_facts(self._session, _OF_ROUNDS):
            subject = fact.action, fact.subject
            if subject not in self._named and not self._facts.has_seen(fact):
                self._named.add(subject)
                yield f"{_OF_ROUNDS[fact.action]} {fact.subject}: the log tells of it, and it is not in the record"


def record_problems(session: Session, checks: EnvelopeChecks, key: bytes, blobs: BlobStore) -> Iterator[str | int]:
    """Describes differences between the record and the log; after each round, yields the number of rounds so far.

    `key` is that of the MACs of entries without a place in the log.
    """
    yield from _clients(session, checks)
    yield from LoggedRights.read(session, key).problems(session)
    yield from _certificates(session)
    yield from request_problems(session)
    yield from _runs(session)
    yield from _consents(session, checks)
    yield from _withdrawals(session, checks)
    log, verified = _LoggedRounds(session), RoundsCheck(session, checks, blobs)
    rounds = select(Round.round_id).join(Run).where(Run.submitted_by != SIMULATOR).order_by(Round.run_id, Round.number)
    for count, round_id in enumerate(session.scalars(rounds).all(), 1):
        row = session.get_one(Round, round_id)
        round_name = f"{row.run_id}/{row.number}"
        checked = checks.of_round(session, row)
        if checked.step is not None and not checked.step.verified:
            yield f"round {round_name}: the step: {checked.step.reason}: {checked.step.message}"
        for envelope in checked.envelopes:
            if not envelope.check.verified:
                subject = f"the {envelope.check.kind} of {envelope.client_id} in phase {envelope.check.phase}"
                yield f"round {round_name}: {subject}: {envelope.check.reason}: {envelope.check.message}"
        yield from log.problems(round_name, checked.opened)
        for problem in verified.problems(row, checked):
            yield f"round {round_name}: {problem}"
        yield count
        session.expunge_all()
    yield from log.further()


def _runs(session: Session) -> Iterator[str]:
    submitted = LoggedDigests.read(session, log_entries.SUBMITTED)
    ends = {state: LoggedDigests.read(session, f"run.{state.lower()}") for state in RUN_ENDED}
    missing = {*submitted.digests}
    runs = select(Run).where(Run.submitted_by != SIMULATOR).order_by(Run.run_id)
    for run in session.scalars(runs.execution_options(yield_per=_RUNS_AT_A_TIME)):
        missing.discard(run.run_id)
        spec_digest = digest(run.spec)
        if spec_digest != run.spec_digest or submitted.missing(run.run_id, spec_digest):
            yield f"run {run.run_id}: its specification is not the one whose submission the log tells of"
        for state, logged in ends.items():
            if (run.run_id in logged.digests) != (run.state is state):
                verb = "tells" if run.run_id in logged.digests else "does not tell"
                yield f"run {run.run_id}: it is {run.state}, and the log {verb} that it became {state}"
    for run_id in sorted(missing):
        yield f"run {run_id}: the log tells of it, and it is not in the record"


def _consents(session: Session, checks: EnvelopeChecks) -> Iterator[str]:
    """The newest answer of a client to a run is the one that the log tells of last."""
    logged: dict[str, str] = {}
    entries = select(AuditEntry.subject, AuditEntry.digest).where(AuditEntry.action.startswith("consent."))
    logged.update(
        (subject, logged_digest) for subject, logged_digest in session.execute(entries.order_by(AuditEntry.entry_id))
    )
    for row, spec in session.execute(select(Consent, Run.spec_digest).join(Run)):
        subject, check = f"{row.run_id}/{row.client_id}", checks.consent(session, row, spec)
        envelope = parsed(row.envelope)
        if not check.verified:
            yield f"consent {subject}: {check.reason}: {check.message}"
        if envelope is not None and logged.pop(subject, "") != envelope_digest(envelope):
            yield f"consent {subject}: the log tells of another answer"
    for subject in logged:
        yield f"consent {subject}: the log tells of it, and it is not in the record"


def _withdrawals(session: Session, checks: EnvelopeChecks) -> Iterator[str]:
    """Each member that has left, by the log, has signed it, and each withdrawal is in the log."""
    rows = session.scalars(select(Withdrawal).order_by(Withdrawal.client_id, Withdrawal.received)).all()
    envelopes = []
    for row in rows:
        for problem in checks.withdrawal(session, row):
            yield f"client {row.client_id}: {problem}"
        if (envelope := parsed(row.envelope)) is not None:
            envelopes.append(envelope)
    logged = set(session.scalars(select(AuditEntry.subject).where(AuditEntry.action == LEFT)))
    gone = logged | {row.client_id for row in rows}
    uris = [client_uri(checks.federation_id, name) for name in gone]
    about = or_(
        and_(AuditEntry.subject.in_(gone), AuditEntry.action.in_(TELLING)),
        and_(AuditEntry.actor.in_(uris), AuditEntry.action == log_entries.ACCEPTED),
    )
    entries = session.scalars(select(AuditEntry).where(about).order_by(AuditEntry.entry_id)).all() if gone else []
    for problem in withdrawal_problems(entries, envelopes, checks.signers(session), checks.federation_id):
        yield f"leaving: {problem}"


def _clients(session: Session, checks: EnvelopeChecks) -> Iterator[str]:
    """Former keys and forgotten members; the rest is among the `LoggedRights`."""
    enrolled, rotated, forgotten = (
        LoggedDigests.read(session, action) for action in (audit.ENROLLED, audit.ROTATED, FORGOTTEN)
    )
    clients = select(Client).where(Client.signing_key != UNSIGNED).order_by(Client.client_id)
    for client in session.scalars(clients).all():
        name = client.client_id
        logged_keys = [*enrolled.digests.get(name, ()), *rotated.digests.get(name, ())]
        try:
            if [digest(key) for key in checks.keys(session, client).raw[:-1]] != logged_keys[:-1]:
                yield f"client {name}: its former signing keys are not those that the log tells of"
        except Refusal as refusal:
            yield f"client {name}: its signing keys: {refusal.message}"
        if (name in forgotten.digests) != (client.forgotten is not None):
            verb = "tells" if name in forgotten.digests else "does not tell"
            yield f"client {name}: the log {verb} that it was forgotten, unlike the record"


def _certificates(session: Session) -> Iterator[str]:
    certified = LoggedDigests.read(session, CERTIFIED)
    for certificate in session.scalars(select(Certificate).where(Certificate.client_id.is_(None))):
        name = certificate.subject.rpartition("/")[2]
        if certified.missing(name, digest(certificate.certificate)):
            yield f"administrator {name}: no entry of the log tells of the certificate {certificate.serial}"


def blob_problems(blobs: BlobStore, needed: set[str]) -> Iterator[str | int]:
    """Describes damaged blobs and missing `needed` ones; now and then, yields the number of blobs read so far."""
    count, missing = 0, set(needed)
    for count, blob in enumerate(blobs.scan(), 1):
        missing.discard(blob.digest)
        try:
            blobs.verify(blob.digest)
        except BlobCorrupt as error:
            yield f"blob {blob.digest}: {error}"
        except BlobMissing:
            pass  # it was removed a moment ago
        if count % _BLOBS_AT_A_TIME == 0:
            yield count
    for digest_ in sorted(missing):
        yield f"blob {digest_}: it is missing, and a run needs it"
    yield count


def noise_problems(session: Session, blobs: BlobStore) -> Iterator[str]:
    """Describes rounds whose kept noise for clients is too long or too large."""
    rounds = select(Round.run_id, Round.number, Round.noise).order_by(Round.run_id, Round.number)
    for run_id, number, noise in session.execute(rounds):
        if noise is None:
            continue
        try:
            defect = noise_defect(update_rows(blobs.local(noise)).values())
        except (BlobMissing, BlobCorrupt):
            continue  # it was removed, or is reported with the blobs
        except Refusal as refusal:
            defect = refusal.message
        if defect:
            yield f"round {run_id}/{number}: the noise {noise}: {defect}"
