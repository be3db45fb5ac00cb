"""The sections of a run specification, such as `[train]`: keys, bounds and defaults."""

import math
import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from federation.secure.thresholds import BLUR, EVALUATION_NOISE
from federation.spec.accounting import DELTA, LEAST_NOISE
from federation.spec.objective_names import OBJECTIVE
from federation.spec.part import Part
from federation.spec.problems import Section
from federation.spec.sharing import MAX_PATTERNS, PATTERN, SharingError, parameters_of
from federation.spec.task_metrics import MetricKind
from federation.tensor_names import BUFFER_NAMES

if TYPE_CHECKING:
    from federation.spec.computation import PrivateSgd
    from federation.vectors import Layout

IDENTIFIER = r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$"

MAX_COUNT = 2**31 - 1  # of epochs, steps, clients
MAX_DEADLINE = 366 * 86_400.0
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Natural = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Seconds = Annotated[float, Field(gt=0, le=MAX_DEADLINE)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]

Split = Literal["train", "validation", "test"]
Scalar = Literal["accuracy", "evaluation", "loss", "norm"]  # the numbers that members may show besides sums
METRIC = r"^([a-z][a-z0-9-]{0,31}(/[a-z0-9.-]{1,32})?)?$"  # of a metric, or of one of its values
TASK = r"[A-Za-z0-9_.:-]{1,120}"  # the form of a task's name
Objective = Annotated[str, Field(pattern=f"^{OBJECTIVE}$")]
Names = Annotated[tuple[Objective, ...], Field(strict=False)]  # TOML has lists


def _share_or_majority(value: Any) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value != "majority" and not (number and 0 <= value <= 1):
        raise ValueError('a share from 0 to 1 is needed, or "majority"')
    return value


Quorum = Annotated[
    float | Literal["majority"],
    BeforeValidator(_share_or_majority),
    Field(description="replies that a round needs: a share of those wanted, from 0 to 1, or more than half of them"),
]


def replies_needed(quorum: float | str, wanted: int) -> int:
    """The number of `wanted` replies that a phase needs, at least one; with fewer at the deadline it is skipped."""
    return wanted // 2 + 1 if isinstance(quorum, str) else max(1, math.ceil(quorum * wanted - 1e-9))


AUTO = "auto"


def _positive_or_auto(value: Any) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value != AUTO and not (number and 0 < value < math.inf):
        raise ValueError(f'a number above 0 is needed, or "{AUTO}"; got {value!r}')
    return value


ServerRate = Annotated[float | Literal["auto"], BeforeValidator(_positive_or_auto)]


class AlgorithmSpec(BaseModel):
    """The aggregation rule: `name`, `prior`, and the rule's own hyper-parameters beside them."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    name: str = Field("fedmgda+", description="a rule of `fedpareto aggregate --list`")
    prior: Literal["uniform", "samples"] = Field(
        "uniform", description="lambda0, the weights of plain averaging: 1/m, or in proportion to the samples"
    )

    @model_validator(mode="after")
    def _finite(self) -> "AlgorithmSpec":
        for name, value in self.hyperparameters.items():
            numbers = value if isinstance(value, list) else [value]
            if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
                raise ValueError(f"{name} = {value} is not finite")
        return self

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The keys that belong to the rule itself; the coordinator's registry validates them."""
        return dict(self.model_extra or {})


