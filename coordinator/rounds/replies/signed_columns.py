"""The columns of the record that repeat what was signed, as functions of the manifests.

The same functions write the record and compare it with what was signed.
"""

import math
from collections.abc import Mapping
from typing import Any

from coordinator.rounds.replies.declines import reason_and_message
from federation.v1.common_pb2 import (
    AssignmentManifest,
    ConsentManifest,
    DeclineManifest,
    ReceiptManifest,
    ReplyManifest,
    StepManifest,
)
from storage.columns import LARGEST_INTEGER


def of_assignment(order: AssignmentManifest) -> dict[str, Any]:
    """Columns of `assignments`."""
    return {
        "assignment_id": order.assignment_id,
        "client_id": order.client_id,
        "base_model": order.base_model,
        "objectives": list(order.objectives),
    }


def of_inputs(order: AssignmentManifest) -> list[dict[str, Any]]:
    """Columns of the rows in `inputs` of an assignment, without its id, in the order of their names."""
    inputs = sorted(order.inputs, key=lambda item: item.name)
    return [{"name": item.name, "digest": item.digest, "size": item.size} for item in inputs]


def of_decline(decline: DeclineManifest) -> dict[str, Any]:
    """Columns of `assignments` for one that its client has declined."""
    reason, message = reason_and_message(decline)
    return {"reason": reason, "message": message}


def of_reply(reply: ReplyManifest, *, stored: bool, counted: bool = True) -> dict[str, Any]:
    """Columns of `replies`.

    Args:
        reply: the manifest.
        stored: True if its payload was stored: the reply was accepted, and its payload is kept.
        counted: True if it ended its assignment; False for a further reply to a fulfilled one, kept as evidence.
    """
    return {
        "assignment_id": reply.assignment_id,
        "client_id": reply.client_id,
        "payload": reply.payload if stored else "",
        "payload_bytes": reply.payload_bytes if counted else 0,
        "samples": min(reply.samples, LARGEST_INTEGER),
        **{name: _finite(numbers) for name, numbers in _numbers(reply).items()},
        "unrepeatable": reply.unrepeatable,
    }


def not_kept(reply: ReplyManifest) -> str:
    """The first column of `replies` that cannot hold the numbers of a reply as they were signed; empty if all can."""
    kept, signed = of_reply(reply, stored=True), {"samples": reply.samples, **_numbers(reply)}
    return next((name for name, value in signed.items() if kept[name] != value), "")


def of_receipt(receipt: ReceiptManifest) -> dict[str, Any]:
    """Columns of `replies` that say how the reply ended its assignment."""
    return {"accepted": receipt.accepted, "reason": receipt.reason}


def of_step(step: StepManifest) -> dict[str, Any]:
    """Columns of `rounds`."""
    return {
        "base_model": step.base_model,
        "result_model": step.result_model,
        "gram": step.gram,
        "combined": step.combined or None,
        "noise": step.noise or None,
    }


def of_consent(consent: ConsentManifest) -> dict[str, Any]:
    """Columns of `consents`."""
    reason, message = reason_and_message(consent) if consent.reason else ("", "")
    return {
        "run_id": consent.run_id,
        "client_id": consent.client_id,
        "answer": consent.answer,
        "reason": reason,
        "message": message,
    }


def _numbers(reply: ReplyManifest) -> dict[str, dict[str, float]]:
    privacy = {field.name: float(value) for field, value in reply.privacy.ListFields()}
    return {"losses": dict(reply.losses), "metrics": dict(reply.metrics), "privacy": privacy}


def _finite(numbers: Mapping[str, float]) -> dict[str, float]:
    """The numbers that JSON can hold: refused replies may carry NaN."""
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
