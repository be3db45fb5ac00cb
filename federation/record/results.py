"""Reads the results of rounds, as the Admin service exports them and a simulation reads its record."""

import math
from collections.abc import Iterable

from federation.v1.admin_pb2 import Participation, PhaseProgress
from federation.v1.common_pb2 import AssignmentState, ReplyManifest

RUN_ENDED = ("COMPLETED", "FAILED", "STOPPED")  # the states in which a run has ended; none leads to another one

_MEASURES = ("evaluate", "secure-unmask")  # the kinds of work that end a round which makes no step


def accepted(phases: Iterable[PhaseProgress], part: Participation) -> bool:
    """True if a client's reply to the last phase that the step depends on was accepted.

    In a round that only measures a model: its measurements, or its reply to the last phase of a private round.
    """
    deciding = [phase.phase for phase in phases if phase.decides]
    final = {max(deciding)} if deciding else {phase.phase for phase in phases if phase.kind in _MEASURES}
    return part.state == AssignmentState.ASSIGNMENT_STATE_FULFILLED and not final.isdisjoint(part.answered)


def not_finite(reply: ReplyManifest) -> str:
    """Names the first loss or metric of a reply that is not finite, with its value; empty if there is none.

    Such a reply is refused.
    """
    numbers = (*reply.losses.items(), *reply.metrics.items())
    return next((f"{name} is {value}" for name, value in numbers if not math.isfinite(value)), "")
