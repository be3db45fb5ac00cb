"""The Admin service for its clients: where its calls come from, and how its messages are read."""

import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import Message

from federation.v1.admin_pb2 import Alert, ListAlertsRequest, ListAlertsResponse, PhaseProgress, Run

if TYPE_CHECKING:
    from federation.v1.admin_pb2_grpc import AdminStub

ResponseT = TypeVar("ResponseT")
FIRST_TIME = datetime(1970, 1, 1, tzinfo=UTC)


class CoordinatorAway(Exception):
    """The coordinator cannot be reached, or does not let this administrator in; the text says why, for people."""


@dataclass(frozen=True)
class OpenedCalls:
    """The calls of an administrator, which any thread may make.

    `live` is False for the record of a stopped coordinator, which has no calls that follow; `outdated` then says
    whether a coordinator serves again.
    """

    stub: "AdminStub"
    live: bool
    outdated: Callable[[], bool]


Source = Callable[[], AbstractContextManager[OpenedCalls]]  # entering raises CoordinatorAway


def enum_name(descriptor: Any, number: int) -> str:
    """The short name of an enumeration's value: RUNNING for RUN_STATE_RUNNING; an unknown number as digits."""
    value = descriptor.values_by_number.get(number)
    if value is None:
        return str(number)
    prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", descriptor.name).upper() + "_"
    return str(value.name).removeprefix(prefix)


def name_of(message: Message, field: str) -> str:
    """The short name of the value of an enumeration in `message.<field>`."""
    return enum_name(message.DESCRIPTOR.fields_by_name[field].enum_type, getattr(message, field))


def whole(call: Callable[[Any], ResponseT], request: Any) -> ResponseT:
    """Fetches every page of a list, with a call whose messages have page tokens, and returns them as one response."""
    response: Any = call(request)
    while response.next_page_token:
        request.page_token = response.next_page_token
        page: Any = call(request)
        if "run" in page.DESCRIPTOR.fields_by_name:
            page.ClearField("run")  # each page repeats it
        response.next_page_token = ""
        response.MergeFrom(page)
    return response  # type: ignore[no-any-return]


def newest_alerts(
    call: Callable[[ListAlertsRequest], ListAlertsResponse],
    request: ListAlertsRequest,
    most: int,
    *,
    since: datetime = FIRST_TIME,
) -> ListAlertsResponse:
    """Fetches the alerts that a request asks for, the newest first: at most this many, and none that began before.

    `next_page_token` of the response says whether there are more.
    """
    response = ListAlertsResponse()
    while True:
        request.page_token, request.page_size = response.next_page_token, most - len(response.alerts)
        page = call(request)
        response.next_page_token = ""
        response.MergeFrom(page)
        if not page.alerts or began(page.alerts[-1]) < since:
            response.next_page_token = ""
        while response.alerts and began(response.alerts[-1]) < since:
            del response.alerts[-1]
        if not response.next_page_token or len(response.alerts) >= most:
            return response


def began(alert: Alert) -> datetime:
    """When an alert began, aware."""
    return alert.began.ToDatetime(UTC)


def epsilon_of_clients(run: Run) -> str:
    """The epsilon that the noise for a run's members has spent, as text; empty without noise."""
    if not run.HasField("client_privacy"):
        return ""
    privacy = run.client_privacy
    budget = f" of {privacy.budget:g}" if privacy.budget else ", without a budget"
    return f"of members: epsilon = {privacy.epsilon:.4g}{budget} (delta = {privacy.delta:g})"


def duration(phase: PhaseProgress) -> float:
    """Seconds from a phase's start to its end; NaN while it runs."""
    if not (phase.HasField("started") and phase.HasField("ended")):
        return math.nan
    return (phase.ended.ToNanoseconds() - phase.started.ToNanoseconds()) / 1e9
