"""The six tasks of the comparison by name, and what the specification must know of each. Imports no PyTorch."""

from dataclasses import dataclass

MEMBERS = 10
AFTER = (15, 100)  # rounds of one run, after which members are measured
ATTACKS = {
    "scaled by 100": "scale=100",
    "false loss": "bias=1000",
    "flipped sign": "sign-flip",
    "flipped labels": "comparison.attacks:FlippedTargets",
}
ATTACKERS = {"one of ten": 1, "three of ten": 3}
# The rule of this project whose claim is tested. It is set, and committed with its settings, margins and procedure, on
# the first three tasks; the held-out ones are not run before. Empty: not fixed yet.
FIXED_RULE = ""


@dataclass(frozen=True)
class ComparedTask:
    """A task of the comparison.

    Attributes:
        kind: the name of its class in `comparison.tasks`.
        held_out: it was run only after rule, settings, margins and procedure were committed.
        last_layer: the pattern of the parameters that a member may keep; empty if there is no hidden layer, or if
            several objectives exclude personal parameters.
        learning_rate: of the members.
        loss: members are measured by their loss, since there is no accuracy.
    """

    kind: str
    held_out: bool = False
    last_layer: str = ""
    learning_rate: float = 0.1
    loss: bool = False

    @property
    def code(self) -> str:
        """The class, as a run specification names it."""
        return f"comparison.tasks:{self.kind}"


TASKS = {
    "scanners": ComparedTask("TurnedDigits"),
    "shards": ComparedTask("ShardedDigits", last_layer="out.*"),
    "objectives": ComparedTask("ServedDigits"),
    "cameras": ComparedTask("TurnedGarments", held_out=True, last_layer="out.*"),
    "dirichlet": ComparedTask("SkewedMnist", held_out=True, last_layer="out.*"),
    "river": ComparedTask("SkewedRiver", held_out=True, last_layer="out.*", learning_rate=0.03, loss=True),
}
