"""Reads the results of rounds, as the Admin service exports them and a simulation reads its record."""

import math
from collections.abc import Iterable

from federation.v1.admin_pb2 import Participation, PhaseProgress
from federation.v1.common_pb2 import AssignmentState, ReplyManifest

RUN_ENDED = ("COMPLETED", "FAILED", "STOPPED")  # the states in which a run has ended; none leads to another one


def accepted(phases: Iterable[PhaseProgress], part: Participation) -> bool:
    """True if a client's reply to the last phase that the step depends on was accepted."""
    final = max((phase.phase for phase in phases if phase.decides), default=None)
    return part.state == AssignmentState.ASSIGNMENT_STATE_FULFILLED and final in part.answered


def not_finite(reply: ReplyManifest) -> str:
    """Names the first loss or metric of a reply that is not finite, with its value; empty if there is none.

    Such a reply is refused.
    """
    numbers = (*reply.losses.items(), *reply.metrics.items())
    return next((f"{name} is {value}" for name, value in numbers if not math.isfinite(value)), "")