class ServerSpec(Section):
    """The server's step: w <- w - learning_rate_t * step, which the optimiser makes from the direction."""

    takers = {  # noqa: RUF012 - a ClassVar of the base
        "beta1": ("optimizer", ("momentum", "adam", "yogi", "adagrad")),
        "beta2": ("optimizer", ("adam", "yogi")),
        "tau": ("optimizer", ("adam", "yogi", "adagrad")),
    }

    learning_rate: ServerRate = Field(
        1.0,
        description="eta_0, the rate of the first round; auto: at most 1, and so small that no step is longer than the "
        "lower median of the members' updates",
    )
    decay: float = Field(
        0.0,
        ge=0,
        le=1,
        description="eta_t = eta_0 * decay^(P/T * floor(t/P)) (FedMGDA+ section 6.1.5); 0 means no decay",
    )
    decay_every: Count = Field(100, description="P, the rounds between two reductions of the rate; for decay > 0")
    optimizer: Literal["sgd", "momentum", "adam", "yogi", "adagrad"] = Field(
        "sgd", description="sgd steps along the direction; the others keep state (Reddi et al., 2021)"
    )
    beta1: BelowOne = Field(0.9, description="the share of the momentum that is kept in each round")
    beta2: BelowOne = Field(0.99, description="the share of the squared directions that is kept in each round")
    tau: Positive = Field(1e-3, description="adaptivity: a smaller number adapts more")


Pattern = Annotated[str, Field(pattern=PATTERN)]
Patterns = Annotated[tuple[Pattern, ...], Field(strict=False, max_length=MAX_PATTERNS)]


class ParametersSpec(Section):
    """Which parameters of the task's model a run does not share."""

    personal: Patterns = Field(
        (), description='parameters that each member keeps, trains and never sends: patterns, such as "head.*"'
    )
    frozen: Patterns = Field((), description="parameters that stay at their initial values: patterns")

    buffers: Literal["", "local", "averaged", "frozen"] = Field(
        "",
        description="the treatment of buffers, such as BatchNorm's running statistics: kept by each member, averaged, "
        "or left at the initial values; a model without buffers needs nothing",
    )
    buffer_names: Patterns = Field(
        BUFFER_NAMES, description="patterns of the names of the buffers, if they are averaged"
    )

    @property
    def shares_all(self) -> bool:
        """True if members send every parameter."""
        return not (self.personal or self.frozen or self.buffers)

    @property
    def keeps(self) -> bool:
        """True if members keep parameters or buffers of their own."""
        return bool(self.personal) or self.buffers == "local"

    def parameters_of(self, layout: "Layout") -> "Layout":
        """The parameters of the run's model, which come before its averaged buffers.

        Raises:
            SharingError: as of `federation.spec.sharing.parameters_of`.
        """
        return parameters_of(layout, self.buffer_names) if self.buffers == "averaged" else layout

    def check_suits(self, layout: "Layout") -> None:
        """Checks the tensors of an initial model. Raises SharingError if they are not those that the run shares."""
        kept = self.buffer_names if self.buffers in ("local", "frozen") else ()
        for tensor in layout.tensors:
            if any(fnmatchcase(tensor.name, pattern) for pattern in (*self.personal, *self.frozen, *kept)):
                raise SharingError(f"parameters: the initial model holds {tensor.name!r}, which the run does not share")
        self.parameters_of(layout)

    @property
    def measured(self) -> Literal["shared", "personalised"]:
        """The model that members measure: the shared one, or each member's own."""
        return "personalised" if self.keeps else "shared"


class MetricSpec(Section):
    """A metric of the task."""

    better: Literal["higher", "lower"] = Field("higher", description="which values are better")
    largest: Positive = Field(1.0, description="private evaluations clip values to [0, largest]")


class EvaluateSpec(Section):
    """Evaluation of the new model on every member's own splits."""

    every: Natural = Field(1, description="rounds between evaluations; 0 is only after the last round")
    splits: tuple[Split, ...] = Field(("train", "validation", "test"), strict=False, min_length=1)
    deadline_seconds: Seconds = 600.0
    metrics: dict[str, MetricSpec] = Field(
        {}, description="metrics of the task that are measured; empty: all, as the submitting machine has the task"
    )

    @property
    def kinds(self) -> tuple[MetricKind, ...]:
        """The kinds of the named metrics."""
        return tuple(MetricKind(name, metric.better, metric.largest) for name, metric in self.metrics.items())


