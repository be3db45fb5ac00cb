"""The coordinator's signed statement of a revocation, which alone ends a worker for good."""

import grpc

from federation.line.channels import signed_detail
from federation.refusals import Refusal
from federation.text import escaped
from federation.trust.identity import parse_peer
from federation.trust.member_files import MemberFiles
from federation.v1.common_pb2 import RevocationManifest


def revocation(error: grpc.RpcError, member: MemberFiles) -> str | None:
    """What a refusal says that carries the signed statement of this member's revocation; None for any other refusal."""
    envelope = signed_detail(error)
    if envelope is None:
        return None
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
