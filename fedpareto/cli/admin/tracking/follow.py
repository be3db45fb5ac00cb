"""`fedpareto admin follow RUN --to NAME:ADDRESS`: sends the numbers of a run to tracking tools until it ends."""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path

import typer

from federation.text import counted
from fedpareto.cli.admin.app import Home, RunName, connected
from fedpareto.cli.failure import INTERRUPTED, USAGE, CommandFailure
from fedpareto.cli.shared_options import ProgressJsonOption, ToOption
from fedpareto.on_first_use import on_first_use
from fedpareto.standard_streams import print_document

with on_first_use():
    from federation.v1 import admin_pb2
    from federation.v1.admin_pb2 import GetRunRequest, ListRoundsRequest, Run
    from federation.v1.admin_pb2_grpc import AdminStub
    from fedpareto.admin_messages import name_of, whole
    from fedpareto.cli.admin.tracking import run_files
    from fedpareto.cli.admin.watch import ended_rounds, messages
    from fedpareto.cli.document import dumps
    from fedpareto.cli.show import sink_lines
    from fedpareto.sinks.round_numbers import numbers_of
    from fedpareto.sinks.sink import RunEnd
    from fedpareto.sinks.target_threads import Deliveries


def follow_command(
    context: typer.Context, run: RunName, to: ToOption = None, home: Home = None, as_json: ProgressJsonOption = False
) -> None:
    """Send the numbers of a run to tracking tools until it ends.

        fedpareto admin follow RUN --to tensorboard:runs

    Each target gets every round once: the rounds so far, and then each one as it ends. What a target has is kept at the
    target, so the same command goes on where it was after Ctrl-C or a crash. A target that cannot be reached is tried
    again, and delays no other. MLflow also gets the model, its card and the report.

    The numbers are those of whole rounds: of no single member, and none that the run does not disclose.

    Exit code 0 when every target has everything, however the run ended; otherwise 1.
    """
    if not to:
        raise CommandFailure("name a target: --to tensorboard:DIR", code=USAGE)
    targets = sink_lines.targets(to)
    with connected(context, home) as stub:
        found = stub.GetRun(GetRunRequest(run=run, brief=True, choice=admin_pb2.RUN_CHOICE_ONLY)).run
        deliveries = Deliveries(sink_lines.followed(found), targets, sink_lines.tell)
        sink_lines.tell(sink_lines.begins(deliveries))
        try:
            end = _followed_to_its_end(stub, found.run_id, deliveries)
            making: AbstractContextManager[Sequence[Path]] = nullcontext(())
            if deliveries.takes_files:
                making = run_files.of(stub, end.run_id, sink_lines.tell)
            with making as files:
                delivered = deliveries.finish(RunEnd(name_of(end, "state"), end.reason, files))
        except KeyboardInterrupt:
            sink_lines.tell("the run goes on, and each target keeps what it has: the same command goes on from there")
            raise typer.Exit(INTERRUPTED) from None
    if as_json:
        facts = {"run_id": end.run_id, "name": end.name, "state": name_of(end, "state"), "reason": end.reason}
        print_document(dumps({**facts, "targets": list(map(asdict, delivered))}))
    else:
        for each in delivered:
            typer.echo(f"{each.target} has {counted(each.rounds, 'round')} of {end.name} (run {end.run_id})")
    sys.stdout.flush()
    sink_lines.check_complete(delivered, "the same command goes on where each target is")


def _followed_to_its_end(stub: "AdminStub", run_id: str, deliveries: "Deliveries") -> "Run":
    """Hands over each round once it has ended, and returns the run after its end."""
    whole_so_far = False

    def lost(text: str) -> None:
        nonlocal whole_so_far
        whole_so_far = False  # rounds may end without a message
        sink_lines.tell(text)

    run = Run()
    for message in messages(stub, run_id, lost):
        run = message.run
        if not whole_so_far and (missed := ended_rounds(stub, run_id)) is not None:
            whole_so_far = True
            for summary in missed:
                deliveries.add(numbers_of(summary))
        if message.HasField("ended"):
            deliveries.add(numbers_of(message.ended))
    for summary in whole(stub.ListRounds, ListRoundsRequest(run=run_id)).rounds[: run.rounds_done]:
        deliveries.add(numbers_of(summary))
    return run
