"""Rehearsals: the trial round of `fedpareto worker run --rehearse`, and the attacks that can be rehearsed."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import typer

from federation.owners_code import described, passes
from fedpareto.cli.failure import answer, failing
from fedpareto.cli.shared_options import CodeOption, JsonOption
from fedpareto.on_first_use import on_first_use
from fedpareto.standard_streams import print_document

with on_first_use():
    from federation import plugins, tasks, training
    from federation.attacks.catalogue import entries
    from federation.spec import sharing
    from federation.spec.run_spec import RunSpec, SpecError
    from federation.text_files import EncodingError, read_text
    from federation.training.trainer import Trainer
    from federation.work import base
    from fedpareto import formatting
    from worker.work.trial import TrialRound, try_round


def run_of(spec: Path | None) -> "RunSpec | None":
    """The run of a specification; None for no file. Raises CommandFailure: it cannot be used."""
    with failing(SpecError, EncodingError, OSError, what="" if spec is None else f"cannot use {spec}"):
        return None if spec is None else RunSpec.parse(read_text(spec))


def rehearse_round(
    prepare: "Callable[[], tuple[dict[str, Trainer], str]]", run: "RunSpec | None", *, as_json: bool
) -> None:
    """Trains and evaluates one round of each task, and prints what it took. No membership is needed.

    `prepare` is `worker.service.prepare_offers` with its arguments.

    Raises:
        CommandFailure: the task or the data cannot be used, a trainer lacks an ability that the
            specification needs, its or the task's code raises an exception, or the training diverges.
    """
    with failing(tasks.DataError, ValueError, training.TrainingDiverged):
        offers, _ = prepare()
        for task, trainer in offers.items():
            with _round_code(task):
                trial = try_round(trainer, run)
            if as_json:
                print_document(json.dumps(asdict(trial)))
            for line in () if as_json else lines(trial):
                typer.echo(line)


@contextmanager
def _round_code(task: str) -> Iterator[None]:
    """Turns an error that no part of a round foresees into a TaskError with the line of the owner's code."""
    try:
        yield
    except (
        tasks.DataError,
        tasks.TaskError,
        plugins.PluginError,
        sharing.SharingError,
        training.TrainingDiverged,
        base.WorkError,
    ):
        raise
    except BaseException as error:  # of the owner's code, or of PyTorch, with the run's minibatches and precision
        if passes(error):
            raise
        raise tasks.TaskError(f"task {task!r}: the rehearsed round failed: {described(error)}") from error


def lines(trial: "TrialRound") -> Iterator[str]:
    """A trial round in words."""
    location = f" on {trial.device}" if trial.device else ""
    yield (
        f"{trial.task}{location}: {trial.samples} training samples, {trial.parameters} shared parameters, "
        f"{trial.steps} steps a round"
    )
    training, evaluation = formatting.seconds(trial.training_seconds), formatting.seconds(trial.evaluation_seconds)
    yield f"  time: {training} to train, {evaluation} to evaluate"
    gpu = "" if trial.device_bytes is None else f", {formatting.size(trial.device_bytes)} on the GPU"
    memory = f"{formatting.size(trial.memory_bytes)} in this process"
    if trial.trainer_bytes is None:
        yield f"  memory: {memory}, with the data{gpu}"
    else:
        largest = formatting.size(trial.trainer_bytes)
        yield f"  memory: {memory}, at most {largest} in each process of the trainer on this machine, without GPUs"
    yield (
        f"  bytes: {formatting.size(trial.download_bytes)} down for the model, "
        f"{formatting.size(trial.upload_bytes)} up for an update with one row"
    )
    yield "  nothing was sent"


def attacks(code: CodeOption = None, as_json: JsonOption = False) -> None:
    """List the attacks that can be rehearsed, with their options."""
    lines = []
    for entry in entries():
        options = (f"      {name}: {words}" for name, words in entry.options.items())
        lines += [entry.spelling, f"    {entry.summary}", *options]
    answer(as_json, [asdict(entry) for entry in entries()], *lines)
