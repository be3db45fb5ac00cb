"""Members that answer each run before they work for it: the signed question about a run, and their signed answers."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from coordinator.rounds.fleets.known import too_old
from coordinator.rounds.fleets.presence import AttendanceStream, Offered
from coordinator.rounds.replies import signed_columns
from coordinator.rounds.replies.declines import MAX_BYTES
from coordinator.rounds.transitions import RUN_ENDED
from federation.refusals import Refusal
from federation.spec.run_spec import RunSpec
from federation.trust.envelope import envelope_digest, sign, verify
from federation.trust.identity import client_uri
from federation.v1.common_pb2 import ConsentManifest, RunManifest, SignedEnvelope
from storage import audit
from storage.models import Client, Consent, Run
from storage.states import Answer, ClientState

WAITS = "waits for the approval of its owner"
# Built once: each phase of a round runs it.
_ANSWERS = (
    select(Client.client_id, Consent.answer, Consent.reason, Consent.message)
    .outerjoin(Consent, (Consent.client_id == Client.client_id) & (Consent.run_id == bindparam("run")))
    .where(Client.consents, Client.state == ClientState.ACTIVE)
    .order_by(Client.client_id)
)


@dataclass(frozen=True)
class Offers:
    """Sends members the questions about runs, as the coordinator of a federation."""

    federation_id: str
    signing_key: Ed25519PrivateKey

    def of(self, run: Run) -> SignedEnvelope:
        """The signed question about a run; the same bytes each time."""
        manifest = RunManifest(
            federation_id=self.federation_id,
            run_id=run.run_id,
            name=run.name,
            task=RunSpec.parse(run.spec).task,
            spec=run.spec_digest,
            submitted_by=run.submitted_by.rpartition("/")[2],
            initial_model=run.initial_model,
        )
        manifest.created.FromDatetime(run.created)
        return sign(manifest, self.signing_key)

    def tell(self, session: Session, attending: Iterable[AttendanceStream], run_id: str = "") -> None:
        """Asks the members that answer runs about one run, or about each run that has not ended; each stream once.

        Members get the questions about runs of the tasks that they offer, and of the kinds that their workers know.
        """
        answering = [stream for stream in attending if stream.consents]
        if not answering:
            return
        ids = select(Run.run_id).where(Run.state.not_in(list(RUN_ENDED)))
        runs = session.scalars(ids.where(Run.run_id == run_id) if run_id else ids).all()
        unasked = {run for run in runs for stream in answering if run not in stream.asked}
        if not unasked:
            return
        names = [stream.client_id for stream in answering]
        members = set(
            session.scalars(
                select(Client.client_id).where(Client.client_id.in_(names), Client.state == ClientState.ACTIVE)
            )
        )
        for run in session.scalars(select(Run).where(Run.run_id.in_(unasked)).order_by(Run.created)).all():
            spec, envelope = RunSpec.parse(run.spec), self.of(run).SerializeToString()
            old = too_old(session, spec)
            for stream in answering:
                if stream.client_id in members and run.run_id not in stream.asked:
                    stream.asked.add(run.run_id)
                    if spec.task in stream.tasks and stream.client_id not in old:
                        stream.say(Offered(envelope))


def offered_specification(session: Session, client_id: str, digest: str) -> bytes | None:
    """The specification of this digest, if a run that has not ended asks this client to take part; None otherwise."""
    client = session.get_one(Client, client_id)
    if client.state is not ClientState.ACTIVE or not client.consents:
        return None
    runs = select(Run.spec).where(Run.spec_digest == digest, Run.state.not_in(list(RUN_ENDED))).limit(1)
    document = session.scalar(runs)
    return document if document is not None and RunSpec.parse(document).task in client.tasks else None


def record_consent(
    session: Session,
    client_id: str,
    envelope: SignedEnvelope,
    *,
    federation_id: str,
    now: datetime,
    changing: Callable[[], None],
) -> str:
    """Records a client's answer to a run. `changing` is called before it replaces another answer.

    Returns:
        The id of the run, empty if there is no such run, or this very answer was on record already.

    Raises:
        Refusal: `limit:manifest`, `key-unknown`, `signature`, `manifest`, `mismatch`, and what `changing` raises.
    """
    if envelope.ByteSize() > MAX_BYTES:
        raise Refusal("limit:manifest", f"a consent of {envelope.ByteSize()} bytes; at most {MAX_BYTES}")
    key = session.get_one(Client, client_id).signing_key
    consent = verify(envelope, ConsentManifest, Ed25519PublicKey.from_public_bytes(key))
    run = session.get(Run, consent.run_id[:32], with_for_update=True)
    if run is None or run.run_id != consent.run_id:
        return ""  # the coordinator was restored from a backup
    _check_fits(consent, {"federation_id": federation_id, "client_id": client_id, "spec": run.spec_digest})
    data = envelope.SerializeToString(deterministic=True)
    row = session.get(Consent, (run.run_id, client_id))
    if row is not None:
        if row.envelope == data:
            return ""
        changing()
    signed = signed_columns.of_consent(consent)
    session.merge(Consent(**{**signed, "answer": Answer(consent.answer)}, envelope=data, at=now))
    audit.record(
        session,
        at=now,
        actor=client_uri(federation_id, client_id),
        action=f"consent.{consent.answer}",
        subject=f"{run.run_id}/{client_id}",
        detail=signed["reason"],
        digest=envelope_digest(envelope),
    )
    return run.run_id


def _check_fits(consent: ConsentManifest, expected: Mapping[str, str]) -> None:
    """Raises the Refusal `mismatch:<field>` unless a consent has these fields and one of the possible answers."""
    for name, value in expected.items():
        if getattr(consent, name) != value:
            raise Refusal(f"mismatch:{name}", f"the answer is about another {name} than the run's")
    if consent.answer not in set(Answer):
        raise Refusal("mismatch:answer", f"{consent.answer[:20]!r} is no answer: accepted, waiting or refused")


def reluctant(session: Session, run_id: str) -> dict[str, str]:
    """The members that answer each run and have not accepted this one, by name, with their answer."""
    return {
        client_id: _answer_text(answer, reason, message)
        for client_id, answer, reason, message in session.connection().execute(_ANSWERS, {"run": run_id})
        if answer is not Answer.ACCEPTED
    }


def _answer_text(answer: Answer | None, reason: str, message: str) -> str:
    if answer is None:
        return "has not answered the run yet"
    if answer is Answer.WAITING:
        return WAITS
    return f"refuses the run: {reason}" + (f": {message}" if message else "")
