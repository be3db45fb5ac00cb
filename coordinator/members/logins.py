"""Logins of administrators: a request signed by the signing key becomes a certificate for some hours."""

from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.members.administrators import certify_administrator
from coordinator.members.authority import Authority
from coordinator.members.logged_rights import LoggedRights
from federation.digests import digest
from federation.refusals import Refusal
from federation.trust.certificates import csr_public_key
from federation.trust.envelope import key_id, verify
from federation.trust.identity import admin_uris
from federation.trust.keys import IdentityError
from federation.v1.common_pb2 import LoginManifest, SignedEnvelope
from storage.models import Administrator, Certificate

TOLERANCE = timedelta(minutes=5)  # between the administrator's clock and the coordinator's
MAX_MANIFEST_BYTES = 8192
_NOBODY = Ed25519PrivateKey.generate().public_key()  # its private key is not kept


def prove_login(
    session: Session, envelope: SignedEnvelope, *, lock: bool = False
) -> tuple[Administrator, LoginManifest]:
    """The administrator who signed a login, and the signed request; `lock` holds its row until the transaction ends.

    A key that is not on record, one that has ended and a wrong signature are refused alike, after the same work, so
    that the answer does not reveal to a stranger which administrators exist.

    Raises:
        Refusal: `login`: no administrator signed this; `manifest`.
    """
    if len(envelope.manifest) > MAX_MANIFEST_BYTES:
        raise Refusal("manifest", f"a login has at most {MAX_MANIFEST_BYTES} bytes")
    administrator = session.get(Administrator, envelope.key_id.hex(), with_for_update=lock, populate_existing=True)
    known = administrator is not None and administrator.ended is None
    key = Ed25519PublicKey.from_public_bytes(administrator.signing_key) if administrator and known else _NOBODY
    named = SignedEnvelope(manifest=envelope.manifest, key_id=key_id(key), signature=envelope.signature)
    try:
        manifest = verify(named, LoginManifest, key)
    except Refusal as refusal:
        if refusal.reason != "signature":
            raise
        administrator = None
    if administrator is None:
        raise Refusal(
            "login",
            "the login is not signed by an administrator's signing key: the administrator was revoked or issued again, "
            "or the directory is of another federation",
        )
    return administrator, manifest


def log_in(
    session: Session,
    envelope: SignedEnvelope,
    *,
    authority: Authority,
    rights: LoggedRights,
    lifetime: timedelta,
    now: datetime,
) -> x509.Certificate:
    """Issues the certificate that a signed login asks for.

    An overheard request is useless, because the certificate is for the key in it. A replay is refused nevertheless:
    each request counts once, within five minutes of its time, and requests stay on record longer than that, with their
    certificates.

    Raises:
        Refusal: `login`, `manifest`, `mismatch:federation_id`, `mismatch:name`, `signed-time`, `csr`, `login-replayed`;
            `unlogged`: the audit log does not tell of the administrator.
    """
    administrator, manifest = prove_login(session, envelope, lock=True)
    rights.must_tell_of(administrator)
    for field, expected in (("federation_id", authority.federation_id), ("name", administrator.name)):
        if (signed_value := getattr(manifest, field)) != expected:
            raise Refusal(f"mismatch:{field}", f"the login is for {signed_value[:63]!r}, not for {expected!r}")
    try:
        signed_at = manifest.created.ToDatetime(now.tzinfo)
    except (ValueError, OverflowError):
        raise Refusal("signed-time", "the time of the login is not a time") from None
    if abs(signed_at - now) > TOLERANCE:
        raise Refusal(
            "signed-time",
            f"the login was made at {signed_at:%Y-%m-%d %H:%M:%S} UTC by your clock, and the coordinator's clock says "
            f"{now:%Y-%m-%d %H:%M:%S} UTC: set the clock",
        )
    try:
        key = csr_public_key(manifest.csr)
    except IdentityError as error:
        raise Refusal("csr", str(error)) from None
    login = digest(envelope.manifest)
    if session.scalar(select(Certificate.serial).filter_by(login=login)) is not None:
        raise Refusal("login-replayed", "this login was used already: make a new one")
    by = admin_uris(authority.federation_id, administrator.name, ())[0]
    return certify_administrator(
        session, administrator, key, authority=authority, lifetime=lifetime, login=login, by=by, now=now
    )
