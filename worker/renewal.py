"""Renewing a member's certificate before it ends."""

from dataclasses import replace

import grpc

from federation.certificates import load_certificate, make_csr
from federation.channels import refusal_from_rpc_error
from federation.identity import parse_peer
from federation.keys import IdentityError, new_tls_key
from federation.member_files import MemberFiles, save_renewal
from federation.proofs import prove_renewal
from federation.v1.federation_pb2 import RenewRequest
from federation.v1.federation_pb2_grpc import FederationStub
from worker.home import Home

ANSWER_SECONDS = 60.0


class RenewalError(Exception):
    """The membership is as it was; the message says why and what to do."""


def renew(home: Home, member: MemberFiles, *, passphrase: bytes | None = None) -> MemberFiles:
    """Gets the next certificate, for a new key, and puts both in the place of the present ones in `home`.

    A passphrase encrypts the new key; None leaves it to the file mode. Returns the member with key and certificate.

    Raises:
        RenewalError: the coordinator cannot be reached, refuses, or answers with another member's certificate.
    """
    key = new_tls_key()
    csr = make_csr(key)
    with member.channel() as channel:
        try:
            request = RenewRequest(csr=csr, proof=prove_renewal(member.signing_key, csr))
            certificate = FederationStub(channel).Renew(request, timeout=ANSWER_SECONDS).certificate
        except grpc.RpcError as error:
            refusal = refusal_from_rpc_error(error, not_after=member.not_after)
            words = ": ".join(part for part in (refusal.reason, refusal.message or refusal.status) if part)
            raise RenewalError(
                f"{member.address} did not renew the certificate of {member.client_id}: {words}"
            ) from error
    try:
        fits = parse_peer(certificate).uri == parse_peer(member.certificate).uri
        fits = fits and load_certificate(certificate).public_key() == key.public_key()
    except IdentityError as error:
        raise RenewalError(f"the coordinator issued a certificate that cannot be read: {error}") from error
    if not fits:
        raise RenewalError(f"the coordinator issued a certificate that is not {member.client_id}'s, or not for its key")
    save_renewal(home.directory, key, certificate, passphrase)
    return replace(member, certificate=certificate, tls_key=key)
