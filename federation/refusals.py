"""Refusals: the one exception that says no, with an exact status, a stable reason and what to do.

Every reason is listed in docs/reasons.md, which a test compares with `REASONS`.
"""

from enum import Enum

from federation.v1.common_pb2 import SignedEnvelope


class Status(Enum):
    """The gRPC status codes that a refusal may carry, by their gRPC names."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    OUT_OF_RANGE = "OUT_OF_RANGE"
    UNAVAILABLE = "UNAVAILABLE"
    ABORTED = "ABORTED"
    DATA_LOSS = "DATA_LOSS"


# Reason -> status. A reason with a suffix (`mismatch:<field>`, `limit:<name>`) is listed by its stem.
REASONS: dict[str, Status] = {
    # who you are
    "certificate-unknown": Status.UNAUTHENTICATED,
    "certificate-revoked": Status.UNAUTHENTICATED,
    "certificate-expired": Status.UNAUTHENTICATED,
    "role": Status.PERMISSION_DENIED,
    # enrollment
    "token-invalid": Status.UNAUTHENTICATED,
    "token-expired": Status.UNAUTHENTICATED,
    "token-used": Status.UNAUTHENTICATED,
    "token-cancelled": Status.UNAUTHENTICATED,
    "csr": Status.INVALID_ARGUMENT,
    "signing-key": Status.INVALID_ARGUMENT,
    "proof": Status.INVALID_ARGUMENT,
    # attendance and blobs
    "hello": Status.INVALID_ARGUMENT,
    "superseded": Status.ABORTED,
    "blob-not-offered": Status.PERMISSION_DENIED,
    "blob-removed": Status.NOT_FOUND,
    "offset": Status.OUT_OF_RANGE,
    # updates, in the order in which they are checked
    "header": Status.INVALID_ARGUMENT,
    "assignment-unknown": Status.NOT_FOUND,
    "assignment-client": Status.PERMISSION_DENIED,
    "assignment-fulfilled": Status.ALREADY_EXISTS,
    "assignment-closed": Status.FAILED_PRECONDITION,
    "deadline": Status.FAILED_PRECONDITION,
    "key-unknown": Status.UNAUTHENTICATED,
    "signature": Status.UNAUTHENTICATED,
    "manifest": Status.INVALID_ARGUMENT,
    "mismatch": Status.INVALID_ARGUMENT,
    "limit": Status.RESOURCE_EXHAUSTED,
    "payload-length": Status.INVALID_ARGUMENT,
    "payload-digest": Status.INVALID_ARGUMENT,
    "layout": Status.INVALID_ARGUMENT,
    "dtype": Status.INVALID_ARGUMENT,
    "non-finite": Status.INVALID_ARGUMENT,
    "zero": Status.INVALID_ARGUMENT,
    # operators
    "argument": Status.INVALID_ARGUMENT,
    "spec": Status.INVALID_ARGUMENT,
    "run-exists": Status.ALREADY_EXISTS,
    "run-unknown": Status.NOT_FOUND,
    "run-ambiguous": Status.INVALID_ARGUMENT,
    "run-state": Status.FAILED_PRECONDITION,
    "round-unknown": Status.NOT_FOUND,
    "client-unknown": Status.NOT_FOUND,
    "client-exists": Status.ALREADY_EXISTS,
    "client-state": Status.FAILED_PRECONDITION,
    "token-unknown": Status.NOT_FOUND,
    "administrator-unknown": Status.NOT_FOUND,
    "administrator-state": Status.FAILED_PRECONDITION,
    "last-officer": Status.FAILED_PRECONDITION,
    # the coordinator itself
    "stopping": Status.UNAVAILABLE,
    "database": Status.UNAVAILABLE,
    "disk": Status.UNAVAILABLE,
    "descriptors": Status.UNAVAILABLE,
    "blob-damaged": Status.DATA_LOSS,
}


class Refusal(Exception):
    """A request that is turned down for a reason that the caller can act on.

    Attributes:
        reason: the stable reason, as in docs/reasons.md; a stem may carry a suffix ("mismatch:round").
        status: the gRPC status that goes with the reason.
        message: what was wrong, with the value, and what to do; no secret and nothing of another client.
        signed: what the coordinator signed about it, to travel in the status details: the receipt of an update that was
            refused for good, or a revocation.
        retry_seconds: when the same request may be made again; 0 when that is not known.
    """

    def __init__(
        self, reason: str, message: str, *, signed: SignedEnvelope | None = None, retry_seconds: float = 0.0
    ) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.status = REASONS[reason.partition(":")[0]]
        self.message = message
        self.signed = signed
        self.retry_seconds = retry_seconds