class StopSpec(Section):
    """The end of a run before its last round, by what members measured of its models."""

    metric: str = Field(
        "", pattern=METRIC, description='"accuracy", "loss" or a metric of the task; empty: the run is not stopped'
    )
    of: Literal["mean", "weighted", "worst"] = Field(
        "mean", description="the value that counts: the members' mean, their mean by samples, or the worst"
    )
    split: Split = "validation"
    target: float | None = Field(None, description="the run ends when the value is at least this good")
    patience: Natural = Field(
        0, description="the run ends after this number of evaluations in a row without a better value; 0: never"
    )
    improvement: NotNegative = Field(0.0, description="the least difference by which a value counts as better")

    @model_validator(mode="after")
    def _complete(self) -> "StopSpec":
        if bool(self.metric) != (self.target is not None or self.patience > 0):
            raise ValueError("give a metric, and with it a target or a patience, or both")
        return self

    def reached(self, kind: MetricKind | None, metrics: Mapping[str, float]) -> str:
        """The reason why a run ends after a round with these metrics; empty if it goes on.

        `kind` is that of the watched metric.
        """
        if kind is None or "stop/value" not in metrics:
            return ""
        value, since = metrics["stop/value"], int(metrics.get("stop/since", 0.0))
        watched_value = f"{self.split} {self.metric} ({self.of})"
        if self.target is not None and (value >= self.target if kind.higher else value <= self.target):
            return f"target reached: {watched_value} = {value:.6g}, target {self.target:g}"
        if self.patience and since >= self.patience:
            return f"no better {watched_value} in {since} evaluations; the last one is {value:.6g}"
        return ""


class ObjectivesSpec(Section):
    """The objectives of a task that has several, and who serves which: the indicator matrix."""

    names: Names = Field(
        (), description="objectives of the task, in its order; empty: as the submitting machine has the task"
    )
    serve: dict[str, Names] = Field(
        {}, description="the objectives that a client serves, by its name; other clients serve those they declare"
    )


class JacobianSpec(Section):
    """The phase in which clients send sketches of their gradients (FedCMOO), and its second leg."""

    deadline_seconds: Seconds = Field(600.0, description="later replies are refused")
    quorum: Quorum = "majority"


class PrivacySpec(Section):
    """What the coordinator may learn of the clients' updates, and noise that protects their samples."""

    secure: Literal["off", "sum", "private", "verified"] = Field(
        "off",
        description="what the coordinator learns: every update; one weighted sum; the sum and the Gram matrix of "
        "sketches; or the same with proofs of every member's length",
    )
    disclose: Annotated[tuple[Scalar, ...], Field(strict=False)] = Field(
        (), description="numbers that members also show, for rules that read them; their owners must allow it"
    )
    clip: NotNegative = Field(0.0, description="C of fedavg in a sum: updates longer than C are shortened to it")
    stage_seconds: Seconds = Field(120.0, description="seconds for each stage of a session after the training")
    effective_members: float = Field(
        0.0,
        ge=0,
        le=100,
        description="the least cover of every member's vector in a sum; 0 is the members' default. Members whose "
        "owners require more decline",
    )
    blur: float = Field(
        BLUR,
        ge=0,
        le=10,
        description="the size of the noise by which each member blurs its update in a private round, relative to each "
        "coordinate. Members whose owners require more decline",
    )
    evaluation_noise: float = Field(
        EVALUATION_NOISE,
        ge=0,
        le=10,
        description="sigma of private evaluations: the standard deviation of the noise on a sum of the members' "
        "values, each over its largest value. Members whose owners require more decline",
    )
    sample_noise: NotNegative = Field(
        0.0,
        description="noise on the gradients of every client's samples (DP-SGD): its standard deviation in units of "
        f"`sample_clip`, at least {LEAST_NOISE}; 0 is none, but a client whose owner asks for noise adds it anyway",
    )
    sample_clip: Positive = Field(1.0, description="the norm to which the gradient of a sample is clipped")
    client_noise: NotNegative = Field(
        0.0,
        description="noise on every step, which protects clients from those who see the models: its standard deviation "
        f"as a multiple of the most that one client moves the step, at least {LEAST_NOISE}; 0 is none",
    )
    client_epsilon: NotNegative = Field(
        0.0, description="the budget of epsilon: the run is stopped before a round would exceed it; 0 is no budget"
    )
    client_delta: float = Field(
        DELTA, gt=0, lt=1, description="the delta of that epsilon; below 1 / the number of clients"
    )

    @model_validator(mode="after")
    def _of_private_rounds(self) -> "PrivacySpec":
        if self.secure == "off" and (self.disclose or self.clip or self.effective_members):
            raise ValueError('disclose, clip and effective_members are for private rounds; secure is "off"')
        if 0 < self.effective_members < 1:
            raise ValueError("effective_members is 0, or at least 1: a member covers itself")
        return self

    @field_validator("sample_noise", "client_noise")
    @classmethod
    def _enough(cls, value: float) -> float:
        if 0 < value < LEAST_NOISE:
            raise ValueError(f"noise below {LEAST_NOISE} protects nothing: 0, or at least {LEAST_NOISE}")
        return value

    @property
    def of_samples(self) -> "PrivateSgd | None":
        """The noise of the clients' training; None without noise."""
        from federation.spec.computation import PrivateSgd  # noqa: PLC0415 - it needs NumPy

        return PrivateSgd(noise=self.sample_noise, clip=self.sample_clip) if self.sample_noise else None


