"""The faults of a schedule: which kinds it has, when they strike, and for how long."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tests.simulated.world import World

GENTLE: Mapping[str, float] = MappingProxyType(
    {
        # The process of the coordinator is killed ...
        "killed while it waits": 0.012,
        "killed before a commit": 0.012,
        "killed after a commit": 0.012,
        "killed before a blob is stored": 0.02,
        "killed after a blob is stored": 0.02,
        # Others act between two steps of the conductor.
        "preempted": 0.05,
        # Its storage fails for a moment, or is full for a while.
        "database failed": 0.01,
        "disk full": 0.004,
        # Calls and streams.
        "request lost": 0.06,
        "answer lost": 0.08,
        "request late": 0.06,
        "request doubled": 0.06,
        "upload broken off": 0.10,
        "stream broken": 0.02,
        "member restarted": 0.02,
        # Operators and clocks.
        "run paused": 0.01,
        "clock set back": 0.005,
        "clock set forward": 0.005,
    }
)
"""The chance of each fault, whenever it could strike, of those that must not change the result."""
HARSH: Mapping[str, float] = MappingProxyType(
    {
        "member revoked": 0.02,
        "work declined": 0.04,
        "deadline passed": 0.004,
        "member gone": 0.02,
        "run stopped": 0.002,
        "member away after a kill": 0.0,  # only in the plans that say so
    }
)
"""Likewise, of the faults after which a run may have another result, and must say why."""
AWAY = "member away"
"""A fault of plans whose rounds begin without some members; it must not change the result either."""
LOST = "member lost at work"
"""A fault of plans whose rounds ask a lost member once more; their results may be of fewer members."""
KILLED_AT_WELCOME = "worker killed at its welcome"
"""A fault of plans that say so: the coordinator has taken a start, and its home has not noted the welcome."""
LEAVES = "member leaves"
"""A fault of plans whose runs go on without some members, whose results are then others."""
AWAY_AFTER_KILL = "member away after a kill"
"""A fault of plans that find another pool after a restart."""
MOST = 4  # faults of one kind in a schedule


@dataclass
class Faults:
    """Draws the faults of one schedule.

    Attributes:
        chances: of each fault; those that are left out never strike.
        struck: how often each fault has struck.
    """

    world: World
    chances: dict[str, float] = field(default_factory=dict)

    @classmethod
    def drawn(cls, world: World, more: Mapping[str, float] = MappingProxyType({})) -> "Faults":
        """Some kinds of faults: each schedule has others, so that some kinds are alone now and then.

        `more` are those of a plan, of which each schedule has all.
        """
        random = world.random
        strength = random.choice((0.3, 1.0, 1.0, 2.0))
        share = random.choice((0.3, 0.6, 1.0))
        harsh = HARSH if random.random() < 0.3 else {}
        kinds = {**GENTLE, **harsh}
        chances = {kind: strength * chance for kind, chance in kinds.items() if random.random() < share}
        return cls(world, {**chances, **more})

    @property
    def harsh(self) -> bool:
        """True if a fault has struck after which the result may be another one."""
        return any(self.world.counts[kind] for kind in (*HARSH, LEAVES))

    def strikes(self, kind: str, *details: object) -> bool:
        """True if a fault strikes now; then it is in the trace."""
        chance = self.chances.get(kind, 0.0)
        if not chance or self.world.random.random() >= chance or self.world.counts[kind] >= MOST:
            return False
        self.world.note(kind, *details)
        return True

    def seconds(self, least: float, most: float) -> float:
        """The length of a delay."""
        return self.world.random.uniform(least, most)
