"""`fedpareto worker export`: the personal parameters that a worker keeps of a run."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedpareto.cli.failure import CommandFailure, answer, failing
from fedpareto.cli.member.member_command import member_command
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from federation import refusals
    from federation.vectors import Layout, read_vector, to_bytes
    from federation.work import base
    from worker.home import WorkerHome
    from worker.work.local_state import kept_state


@member_command(keys=False)
def export_command(
    home: "WorkerHome",
    as_json: bool,
    run: Annotated[str, typer.Argument(help="The run's id, as the worker's log names it.")],
    out: Annotated[Path, typer.Option(help="The file to write, in the safetensors format.")],
) -> None:
    """Write the personal parameters of this member in a run.

    With the shared parameters, which `fedpareto admin export` writes, they are this member's model.
    """
    written = write_personal(home, run, out)
    names = ", ".join(written["tensors"])
    answer(
        as_json,
        written,
        f"{out}: {written['parameters']} personal parameters after round {written['round']}: {names}",
    )


def write_personal(home: "WorkerHome", run: str, out: Path) -> dict[str, Any]:
    """Writes the newest personal parameters of a run, by its id, to a file; returns what was written.

    Raises:
        CommandFailure: there are none, or they cannot be read or written.
    """
    kept = kept_state(home.kept, run)
    with failing(OSError, what="cannot read the kept parameters"):
        rounds = kept.rounds()
    nothing = CommandFailure(f"{home.directory} keeps no personal parameters of a run {run!r}")
    if not rounds:
        raise nothing
    path = kept.path(rounds[-1])
    try:
        with failing(OSError, what="cannot read the kept parameters"):
            stored, vector = read_vector(path)
    except refusals.Refusal as refusal:
        raise CommandFailure(f"{path} is damaged: {refusal.message}") from None
    personal = tuple(tensor for tensor in stored.tensors if not tensor.name.startswith(base.RESIDUAL))
    if not personal:
        raise nothing
    layout = Layout(personal)
    with failing(OSError, what=f"cannot write {out}"):
        out.write_bytes(to_bytes(layout, vector[: layout.size]))
    names = [tensor.name for tensor in layout.tensors]
    return {"run": run, "round": rounds[-1], "file": str(out), "tensors": names, "parameters": layout.size}
