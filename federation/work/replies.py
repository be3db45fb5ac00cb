"""Makes replies: the message with the result of a client's work, before it is signed."""

from dataclasses import asdict

from federation.record import bound_fields
from federation.record.bound_fields import repeated
from federation.v1.common_pb2 import AssignmentManifest, ReplyManifest, SamplePrivacy
from federation.work.base import Result
from federation.work.registry import encode_statement


def reply_manifest(order: AssignmentManifest, result: Result, *, software: str, repeatable: bool) -> ReplyManifest:
    """The reply to an assignment, without its time and its payload.

    Args:
        order: the assignment.
        result: of the work.
        software: the client's, with its version.
        repeatable: True if the client's trainer gives the same result for the same work.
    """
    return ReplyManifest(
        **repeated(order, bound_fields.REPLY),
        samples=result.samples,
        losses=dict(result.losses),
        metrics=dict(result.metrics),
        software=software,
        seconds=result.seconds,
        statement=encode_statement(order.kind, result.statement),
        privacy=None if result.privacy is None else SamplePrivacy(**asdict(result.privacy)),
        unrepeatable=not repeatable,
    )
