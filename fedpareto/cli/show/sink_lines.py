"""What commands say about the targets to which a run goes."""

from collections.abc import Sequence
from datetime import UTC

import typer

from federation.plugins import PluginError
from federation.text import counted, escaped
from federation.v1.admin_pb2 import Run
from fedpareto.cli.failure import USAGE, CommandFailure, failing
from fedpareto.missing_packages import PackagesMissing
from fedpareto.sinks.sink import FollowedRun, SinkError
from fedpareto.sinks.target_threads import Delivered, Deliveries
from fedpareto.sinks.targets import SinkTarget, targets_of


def targets(texts: Sequence[str] | None) -> list[SinkTarget]:
    """The targets of `--to`; none if the option is not given.

    Raises:
        CommandFailure: one of them cannot be used.
    """
    with failing(SinkError, PluginError, PackagesMissing, code=USAGE, what="--to"):
        return targets_of(texts or [])


def tell(text: str) -> None:
    """A line on standard error."""
    typer.echo(escaped(text), err=True)


def followed(run: Run) -> FollowedRun:
    """A run as targets know it."""
    created = run.created.ToDatetime(UTC)
    return FollowedRun(run.run_id, run.name, run.task, run.algorithm, created, run.rounds_total)


def begins(deliveries: Deliveries) -> str:
    """Which run goes where."""
    run = deliveries.run
    return f"{run.name} (run {run.run_id}) goes to {', '.join(deliveries.shown)}"


def check_complete(delivered: Sequence[Delivered], remedy: str) -> None:
    """Raises CommandFailure: a target lacks something."""
    lacking = [f"{each.target}: {each.problem}" for each in delivered if each.problem]
    if lacking:
        of = counted(len(delivered), "target")
        raise CommandFailure(f"{len(lacking)} of {of} lack something; {remedy}: {'; '.join(lacking)}")
