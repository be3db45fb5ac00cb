"""The sections of a run specification, such as `[train]`: keys, bounds and defaults."""

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from federation.secure.thresholds import BLUR, EVALUATION_NOISE
from federation.spec.accounting import DELTA, LEAST_NOISE
from federation.spec.objective_names import OBJECTIVE
from federation.spec.problems import Section
from federation.spec.sharing import MAX_PATTERNS, PATTERN, SharingError, parameters_of, without_fixed
from federation.spec.task_metrics import MetricKind
from federation.tensor_names import BUFFER_NAMES

if TYPE_CHECKING:
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


Quorum = Annotated[float | Literal["majority"], BeforeValidator(_share_or_majority)]


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

    name: str = Field(
        "fedmgda+",
        description="The [algorithm](research/algorithms.md). `fedpareto aggregate --list` shows the algorithms and "
        "their hyper-parameters. [A rule of your own](research/plugins.md#a-rule) is written as `module:Class`.",
    )
    prior: Literal["uniform", "samples"] = Field(
        "uniform",
        description='lambda0, the weights of plain averaging: `"uniform"` is 1/m for each of the m clients, '
        '`"samples"` is in proportion to the training samples that they claim.',
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
        "decay": ("schedule", ("stepwise",)),
        "decay_every": ("schedule", ("stepwise",)),
    }

    learning_rate: ServerRate = Field(
        1.0,
        description='eta_0, the rate of the first round. `"auto"` finds it anew in each round: at most 1, and so '
        "small that no step is longer than the lower median of the lengths of the members' updates.",
    )
    schedule: Literal["stepwise", "inverse"] = Field(
        "stepwise",
        description='How the rate changes over the rounds: `"stepwise"`, by `decay` and `decay_every`; or `"inverse"`, '
        "`eta_0 * 2 / (t + 2)` in round t from 0, the rate of FedMGDA+'s theorem 2 with `eta_0 = 1/c` for losses that "
        "are strongly convex with modulus c.",
    )
    decay: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Between 0 and 1. The rate of round t out of T is `eta_0 * decay^(P/T * floor(t/P))`, the "
        "schedule of FedMGDA+, where P is `decay_every`; 0 means no decay.",
    )
    decay_every: Count = Field(
        100,
        description="P, the number of rounds between two reductions of the rate, with `decay`. 100 is the paper's "
        "value, for runs of 2000 rounds. A run of at most P rounds keeps its first rate, and `submit` warns about "
        "this.",
    )
    optimizer: Literal["sgd", "momentum", "adam", "yogi", "adagrad"] = Field(
        "sgd",
        description='`"sgd"` steps along the direction itself. `"momentum"` (FedAvgM) adds up directions, `"adam"`, '
        '`"yogi"` and `"adagrad"` also scale each parameter by the size of its past directions.',
    )
    beta1: BelowOne = Field(0.9, description="The share of the momentum that is kept in each round.")
    beta2: BelowOne = Field(0.99, description="The share of the squared directions that is kept in each round.")
    tau: Positive = Field(
        1e-3,
        description="Adaptivity: the step is `m / (sqrt(v) + tau)`, and v begins at tau².",
    )


Pattern = Annotated[str, Field(pattern=PATTERN)]
Patterns = Annotated[tuple[Pattern, ...], Field(strict=False, max_length=MAX_PATTERNS)]


