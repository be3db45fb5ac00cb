"""What ends a worker for good: signed statements, and refusals after which its owner has to act."""

import grpc

from federation.refusals import Refusal
from federation.text import escaped
from federation.transport.channels import signed_detail
from federation.trust.envelope import verify
from federation.trust.identity import parse_peer
from federation.trust.member_files import MemberFiles
from federation.v1.common_pb2 import RevocationManifest, SignedEnvelope, WithdrawalManifest

LEFT = "client-left"
# Refusals that end the worker, as a signed revocation does: its owner has to act.
FINAL_REASONS = {
    "certificate-expired": "join again, with a new join string and this directory",
    "superseded": "another worker with this client's identity attends now: run one, or join a second client. If it "
    "runs with a copy of this directory, remove one of the two",
}
# Refusals after which the worker keeps trying: they may end by themselves, or the coordinator's operator ends them.
ADVICE = {
    "certificate-unknown": "the coordinator may have lost its database, or been restored from a backup that is older "
    "than this membership, or this directory belongs to another federation: ask its operator",
    "certificate-revoked": "the coordinator sent no signed statement of a revocation, and only that ends a worker: "
    "ask the federation's security officer",
    "home-copied": "stop both workers, then run `fedpareto worker copied` with the directory that goes on; the other "
    "directory's ledgers may have entries that this one lacks",
    "role": "this certificate may not work for the federation: use the directory that `fedpareto worker join` made",
    "hello": "the coordinator did not understand this worker: compare the versions of both",
    "limit:tasks": "offer fewer tasks or objectives, with names of letters, digits and hyphens",
    "limit:hello": "offer fewer tasks or objectives, or such with shorter names",
}


def end_of_membership(error: grpc.RpcError, member: MemberFiles) -> str | None:
    """What a refusal says that carries the signed statement of the end of this membership; None for any other refusal.

    The coordinator signs that a member was revoked. That it has left, the member itself has signed.
    """
    envelope = signed_detail(error)
    return None if envelope is None else _revocation(envelope, member) or _withdrawal(envelope, member)


def _revocation(envelope: SignedEnvelope, member: MemberFiles) -> str | None:
    """What the signed statement of this member's revocation says; None for any other."""
    try:
        manifest = member.coordinator.verify(envelope, RevocationManifest)
    except Refusal:
        return None
    ours, serial = (member.federation_id, member.client_id), parse_peer(member.certificate).serial
    if (manifest.federation_id, manifest.client_id) != ours or manifest.serial not in ("", serial):
        return None
    problem, advice = "a security officer shut this client out", "talk to the federation's security officer"
    if manifest.serial:
        problem, advice = "this certificate has ended", "use the directory that was renewed, not a copy from before"
    reason = f" ({escaped(manifest.reason)})" if manifest.reason else ""
    return f"certificate-revoked: {problem}{reason}; the coordinator signed it: {advice}"


def _withdrawal(envelope: SignedEnvelope, member: MemberFiles) -> str | None:
    """What this member's own withdrawal says; None for anything else."""
    try:
        manifest = verify(envelope, WithdrawalManifest, member.signing_key.public_key())
    except Refusal:
        return None
    if (manifest.federation_id, manifest.client_id) != (member.federation_id, member.client_id):
        return None
    return (
        f"{LEFT}: this client has left the federation, by a withdrawal that was signed with its own key: to come back, "
        "join again with a new join string for its name and this directory; if nobody here has left, somebody has a "
        "copy of the key: tell the federation's security officer"
    )
