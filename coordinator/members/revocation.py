"""The coordinator's signed word that a client is shut out: a worker stops for good on nothing less."""

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.envelope import seal
from federation.refusals import Refusal
from federation.v1.common_pb2 import RevocationManifest
from storage.models import Certificate, Client, ClientState

REVOKED = "your certificate has been revoked; ask an administrator why"


def revoked(federation_id: str, key: Ed25519PrivateKey, client: Client, certificate: Certificate | None) -> Refusal:
    """The refusal that a revoked client hears, with the signed statement.

    Args:
        federation_id: the federation.
        key: the coordinator's signing key.
        client: who calls.
        certificate: the one that was shown, when it has ended and the client has not.
    """
    shut_out = client.state is ClientState.REVOKED
    manifest = RevocationManifest(federation_id=federation_id, client_id=client.client_id)
    if shut_out:
        manifest.reason = client.revoked_reason
    elif certificate is not None:
        manifest.serial = certificate.serial
        manifest.reason = "the client has attended with a newer certificate"
    ended = client.revoked if shut_out else certificate.revoked if certificate is not None else None
    if ended is not None:
        manifest.revoked.FromDatetime(ended)
    return Refusal("certificate-revoked", REVOKED, signed=seal(manifest, key))