Clients = Annotated[tuple[Annotated[str, Field(max_length=63)], ...], Field(strict=False, max_length=1000)]


class SelectionSpec(Section):
    """Who is asked to train in a round, and how many must answer."""

    method: Literal["all", "fraction", "count"] = "all"
    fraction: float = Field(1.0, gt=0, le=1, description="for method = fraction: max(1, ceil(fraction * pool)) clients")
    count: Count = Field(1, description="for method = count: the number of clients")
    by: Literal["uniform", "samples"] = Field("uniform", description="the chance of each client to be drawn")
    always: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (), description="clients, by name, that are asked in every round in which they are in the pool"
    )
    members: Clients = Field((), description="the only clients that may be asked, by name; empty: all")
    exclude: Clients = Field((), description="clients that are not asked, by name")
    tags: Clients = Field((), description="only clients with one of these tags may be asked; empty: all")
    required: Clients = Field(
        (), description="clients, by name, that a round needs to begin, and whose replies it needs for a step"
    )
    patience_seconds: float = Field(
        0.0,
        ge=0,
        le=MAX_DEADLINE,
        description="seconds for which a round waits for required clients before it is skipped; 0: no limit",
    )
    pool: Literal["attending", "enrolled"] = Field(
        "attending", description="clients that attend now, or every active client that offers the task"
    )
    minimum: Count = Field(1, description="a round waits until the pool holds at least this number of clients")
    over_selection: float = Field(
        1.0, ge=1, le=10, description="clients that are asked, as a multiple of those wanted; the first replies count"
    )
    quorum: Quorum = "majority"
    grace_seconds: float = Field(
        300.0,
        ge=0,
        le=MAX_DEADLINE,
        description="seconds for which a phase waits for a client that has disconnected",
    )

    def admits(self, client_id: str, tags: Collection[str] = ()) -> bool:
        """True if a client with these tags may be asked."""
        named = not self.members or client_id in self.members
        tagged = not self.tags or client_id in self.required or any(tag in self.tags for tag in tags)
        return named and tagged and client_id not in self.exclude

    def wanted(self, pool: int) -> int:
        """The number of replies that a round wants out of `pool` clients: at least one, at most all of them.

        The fraction p of N clients is max(1, ceil(p N)), with a guard against 0.1 * 30 = 3.0000000000000004.
        """
        if self.method == "all":
            return pool
        if self.method == "fraction":
            return min(pool, max(1, math.ceil(self.fraction * pool - 1e-9)))
        return min(pool, self.count)

    def asked(self, pool: int) -> int:
        """The number of clients asked so that the wanted number answers, over-selection included."""
        return min(pool, math.ceil(self.wanted(pool) * self.over_selection - 1e-9))

    def unknown(self, names: Collection[str]) -> str:
        """The first key with a client that is not among these, and the client, as "selection.KEY: NAME"; else empty."""
        for key in ("members", "exclude", "required"):
            for client_id in getattr(self, key):
                if client_id not in names:
                    return f"selection.{key}: there is no client {client_id!r}"
        return ""

    @model_validator(mode="after")
    def _can_be_asked(self) -> "SelectionSpec":
        for key in ("members", "always", "required"):
            if excluded := [name for name in getattr(self, key) if name in self.exclude]:
                raise ValueError(f"exclude and {key} both name {excluded[0]!r}")
        for key in ("always", "required"):
            if self.members and (absent := [name for name in getattr(self, key) if name not in self.members]):
                raise ValueError(f"{key} names {absent[0]!r}, and members does not")
        if self.members and self.minimum > len(self.members):
            raise ValueError(f"minimum = {self.minimum}, and members names {len(self.members)} clients")
        if self.patience_seconds and not self.required:
            raise ValueError("patience_seconds is for required clients, and required names none")
        return self


