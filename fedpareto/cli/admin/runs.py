"""`fedpareto admin ...`: runs, rounds and disk space. Most commands are one call of the Admin service."""

import math
from typing import Annotated

import typer

from federation.text import counted
from fedpareto.cli import completion
from fedpareto.cli.admin.app import Answer, Home, OpenRunName, Reason, RunName, Yes, command, confirm, connected
from fedpareto.cli.failure import INTERRUPTED, USAGE, CommandFailure
from fedpareto.cli.shared_options import JsonOption
from fedpareto.on_first_use import on_first_use
from fedpareto.standard_streams import print_document

with on_first_use():
    from federation.v1 import admin_pb2 as v1
    from federation.v1.admin_pb2_grpc import AdminStub
    from fedpareto import admin_messages, run_names
    from fedpareto.cli import document
    from fedpareto.cli.admin import watch as watching
    from fedpareto.cli.show import envelope_lines, metric_tables, participation_table, round_lines, round_tables, tables
    from fedpareto.formatting import when
    from fedpareto.run_names import RunNames


@command
def disk(stub: "AdminStub") -> Answer:
    """Show the disk space of the record.

    It shows models, updates and the database for each run, the free space, and an estimate of the space that open runs
    will still need.
    """
    response, names = stub.GetDisk(v1.GetDiskRequest()), RunNames.read(stub)
    return response, lambda: tables.disk(response, names)


@command
def runs(stub: "AdminStub") -> Answer:
    """List the runs, newest first."""
    response = admin_messages.whole(stub.ListRuns, v1.ListRunsRequest())
    return response, lambda: tables.runs(response.runs)


@command
def show_run(
    stub: "AdminStub",
    run: RunName,
    every: Annotated[bool, typer.Option("--all", help="Every number of the last evaluated round.")] = False,
) -> Answer:
    """Show a run.

    That is: its state, its ten most useful numbers, the objectives that each member serves, its specification.
    """
    response = stub.GetRun(v1.GetRunRequest(run=run))
    own = metric_tables.members_at_the_end(stub, response.run)
    return response, lambda: tables.run(response.run, own, every=every)


@command
def pause(stub: "AdminStub", run: OpenRunName) -> Answer:
    """Pause a run. Replies to open assignments still count."""
    response = stub.PauseRun(v1.PauseRunRequest(run=run))
    return response, f"paused; resume it with: fedpareto admin resume {response.run.run_id}"


@command
def resume(stub: "AdminStub", run: OpenRunName) -> Answer:
    """Resume a paused run."""
    response = stub.ResumeRun(v1.ResumeRunRequest(run=run))
    return response, f"resumed; follow it with: fedpareto admin watch {response.run.run_id}"


@command
def stop(stub: "AdminStub", run: OpenRunName, reason: Reason = "", yes: Yes = False) -> Answer:
    """Stop a run for good. Its last model can still be exported."""
    present = stub.GetRun(v1.GetRunRequest(run=run, brief=True, choice=v1.RUN_CHOICE_OPEN)).run

    def question() -> str:
        done = f"{present.rounds_done} of {counted(present.rounds_total, 'round')} done"
        of = f"{present.run_id}, {when(present, 'created')[:16]}"
        return f"End {present.name} ({of}), {done}? It cannot go on afterwards."

    confirm(yes, question)
    response = stub.StopRun(v1.StopRunRequest(run=present.run_id, reason=reason))
    ended = admin_messages.whole(stub.ListRounds, v1.ListRoundsRequest(run=response.run.run_id)).rounds
    if response.run.algorithm == run_names.STATISTICS:
        return response, "stopped"
    if response.run.algorithm == run_names.EVALUATE:
        return response, "stopped; the models that it has measured stay in its record"
    if not any(summary.result_model for summary in ended):
        return response, "stopped; no round has made a step, so its model is still the initial one"
    return response, f"stopped; its model: fedpareto admin export {response.run.run_id} --out model.safetensors"


def watch(context: typer.Context, run: OpenRunName, home: Home = None, as_json: JsonOption = False) -> None:
    """Show the rounds of a run until it ends.

    Ctrl-C stops watching, not the run. Watching goes on when the coordinator restarts. With --json each change is one
    JSON object on a line.

    Exit code 0 when the run completed and every member that its last round asked replied; otherwise 1.
    """
    with connected(context, home) as stub:
        follow(stub, run, as_json)


