"""Tables of members, join strings and administrators."""

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from federation.spec.computation import Ability
from federation.spec.objective_names import JOINT
from federation.v1.admin_pb2 import (
    Administrator,
    Client,
    CoordinatorProcess,
    JoinString,
    ListRequestsResponse,
    TaskSummary,
)
from federation.v1.common_pb2 import DecisionManifest
from fedpareto.admin_messages import name_of
from fedpareto.cli.show.tables import new_table, state
from fedpareto.formatting import UNKNOWN, natural, short, when
from fedpareto.officer_requests import OfficerRequest, signed_manifest
from fedpareto.run_names import RunNames

_LISTED = 5  # tasks of a member in the table of members
_SOON = timedelta(days=1)  # a worker renews its certificate long before


def clients(items: Iterable[Client], now: datetime, names: RunNames) -> RenderableType:
    """The members: state, when last seen, tasks, and the problems at the time `now`."""
    table = new_table("member", "state", "last seen", "tasks (samples)", "what is wrong")
    for client in sorted(items, key=lambda client: natural(client.client_id)):
        table.add_row(
            client.client_id,
            state(name_of(client, "state")),
            Text("attends", style="green") if client.attending else when(client, "last_seen")[:16],
            _offered(client) or UNKNOWN,
            Text("\n".join(_wrong(client, now, names)), style="yellow"),
        )
    if not table.row_count:
        return Text("no members yet: make a join string with `fedpareto admin join-string NAME`")
    return Group(table, Text("\nmore of one member: fedpareto admin client NAME", style="dim"))


def _offered(client: Client) -> str:
    """Its first tasks with their samples, and how many more there are."""
    tasks = ", ".join(f"{task.task} ({task.samples})" for task in client.tasks[:_LISTED])
    return f"{tasks} and {more} more" if (more := len(client.tasks) - _LISTED) > 0 else tasks


def _wrong(client: Client, now: datetime, names: RunNames) -> Iterator[str]:
    """The problems that keep a member from work, now or soon."""
    name = name_of(client, "state")
    if name == "PENDING":
        yield f"waits for approval: fedpareto admin approve {client.client_id}"
    if name == "LEFT":
        yield f"left {when(client, 'left')[:16]}; back with: fedpareto admin join-string {client.client_id} --again"
    if name in ("REVOKED", "LEFT"):
        return
    if client.paused or client.HasField("closed_until"):
        until = f" until {when(client, 'closed_until')[:16]}" if client.HasField("closed_until") else " by its owner"
        yield f"{'paused' if client.paused else 'closed'}{until}"
    elif not client.attending:
        yield "does not attend"
    if client.undecided:
        yield f"owner must approve: {', '.join(map(names.of_open, client.undecided))}"
    if client.HasField("certificate_expires"):
        ends = client.certificate_expires.ToDatetime(UTC)
        if ends <= now + _SOON:
            yield f"its certificate {'has ended' if ends <= now else 'ends'} {when(client, 'certificate_expires')[:16]}"
    else:
        yield "has no valid certificate"
    if client.attending and not client.tasks:
        yield "offers no task"
    yield from (f"has no samples for {task.task}" for task in client.tasks if not task.samples)
    for task in client.tasks:
        if task.HasField("training_sessions_left") and not task.training_sessions_left:
            yield f"no private rounds left for {task.task}"


def client(item: Client, now: datetime, names: RunNames) -> RenderableType:
    """One member: its state, keys and machine, and for each task its samples, quotas and abilities."""
    grid = Table.grid(padding=(0, 2))
    grid.add_row("member", item.client_id)
    grid.add_row("state", state(name_of(item, "state")))
    for line in _wrong(item, now, names):
        grid.add_row("", Text(line, style="yellow"))
    grid.add_row("tags", ", ".join(item.tags) or UNKNOWN)
    grid.add_row("contact", item.contact or UNKNOWN)
    grid.add_row("last seen", when(item, "last_seen"))
    grid.add_row("enrolled", when(item, "enrolled"))
    grid.add_row("certificate ends", when(item, "certificate_expires"))
    if item.HasField("left"):
        grid.add_row("left", when(item, "left"))
    if item.HasField("forgotten"):
        grid.add_row("forgotten", when(item, "forgotten"))
    grid.add_row("key", item.key_id)
    grid.add_row("device", item.device or UNKNOWN)
    grid.add_row("software", item.software or UNKNOWN)
    parts: list[RenderableType] = [grid]
    for task in item.tasks:
        parts += [Text(f"\ntask {task.task}", style="bold"), _task(task)]
    return Group(*parts)


def _task(task: TaskSummary) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_row("training samples", str(task.samples))
    if list(task.objectives) not in ([], [JOINT]):
        grid.add_row("objectives", ", ".join(task.objectives))
    if task.HasField("training_sessions_left"):
        left = f"{task.training_sessions_left} of training, {task.evaluation_sessions_left} of evaluation"
        grid.add_row("private rounds left", left)
    missing = [ability for ability in Ability if ability not in task.abilities]
    grid.add_row("can", ", ".join(task.abilities) or UNKNOWN)
    if missing:
        grid.add_row("cannot", ", ".join(missing))
    return grid


def join_strings(items: Iterable[JoinString]) -> RenderableType:
    """Join strings."""
    table = new_table("member", "state", "made by", "made", "expires", "used or cancelled")
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


def coordinators(items: Iterable[CoordinatorProcess], names: RunNames) -> RenderableType:
    """Coordinators with the runs that each conducts, and the epochs of their leases."""
    table = new_table("address", "state", "started", "last seen", ">members", "conducts")
    for process in items:
        runs = [
            names.named(run.run_id, run.name)
            + (f", epoch {run.epoch} until {when(run, 'lease_until')[11:19]}" if run.epoch else "")
            for run in process.runs
        ]
        table.add_row(
            process.address or UNKNOWN,
            state("ALIVE" if process.alive else "DEAD"),
            when(process, "started")[:16],
            when(process, "last_seen")[:19],
            str(process.members),
            "\n".join(runs),
        )
    return table


def administrators(items: Iterable[Administrator]) -> RenderableType:
    """Administrators."""
    table = new_table("administrator", "state", "roles", "last seen", "logged in until", "certificate")
    for administrator in items:
        table.add_row(
            administrator.name,
            state("REVOKED" if administrator.HasField("revoked") else "ACTIVE"),
            ", ".join(administrator.roles),
            when(administrator, "last_seen")[:16],
            when(administrator, "certificate_expires")[:16],
            short(administrator.serial),
        )
    return table


def requests(response: ListRequestsResponse) -> RenderableType:
    """Requests; without any, the actions that take two officers."""
    table = new_table("request", "state", "what", "open until", "decided by", "decided")
    for item in response.requests:
        asked, decision = OfficerRequest.of(item), signed_manifest(item.decision, DecisionManifest())
        table.add_row(
            asked.name,
            state(name_of(item, "state")),
            str(asked),
            asked.until[:16],
            decision.officer or "–",
            when(item, "ended")[:16],
        )
    takes_two = ", ".join(response.actions) or "nothing"
    return table if table.row_count else Text(f"no requests; what takes two officers in this federation: {takes_two}")
