"""The specification of one run of the comparison: a task, a rule with its rate, and who attacks."""

from typing import Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from comparison.catalogue import MEMBERS, TASKS


class ComparisonSpecification(BaseModel, extra="forbid", frozen=True):
    """One run. research/README.md describes the keys.

    Attributes:
        algorithm: the section of a run specification.
        rate: of the server, the same in all rounds, or "auto". `rates` may give it by task instead.
        chosen: whether the rate is the best for the mean over the members, or for the worst member.
        split: what is measured. A run that chooses a rate measures the validation split, and no other.
        attack: of the last `attackers` members.
        personal: the last layer stays at the members.
        tuned: after the last round each member trains one epoch more on its own data, and is measured then.
    """

    name: str
    seed: int = Field(ge=0)
    task: str
    algorithm: dict[str, Any]
    rate: float | Literal["auto"]
    chosen: Literal["mean", "worst"] = "mean"
    rounds: int = Field(100, ge=1)
    split: Literal["validation", "test"] = "test"
    attack: str = ""
    attackers: int = Field(0, ge=0, lt=MEMBERS)
    personal: bool = False
    tuned: bool = False

    @model_validator(mode="before")
    @classmethod
    def _rate_of_the_task(cls, given: Any) -> Any:
        """Takes the rate of this task from `rates`, so that a rate of another task does not make this another run."""
        if isinstance(given, dict) and "rates" in given:
            rest = {key: value for key, value in given.items() if key != "rates"}
            if rest.get("task") not in given["rates"]:
                raise ValueError(f"rates: none for the task {rest.get('task')!r}")
            return {"rate": given["rates"][rest["task"]], **rest}
        return given

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.task not in TASKS:
            raise ValueError(f"task: one of {', '.join(TASKS)}; got {self.task!r}")
        if isinstance(self.rate, float) and not self.rate > 0:
            raise ValueError(f"rate: positive; got {self.rate}")
        if bool(self.attack) != (self.attackers > 0):
            raise ValueError(f"attack = {self.attack!r} and attackers = {self.attackers}: give both or neither")
        if self.personal and not TASKS[self.task].last_layer:
            raise ValueError(f"personal: the model of {self.task} has no last layer that can be personal")
        return self