def follow(stub: "AdminStub", run: str, as_json: bool) -> None:
    """Watches a run to its end. Fails if it did not complete, or a member did not reply in its last round."""
    run_state = v1.Run()
    try:
        if as_json:
            messages = watching.messages(stub, run, lambda text: typer.echo(text, err=True))
            for message in watching.changes(messages):
                print_document(document.line(message))
                run_state = message.run
        else:
            run_state = watching.show(stub, run, tables.console())
    except KeyboardInterrupt:
        typer.echo(f"\nThe run goes on. Follow it again: fedpareto admin watch {run}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if problem := watching.not_completed(run_state):
        raise CommandFailure(problem)
    if not as_json:
        what = f"its model: fedpareto admin export {run_state.run_id} --out model.safetensors"
        if run_state.algorithm == run_names.STATISTICS:
            what = f"what it told of the data: fedpareto admin statistics {run_state.run_id}"
        typer.echo(f"completed; {what}", err=True)
    if silent := participation_table.silent(run_state):
        failures = "; ".join(map(participation_table.said, silent))
        asked = counted(len(participation_table.asked_last(run_state)), "member")
        raise CommandFailure(f"{len(silent)} of {asked} failed in the last round: {failures}")


@command
def rounds(stub: "AdminStub", run: RunName) -> Answer:
    """List the rounds of a run.

    For each: replies, accuracy, improvement, bytes, time.
    """
    response = admin_messages.whole(stub.ListRounds, v1.ListRoundsRequest(run=run))
    stop = round_lines.stop_title(stub.GetRun(v1.GetRunRequest(run=response.run.run_id, brief=True)).run)
    return response, lambda: round_tables.rounds(response.rounds, stop)


@command
def compare(
    stub: "AdminStub",
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN RUN ...", help="Runs by id or name, two or more.", autocompletion=completion.runs),
    ],
) -> Answer:
    """Show runs beside each other.

    That is: the numbers of their last evaluated rounds, their bytes and their time. A run that measures models is shown
    once for each model, so one such run is enough.
    """
    read_runs = []
    for run in runs:
        response = stub.GetRun(v1.GetRunRequest(run=run))
        read_runs.append((response.run, admin_messages.whole(stub.ListRounds, v1.ListRoundsRequest(run=run)).rounds))
    table = metric_tables.comparison(read_runs)
    if len(table["runs"]) < 2:
        raise CommandFailure("name two runs or more: fedpareto admin compare RUN RUN", code=USAGE)
    return table, lambda: metric_tables.compared(table, {run.run_id: when(run, "created")[:16] for run, _ in read_runs})


@command
def show_round(
    stub: "AdminStub",
    run: RunName,
    number: Annotated[int, typer.Argument(metavar="N", help="The round, from 0; -1 is the last one.")],
) -> Answer:
    """Show a round.

    That is: its phases and objectives, every member's part, the cosines between their updates.
    """
    response = stub.GetRound(v1.GetRoundRequest(run=run, round=number))
    round_document = document.document(response)
    for matrix in filter(None, (round_document, round_document["objectives"])):
        matrix["cosines"] = _square(matrix["cosines"])
    return round_document, lambda: round_tables.round_(response)


def _square(values: list[float]) -> list[list[float]]:
    """A square matrix from its rows, one after the other."""
    side = math.isqrt(len(values))
    return [values[row * side : (row + 1) * side] for row in range(side)]


@command
def replies(
    stub: "AdminStub",
    run: RunName,
    number: Annotated[int | None, typer.Option("--round", min=0, help="Only this round.")] = None,
    client: Annotated[str, typer.Option(help="Only this member.", autocompletion=completion.members)] = "",
) -> Answer:
    """List the received replies, including refused ones.

    --json has the signed envelopes.
    """
    collected = v1.ListRepliesResponse()
    for page in stub.ListReplies(v1.ListRepliesRequest(run=run, round=number, client_id=client)):
        collected.MergeFrom(page)
    return collected, lambda: envelope_lines.replies(collected.replies)
