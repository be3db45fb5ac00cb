"""`fedpareto worker export`: the personal parameters that a worker keeps of a run."""

from pathlib import Path
from typing import Annotated

import typer

from fedpareto.cli.failure import Failure, answer, failing
from fedpareto.cli.options import JsonOption


def export_command(
    run: Annotated[str, typer.Argument(help="The run's id, as the worker's log names it.")],
    out: Annotated[Path, typer.Option(help="The file to write, in the safetensors format.")],
    home: Annotated[Path, typer.Option(help="Directory of this worker.")] = Path("fedpareto-worker"),
    as_json: JsonOption = False,
) -> None:
    """Write the personal parameters of this member in a run.

    With the shared parameters, which `fedpareto admin export` writes, they are this member's model.
    """
    from federation.refusals import Refusal
    from federation.vectors import model_layout
    from worker.home import Home, HomeError
    from worker.personal import kept_parameters

    place = Home(home)
    with failing(HomeError):
        place.require_joined()
    kept = kept_parameters(place.personal, run)
    rounds = kept.rounds()
    if not rounds:
        raise Failure(f"{home} keeps no personal parameters of a run {run!r}")
    path = kept.path(rounds[-1])
    try:
        layout = model_layout(path)
    except Refusal as refusal:
        raise Failure(f"{path} is damaged: {refusal.message}") from None
    with failing(OSError, what=f"cannot write {out}"):
        out.write_bytes(path.read_bytes())
    names = [tensor.name for tensor in layout.tensors]
    answer(
        as_json,
        {"run": run, "round": rounds[-1], "file": str(out), "tensors": names, "parameters": layout.size},
        f"{out}: {layout.size} personal parameters after round {rounds[-1]}: {', '.join(names)}",
    )
