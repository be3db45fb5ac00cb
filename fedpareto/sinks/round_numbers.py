"""The numbers of a round that go out: those that its run discloses."""

import math

from federation.v1.admin_pb2 import RoundSummary
from fedpareto.sinks.sink import RoundNumbers


def numbers_of(summary: RoundSummary) -> RoundNumbers:
    """A round that has ended, as the Admin service sums it up, for targets: no number of a single member.

    A number that privacy hides from operators is in no answer of the coordinator. Without the filter here, a
    coordinator that sent one nevertheless would publish it.
    """
    hidden = set(summary.undisclosed)
    counts = {"replies/asked": summary.asked, "replies/accepted": summary.accepted, "seconds": summary.seconds}
    values = {**{name: value for name, value in summary.metrics.items() if name not in hidden}, **counts}
    known = {name: float(value) for name, value in sorted(values.items()) if not math.isnan(value)}
    seconds = summary.seconds if math.isfinite(summary.seconds) else 0.0
    return RoundNumbers(summary.round, summary.started.ToNanoseconds() / 1e9 + seconds, known)
