"""The record of a soak, as Markdown."""

from collections.abc import Sequence
from statistics import median

from tests.soak.faults import Kind
from tests.soak.figures import SHARE, growths
from tests.soak.soak import Findings

_UNITS = {"memory": "memory, MiB", "descriptors": "descriptors", "threads": "threads"}


def record(
    found: Findings,
    *,
    command: str,
    commit: str,
    seed: int,
    lease: float,
    lasting: str,
    ended: str,
    left_out: Sequence[Kind],
) -> str:
    """The record of a soak that has ended as `ended` says; `left_out` are faults that were not possible."""
    runs = ", ".join(f"{count} {kind}" for kind, count in sorted(found.runs.items()))
    lines = [
        f"- Command: `{command}`, seed {seed}, commit `{commit}`, a lease of {lease:g} s.",
        f"- {found.seconds / 60:.1f} minutes, {ended}: {runs} runs with those before the faults. "
        f"A run was under way for {found.under_way / 60:.1f} minutes; the rest were checks.",
        f"- Faults: {found.faults.total()}. Another coordinator took a run {found.leases} times; "
        f"{found.refused} writes of coordinators that had lost a lease were refused.",
        f"- Starts that failed while PostgreSQL was away, and were repeated: {found.starts}.",
        f"- Receipts of members compared with the record: {found.receipts}.",
        f"- Problems: {len(found.problems)}.",
        *(f"  - {' '.join(problem.split())[:300]}" for problem in found.problems[:20]),
        "",
        "| Faults | Times |",
        "|---|---|",
        *(f"| {kind} | {'not possible here' if kind in left_out else found.faults[kind]} |" for kind in Kind),
        "",
        "| From the fault of a conductor until another coordinator had the run | Times | Median | Longest |",
        "|---|---|---|---|",
    ]
    for kind in Kind:
        if seconds := [seconds for one, seconds in found.takeovers if one is kind]:
            lines.append(f"| {kind} | {len(seconds)} | {median(seconds):.1f} s | {max(seconds):.1f} s |")
    lines += [
        "",
        f"| What a coordinator takes | Second quarter | Last quarter | Change (at most {SHARE:+.0%}) | Samples | "
        "Mean age |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.who}: {_UNITS[one.what]} | {one.second:.1f} | {one.last:.1f} | {one.share:+.1%} | "
        f"{one.samples[0]}, {one.samples[1]} | {one.ages[0]:.0f} s, {one.ages[1]:.0f} s |"
        for one in growths(found.samples, lasting, found.seconds)
    ]
    return "\n".join(lines) + "\n"
