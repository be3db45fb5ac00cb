"""The policy of a member's site: `policy.toml` in the worker's home, written by the worker's owner.

    restore = "ask"

    [limits]
    samples = 32

It sets what the coordinator may ask of this site; the coordinator cannot change it. Every key is optional. Each
assignment is compared with it in `assignment_checks`.
"""

import re
from collections.abc import Iterable
from dataclasses import fields
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal, get_args
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field, field_validator, model_validator

from federation.errors import Error
from federation.spec.accounting import DELTA, LEAST_NOISE
from federation.spec.computation import PrivateSgd
from federation.spec.problems import Format, Section, read_document
from federation.statistics.rules import MemberRules
from federation.text_files import FORMAT
from federation.work.site import SecurePolicy
from federation.work.work_bounds import LARGEST_BOUND, WorkBounds

_TIME = r"^(([01][0-9]|2[0-3]):[0-5][0-9]|24:00)$"
_Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
_DAYS: tuple[_Day, ...] = get_args(_Day)
_ADDRESS = re.compile(r"([A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?)(:[0-9]{1,5})?")
_KEYS = "docs/member/your-site.md lists the keys that exist"


class PolicyError(Error, ValueError):
    """A policy that cannot be used; the message names the file and each key that is wrong."""


class WorkLimits(Section):
    """Bounds on the work of an assignment, and on the number of assignments that wait here."""

    samples: int = Field(
        8,
        ge=1,
        description="The fewest different training samples that an update or a gradient may be made from. An update "
        "made from one sample is that sample's gradient, and a gradient of few samples can reveal them. The first "
        "minibatches count with the fewest samples that they can have: one of 11 samples and `train.batch_size = 10` "
        "with 6, because models with BatchNorm [even them "
        "out](research/personal-parameters.md#small-minibatches-and-batchnorm).",
    )
    steps: int = Field(1, ge=1, description="The fewest optimiser steps for an update.")
    max_steps: int = Field(1_000_000, ge=1, description="The most optimiser steps for an update.")
    max_epochs: float = Field(
        0.0,
        ge=0,
        description="The most passes over the training samples for an update, also where a run counts in steps. 0 "
        "is any number.",
    )
    max_bytes: int = Field(
        0,
        ge=0,
        description="The most bytes that one assignment may move: the model, the other inputs, and the reply "
        "together. 0 is any number.",
    )
    members: int = Field(
        1,
        ge=1,
        description="The fewest clients that the coordinator asks in a phase, with this one. The coordinator signs "
        "the number in the assignment. How many of them must reply is the run's "
        "[quorum](reference/run-spec.md#selection).",
    )
    rows: int = Field(
        0, ge=0, description="The most rows in an update; 0 means one for each objective that the worker serves."
    )
    hours: float = Field(
        168.0,
        gt=0,
        le=87_600,
        description="The longest time, in hours, that the worker spends on one assignment, however late its "
        "deadline is.",
    )
    waiting: int = Field(
        64,
        ge=1,
        le=10_000,
        description="The most assignments that wait at the worker at a time, together with the finished replies "
        "that wait for a receipt. Usually each run that asks this worker has one.",
    )
    home_bytes: int = Field(
        64 << 30,
        ge=1 << 20,
        description="The most bytes of all files in the worker's home; see "
        "[below](member/your-site.md#what-a-coordinator-can-store-here). With more, each assignment is declined with "
        "`limit:disk`.",
    )
    rounds_forward: bool = Field(
        True,
        description="Whether the worker declines work of a round before the newest one that it has worked in, for "
        "each run. A signed statement of the coordinator that a backup was restored moves the newest round back.",
    )

    @property
    def bounds(self) -> WorkBounds:
        """The bounds on the work of an assignment, which the worker tells the coordinator."""
        return WorkBounds(**{item.name: min(getattr(self, item.name), LARGEST_BOUND) for item in fields(WorkBounds)})


class StatisticsPolicy(Section):
    """The rules for runs that describe the data of this site."""

    open: bool = Field(
        False,
        description="Whether runs that [describe data](research/statistics.md) get counts and sums of this site in the "
        "open: the coordinator reads them. Data under [`[privacy.NAME]`]"
        "(member/differential-privacy.md#the-owners-section) are never described so. Private sums need no such key.",
    )
    samples: int = Field(50, ge=1, description="The fewest samples that are described.")
    samples_per_bin: int = Field(10, ge=1, description="The fewest samples for each bin of a histogram.")
    smallest: int = Field(
        5,
        ge=1,
        description="The smallest count of a bin, of a class, or of values outside the range that is told; a smaller "
        "one is told as 0. In a private sum, "
        "[its samples are moved](research/statistics.md#what-a-member-does-not-tell) instead. 1 is without this rule.",
    )

    @property
    def rules(self) -> MemberRules:
        """The rules by which counts are told."""
        return MemberRules(**{item.name: getattr(self, item.name) for item in fields(MemberRules)})


