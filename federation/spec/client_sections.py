"""The sections of a run specification about its clients: who is asked, what data are asked for, who is simulated."""

import math
import re
from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from federation.spec.part import Part
from federation.spec.problems import Section
from federation.spec.run_sections import MAX_DEADLINE, Count, Quorum, Seconds, Split
from federation.statistics.data_columns import LEAST_BINS, MAX_BINS, Column, ColumnError, check_columns

Clients = Annotated[tuple[Annotated[str, Field(max_length=63)], ...], Field(strict=False, max_length=1000)]


class SelectionSpec(Section):
    """Who is asked to train in a round, and how many must answer."""

    method: Literal["all", "fraction", "count"] = Field(
        "all", description='`"all"` clients of the pool, a `"fraction"` of them, or a `"count"`.'
    )
    fraction: float = Field(
        1.0, gt=0, le=1, description='With `method = "fraction"`: max(1, ceil(fraction × pool)) clients.'
    )
    count: Count = Field(
        1, description='With `method = "count"`: the number of clients, or the whole pool if it is smaller.'
    )
    by: Literal["uniform", "samples"] = Field(
        "uniform",
        description='The chance of each client to be drawn: the same for all, or in proportion to its `"samples"`.',
    )
    always: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (),
        description="Names of clients that are asked in every round in which they are in the pool, such as the "
        "attackers of a rehearsal. The other clients are drawn at random. If more clients are named than a round "
        "asks, all of them are asked.",
    )
    members: Clients = Field((), description="Names of the only clients that the run may ask. Empty: all.")
    exclude: Clients = Field((), description="Names of clients that the run does not ask.")
    tags: Clients = Field(
        (),
        description="Only clients with at least one of these "
        "[tags](operate/operations.md#tags-and-required-members) are asked, as they are when a round begins. Empty: "
        "all.",
    )
    required: Clients = Field(
        (),
        description="Names of clients that each round needs. A round does not begin before they are in the pool. It "
        "always asks them, with any tags, and [makes no step without their "
        "replies](reference/run-spec.md#required-members).",
    )
    patience_seconds: float = Field(
        0.0,
        ge=0,
        le=MAX_DEADLINE,
        description="How long a round waits for required clients to be in the pool before it is skipped. With 0 it "
        "waits without a limit, as for `minimum`.",
    )
    pool: Literal["attending", "enrolled"] = Field(
        "attending",
        description="The clients that can be selected: those that attend now, or every active client that offers "
        'the task (`"enrolled"`).',
    )
    minimum: Count = Field(1, description="A round does not begin before the pool holds this many clients.")
    over_selection: float = Field(
        1.0,
        ge=1,
        le=10,
        description="Between 1 and 10: the number of clients that are asked, as a multiple of the number wanted. "
        "The first replies count; the other assignments are cancelled.",
    )
    quorum: Quorum = Field(
        "majority",
        description='The share of the wanted replies that a round needs, from 0 to 1; or `"majority"`, more than '
        "half: two of two, or two of three. With fewer at the deadline the round is skipped, and the model stays. At "
        "least one reply is always needed.",
    )
    grace_seconds: float = Field(
        300.0,
        ge=0,
        le=MAX_DEADLINE,
        description="How many seconds a phase waits for a client that was asked and has disconnected. When every "
        "client that has not replied has been away for longer, the phase ends before its deadline, and these clients "
        "are recorded as `EXPIRED` with the reason `absent`. A client that returns earlier can still reply. With "
        '`pool = "enrolled"` this holds for clients that attended during the phase.',
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


class StatisticsSpec(Section):
    """What a run of the kind "statistics" asks of the members' data."""

    open: bool = Field(
        False,
        description="Whether members send their numbers so that the coordinator reads those of each; the owner of each "
        "site then has to allow it, too (`statistics.open` in policy.toml). Choose one: true, or "
        '`privacy.secure = "sum"`, which asks for [sums over the members](research/statistics.md#private-runs) alone.',
    )
    columns: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (),
        description="The names of the columns. If empty, `submit` takes all of them from the task; likewise `ranges` "
        "and `classes`.",
    )
    ranges: dict[str, Annotated[tuple[float, float], Field(strict=False)]] = Field(
        {},
        description="The smallest and the largest value of columns, by name: `ranges = { age = [0, 120] }`. Bins "
        "divide the range. Without one, they are powers of two on both sides of 0.",
    )
    classes: dict[str, int] = Field(
        {}, description="The number of classes, C, of columns with classes from 0 to C - 1, by name."
    )
    bins: int = Field(20, ge=LEAST_BINS, le=MAX_BINS, description="The bins of the histogram of a column of numbers.")
    splits: tuple[Split, ...] = Field(
        ("train",), strict=False, min_length=1, description="The splits whose samples are described, together."
    )
    deadline_seconds: Seconds = Field(
        600.0, description="The round continues without clients that have not replied by then."
    )

    @model_validator(mode="after")
    def _describes(self) -> "StatisticsSpec":
        if len(set(self.splits)) < len(self.splits):
            raise ValueError("splits: one is there twice")
        for key, named in (("ranges", self.ranges), ("classes", self.classes)):
            if self.columns and (unknown := [name for name in named if name not in self.columns]):
                raise ValueError(f"{key}: {unknown[0]!r} is none of the columns")
        if self.columns:
            try:
                check_columns(self.described, self.bins)
            except ColumnError as error:
                raise ValueError(f"columns: {error}") from None
        return self

    @property
    def described(self) -> tuple[Column, ...]:
        """The columns, with their ranges and classes."""
        return tuple(
            Column(
                name=name,
                low=self.ranges[name][0] if name in self.ranges else None,
                high=self.ranges[name][1] if name in self.ranges else None,
                classes=self.classes.get(name, 0),
            )
            for name in self.columns
        )


class SimulationSpec(Section):
    """The clients that `fedpareto simulate` makes up; a federation of real workers has its own and reads none of it."""

    clients: int = Field(
        10, ge=1, le=100_000, description="The number of clients; their names are `client-000`, `client-001`, ..."
    )
    partition: str = Field(
        "iid",
        description='The [partition](research/simulation.md#partitions): `"iid"`, `"shards:S"` (S shards of the '
        'label-sorted set for each client), `"labels:S"` (at most S labels for each client), `"dirichlet:ALPHA"`, or '
        '`"natural"` (by owner, where a task knows owners).',
    )
    sizes: str = Field(
        "equal",
        description='The number of samples of each client, for `iid` and `dirichlet`: `"equal"` or '
        '`"lognormal:SIGMA"`.',
    )
    partition_seed: int = Field(
        0,
        ge=0,
        description="The seed of the partition. All other random choices follow the run's `seed`, except the initial "
        "model with `model_seed`.",
    )
    model_seed: int | None = Field(
        None,
        ge=0,
        lt=2**63,
        description="The seed of the initial model; without this key, the run's `seed`. With it, the same model begins "
        "runs that select clients and deal minibatches by different seeds, or different models begin the same run.",
    )
    objectives: str = Field(
        "all",
        description='The [objectives](research/objectives.md) that each client serves: `"all"`, or `"cycle:K"`, K '
        "of them in turn. `objectives.serve` overrides this.",
    )
    attackers: int = Field(0, ge=0, description="The number of attackers. They are the last clients by name.")
    attack: str = Field(
        "",
        description='Their [attack](research/attacks.md), such as `"sign-flip"` or `"scale=100,bias=1000"`; [an '
        "attack of your own](research/plugins.md#an-attack) is written as `module:Class`.",
    )

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
