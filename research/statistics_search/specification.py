"""The run specification of a search on private statistics: the attack, what the coordinator knows, and the rule."""

from typing import Literal

from pydantic import BaseModel, Field

Attack = Literal[
    "members",
    "class",
    "flag",
    "outlier",
    "coded",
    "coded-inside",
    "threshold",
    "edges",
    "digits",
    "missing",
    "value",
    "again",
]


class StatisticsSearchSpecification(BaseModel, extra="forbid", frozen=True):
    """One run. research/README.md describes the keys.

    Attributes:
        attack: what the coordinator looks for.
        members: m; t of them collude.
        smallest: the owners' `statistics.smallest`; 1 is without the rule.
        knows: "nothing" of the other members' numbers, or all "others" but the attacked member's.
        trials: pairs of worlds, with and without the sample; or questions of the search over members.
    """

    name: str
    seed: int
    rounds: int = 1
    task: Literal["digits"] = "digits"
    attack: Attack = "members"
    members: int = Field(7, ge=5, le=20)
    smallest: int = Field(5, ge=1)
    knows: Literal["nothing", "others"] = "others"
    trials: int = Field(40, ge=4)
