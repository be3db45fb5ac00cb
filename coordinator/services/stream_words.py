"""A worker's messages on its stream, within bounds: names have an alphabet, lists a length, and text is one line."""

import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from datetime import UTC
from typing import Any

from federation.refusals import Refusal
from federation.spec.accounting import Mechanism, NoiseBudget
from federation.spec.computation import Ability
from federation.spec.objective_names import OBJECTIVE
from federation.spec.run_sections import TASK
from federation.spec.run_spec import RUN_KINDS
from federation.task_layout import TaskLayout
from federation.text import escaped
from federation.v1.federation_pb2 import Heartbeat, Hello, SessionsLeft, TaskOffer
from federation.work.closing import SiteClosing
from federation.work.work_bounds import WorkBounds

MAX_HELLO_BYTES = 64 << 10
MAX_TASKS = 100
MAX_OBJECTIVES = 1000  # of all tasks together
MAX_SAMPLES = MAX_SESSIONS = 2**53
MAX_TEXT = 200  # characters of software and device


@dataclass(frozen=True)
class ReceivedHello:
    """A worker's Hello, within bounds. Numbers and names are by offered task; texts are printable."""

    tasks: dict[str, int]  # training samples
    objectives: dict[str, list[str]]
    sessions_left: dict[str, dict[str, int]]  # as `left` gives them
    abilities: dict[str, list[str]]
    layouts: dict[str, dict[str, Any]]  # as of `TaskLayout`; of a task that is not here, the worker has told none
    private_only: list[str]  # tasks
    noise_budgets: dict[str, dict[str, Any]]  # as of `NoiseBudget`; of a task that is not here there is none
    limits: dict[str, Any]  # as of `WorkBounds`; empty if the worker has told none
    consents: bool
    run_kinds: list[str]  # besides "train"
    closing: SiteClosing | None  # None while its site is open
    software: str
    device: str


def introduction(hello: Hello) -> ReceivedHello:
    """Reads a Hello.

    Raises:
        Refusal: `limit:hello`: too many bytes; `limit:tasks`: too many tasks or objectives, or names that cannot be
            theirs; `hello`: a layout that no model has, a bound or a budget out of range, or no time.
    """
    if hello.ByteSize() > MAX_HELLO_BYTES:
        raise Refusal("limit:hello", f"a Hello of {hello.ByteSize()} bytes; at most {MAX_HELLO_BYTES}")
    if len(hello.tasks) > MAX_TASKS:
        raise Refusal("limit:tasks", f"{len(hello.tasks)} tasks offered; at most {MAX_TASKS}")
    count = sum(len(offer.objectives) for offer in hello.tasks)
    if count > MAX_OBJECTIVES:
        raise Refusal("limit:tasks", f"{count} objectives of all tasks together; at most {MAX_OBJECTIVES}")
    for offer in hello.tasks:
        _check_matches(TASK, offer.task, "a task")
        for name in offer.objectives:
            _check_matches(OBJECTIVE, name, "an objective")
    tasks = {offer.task: min(offer.samples, MAX_SAMPLES) for offer in hello.tasks}
    return ReceivedHello(
        tasks=tasks,
        objectives={offer.task: list(dict.fromkeys(offer.objectives)) for offer in hello.tasks},
        sessions_left={sessions.task: left(sessions, tasks) for sessions in hello.sessions_left},
        abilities={offer.task: [name for name in Ability if name in offer.abilities] for offer in hello.tasks},
        layouts={offer.task: _layout(offer) for offer in hello.tasks if offer.HasField("layout")},
        private_only=sorted({offer.task for offer in hello.tasks if offer.private_only}),
        noise_budgets={offer.task: _budget(offer) for offer in hello.tasks if offer.HasField("noise_budget")},
        limits=_limits(hello),
        consents=hello.consents,
        run_kinds=[name for name in RUN_KINDS if name in hello.run_kinds],
        closing=closing_of(hello),
        software=escaped(hello.software, MAX_TEXT),
        device=escaped(hello.device, MAX_TEXT),
    )


def closing_of(message: Hello | Heartbeat) -> SiteClosing | None:
    """Why a site is closed, and until when; None while it is open.

    Raises:
        Refusal: `hello`: `closed_until` is not a time.
    """
    try:
        until = message.closed_until.ToDatetime(tzinfo=UTC) if message.HasField("closed_until") else None
    except (ValueError, OverflowError) as error:
        raise Refusal("hello", f"closed_until does not exist: {error}") from None
    return SiteClosing.of(until, paused=message.paused)


def _layout(offer: TaskOffer) -> dict[str, Any]:
    told = offer.layout
    try:
        return asdict(TaskLayout(told.digest, told.tensors, told.elements))
    except ValueError as error:
        raise Refusal("hello", f"the layout of task {offer.task}: {escaped(str(error), MAX_TEXT)}") from None


def _budget(offer: TaskOffer) -> dict[str, Any]:
    told = offer.noise_budget
    spent = tuple(Mechanism(one.noise, one.rate, one.steps) for one in told.spent)
    try:
        return asdict(NoiseBudget(noise=told.noise, epsilon=told.epsilon, delta=told.delta, spent=spent))
    except ValueError as error:
        raise Refusal("hello", f"the budget of task {offer.task}: {escaped(str(error), MAX_TEXT)}") from None


def _limits(hello: Hello) -> dict[str, Any]:
    if not hello.HasField("limits"):
        return {}
    try:
        return asdict(WorkBounds(**{item.name: getattr(hello.limits, item.name) for item in fields(WorkBounds)}))
    except ValueError as error:
        raise Refusal("hello", f"limits: {error}") from None


def left(sessions: SessionsLeft, tasks: Collection[str]) -> dict[str, int]:
    """The private rounds that are left of a task, by purpose: "training" and "evaluation".

    Raises:
        Refusal: `limit:tasks`: it is not one of these tasks, which the worker offers.
    """
    if sessions.task not in tasks:
        raise Refusal(
            "limit:tasks", f"private rounds of '{escaped(sessions.task, 80)}', which this worker does not offer"
        )
    return {kind: min(getattr(sessions, kind), MAX_SESSIONS) for kind in ("training", "evaluation")}


def _check_matches(pattern: str, name: str, role: str) -> None:
    if re.fullmatch(pattern, name) is None:
        raise Refusal("limit:tasks", f"'{escaped(name, 80)}' cannot be the name of {role}: it must fit {pattern}")
