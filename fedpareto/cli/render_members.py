"""Tables of members, join strings and administrators."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from rich.console import RenderableType
from rich.text import Text

from federation.objectives import JOINT
from federation.v1.admin_pb2 import Administrator, Client, JoinString, ListRequestsResponse, TaskSummary
from federation.v1.common_pb2 import DecisionManifest, RequestManifest, SignedEnvelope
from federation.work.computation import Ability
from fedpareto.cli.escaping import make_safe
from fedpareto.cli.render import new_table, state
from fedpareto.formatting import short, when
from fedpareto.messages import name_of

M = TypeVar("M", bound=Message)


def clients(items: Iterable[Client]) -> RenderableType:
    """The members."""
    table = new_table("client", "state", "attends", "last seen", "tasks (samples)", "device", "expires", "key")
    for client in items:
        table.add_row(
            client.client_id + (f"\n{', '.join(client.tags)}" if client.tags else ""),
            state(name_of(client, "state")),
            _attends(client),
            when(client, "last_seen")[:16],
            "\n".join(
                f"{task.task} ({task.samples}){_offered(task.objectives)}{_left(task)}{_cannot(task)}"
                for task in client.tasks
            )
            or "–",
            client.device or "–",
            when(client, "certificate_expires")[:10],
            short(client.key_id)[:8],
        )
    return (
        table if table.row_count else Text("no clients yet: make a join string with `fedpareto admin join-string NAME`")
    )


def _attends(client: Client) -> Text:
    """Whether it attends; until when its site is closed, and the runs that wait for its owner."""
    text = Text("yes", style="green") if client.attending else Text("no")
    if client.HasField("closed_until"):
        text.append(f"\nclosed until {when(client, 'closed_until')[:16]}", style="yellow")
    if client.undecided:
        text.append(f"\nowner must approve: {', '.join(client.undecided)}", style="yellow")
    return text


def _left(task: TaskSummary) -> str:
    """The private rounds of training and evaluation that are left of a task, on a line of their own; if told."""
    if not task.HasField("training_sessions_left"):
        return ""
    return f"\n  private: {task.training_sessions_left} / {task.evaluation_sessions_left} left"


def _cannot(task: TaskSummary) -> str:
    """The abilities that its trainer lacks, on a line of their own."""
    missing = [ability for ability in Ability if ability not in task.abilities]
    return f"\n  cannot: {', '.join(missing)}" if missing else ""


def _offered(objectives: Sequence[str]) -> str:
    """The objectives that a client serves, of a task with several."""
    if len(objectives) < 2 and list(objectives) in ([], [JOINT]):
        return ""
    return f": {', '.join(objectives)}" if len(objectives) <= 3 else f": {len(objectives)} objectives"


def join_strings(items: Iterable[JoinString]) -> RenderableType:
    """Join strings."""
    table = new_table("client", "state", "made by", "made", "expires", "used or cancelled")
    for join_string in items:
        table.add_row(
            join_string.client_id,
            state(name_of(join_string, "state")),
            join_string.created_by.rpartition("/")[2],
            when(join_string, "created")[:16],
            when(join_string, "expires")[:16],
            when(join_string, "ended")[:16],
        )
    return table if table.row_count else Text("no join strings: make one with `fedpareto admin join-string NAME`")


def administrators(items: Iterable[Administrator]) -> RenderableType:
    """Administrators."""
    table = new_table("administrator", "state", "roles", "last seen", "logged in until", "certificate")
    for one in items:
        table.add_row(
            one.name,
            state("REVOKED" if one.HasField("revoked") else "ACTIVE"),
            ", ".join(one.roles),
            when(one, "last_seen")[:16],
            when(one, "certificate_expires")[:16],
            short(one.serial),
        )
    return table


def request_name(request_id: str, *, whole: bool = False) -> str:
    """The hexadecimal digits of a request's digest by which commands name it: the first twelve, or all."""
    digits = request_id.partition(":")[2]
    return digits if whole else digits[:12]


def request_in_words(envelope: SignedEnvelope) -> str:
    """What an officer has signed."""
    asked = _signed(envelope, RequestManifest())
    reason = f" ({asked.reason})" if asked.reason else ""
    return f"{asked.action} {asked.subject}{reason}, asked by {asked.officer}"


def _signed(envelope: SignedEnvelope, manifest: M) -> M:
    """The manifest that was signed, with its strings made safe to show; empty if it cannot be read."""
    with suppress(DecodeError):
        manifest.ParseFromString(envelope.manifest)
    make_safe(manifest)
    return manifest


def requests(response: ListRequestsResponse) -> RenderableType:
    """Requests, and what takes two officers."""
    table = new_table("request", "state", "what", "open until", "decided by", "decided")
    for item in response.requests:
        asked, decision = _signed(item.request, RequestManifest()), _signed(item.decision, DecisionManifest())
        table.add_row(
            request_name(item.request_id),
            state(name_of(item, "state")),
            request_in_words(item.request),
            when(asked, "expires")[:16],
            decision.officer or "–",
            when(item, "ended")[:16],
        )
    takes_two = ", ".join(response.actions) or "nothing"
    return table if table.row_count else Text(f"no requests; what takes two officers in this federation: {takes_two}")
