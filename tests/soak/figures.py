"""Memory, descriptors and threads of coordinators over time."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import fmean

import psutil

from tests.soak.cluster import Coordinator

SHARE = 0.05  # by which the last quarter may exceed the second one
AGES = (30.0, 90.0)  # seconds since the start of the process: those of processes that are killed now and then


@dataclass(frozen=True)
class Sample:
    """What a coordinator's process takes at one time.

    Attributes:
        coordinator: its name.
        at: seconds since the beginning of the soak.
        age: seconds since the start of the process.
        memory: of the process alone (unique set size), in MiB.
        descriptors: open ones.
        threads: of the process.
    """

    coordinator: str
    at: float
    age: float
    memory: float
    descriptors: float
    threads: float

    @classmethod
    def of(cls, coordinator: Coordinator, at: float, now: float) -> "Sample":
        """Measures a coordinator; `now` is the time of the machine, in seconds."""
        process = psutil.Process(coordinator.pid)
        with process.oneshot():
            memory = process.memory_full_info().uss / (1 << 20)
            age = now - process.create_time()
            return cls(coordinator.name, at, age, memory, process.num_fds(), process.num_threads())


@dataclass(frozen=True)
class Growth:
    """A quantity in the second quarter and in the last one: the means, how many samples they have, and their ages."""

    who: str
    what: str
    second: float
    last: float
    samples: tuple[int, int]
    ages: tuple[float, float]

    @property
    def share(self) -> float:
        """By how much the last quarter exceeds the second one."""
        return self.last / self.second - 1

    @property
    def grows(self) -> bool:
        """True if it exceeds what is allowed."""
        return self.share > SHARE


def growths(samples: Sequence[Sample], lasting: str, seconds: float) -> list[Growth]:
    """Compares the last quarter of a soak with the second one.

    The coordinator `lasting` was never killed: all its samples count. Of the others those count that were taken when
    the process had an age within `AGES`, so that processes of comparable age are compared.
    """
    young = [one for one in samples if one.coordinator != lasting and AGES[0] <= one.age <= AGES[1]]
    groups = {
        f"{lasting} (never killed)": [one for one in samples if one.coordinator == lasting],
        f"the others, {AGES[0]:.0f} to {AGES[1]:.0f} s old": young,
    }
    found = []
    for who, group in groups.items():
        second, last = _quarter(group, seconds, 1), _quarter(group, seconds, 3)
        if second and last:
            ages = (fmean(one.age for one in second), fmean(one.age for one in last))
            for field in fields(Sample)[3:]:
                before, after = (fmean(getattr(one, field.name) for one in some) for some in (second, last))
                found.append(Growth(who, field.name, before, after, (len(second), len(last)), ages))
    return found


def _quarter(samples: Sequence[Sample], seconds: float, number: int) -> list[Sample]:
    return [one for one in samples if number * seconds / 4 <= one.at < (number + 1) * seconds / 4 + (number == 3)]
