"""Runs a command of a worker whose clock is some seconds ahead: python wrong_clock.py SECONDS worker run ..."""

import datetime
import sys
import time
from types import SimpleNamespace

import grpc._channel

from fedpareto.cli.entry import main
from worker.connection import clock

AHEAD = float(sys.argv.pop(1))
real_time = time.time


class Ahead(datetime.datetime):
    """The date and time of a clock that is ahead."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
        return datetime.datetime.now(tz) + datetime.timedelta(seconds=AHEAD)


# Timeouts are counted by gRPC's core and TLS, which have the true time.
grpc._channel.time = SimpleNamespace(**vars(time))  # type: ignore[attr-defined, assignment]
time.time = lambda: real_time() + AHEAD
clock.datetime = Ahead  # type: ignore[attr-defined]
main()
