"""A run that goes to targets, and sinks that a test owns."""

import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from fedpareto.sinks.sink import FollowedRun, RoundNumbers, RunEnd
from fedpareto.sinks.target_threads import Delivered, Deliveries
from fedpareto.sinks.targets import targets_of

RUN = FollowedRun("3f2a91c05be7", "scans, ålder", "digits", "fedmgda+", datetime(2026, 5, 4, 12, tzinfo=UTC), 6)
END = RunEnd("COMPLETED", "")


def numbers(number: int) -> RoundNumbers:
    values: Mapping[str, float] = {
        "accuracy/mean": number / 8,
        "loss/train": float("inf") if number == 2 else 1 / (number + 1),
        "loss/train/left half": 2.0**-number,
        "evaluated": 3.0,
    }
    return RoundNumbers(number, 1_777_896_000.0 + 10 * number, values)


def send(addresses: Sequence[str], rounds: int, end: RunEnd = END) -> list[Delivered]:
    """The whole run goes to targets, as a command does it."""
    deliveries = Deliveries(RUN, targets_of(addresses), lambda text: print(text, file=sys.stderr), pause=0.01)
    for number in range(rounds):
        deliveries.add(numbers(number))
    return deliveries.finish(end)
