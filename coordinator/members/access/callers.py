"""The callers that may make each rpc."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from federation.refusals import Refusal
from federation.trust.identity import PeerIdentity, Role


@dataclass(frozen=True)
class CallerRule:
    """The callers that an rpc permits: clients, administrators of a role, or anyone, with or without a certificate."""

    kind: Literal["client", "admin", "anyone"]
    role: Role | None = None


_ADMIN: Mapping[Role, tuple[str, ...]] = {
    Role.VIEWER: (
        *("ListJoinStrings", "ListClients", "ListAdministrators", "ListRuns", "ListRounds", "ListReplies"),
        *("GetDisk", "GetSystem", "GetRun", "GetRound", "WatchRun", "ExportRounds", "ExportModel"),
        *("ListAudit", "VerifyAudit", "ListRequests", "ListAlerts", "ListCoordinators"),
    ),
    Role.OPERATOR: ("SubmitRun", "PauseRun", "ResumeRun", "StopRun", "TagClient"),
    Role.SECURITY_OFFICER: (
        *("CreateJoinString", "CancelJoinStrings", "ExportBundle"),
        *("ApproveClient", "RevokeClient", "ForgetClient", "RevokeAdministrator"),
        *("RequestAction", "DecideRequest"),
    ),
}
_CLIENT = ("Attend", "FetchBlob", "LocateBlob", "Submit", "Renew", "RotateKey", "GetModel", "Leave")
# Only these rpcs are served. A test compares them with the contract.
RULES: Mapping[str, CallerRule] = {
    **{f"/federation.v1.Enrollment/{rpc}": CallerRule("anyone") for rpc in ("Enroll", "Login")},
    **{f"/federation.v1.Federation/{rpc}": CallerRule("client") for rpc in _CLIENT},
    **{f"/federation.v1.Admin/{rpc}": CallerRule("admin", role) for role, rpcs in _ADMIN.items() for rpc in rpcs},
    **{f"/grpc.health.v1.Health/{rpc}": CallerRule("anyone") for rpc in ("Check", "List", "Watch")},
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": CallerRule("anyone"),
}


def authorise(rule: CallerRule | None, identity: PeerIdentity | None, action: str) -> None:
    """Raises if the caller may not call an rpc: `rule` is None for one without a rule, `action` its name.

    Raises:
        Refusal: `certificate-unknown`, `role`.
    """
    if rule is not None and rule.kind == "anyone":
        return
    if identity is None:
        raise Refusal(
            "certificate-unknown", f"{action} needs a certificate of the federation, and its port asks for it"
        )
    if rule is None:
        raise Refusal("role", f"no role permits {action}")
    if identity.kind != rule.kind:
        holders = {"client": "clients", "admin": "administrators"}
        raise Refusal("role", f"{action} is for {holders[rule.kind]}; your certificate is of a {identity.kind}")
    if rule.role is not None and rule.role not in identity.roles:
        roles = ", ".join(sorted(identity.roles)) or "none"
        raise Refusal("role", f"{action} needs the role {rule.role}; your certificate gives {roles}")
