"""Rotation: a member's next signing key, signed by the present one. Functions of a session."""

from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.members.authority import Authority, certify
from coordinator.members.membership import REVOKED
from coordinator.members.renewal import end_surplus
from coordinator.rounds.transitions import RUN_ENDED
from coordinator.signing_keys import Signing, rotations_of
from federation.digests import digest
from federation.record.joinings import RENEWED
from federation.refusals import Refusal
from federation.spec.run_spec import RunSpec
from federation.trust.certificates import csr_public_key, der, serial_of
from federation.trust.envelope import key_id
from federation.trust.key_chain import open_rotation, receipt
from federation.trust.keys import IdentityError
from federation.trust.proofs import proves_renewal
from federation.v1.common_pb2 import KeyRotation, SignedEnvelope
from storage import audit
from storage.models import Assignment, Client, Phase, Rotation, Round, Run
from storage.states import ClientState

OVERLAP = timedelta(days=7)  # for replies to earlier assignments, signed by the old key


def rotate_key(
    session: Session,
    client_id: str,
    serial: str,
    rotation: KeyRotation,
    csr: bytes,
    proof: bytes,
    *,
    signing: Signing,
    authority: Authority,
    by: str,
    now: datetime,
) -> tuple[SignedEnvelope, x509.Certificate]:
    """Registers a member's next signing key, and issues a certificate that names it.

    Both keys have signed the rotation. The rotation that made the present key gets its receipt again, since the answer
    may have been lost. `serial` is of the certificate that the member shows, `csr` a request for the next one, and
    `proof` by the new signing key (`prove_renewal`). Returns the receipt and the certificate.

    Raises:
        Refusal: `certificate-revoked`, `csr`, `key-ended`, `key-unknown`, `signature`, `manifest`, `rotation`,
            `signing-key`, `proof`; `run-state`: members of a run with private rounds have pinned the present key.
    """
    try:
        tls_key = csr_public_key(csr)
    except IdentityError as error:
        raise Refusal("csr", str(error)) from None
    client = session.get_one(Client, client_id, with_for_update=True, populate_existing=True)
    if client.state is ClientState.REVOKED:
        raise Refusal("certificate-revoked", REVOKED)
    before, replaced = rotations_of(session, client_id), None
    if before and before[-1].statement == rotation.statement:
        present, answer = Ed25519PublicKey.from_public_bytes(client.signing_key), before[-1].receipt
        _check_possession(present, proof, csr, client_id)
    else:
        replaced = client.key_id
        answer = _register(session, client, rotation, (csr, proof), len(before) + 1, signing=signing, now=now)
    certificate = certify(session, client_id, tls_key, client.signing_key, authority=authority, now=now)
    session.flush()
    end_surplus(session, client_id, keep={serial, serial_of(certificate)}, by=by, now=now)
    told = f"certificate {serial_of(certificate)}"  # a withdrawal may name it
    if replaced is None:
        audit.record(
            session,
            at=now,
            actor=by,
            action=RENEWED,
            subject=client_id,
            detail=told,
            digest=digest(der(certificate)),
        )
    else:
        audit.record(
            session,
            at=now,
            actor=by,
            action=audit.ROTATED,
            subject=client_id,
            detail=f"signing key {replaced[:16]} replaced by {client.key_id[:16]}, {told}",
            digest=digest(client.signing_key),
        )
    return answer, certificate


def _register(
    session: Session,
    client: Client,
    rotation: KeyRotation,
    csr_and_proof: tuple[bytes, bytes],
    number: int,
    *,
    signing: Signing,
    now: datetime,
) -> SignedEnvelope:
    """Puts the new key in the place of the present one; returns the receipt."""
    client_id, federation_id = client.client_id, signing.federation_id
    keys = signing.keys_of(session, client_id, client.signing_key, rotation.statement)
    if keys.former_of(rotation.statement) is not None:
        raise Refusal("key-ended", f"{client_id} has replaced the key that signed this rotation already")
    manifest, new = open_rotation(
        rotation, keys.present, federation_id=federation_id, client_id=client_id, number=number
    )
    name = key_id(new).hex()
    if session.scalar(select(Client).filter_by(key_id=name)) or session.get(Rotation, name) is not None:
        raise Refusal("signing-key", "this signing key is registered already, or was once: make a new one")
    _check_possession(new, csr_and_proof[1], csr_and_proof[0], client_id)
    _check_in_no_private_run(session, client_id)
    answer = receipt(
        rotation, signing.key, federation_id=federation_id, client_id=client_id, ended=now, until=now + OVERLAP
    )
    recorded = KeyRotation(statement=rotation.statement, possession=rotation.possession, receipt=answer)
    row = Rotation(key_id=client.key_id, client_id=client_id, number=number)
    row.rotation = recorded.SerializeToString(deterministic=True)
    session.add(row)
    client.signing_key, client.key_id = manifest.new_key, name
    return answer


def _check_possession(key: Ed25519PublicKey, proof: bytes, csr: bytes, client_id: str) -> None:
    if not proves_renewal(key, proof, csr):
        raise Refusal("proof", f"the proof is not by the new signing key of {client_id} over this request")


def _check_in_no_private_run(session: Session, client_id: str) -> None:
    runs = (
        select(Run.name, Run.spec)
        .join(Round)
        .join(Phase)
        .join(Assignment)
        .where(Assignment.client_id == client_id, Run.state.not_in(RUN_ENDED))
        .distinct()
    )
    for name, spec in session.execute(runs):
        # Section 3, rule 0: the others take a new key from its owner's card alone, and would decline this member until
        # then.
        if RunSpec.parse(spec).privacy.secure != "off":
            raise Refusal(
                "run-state",
                f"the run {name} has private rounds, and its members have pinned your present key: replace it when the "
                "run has ended",
            )
