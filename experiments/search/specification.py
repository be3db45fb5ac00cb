"""The run specification of a search: what members allow, whose updates they are, and what the coordinator knows."""

from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator

from experiments.leakage.specification import LocalTraining
from federation.secure.thresholds import Mode


class SearchSpecification(BaseModel, extra="forbid", frozen=True):
    """One run. docs/research/experiments.md describes the keys.

    Attributes:
        algorithm: whose bounds members enforce: an algorithm of a run, "evaluation", or a name with a colon for a
            plug-in, of which members know nothing.
        epsilon: of the algorithm.
        members: m.
        updates: "ideal" are uncorrelated and of length 1; "digits" are those of members that train.
        knows: what the coordinator knows of the inner products of the updates when it chooses: "nothing" or "gram".
        raw: updates keep their lengths, as with `fedavg` and a large clip.
        sums: 2 for two sums from the same model, trained with different seeds; the best combination is taken.
        rounds: of FedAvg before the attack on the model of digits.
        trials: plans that are tried in each search.
        alpha: of the Dirichlet distribution of labels.
    """

    name: str
    seed: int
    task: Literal["digits"] = "digits"
    mode: Mode = Field(Mode.PRIVATE, strict=False)
    algorithm: str = "any:Rule"
    epsilon: float | None = None
    members: int = Field(10, ge=5, le=100)
    updates: Literal["ideal", "digits"] = "ideal"
    knows: Literal["nothing", "gram"] = "gram"
    raw: bool = False
    sums: int = Field(1, ge=1, le=2)
    rounds: int = Field(10, ge=0)
    trials: int = Field(1000, ge=1)
    alpha: float = Field(0.3, gt=0)
    train: LocalTraining = LocalTraining()

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.updates == "ideal" and (self.raw or self.sums > 1):
            raise ValueError("raw, sums: only with updates of digits")
        return self