class ParametersSpec(Section):
    """Which parameters of the task's model a run does not share."""

    personal: Patterns = Field(
        (),
        description='Patterns of the parameters that each member keeps and trains, such as `["head.*"]`. They are '
        "never sent.",
    )
    frozen: Patterns = Field((), description="Patterns of the parameters that stay at their initial values.")

    buffers: Literal["", "local", "averaged", "frozen"] = Field(
        "",
        description="For a model with [buffers](research/personal-parameters.md#buffers), such as BatchNorm's "
        'running statistics: `"local"` (kept by each member), `"averaged"` (the mean of the members\') or `"frozen"` '
        "(as they were initially).",
    )
    buffer_names: Patterns = Field(
        BUFFER_NAMES, description="Patterns of the names of the buffers, where they are averaged."
    )
    fixed: Patterns = Field(
        (),
        description="Patterns of the tensors that stay as the initial model of the run has them: they are in each "
        "model of the run, and neither trained nor sent. `submit --statistics` writes those of a layer "
        "[Standardise](research/standardise.md).",
    )
    statistics: str = Field(
        "",
        pattern=r"^((blake3|sha256):[0-9a-f]{64})?$",
        description='The digest of the signed result of a run of kind `"statistics"`, with whose means and '
        "deviations the layer [Standardise](research/standardise.md) of the model is filled. `submit --statistics` "
        "writes it.",
    )

    @model_validator(mode="after")
    def _fills_fixed(self) -> "ParametersSpec":
        if self.statistics and not self.fixed:
            raise ValueError(
                "statistics: the tensors that it fills have to be in fixed; `submit --statistics` writes both"
            )
        return self

    @property
    def shares_all(self) -> bool:
        """True if members send every parameter."""
        return not (self.personal or self.frozen or self.buffers or self.fixed)

    @property
    def keeps(self) -> bool:
        """True if members keep parameters or buffers of their own."""
        return bool(self.personal) or self.buffers == "local"

    def parameters_of(self, layout: "Layout") -> "Layout":
        """The parameters of the run's model, which come before its averaged buffers and its fixed tensors.

        Raises:
            SharingError: as of `federation.spec.sharing.parameters_of` and `without_fixed`.
        """
        trained = self.trained(layout)
        return parameters_of(trained, self.buffer_names) if self.buffers == "averaged" else trained

    def trained(self, layout: "Layout") -> "Layout":
        """The tensors of the run's model that a round can change: its parameters and averaged buffers.

        Raises:
            SharingError: as of `federation.spec.sharing.without_fixed`.
        """
        return without_fixed(layout, self.fixed) if self.fixed else layout

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

    every: Natural = Field(
        1,
        description="Rounds between evaluations. The last round is always evaluated, unless it is skipped; 0 means "
        "only that one.",
    )
    splits: tuple[Split, ...] = Field(
        ("train", "validation", "test"),
        strict=False,
        min_length=1,
        description="The splits to measure; a client leaves out splits that it does not have.",
    )
    deadline_seconds: Seconds = Field(
        600.0, description="The round continues without clients that have not replied by then."
    )
    metrics: dict[str, MetricSpec] = Field(
        {},
        description="The [task's own metrics](start/your-own-task.md#metrics) that are measured. If empty, `submit` "
        "takes all of them from the task. Set them if the task is not installed on the submitting machine: `metrics "
        '= { auc = {}, rmse = { better = "lower", largest = 100.0 } }`. `better` is `"higher"` (the default) or '
        '`"lower"`. Private evaluations clip values to [0, `largest`] (default 1).',
    )

    @property
    def kinds(self) -> tuple[MetricKind, ...]:
        """The kinds of the named metrics."""
        return tuple(MetricKind(name, metric.better, metric.largest) for name, metric in self.metrics.items())


class StopSpec(Section):
    """The end of a run before its last round, by what members measured of its models."""

    metric: str = Field(
        "",
        pattern=METRIC,
        description='`"accuracy"`, `"loss"` or a metric of the task, such as `"auc"`, or `"recall/3"` for one value '
        "of a metric with several. If empty, the run is not stopped early.",
    )
    of: Literal["mean", "weighted", "worst"] = Field(
        "mean",
        description='Of the members\' values: `"mean"`, `"weighted"` (the mean weighted by the samples that they '
        'claim) or `"worst"`. A private round shows only the mean.',
    )
    split: Split = Field(
        "validation", description="The split. If the test split stops a run, its result on this split is biased."
    )
    target: float | None = Field(
        None, description="The run ends when the value is at least this good. Without this key there is no target."
    )
    patience: Natural = Field(
        0, description="The run ends after this number of evaluations in a row without a better value; 0 is never."
    )
    improvement: NotNegative = Field(
        0.0,
        description="By how much a value must be better than the last one that counted as better. The first one "
        "counts.",
    )

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
        (),
        description="The names, in the task's order. If empty, `submit` takes them from the task; set them if the "
        "task is not installed on the submitting machine.",
    )
    serve: dict[str, Names] = Field(
        {},
        description='The objectives that a client serves, by the client\'s name: `serve = { clinic-a = ["left"] }`. '
        "The client's worker must declare them.",
    )


class JacobianSpec(Section):
    """The phase in which clients send sketches of their gradients (FedCMOO), and its second leg."""

    deadline_seconds: Seconds = Field(
        600.0, description="A sketch that arrives later is refused with [`deadline`](reference/reasons.md#replies)."
    )
    quorum: Quorum = Field(
        "majority",
        description='The share of the wanted sketches that a round needs, from 0 to 1; or `"majority"`, more than '
        "half.",
    )