class OpenHours(Section):
    """The opening hours of the site: it begins no training or evaluation at other times."""

    zone: str = Field(
        "UTC",
        description='The time zone of `open.begin` and `open.end`, such as `"Europe/Berlin"` of the IANA database.',
    )
    begin: str = Field(
        "00:00",
        pattern=_TIME,
        description="The time of day at which the site opens. See [Hours](member/your-site.md#hours).",
    )
    end: str = Field(
        "24:00",
        pattern=_TIME,
        description="The time of day at which the site closes. A time that is not after `open.begin` is on the next "
        "day.",
    )
    days: Annotated[tuple[_Day, ...], Field(strict=False)] = Field(
        _DAYS, min_length=1, description="The days on which it opens, in its time zone."
    )

    @field_validator("zone")
    @classmethod
    def _known(cls, value: str) -> str:
        try:
            ZoneInfo(value)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError(f"this machine knows no time zone {value!r}; see `timedatectl list-timezones`") from None
        return value

    def closed_until(self, now: datetime) -> datetime | None:
        """The time at which the site opens next, UTC; None if it is open now. Times are aware."""
        today, opens = now.astimezone(ZoneInfo(self.zone)).date(), []
        for offset in range(-1, 9):
            day = today + timedelta(days=offset)
            if _DAYS[day.weekday()] not in self.days:
                continue
            begin, end = self._at(day, self.begin), self._at(day, self.end)
            if end <= begin:
                end = self._at(day + timedelta(days=1), self.end)
            if begin <= now < end:
                return None
            opens.append(begin)
        return min(begin for begin in opens if begin > now)

    def _at(self, day: date, time: str) -> datetime:
        """A time of day, UTC; "24:00" is the beginning of the next day."""
        hours, minutes = map(int, time.split(":"))
        local = datetime(day.year, day.month, day.day, tzinfo=ZoneInfo(self.zone)) + timedelta(
            days=hours // 24, hours=hours % 24, minutes=minutes
        )
        return local.astimezone(UTC)


class SamplePolicy(Section):
    """Differential privacy of the samples of one data set: every training on it has noise, in every run."""

    tasks: tuple[str, ...] = Field(
        (),
        strict=False,
        description="The tasks that train on this data set; they share its budget. Empty: the task with the name of "
        "the data set.",
    )
    noise: float = Field(
        ge=LEAST_NOISE,
        description=f"The least noise: the standard deviation as a multiple of `clip`, at least {LEAST_NOISE}. A run "
        "may ask for more.",
    )
    clip: float = Field(
        1.0, gt=0, description="The largest norm to which the gradient of a sample is clipped. A run may ask for less."
    )
    epsilon: float = Field(
        gt=0,
        description="The budget: what all runs together may spend. A training that would exceed it is declined with "
        "[`dp-budget`](reference/reasons.md#reasons-of-a-worker), and the message says what is left.",
    )
    delta: float = Field(
        DELTA,
        gt=0,
        lt=1,
        description="The delta for which epsilon holds. It should be far below 1 / the number of samples; the "
        "worker does not start if it is not below.",
    )
    evaluate: bool = Field(
        False,
        description="Whether losses and accuracies on the validation and test splits are sent, without noise. The "
        "training split is never measured.",
    )

    @property
    def floor(self) -> PrivateSgd:
        """The least noise and the largest bound."""
        return PrivateSgd(noise=self.noise, clip=self.clip)


class SecureSection(SecurePolicy):
    """The owner's rules for private rounds: for all tasks, and exceptions by task."""

    tasks: dict[str, SecurePolicy] = Field(
        {},
        description="Other values of these keys for some tasks: see [Private "
        "rounds](member/privacy.md#the-limits-of-an-owner).",
    )
    data_sets: dict[str, Annotated[tuple[str, ...], Field(strict=False)]] = Field(
        {},
        description="The tasks that train on one data set, by its name. Their private rounds and evaluations count "
        "together, as those of the tasks of a section "
        "[`[privacy.NAME]`](member/differential-privacy.md#the-owners-section) do.",
    )

    def of(self, task: str) -> SecurePolicy:
        """The rules for a task."""
        exceptions = self.tasks.get(task, SecurePolicy())
        return SecurePolicy(
            **{
                name: getattr(exceptions if name in exceptions.model_fields_set else self, name)
                for name in SecurePolicy.model_fields
            }
        )


