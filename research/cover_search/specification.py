"""The run specification of a search: what members allow, whose updates they are, and what the coordinator knows."""

from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator

from federation.secure.thresholds import Mode
from leakage.specification import LocalTraining

Failure = Literal["never", "random", "zero"]


class SearchSpecification(BaseModel, extra="forbid", frozen=True):
    """One run. research/README.md describes the keys.

    Attributes:
        algorithm: whose bounds members enforce: an algorithm of a run, "evaluation", or a name with a colon for a
            plug-in, of which members know nothing.
        epsilon: of the algorithm.
        members: m.
        updates: "ideal" are uncorrelated and of length 1; if signs are decoded, their coordinates have one absolute
            value. "digits" are those of members that train; "adam" those after one step of Adam on all samples with an
            epsilon of 1e-30, whose coordinates are the rate, minus the rate, or zero; "constant" the same from a model
            whose hidden outputs are constant.
        knows: what the coordinator knows when it chooses: "nothing", the inner products of the updates ("gram"), or the
            updates of all others ("others"), which it subtracts; the noise on them it cannot subtract.
        raw: updates keep their lengths, as with `fedavg` and a large clip.
        sums: 2 for two sums from the same model, trained with different seeds; the best combination is taken.
        blur: c, the noise on every member's vector.
        reader: "linear" takes the best combination of the sums; "signs" also decodes the sign of each coordinate, by
            Bayes' rule, and knows the absolute values.
        copies: coordinates that have the same value in every update; ideal updates only.
        zeros: the share of the coordinates of ideal updates that are zero, at random for each member.
        repeats: how often each sum is asked, from nearly the same model; once by default. Every time the noise is new.
        fails: what the attacked member answers in the second sum: its update ("never" fails), a random direction, or
            the zero vector.
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
    updates: Literal["ideal", "digits", "adam", "constant"] = "ideal"
    knows: Literal["nothing", "gram", "others"] = "gram"
    raw: bool = False
    sums: int = Field(1, ge=1, le=2)
    blur: float = Field(0.0, ge=0)
    reader: Literal["linear", "signs"] = "linear"
    copies: int = Field(1, ge=1)
    zeros: float = Field(0.0, ge=0, lt=1)
    repeats: tuple[int, ...] = ()
    fails: Failure = "never"
    rounds: int = Field(10, ge=0)
    trials: int = Field(1000, ge=1)
    alpha: float = Field(0.3, gt=0)
    train: LocalTraining = LocalTraining()

    @property
    def asked(self) -> tuple[int, ...]:
        """How often each sum is asked, (sums,)."""
        return self.repeats or (1,) * self.sums

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.raw and self.updates != "digits":
            raise ValueError("raw: only with updates of digits")
        if (self.copies > 1 or self.zeros) and (self.updates != "ideal" or self.reader != "signs"):
            raise ValueError("copies, zeros: only with ideal updates whose signs are decoded")
        if self.fails != "never" and self.sums < 2:
            raise ValueError("fails: in the second of two sums")
        if len(self.asked) != self.sums or min(self.asked) < 1:
            raise ValueError(f"repeats: one positive number for each sum, got {list(self.repeats)}")
        if self.reader == "signs" and self.updates == "digits":
            raise ValueError('reader: signs are decoded of updates "ideal", "adam" and "constant"')
        return self
