"""Everything that leaves a site: the rows of *What leaves* in docs/member/your-site.md, with the fields of each.

A field is written `Message.field`. Every field of every message that a worker sends is in a row, so a new field needs
one, and a row in the document.
"""

from collections.abc import Mapping

_REPLY_TO = ("run_id", "round", "phase", "attempt", "assignment_id", "task", "spec", "base_model", "created")
_TRAINED = ("SubmitRequest.chunk", "SubmitRequest.offset", "ReplyManifest.rows", "Row.name", "Row.dtype", "Row.length")


def _of(message: str, *fields: str) -> tuple[str, ...]:
    return tuple(f"{message}.{field}" for field in fields)


LEAVES: Mapping[str, tuple[str, ...]] = {
    "Membership": (
        *_of("EnrollRequest", "secret", "csr", "signing_key", "proof", "software"),
        *_of("RenewRequest", "csr", "proof"),
        *_of("RotateKeyRequest", "rotation", "csr", "proof"),
        *_of("KeyRotation", "statement", "possession", "receipt"),
    ),
    "Withdrawal": (
        "LeaveRequest.withdrawal",
        *_of("WithdrawalManifest", "federation_id", "client_id", "certificate", "created", "forget"),
    ),
    "Tasks": (
        *_of("Hello", "software", "device", "tasks", "nonce", "run_kinds"),
        *_of("TaskOffer", "task", "samples", "objectives", "abilities", "layout"),
        *_of("TaskLayout", "digest", "tensors", "elements"),
    ),
    "Bounds": (
        *_of("Hello", "limits", "consents"),
        *_of("WorkLimits", "samples", "steps", "max_steps", "max_epochs", "max_bytes", "members", "rows"),
        *_of("TaskOffer", "private_only"),
    ),
    "Noise budget": (
        *_of("TaskOffer", "noise_budget"),
        *_of("NoiseBudget", "noise", "epsilon", "delta", "spent"),
        *_of("SpentNoise", "noise", "rate", "steps"),
    ),
    "Presence": (
        *_of("Hello", "closed_until", "paused", "sessions_left", "log_size", "start", "earlier_starts"),
        *_of("Heartbeat", "assignment_id", "progress", "log_size", "closed_until", "paused"),
        *_of("SessionsLeft", "task", "training", "evaluation"),
        *_of("AttendRequest", "hello", "heartbeat", "sessions_left"),
    ),
    "Downloads": (*_of("FetchBlobRequest", "digest", "offset"), *_of("LocateBlobRequest", "digest")),
    "Question for a model": (
        *_of("GetModelRequest", "run", "nonce", "best", "split"),
        "FetchBlobRequest.grant",
        "LocateBlobRequest.grant",
    ),
    "Update": _TRAINED,
    "Sketch": _TRAINED,
    "Masked vector": (*_TRAINED, "ReplyManifest.statement"),
    "Averaged buffers": _TRAINED,
    "Statistics": _TRAINED,
    "Scores": (
        *_of("ReplyManifest", "losses", "metrics", "samples", "seconds"),
        *_of("LossesEntry", "key", "value"),
        *_of("MetricsEntry", "key", "value"),
    ),
    "Noise": (
        "ReplyManifest.privacy",
        *_of("SamplePrivacy", "noise", "clip", "rate", "steps", "epsilon", "bound", "delta"),
    ),
    "Reply": (
        *_of("SubmitRequest", "reply", "log_size", "start"),
        *_of("ReplyManifest", "federation_id", "client_id", *_REPLY_TO),
        *_of("ReplyManifest", "payload", "payload_bytes", "software", "unrepeatable"),
        *_of("SignedEnvelope", "manifest", "key_id", "signature"),
    ),
    "Decline": (
        "AttendRequest.decline",
        *_of("DeclineManifest", "federation_id", "client_id", "assignment_id", "assignment", "created"),
        *_of("DeclineManifest", "reason", "message"),
    ),
    "Answer to a run": (
        "AttendRequest.consent",
        *_of("ConsentManifest", "federation_id", "client_id", "run_id", "spec", "created"),
        *_of("ConsentManifest", "answer", "reason", "message"),
    ),
}
