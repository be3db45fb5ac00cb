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
        8, ge=1, description="the fewest different training samples that an update or a gradient is made from"
    )
    steps: int = Field(1, ge=1, description="the fewest optimiser steps in an update")
    max_steps: int = Field(1_000_000, ge=1, description="the most optimiser steps in an update")
    max_epochs: float = Field(
        0.0, ge=0, description="the most passes over the training samples for an update; 0 is any number"
    )
    max_bytes: int = Field(
        0, ge=0, description="the most bytes that one assignment moves: model, inputs and reply; 0 is any number"
    )
    members: int = Field(1, ge=1, description="the fewest clients that the coordinator asks beside and with this one")
    rows: int = Field(0, ge=0, description="the most rows in an update; 0 is one for each objective served here")
    hours: float = Field(168.0, gt=0, le=87_600, description="the longest time that one assignment may be worked on")
    waiting: int = Field(64, ge=1, le=10_000, description="the most assignments that wait here at a time")
    home_bytes: int = Field(
        64 << 30, ge=1 << 20, description="the most bytes in the worker's home; with more, no assignment is taken"
    )
    rounds_forward: bool = Field(
        True, description="whether a round before the newest one of its run is declined, unless a restore was signed"
    )

    @property
    def bounds(self) -> WorkBounds:
        """The bounds on the work of an assignment, which the worker tells the coordinator."""
        return WorkBounds(**{item.name: min(getattr(self, item.name), LARGEST_BOUND) for item in fields(WorkBounds)})


class OpenHours(Section):
    """The opening hours of the site: it begins no training or evaluation at other times."""

    zone: str = Field("UTC", description='the time zone of `begin` and `end`, such as "Europe/Berlin"')
    begin: str = Field("00:00", pattern=_TIME, description="the time of day at which the site opens")
    end: str = Field("24:00", pattern=_TIME, description="when it closes; not after `begin` is on the next day")
    days: Annotated[tuple[_Day, ...], Field(strict=False)] = Field(
        _DAYS, min_length=1, description="the days on which it opens"
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
        (), strict=False, description="the tasks that train on this data set; none is the task of the same name"
    )
    noise: float = Field(
        ge=LEAST_NOISE, description="the least noise on a sum of gradients: its standard deviation in units of `clip`"
    )
    clip: float = Field(1.0, gt=0, description="the largest norm to which the gradient of a sample is clipped")
    epsilon: float = Field(gt=0, description="the budget: what all runs together may spend")
    delta: float = Field(DELTA, gt=0, lt=1, description="for which epsilon holds; below 1 / the number of samples")
    evaluate: bool = Field(
        False, description="whether losses and accuracies on the validation and test splits are told, without noise"
    )

    @property
    def floor(self) -> PrivateSgd:
        """The least noise and the largest bound."""
        return PrivateSgd(noise=self.noise, clip=self.clip)


class SecureSection(SecurePolicy):
    """The owner's rules for private rounds: for all tasks, and exceptions by task."""

    tasks: dict[str, SecurePolicy] = Field({}, description="what differs for a task, by its name")
    data_sets: dict[str, Annotated[tuple[str, ...], Field(strict=False)]] = Field(
        {}, description="the tasks that train on one data set, by its name: their private rounds count together"
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
        description="what happens when the coordinator signs that it was restored from a backup: accept it at once, or "
        "do nothing of the affected runs until the owner accepts it",
    )
    tasks: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (), description="the tasks that may be offered; none is each one that `--task` or worker.toml names"
    )
    algorithms: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (), description="the algorithms of runs in which the site takes part; none is any"
    )
    submitters: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (), description="the administrators in whose runs the site takes part, by name; none is all"
    )
    approve: Literal["none", "each-run"] = Field(
        "none", description="whether nothing is done for a run before the owner has approved it"
    )
    downloads_from: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (),
        description='the hosts of buckets, such as "bucket.example.org" or "bucket.example.org:9000", from which the '
        "worker downloads models if the coordinator gives it a URL there; none: from the coordinator alone",
    )
    error_texts: bool = Field(
        False,
        description="whether a decline tells the coordinator the whole text of an error at this site, which can hold "
        "paths, values and names of patients; in private rounds never",
    )
    limits: WorkLimits = WorkLimits()
    open: OpenHours = OpenHours()
    secure: SecureSection = SecureSection()
    privacy: dict[str, SamplePolicy] = Field({}, description="differential privacy, by the name of a data set")

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
        return bool(self.algorithms or self.submitters) or self.approve == "each-run"

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