class LimitsSpec(Section):
    """Bounds on what clients send, and on failing rounds."""

    samples: int = Field(
        10_000_000,
        ge=1,
        le=2**53,
        description="an update that claims more training samples is refused; an offer of more counts as this many",
    )
    norm: Positive = Field(
        1e12, description="an update is refused when the Euclidean norm of one of its rows is larger"
    )
    attempts: Count = Field(5, description="attempts at a round; when the last one is voided, the round is skipped")
    skipped_rounds: Count = Field(3, description="this number of skipped rounds in a row fails the run")


class SimulationSpec(Section):
    """The clients that `fedpareto simulate` makes up; a federation of real workers has its own and reads none of it."""

    clients: int = Field(10, ge=1, le=100_000, description="the number of clients: client-000, client-001, ...")
    partition: str = Field("iid", description="the partition of the samples: iid, shards:S, dirichlet:ALPHA or natural")
    sizes: str = Field("equal", description="the samples of each client, for iid and dirichlet: see `data show --help`")
    partition_seed: int = Field(
        0, ge=0, description="the seed of the partition; all other random choices follow the run's `seed`"
    )
    objectives: str = Field(
        "all", description="the objectives that each client serves: all, or cycle:K, K of them in turn"
    )
    attackers: int = Field(0, ge=0, description="the number of attackers; they are the last clients by name")
    attack: str = Field("", description='their attack, such as "sign-flip" or "scale=100,bias=1000"')

    @field_validator("partition")
    @classmethod
    def _a_partition(cls, value: str) -> str:
        Part(0, 1, value)
        return value

    @field_validator("sizes")
    @classmethod
    def _sizes_of_the_partition(cls, value: str, info: ValidationInfo) -> str:
        if "partition" in info.data:  # pydantic leaves out an invalid one
            Part(0, 1, info.data["partition"], sizes=value)
        return value

    @field_validator("objectives")
    @classmethod
    def _of_the_objectives(cls, value: str) -> str:
        if re.fullmatch(r"all|cycle:[1-9][0-9]{0,3}", value) is None:
            raise ValueError(f"unknown choice of objectives {value!r}: use all or cycle:K")
        return value

    @model_validator(mode="after")
    def _both_or_neither(self) -> "SimulationSpec":
        if (self.attackers > 0) != bool(self.attack):
            raise ValueError(f"attackers = {self.attackers} and attack = {self.attack!r}: give both or neither")
        if self.attackers > self.clients:
            raise ValueError(f"{self.attackers} attackers among {self.clients} clients")
        return self
