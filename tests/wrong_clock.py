"""Runs a command of a worker whose clock is an hour ahead: python wrong_clock.py worker run ..."""

import datetime
import time

from fedpareto.cli.entry import main
from worker import clock

AHEAD = 3600.0
real_time = time.time


class Ahead(datetime.datetime):
    """The date and time of a clock that is ahead."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
        return datetime.datetime.now(tz) + datetime.timedelta(seconds=AHEAD)


time.time = lambda: real_time() + AHEAD
clock.datetime = Ahead  # type: ignore[misc]
main()
