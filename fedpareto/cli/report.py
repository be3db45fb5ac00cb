"""`fedpareto report RUN`: a run as one HTML page."""

import re
from pathlib import Path
from typing import Annotated

import typer

from federation.text import counted
from fedpareto.cli import completion
from fedpareto.cli.admin.app import RunName
from fedpareto.cli.failure import USAGE, CommandFailure, answer, failing
from fedpareto.cli.shared_options import DEFAULT_ADMIN_HOME, AdminHome, AdminPassphraseOption, ForceOption, JsonOption
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from fedpareto.cli.admin.client import connect
    from fedpareto.web.report import page
    from fedpareto.web.sections.shown_run import ShownRun


def report_command(
    run: RunName,
    beside: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RUN",
            autocompletion=completion.runs,
            help="Another run of the same task, for comparison; repeat it for several. The administrator's directory "
            "of another coordinator or simulation, ./NAME-simulation/admin, stands for its newest run.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file to write. Default: report-NAME.html.", show_default=False)
    ] = None,
    force: ForceOption = False,
    home: AdminHome = DEFAULT_ADMIN_HOME,
    passphrase_file: AdminPassphraseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a report of a run as one HTML page.

    The page contains its figures, and needs no other file.

    It shows accuracy and its spread, each member at the end, weights, conflicts, losses, replies, bytes and phases,
    with the numbers; for several objectives also the path through the plane of losses, or a radar chart.

    With --beside and runs of `scalarised` that weigh one objective alone, it shows the best loss of each objective.
    """
    names = beside or []
    with connect(home, passphrase_file=passphrase_file) as stub:
        data = ShownRun.read(stub, run)
        others = {name: ShownRun.read(stub, name) for name in names if "/" not in name}
    for name in names:
        if name not in others:
            with connect(Path(name), passphrase_file=passphrase_file) as stub:
                newest = ShownRun.newest(stub)
            if newest is None:
                raise CommandFailure(f"--beside {name}: that coordinator has no runs yet")
            others[name] = newest
    for other in others.values():
        _check_comparable(data, other)
    target = out or Path(f"report-{re.sub(r'[^A-Za-z0-9.-]', '-', data.run.name)}.html")  # whatever the name
    if target.exists() and not force:
        raise CommandFailure(f"{target} exists: give --force to overwrite it", code=USAGE)
    with failing(OSError, what=f"cannot write {target}"):
        target.write_text(page(data, list(others.values())), encoding="utf-8")
    rounds, clients = len(data.lines), len(data.names)
    answer(
        as_json,
        {"file": str(target), "run": data.run.run_id, "rounds": rounds, "clients": clients, "beside": names},
        f"{target}: {counted(rounds, 'round')}, {counted(clients, 'client')}",
    )


def _check_comparable(data: "ShownRun", other: "ShownRun") -> None:
    """Raises a Failure if two runs do not measure the same."""
    if (other.run.task, other.objectives) != (data.run.task, data.objectives):
        raise CommandFailure(
            f"--beside {other.run.name}: it is a run of {other.run.task}, {data.run.name} one of {data.run.task}; only "
            "runs of the same task and objectives compare",
            code=USAGE,
        )
