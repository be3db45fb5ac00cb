"""Refusals: the exception that rejects a request, with an exact status, a stable reason and the remedy.

`fedpareto explain` and docs/reference/reasons.md say what each reason means: `fedpareto/cli/reasons/reasons.toml`.
"""

from typing import Literal

Status = Literal[
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "OUT_OF_RANGE",
    "UNAVAILABLE",
    "ABORTED",
    "DATA_LOSS",
]
"""The name of a gRPC status that a refusal may carry."""

# Reason -> status. A reason with a suffix (`mismatch:<field>`, `limit:<name>`) is listed by its stem.
REASONS: dict[str, Status] = {
    # who you are
    "certificate-unknown": "UNAUTHENTICATED",
    "certificate-revoked": "UNAUTHENTICATED",
    "client-left": "FAILED_PRECONDITION",
    "withdrawal": "INVALID_ARGUMENT",
    "certificate-expired": "UNAUTHENTICATED",
    "role": "PERMISSION_DENIED",
    "unlogged": "PERMISSION_DENIED",
    # enrollment
    "join-string-invalid": "UNAUTHENTICATED",
    "join-string-expired": "UNAUTHENTICATED",
    "join-string-used": "UNAUTHENTICATED",
    "join-string-cancelled": "UNAUTHENTICATED",
    "csr": "INVALID_ARGUMENT",
    "signing-key": "INVALID_ARGUMENT",
    "proof": "INVALID_ARGUMENT",
    "rotation": "INVALID_ARGUMENT",
    # what administrators sign
    "login": "UNAUTHENTICATED",
    "signed-time": "UNAUTHENTICATED",
    "login-replayed": "ALREADY_EXISTS",
    # attendance and blobs
    "hello": "INVALID_ARGUMENT",
    "superseded": "ABORTED",
    "home-copied": "FAILED_PRECONDITION",
    "blob-not-offered": "PERMISSION_DENIED",
    "blob-removed": "NOT_FOUND",
    "offset": "OUT_OF_RANGE",
    # a run's model, for a member
    "not-contributed": "PERMISSION_DENIED",
    "results": "PERMISSION_DENIED",
    "model-missing": "NOT_FOUND",
    # replies, in the order in which they are checked
    "header": "INVALID_ARGUMENT",
    "assignment-unknown": "NOT_FOUND",
    "assignment-client": "PERMISSION_DENIED",
    "start-ended": "FAILED_PRECONDITION",
    "assignment-fulfilled": "ALREADY_EXISTS",
    "assignment-closed": "FAILED_PRECONDITION",
    "deadline": "FAILED_PRECONDITION",
    "key-unknown": "UNAUTHENTICATED",
    "key-ended": "UNAUTHENTICATED",
    "signature": "UNAUTHENTICATED",
    "manifest": "INVALID_ARGUMENT",
    "mismatch": "INVALID_ARGUMENT",
    "statement": "INVALID_ARGUMENT",
    "limit": "RESOURCE_EXHAUSTED",
    "payload-length": "INVALID_ARGUMENT",
    "payload-digest": "INVALID_ARGUMENT",
    "layout": "INVALID_ARGUMENT",
    "dtype": "INVALID_ARGUMENT",
    "non-finite": "INVALID_ARGUMENT",
    "zero": "INVALID_ARGUMENT",
    "privacy": "INVALID_ARGUMENT",
    # operators
    "argument": "INVALID_ARGUMENT",
    "spec": "INVALID_ARGUMENT",
    "scale": "INVALID_ARGUMENT",
    "cohort": "FAILED_PRECONDITION",
    "sessions-left": "FAILED_PRECONDITION",
    "model-evaluated": "FAILED_PRECONDITION",
    "run-exists": "ALREADY_EXISTS",
    "run-unknown": "NOT_FOUND",
    "run-ambiguous": "INVALID_ARGUMENT",
    "run-state": "FAILED_PRECONDITION",
    "round-unknown": "NOT_FOUND",
    "metric-unknown": "NOT_FOUND",
    "client-unknown": "NOT_FOUND",
    "client-exists": "ALREADY_EXISTS",
    "client-state": "FAILED_PRECONDITION",
    "client-key": "FAILED_PRECONDITION",
    "join-string-unknown": "NOT_FOUND",
    "administrator-unknown": "NOT_FOUND",
    "administrator-state": "FAILED_PRECONDITION",
    "last-officer": "FAILED_PRECONDITION",
    "two-officers": "FAILED_PRECONDITION",
    "request-exists": "ALREADY_EXISTS",
    "request-unknown": "NOT_FOUND",
    "request-state": "FAILED_PRECONDITION",
    "request-expired": "FAILED_PRECONDITION",
    "request-own": "PERMISSION_DENIED",
    "request-officer": "FAILED_PRECONDITION",
    # the coordinator itself
    "stopping": "UNAVAILABLE",
    "database": "UNAVAILABLE",
    "disk": "UNAVAILABLE",
    "descriptors": "UNAVAILABLE",
    "blob-store": "UNAVAILABLE",
    "clock": "UNAVAILABLE",
    "blob-damaged": "DATA_LOSS",
}


class Refusal(Exception):
    """A request is rejected for a reason that the caller can act on.

    Attributes:
        reason: the stable reason, as in docs/reference/reasons.md; a stem may carry a suffix ("mismatch:round").
        status: the gRPC status that goes with the reason.
        message: the error, with the value, and the remedy; no secret, and no data of another client.
        signed: a receipt or a revocation that the coordinator signed, to travel in the status details: a serialized
            SignedEnvelope; empty for none.
        retry_seconds: the time until the same request may be made again; 0 if it is unknown.
    """

    def __init__(self, reason: str, message: str, *, signed: bytes = b"", retry_seconds: float = 0.0) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.status = REASONS[reason.partition(":")[0]]
        self.message = message
        self.signed = signed
        self.retry_seconds = retry_seconds
