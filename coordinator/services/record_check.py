"""Compares the record with the audit log, and blobs with their digests: finds edited rows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.members.administrators import CERTIFIED, ISSUED, REVOKED, identity_digest
from coordinator.rounds.states import RUN_ENDED, SIMULATOR
from coordinator.services.officers_check import request_problems
from coordinator.services.verification import Verifier, parsed
from federation import log_entries
from federation.digests import digest
from federation.envelope import envelope_digest
from federation.noise_rows import noise_defect
from federation.proofs import UNSIGNED
from federation.refusals import Refusal
from federation.runs import RunSpec, SpecError
from federation.v1.common_pb2 import AssignmentManifest, ReplyManifest
from federation.vectors import update_rows
from federation.work.secure.orders import order_problems
from storage import audit
from storage.blobs import BlobCorrupt, BlobMissing, BlobStore
from storage.models import (
    Administrator,
    Assignment,
    AuditEntry,
    Certificate,
    Client,
    Consent,
    Phase,
    Reply,
    Round,
    Run,
)
from storage.states import ClientState

_BLOBS_AT_A_TIME = 50


@dataclass(frozen=True)
class Told:
    """What the entries of one action tell: the digest of each subject, the newest last."""

    digests: Mapping[str, list[str]]

    @classmethod
    def read(cls, session: Session, action: str) -> "Told":
        """The entries of an action."""
        digests: dict[str, list[str]] = {}
        rows = select(AuditEntry.subject, AuditEntry.digest).where(AuditEntry.action == action)
        for subject, told in session.execute(rows.order_by(AuditEntry.entry_id)):
            digests.setdefault(subject, []).append(told)
        return cls(digests)

    def missing(self, subject: str, found: str) -> bool:
        """Whether no entry tells of this digest about a subject."""
        return found not in self.digests.get(subject, ())


def record_problems(session: Session, verifier: Verifier) -> Iterator[str | int]:
    """What differs between the record and the log, in words, and after each round how many there were so far."""
    yield from _clients(session, verifier)
    yield from _administrators(session)
    yield from request_problems(session)
    yield from _runs(session)
    yield from _consents(session, verifier)
    steps, issued, accepted, declined = (
        Told.read(session, name)
        for name in (log_entries.STEPPED, log_entries.ISSUED, log_entries.ACCEPTED, log_entries.DECLINED)
    )
    replies = ((accepted, "accepted reply to assignment"), (declined, "decline of assignment"))
    seen: set[str] = set()
    rounds = select(Round).join(Run).where(Run.submitted_by != SIMULATOR).order_by(Round.run_id, Round.number)
    for count, row in enumerate(session.scalars(rounds).all(), 1):
        place = f"{row.run_id}/{row.number}"
        seen.add(place)
        yield from _step(session, verifier, row, place, steps)
        for client, checks in verifier.of_round(session, row.round_id).items():
            for _, check in checks:
                if not check.verified:
                    words = f"{check.reason}: {check.message}"
                    yield f"round {place}: the {check.kind} of {client} in phase {check.phase}: {words}"
        yield from _replies(session, row, place, issued, accepted, declined, seen)
        yield from _private(session, row, place)
        yield count
        session.expunge_all()
    for told, what in ((steps, "step of round"), (issued, "assignment"), *replies):
        for subject in told.digests:
            if subject not in seen and f"{what} {subject}" not in seen:
                yield f"{what} {subject}: the log tells of it, and it is not in the record"


def _step(session: Session, verifier: Verifier, row: Round, place: str, steps: Told) -> Iterator[str]:
    if row.step is None:
        if place in steps.digests:
            yield f"round {place}: the log tells of its step, and it has none"
        return
    check = verifier.step(session, row)
    if not check.verified:
        yield f"round {place}: the step: {check.reason}: {check.message}"
    envelope = parsed(row.step)
    if envelope is not None and steps.missing(place, envelope_digest(envelope)):
        yield f"round {place}: the step: no entry of the log tells of it"


def _replies(
    session: Session, row: Round, place: str, issued: Told, accepted: Told, declined: Told, seen: set[str]
) -> Iterator[str]:
    """Compares assignments, declines and accepted replies of a round with the entries; notes those that are there."""
    assignments = select(Assignment).join(Phase).where(Phase.round_id == row.round_id)
    for assignment in session.scalars(assignments):
        name = assignment.assignment_id
        seen.add(f"assignment {name}")
        envelope = parsed(assignment.envelope)
        if envelope is not None and issued.missing(name, envelope_digest(envelope)):
            yield f"round {place}: assignment {name}: no entry of the log tells of it"
        refusal = None if assignment.decline is None else parsed(assignment.decline)
        if refusal is not None:
            seen.add(f"decline of assignment {name}")
            if declined.missing(name, envelope_digest(refusal)):
                yield f"round {place}: the decline of assignment {name}: no entry of the log tells of it"
    replies = select(Reply).join(Assignment).join(Phase).where(Phase.round_id == row.round_id, Reply.accepted)
    for reply in session.scalars(replies):
        name = reply.assignment_id
        seen.add(f"accepted reply to assignment {name}")
        if accepted.missing(name, reply.envelope_digest):
            yield f"round {place}: the accepted reply to assignment {name}: no entry of the log tells of it"


def _private(session: Session, row: Round, place: str) -> Iterator[str]:
    """What members of private rounds should have refused, in any attempt."""
    try:
        spec = RunSpec.parse(session.scalars(select(Run.spec).where(Run.run_id == row.run_id)).one())
    except SpecError as error:
        yield f"round {place}: the specification of its run: {error}"
        return
    if spec.privacy.secure == "off":
        return
    assignments = select(Assignment).join(Phase).where(Phase.round_id == row.round_id)
    orders = [parsed(assignment.envelope) for assignment in session.scalars(assignments)]
    replies = select(Reply).join(Assignment).join(Phase).where(Phase.round_id == row.round_id, Reply.accepted)
    answers = [parsed(reply.envelope) for reply in session.scalars(replies)]
    try:
        asked = [AssignmentManifest.FromString(order.manifest) for order in orders if order is not None]
        said = [ReplyManifest.FromString(answer.manifest) for answer in answers if answer is not None]
    except DecodeError:
        return  # such an envelope has been named above
    for problem in order_problems(spec, asked, said):
        yield f"round {place}: {problem}"


def _runs(session: Session) -> Iterator[str]:
    submitted = Told.read(session, log_entries.SUBMITTED)
    ends = {state: Told.read(session, f"run.{state.lower()}") for state in RUN_ENDED}
    runs = session.scalars(select(Run).where(Run.submitted_by != SIMULATOR).order_by(Run.run_id)).all()
    for run in runs:
        found = digest(run.spec)
        if found != run.spec_digest or submitted.missing(run.run_id, found):
            yield f"run {run.run_id}: its specification is not the one whose submission the log tells of"
        for state, told in ends.items():
            if (run.run_id in told.digests) != (run.state is state):
                there = "tells" if run.run_id in told.digests else "does not tell"
                yield f"run {run.run_id}: it is {run.state}, and the log {there} that it became {state}"
    for run_id in submitted.digests.keys() - {run.run_id for run in runs}:
        yield f"run {run_id}: the log tells of it, and it is not in the record"


def _consents(session: Session, verifier: Verifier) -> Iterator[str]:
    """The newest answer of a client to a run is the one that the log tells of last."""
    told: dict[str, str] = {}
    entries = select(AuditEntry.subject, AuditEntry.digest).where(AuditEntry.action.startswith("consent."))
    told.update((subject, found) for subject, found in session.execute(entries.order_by(AuditEntry.entry_id)))
    rows = select(Consent, Run.spec_digest, Client.signing_key).join(Run).join(Client)
    for row, spec, key in session.execute(rows):
        place, check = f"{row.run_id}/{row.client_id}", verifier.consent(session, row, spec, key)
        envelope = parsed(row.envelope)
        if not check.verified:
            yield f"consent {place}: {check.reason}: {check.message}"
        if envelope is not None and told.pop(place, "") != envelope_digest(envelope):
            yield f"consent {place}: the log tells of another answer"
    for place in told:
        yield f"consent {place}: the log tells of it, and it is not in the record"


def _clients(session: Session, verifier: Verifier) -> Iterator[str]:
    enrolled, rotated, approved, revoked, forgotten = (
        Told.read(session, action)
        for action in (audit.ENROLLED, audit.ROTATED, "client.approved", "client.revoked", "client.forgotten")
    )
    pending = AuditEntry.detail.endswith(f", {ClientState.PENDING}")
    waited = set(session.scalars(select(AuditEntry.subject).where(AuditEntry.action == audit.ENROLLED, pending)))
    clients = session.scalars(select(Client).where(Client.signing_key != UNSIGNED).order_by(Client.client_id)).all()
    for client in clients:
        name = client.client_id
        told = [*enrolled.digests.get(name, ()), *rotated.digests.get(name, ())]
        try:
            if [digest(key) for key in verifier.keys(session, client).raw] != told:
                yield f"client {name}: its signing keys are not those that the log tells of"
        except Refusal as refusal:
            yield f"client {name}: its signing keys: {refusal.message}"
        if (name in revoked.digests) != (client.state is ClientState.REVOKED):
            there = "tells" if name in revoked.digests else "does not tell"
            yield f"client {name}: it is {client.state}, and the log {there} of its revocation"
        if (name in forgotten.digests) != (client.forgotten is not None):
            there = "tells" if name in forgotten.digests else "does not tell"
            yield f"client {name}: the log {there} that it was forgotten, unlike the record"
        if client.state is ClientState.ACTIVE and name in waited and name not in approved.digests:
            yield f"client {name}: it is ACTIVE, and the log does not tell of its approval"
    for name in enrolled.digests.keys() - {"", *(client.client_id for client in clients)}:
        yield f"client {name}: the log tells that it enrolled, and it is not in the record"


def _administrators(session: Session) -> Iterator[str]:
    issued, certified = Told.read(session, ISSUED), Told.read(session, CERTIFIED)
    changes = select(AuditEntry.subject, AuditEntry.action).where(AuditEntry.action.in_([ISSUED, REVOKED]))
    last = {row.subject: row.action for row in session.execute(changes.order_by(AuditEntry.entry_id))}
    keys: dict[str, list[Administrator]] = {}
    for row in session.scalars(select(Administrator).order_by(Administrator.name, Administrator.issued)):
        keys.setdefault(row.name, []).append(row)
        if issued.missing(row.name, identity_digest(row)):
            yield f"administrator {row.name}: no entry of the log tells of its signing key with these roles"
    for name, rows in keys.items():
        if any(row.ended is None for row in rows[:-1]):
            yield f"administrator {name}: a signing key counts although the log tells of a newer one"
        if (last.get(name) == REVOKED) != (rows[-1].ended is not None):
            there = "tells" if last.get(name) == REVOKED else "does not tell"
            yield f"administrator {name}: the log {there} of its revocation, and the record says otherwise"
    for name in issued.digests.keys() - keys.keys():
        yield f"administrator {name}: the log tells of it, and it is not in the record"
    for certificate in session.scalars(select(Certificate).where(Certificate.client_id.is_(None))):
        name = certificate.subject.rpartition("/")[2]
        if certified.missing(name, digest(certificate.certificate)):
            yield f"administrator {name}: no entry of the log tells of the certificate {certificate.serial}"


def blob_problems(blobs: BlobStore, needed: set[str]) -> Iterator[str | int]:
    """Which blobs are damaged, or missing although they are `needed`, and now and then how many were read so far."""
    count, stored = 0, set()
    for count, blob in enumerate(blobs.scan(), 1):
        stored.add(blob.digest)
        try:
            blobs.verify(blob.digest)
        except BlobCorrupt as error:
            yield f"blob {blob.digest}: {error}"
        except BlobMissing:
            pass  # it was removed a moment ago
        if count % _BLOBS_AT_A_TIME == 0:
            yield count
    for digest_ in sorted(needed - stored):
        yield f"blob {digest_}: it is missing, and a run needs it"
    yield count


def noise_problems(session: Session, blobs: BlobStore) -> Iterator[str]:
    """Which rounds have noise for clients that is too long or too large, as far as it is kept."""
    rounds = select(Round.run_id, Round.number, Round.noise).order_by(Round.run_id, Round.number)
    for run_id, number, noise in session.execute(rounds):
        if noise is None:
            continue
        try:
            defect = noise_defect(update_rows(blobs.local(noise)).values())
        except (BlobMissing, BlobCorrupt):
            continue  # it is kept no longer, or is named with the blobs
        except Refusal as refusal:
            defect = refusal.message
        if defect:
            yield f"round {run_id}/{number}: the noise {noise}: {defect}"