class Policy(Section):
    """The rules of a worker's owner. `Policy.load` reads them."""

    format: Format = FORMAT
    restore: Literal["accept", "ask"] = Field(
        "accept",
        description="What happens when the coordinator signs that it was [restored from a "
        'backup](operate/operations.md#backup). `"accept"`: the worker tells its owner and continues. `"ask"`: it '
        "does no work for the runs that go back to an earlier round until the owner runs `fedpareto worker restored "
        "--accept`.",
    )
    tasks: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (),
        description="The tasks that may be offered. `fedpareto worker run` ends with a message if `--task` or "
        "`worker.toml` names another one. Empty: each task that `--task` or `worker.toml` names.",
    )
    algorithms: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (),
        description="The [algorithms](research/algorithms.md) of runs in which the site takes part. Empty: any. "
        'Name `"evaluate"` for runs that only [measure models](research/evaluation.md), and `"statistics"` for runs '
        "that [describe data](research/statistics.md). In a private round, a plug-in that is named here may also ask "
        "for gradients, for other targets than the mean of the objectives, and for negative coefficients.",
    )
    submitters: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (),
        description="The names of the administrators in whose runs the site takes part. Empty: all. The coordinator "
        "signs who submitted a run.",
    )
    approve: Literal["none", "each-run"] = Field(
        "none",
        description='`"each-run"`: nothing is done for a run before the owner has [approved '
        "it](member/your-site.md#runs-that-the-owner-approves).",
    )
    downloads_from: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (),
        description="The hosts of [buckets](member/your-site.md#downloads-from-a-bucket) from which the worker may "
        'download models, such as `"bucket.example.org"` or `"bucket.example.org:9000"`. Empty: it downloads from '
        "the coordinator alone.",
    )
    error_texts: bool = Field(
        False,
        description="Whether a decline tells the coordinator the whole text of an error, as the worker's log has "
        "it, up to 1000 characters. The text can hold paths, values and names of patients, and it stays in the "
        "federation's record. In private rounds it never leaves.",
    )
    limits: WorkLimits = WorkLimits()
    open: OpenHours = OpenHours()
    secure: SecureSection = SecureSection()
    statistics: StatisticsPolicy = StatisticsPolicy()
    privacy: dict[str, SamplePolicy] = Field(
        {},
        description="[Differential privacy](member/differential-privacy.md#the-owners-section), by the name of a "
        "data set.",
    )

    @field_validator("downloads_from")
    @classmethod
    def _addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for host in value:
            if _ADDRESS.fullmatch(host) is None:
                raise ValueError(
                    f"{host!r} is neither HOST nor HOST:PORT: a scheme, a path or a pattern do not belong here"
                )
        return value

    @model_validator(mode="after")
    def _one_data_set_for_each_task(self) -> "Policy":
        tasks = [task for name, rule in self.privacy.items() for task in rule.tasks or (name,)]
        if twice := sorted({task for task in tasks if tasks.count(task) > 1}):
            raise ValueError(f"privacy: task {twice[0]!r} belongs to two data sets; it can train on one")
        return self

    @property
    def download_addresses(self) -> frozenset[str]:
        """The addresses "host:port" of `downloads_from`, in lower case; the port is 443 unless it is given."""
        return frozenset(host.lower() if ":" in host else f"{host.lower()}:443" for host in self.downloads_from)

    @property
    def data_sets(self) -> dict[str, frozenset[str]]:
        """For each task that shares its data set with others, the tasks of this data set."""
        data_sets: dict[str, frozenset[str]] = {}
        for tasks in (*self.secure.data_sets.values(), *(rule.tasks for rule in self.privacy.values())):
            joined = frozenset(tasks).union(*(data_sets.get(task, frozenset()) for task in tasks))
            data_sets |= dict.fromkeys(joined, joined)
        return data_sets

    @property
    def decides(self) -> bool:
        """True if the site answers each run before it works for it."""
        return bool(self.algorithms or self.submitters or self.statistics.open) or self.approve == "each-run"

    def statistics_of(self, tasks: Iterable[str]) -> dict[str, MemberRules]:
        """The rules of those of these tasks whose statistics may be told in the open, by name."""
        return self.summed_of(tasks) if self.statistics.open else {}

    def summed_of(self, tasks: Iterable[str]) -> dict[str, MemberRules]:
        """The rules of those of these tasks whose statistics may enter private sums, by name."""
        noisy = self._noisy()
        return {name: self.statistics.rules for name in tasks if name not in noisy}

    def described_of(self, tasks: Iterable[str]) -> frozenset[str]:
        """Those of these tasks that may be described in some run: in the open, or in one that the owner approves."""
        summed = self.summed_of(tasks)
        return frozenset(summed if self.statistics.open or self.approve == "each-run" else ())

    def _noisy(self) -> set[str]:
        """The tasks whose data are under `[privacy.NAME]`."""
        return {task for name, rule in self.privacy.items() for task in rule.tasks or (name,)}

    def check_allows(self, tasks: Iterable[str]) -> None:
        """Raises PolicyError if the owner does not allow one of these tasks to be offered."""
        for name in tasks:
            if self.tasks and name not in self.tasks:
                allowed = ", ".join(self.tasks)
                raise PolicyError(f"policy.toml allows the tasks {allowed}; --task or worker.toml names {name!r}")

    @classmethod
    def load(cls, path: Path) -> "Policy":
        """Reads the policy; the defaults when there is no such file.

        Raises:
            PolicyError: the file cannot be read, is not TOML, or has keys that are unknown or wrong.
        """
        try:
            return read_document(path, cls, _KEYS, PolicyError)
        except FileNotFoundError:
            return cls()
