"""What each member did in a run, as the commands show it: who replied, who did not and why, and warnings."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from federation.v1.admin_pb2 import MemberPart, MemberSummary, Run, WarningKind
from fedpareto.messages import name_of

REASON_WIDTH = 200  # characters of a reason
LISTED = 5  # members with failures that a list of runs names for each run
_FAILED = (MemberPart.MEMBER_PART_DECLINED, MemberPart.MEMBER_PART_REFUSED, MemberPart.MEMBER_PART_MISSING)


def failures(member: MemberSummary) -> int:
    """Rounds and evaluations that a member was asked for and did not give."""
    return member.declined + member.refused + member.missing + member.evaluations_missed


def asked_last(run: Run) -> list[MemberSummary]:
    """The members that the last ended round asked for something and did not find unnecessary."""
    return [
        member
        for member in run.members
        if member.last_round + 1 == run.rounds_done and member.last_part != MemberPart.MEMBER_PART_NOT_NEEDED
    ]


def silent(run: Run) -> list[MemberSummary]:
    """Those of them whose reply did not come, or does not count."""
    return [member for member in asked_last(run) if member.last_part in _FAILED]


def said(member: MemberSummary) -> str:
    """How a member's last failure went: "site-c declined: failed: ..."."""
    part = name_of(member, "last_part").lower()
    words = {"declined": "declined", "refused": "was refused", "missing": "did not reply"}.get(part, part)
    return f"{member.client_id} {words}: {_reason(member)}"


def table(members: Sequence[MemberSummary]) -> RenderableType:
    """Each member over the rounds that have ended: how often it replied, or why not."""
    if not members:
        return Text("no round has ended yet")
    evaluations = any(member.evaluations_missed for member in members)
    unneeded = any(member.not_needed for member in members)
    found = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    found.add_column("member", no_wrap=True, max_width=24)
    columns = ["asked", "replied", "declined", "refused", "missing"]
    columns += ["not needed"] * unneeded + ["evaluations missed"] * evaluations
    for name in columns:
        found.add_column(name, justify="right")
    found.add_column("last reason", overflow="fold")
    for member in members:
        counts = [member.asked, member.replied, member.declined, member.refused, member.missing]
        counts += [member.not_needed] * unneeded + [member.evaluations_missed] * evaluations
        reason = f"round {member.last_reason_round}: {_reason(member)}" if member.last_reason else "–"
        style = "yellow" if failures(member) else ""
        found.add_row(Text(member.client_id, style=style), *map(str, counts), Text(reason))
    return found


def warnings(run: Run) -> Iterator[Text]:
    """What the operator should look at, a line each."""
    for warning in run.warnings:
        yield Text(f"warning: {warning.message}", style="yellow")


def notes(runs: Iterable[Run]) -> RenderableType:
    """Below a list of runs: why each is not going on, its warnings, and its members with failures."""
    lines: list[Text] = []
    for run in runs:
        failing = sorted((member for member in run.members if failures(member)), key=failures, reverse=True)
        warned = [warning for warning in run.warnings if warning.kind != WarningKind.WARNING_KIND_MEMBER_FAILS]
        about = [Text(f"{run.name}: {warning.message}", style="yellow") for warning in warned]
        about += [Text(f"{run.name}: {_tally(member)}", style="yellow") for member in failing[:LISTED]]
        if len(failing) > LISTED:
            more = f"{len(failing) - LISTED} more members with failures, see `fedpareto admin run {run.run_id}`"
            about.append(Text(f"{run.name}: {more}"))
        if run.reason:
            about.insert(0, Text(f"{run.name}: {name_of(run, 'state')} {run.reason}"))
        lines += about
    return Group(*([Text()] if lines else []), *lines)


def _tally(member: MemberSummary) -> str:
    counts = {
        "declined": member.declined,
        "refused": member.refused,
        "missing": member.missing,
        "evaluations missed": member.evaluations_missed,
    }
    words = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return (
        f"{member.client_id} replied in {member.replied} of {member.asked} rounds, {words}; "
        f"round {member.last_reason_round}: {_reason(member)}"
    )


def _reason(member: MemberSummary) -> str:
    return _cut(member.last_reason) or "no reason given"


def _cut(text: str) -> str:
    return text if len(text) <= REASON_WIDTH else f"{text[: REASON_WIDTH - 1]}…"
