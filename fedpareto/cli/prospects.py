"""What `fedpareto admin submit --dry-run` says: whether a run could begin, whom it would ask, what it would take."""

import typer

from federation.v1.admin_pb2 import SubmitRunResponse
from fedpareto.cli.document import dumps
from fedpareto.cli.failure import Failure
from fedpareto.formatting import size


def tell(response: SubmitRunResponse, as_json: bool) -> None:
    """Prints the coordinator's answer.

    Raises:
        Failure: the run could not begin now.
    """
    if as_json:
        typer.echo(dumps(response))
    else:
        for warning in response.warnings:
            typer.echo(f"warning: {warning}", err=True)
        names = ", ".join(response.members) or "none"
        typer.echo(f"members that could be asked now: {len(response.members)} ({names}); a round asks {response.asked}")
        free = size(max(response.disk_free, 0))
        typer.echo(f"disk: about {size(response.disk_needed)} for all rounds; {free} are free for it")
    if len(response.members) < response.minimum:
        raise Failure(
            f"the run would wait: {len(response.members)} members could be asked, and selection.minimum is "
            f"{response.minimum}"
        )
    if response.disk_needed > response.disk_free:
        raise Failure("the coordinator's disk has too little space for the run")
    if not as_json:
        typer.echo("nothing was submitted; the run could begin now")