class PrivacySpec(Section):
    """What the coordinator may learn of the clients' updates, and noise that protects their samples."""

    secure: Literal["off", "sum", "private", "verified"] = Field(
        "off",
        description='What the coordinator learns in a round. `"off"`: every update. `"sum"`: one weighted sum of '
        'the updates. `"private"`: the sum, and the inner products of sketches of the updates, which multi-gradient '
        'descent needs. `"verified"`: as `"private"`, with checks of every member\'s length.',
    )
    disclose: Annotated[tuple[Scalar, ...], Field(strict=False)] = Field(
        (),
        description='Numbers that members also show, for algorithms that read them: `"loss"`, `"accuracy"`, '
        '`"norm"`, and `"evaluation"` for evaluations in the clear. The owner of each member must allow them.',
    )
    clip: NotNegative = Field(
        0.0,
        description="C, for `fedavg` in a private round: updates longer than C are shortened to it. Other "
        "algorithms sum updates of length 1.",
    )
    stage_seconds: Seconds = Field(
        120.0,
        description="The time in seconds for each phase of a session after the training. The phase in which members "
        "send their masked vectors has 4 bytes for each parameter at 100 kB/s more (`SLOWEST_BYTES_PER_SECOND` of "
        "`federation/transport/transfer_times.py`): 32 s for 0.8 M parameters. Give more if members have slower "
        "connections.",
    )
    effective_members: float = Field(
        0.0,
        ge=0,
        le=100,
        description="The least [cover](reference/private-protocol.md#35-coefficients) of every member's vector in a "
        "sum, at least 1; 0 is what members require by default. Members whose owners require more "
        "(`secure.effective_members`) decline, so set this to the largest value that an owner requires.",
    )
    blur: float = Field(
        BLUR,
        ge=0,
        le=10,
        description="c of the [blur](reference/private-protocol.md#2c-the-blur-of-an-update): in a private round, "
        "each member adds noise to every coordinate of its update, in proportion to the coordinate. In a sum with "
        "equal weights, all noise together is c / √(m (n_min − t)) times as long as for one member: 0.26, 0.16, 0.08 "
        "and 0.03 with 5, 10, 20 and 50 members. Members whose owners require more (`secure.blur`, 1 by default) "
        "decline.",
    )
    evaluation_noise: float = Field(
        EVALUATION_NOISE,
        ge=0,
        le=10,
        description="σ of private evaluations: the standard deviation of the "
        "[noise](member/privacy.md#what-a-private-round-does-not-hide) on the sum of the members' values, each "
        "divided by the largest value. The mean accuracy of 10 members then has noise of 0.016, of 20 members 0.008, "
        "and a mean loss 10 times as much (`evaluation/noise` in each round). Members whose owners require more "
        "(`secure.evaluation_noise`) decline the evaluation.",
    )
    sample_noise: NotNegative = Field(
        0.0,
        description="Noise on the gradients of every client's samples (DP-SGD): its standard deviation as a "
        f"multiple of `sample_clip`, at least {LEAST_NOISE}; 0 is none. A client whose owner asks for more noise adds "
        "more, and one whose owner asks for noise adds it in any case. Workers need the extra `dp`. The training "
        "split is not measured, and algorithms that need its losses or gradients are refused. The run cannot be "
        "repeated bit for bit.",
    )
    sample_clip: Positive = Field(1.0, description="The norm to which the gradient of each sample is clipped.")
    client_noise: NotNegative = Field(
        0.0,
        description="Noise on every step, which protects clients against those who see the models: its standard "
        f"deviation as a multiple of the most that one client moves the step, at least {LEAST_NOISE}; 0 is none. For "
        "`fedavg-n` and `fedmgda+`. What clients send is then hidden from operators, and nothing is measured. The "
        "coordinator chooses the noise, so [the models cannot be "
        "verified](reference/verify.md#noise-that-the-coordinator-chose).",
    )
    client_epsilon: NotNegative = Field(
        0.0,
        description="The budget of epsilon with this noise: the run is stopped before the round that would exceed "
        "it. 0 is no budget.",
    )
    client_delta: float = Field(
        DELTA,
        gt=0,
        lt=1,
        description="The delta for which epsilon holds; choose it far below 1 / the number of clients.",
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


class LimitsSpec(Section):
    """Bounds on what clients send, and on failing rounds."""

    samples: int = Field(
        10_000_000,
        ge=1,
        le=2**53,
        description="A reply that claims more training samples is refused with "
        "[`limit:samples`](reference/reasons.md#replies). If clients are selected by the samples that their workers "
        "offer (`selection.by`), a larger offer counts as this many.",
    )
    norm: Positive = Field(
        1e12,
        description="An update is refused with [`limit:norm`](reference/reasons.md#replies) when the Euclidean norm "
        "of one of its rows is larger. It does not apply to sketches of gradients.",
    )
    attempts: Count = Field(
        5,
        description="A round is skipped when this many [attempts](reference/protocol.md#attempts-at-a-round) at it "
        "were voided.",
    )
    skipped_rounds: Count = Field(
        3,
        description="The run fails after this many skipped rounds in a row. A run also fails if none of its rounds "
        "has made a step.",
    )
