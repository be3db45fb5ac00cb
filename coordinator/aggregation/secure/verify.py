"""Verifies the step of a private round: an outsider plays the conversation again with the signed replies on record.

The replay recomputes the lists of members, the Gram matrix from the openings, the coefficients from the Gram matrix
with cap and share rule, the mask secrets from the shares against commitments and keys, the sum, and the checks of
section 4. It opens no update, and does not show of one that it was honest. It cannot know that the coordinator had all
masked vectors before it drew the challenges.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregation.base import Rule
from coordinator.aggregation.phases import Asked, Phase, Replies, Reply, RoundContext, Step, Voided
from coordinator.aggregation.rules import TooFewUpdatesError
from coordinator.aggregation.secure.phases import Readying
from coordinator.aggregation.secure.settled import Record, Setting
from federation.digests import digest
from federation.secure.errors import Malformed
from federation.vectors import DTYPES, Array, payload_bytes
from federation.work.base import Shape, payload_layout
from federation.work.secure.stage import CIPHERTEXTS
from federation.work.secure.terms import SessionTerms, Stage


class Unverified(Exception):
    """A step that does not follow from what was signed; the message names what differs."""


@dataclass(frozen=True, eq=False)
class SecureEvidence:
    """What is on record of the step of a private round.

    Attributes:
        record: what the signed step says.
        agreed: the terms that the record holds.
        replies: those that entered, with their statements; their signatures have been verified.
        combined: the vector of the step, (d,).
        weights: of the members whose vectors are in the sum, (|V|,); None where they are not on record.
    """

    record: Record
    agreed: SessionTerms
    replies: Sequence[Reply]
    combined: NDArray[np.float32]
    weights: NDArray[np.float64] | None = None


def verify_secure_step(rule: Rule, context: RoundContext, evidence: SecureEvidence, shape: Shape) -> Step:
    """The step that follows from the signed replies.

    Args:
        rule: of the run.
        context: of the round, as the coordinator had it: the state before, the rates, `private`.
        evidence: what is on record.
        shape: of the model.

    Raises:
        Unverified: the step on record does not follow.
        ValueError: the context is not of a private round.
    """
    if context.private is None:
        raise ValueError("the context is not of a private round")
    record = evidence.record
    setting = Setting(
        agreed=evidence.agreed,
        terms_bytes=record.terms,
        taus=lambda view, V, inputs: (record.tau1, record.tau2),
    )
    conversation = rule.round(replace(context, private=replace(context.private, recorded=setting)))
    replies: Any = None
    try:
        while True:
            phase = conversation.send(replies)
            replies = _replies(phase, evidence, shape)
    except StopIteration as end:
        step: Step = end.value
    except (Voided, TooFewUpdatesError, Malformed) as error:
        raise Unverified(f"the signed replies make no step: {error}") from error
    _same(step, evidence)
    return step


def _same(step: Step, evidence: SecureEvidence) -> None:
    if step.private is None or step.combined is None:
        raise Unverified("the signed replies make no step")
    for item in fields(Record):
        if item.name != "alarms" and getattr(step.private, item.name) != getattr(evidence.record, item.name):
            raise Unverified(f"the {item.name} of the session do not follow from the signed replies")
    if not np.array_equal(step.combined, evidence.combined):
        raise Unverified("the sum does not follow from the signed replies")
    if evidence.weights is not None and not np.allclose(step.combination.weights, evidence.weights, atol=1e-12):
        raise Unverified("the weights do not follow from the signed replies")


def _replies(phase: Phase, evidence: SecureEvidence, shape: Shape) -> Replies:
    """The replies on record to a phase."""
    stage, attempt = Stage(phase.kind.name), int(getattr(phase, "attempt", 0))
    found = []
    for reply in evidence.replies:
        if (reply.statement.stage, reply.statement.attempt) == (stage, attempt):
            if phase.clients is not None and reply.client_id not in phase.clients:
                raise Unverified(f"{reply.client_id} replied to {stage.value}, and was not asked")
            found.append(_with_rows(phase, reply, shape))
    return Replies(found)


def _with_rows(phase: Phase, reply: Reply, shape: Shape) -> Reply:
    """The reply with the rows of its payload, whose digest must be the one that was signed.

    Ciphertexts between members are not on record, and nothing is computed from them.
    """
    if isinstance(phase, Readying):
        return reply
    work = phase.work(Asked(reply.client_id, shape.serves, _NO_SPEC))
    rows = work.rows(shape)
    if not rows:
        return reply
    if [row.name for row in rows] == [CIPHERTEXTS]:
        empty: Array = np.zeros(rows[0].length, np.uint8)
        return replace(reply, rows=(empty,))
    where = f"the payload of {reply.client_id} at {reply.statement.stage.value}"
    if len(reply.rows) != len(rows):
        raise Unverified(f"{where} is missing")
    content = {
        row.name: np.asarray(_read(given), DTYPES[row.dtype]) for row, given in zip(rows, reply.rows, strict=True)
    }
    try:
        found = digest(b"".join(payload_bytes(payload_layout(rows), content)))
    except ValueError as error:
        raise Unverified(f"{where}: {error}") from error
    if found != reply.signed_payload:
        raise Unverified(f"{where} has another digest than the one that was signed")
    return replace(reply, rows=tuple(content.values()))


def _read(row: Any) -> Any:
    return row.read() if hasattr(row, "read") else row


_NO_SPEC: Any = None  # no stage after READY reads the specification
