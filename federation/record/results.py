"""Reads the results of rounds, as the Admin service exports them and a simulation reads its record."""

from collections.abc import Iterable

from federation.v1.admin_pb2 import Participation, PhaseProgress
from federation.v1.common_pb2 import AssignmentState


def accepted(phases: Iterable[PhaseProgress], part: Participation) -> bool:
    """True if a client's reply to the last phase that the step depends on was accepted."""
    final = max((phase.phase for phase in phases if phase.decides), default=None)
    return part.state == AssignmentState.ASSIGNMENT_STATE_FULFILLED and final in part.answered
