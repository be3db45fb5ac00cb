"""A trial round on the owner's data, without a coordinator: nothing is sent, and nothing is written."""

import resource
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace

from federation.owners_code import without_exit
from federation.plugins import PluginError
from federation.spec.computation import SPLITS, Measure
from federation.spec.run_spec import RunSpec
from federation.training.external import ExternalTrainer
from federation.training.own import assumed_parameters, compute
from federation.training.run_trial import FirstTraining
from federation.training.trainer import Trainer
from federation.training.trainers import close_trainer
from federation.work.base import payload_layout

_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True, kw_only=True)
class TrialRound:
    """The costs of one round of a task at this site, with one row. Seconds are elapsed time.

    Attributes:
        device: the trainer's device; empty if a trainer of the owner's own does not name it.
        parameters: the number of parameters that the run shares.
        steps: optimiser steps.
        training_seconds: to measure the model on the training split, if the run does, and to train.
        evaluation_seconds: to measure the model on all splits.
        memory_bytes: the peak memory of this process, with its libraries, and with the data if it trains.
        trainer_bytes: a bound on what each process of an external trainer on this machine has held, without GPUs. Linux
            counts from the fork, so it is never below what this process held then. None where the training is in this
            process.
        device_bytes: the most that PyTorch has held on GPUs in this process; None if it used none.
        download_bytes: the size of a model.
        upload_bytes: the size of an update, without its manifest of about a kilobyte.
    """

    task: str
    device: str
    samples: int
    parameters: int
    steps: int
    training_seconds: float
    evaluation_seconds: float
    memory_bytes: int
    trainer_bytes: int | None
    device_bytes: int | None
    download_bytes: int
    upload_bytes: int


def try_round(trainer: Trainer, spec: RunSpec | None = None) -> TrialRound:
    """Trains the task's initial model once on this client's data, as a run's first round does, and evaluates it.

    Without a specification, the keys have their defaults, and buffers are averaged. No noise is added. The trainer is
    closed. The smallest minibatch is tried first. A first step is not counted, since PyTorch and the trainer import
    modules in it.

    Raises:
        DataError: there are no training samples.
        SharingError: `[parameters]` does not suit the model.
        PluginError: code of the owner's tried to end the process.
        TaskError: the model cannot be trained on the smallest minibatch.
        TrainingDiverged: a loss or a parameter is not finite.
        WorkError: the trainer lacks an ability that the training needs, or the model needs more than the one sample
            that is left for a minibatch.
    """
    with ExitStack() as stack:
        stack.callback(close_trainer, trainer)
        if spec is None:
            parameters = assumed_parameters(trainer.buffers, trainer.scale_layer)
            spec = RunSpec(name="rehearsal", task=trainer.task.name, rounds=1, parameters=parameters)
        training = FirstTraining.of(trainer, spec)
        if training.work.private is not None:
            trainer.check_private()
        training.try_smallest(trainer)
        sgd, descent = training.work.sgd, training.descent
        first = replace(descent, sgd=sgd.changed(epochs=0, steps=1), measure=False)
        with without_exit(PluginError):
            _, trained, measured = (
                compute(trainer, training.base, computation, training.own, seed=spec.seed, round=0, client_id="")
                for computation in (first, descent, Measure(splits=SPLITS))
            )
    return TrialRound(
        task=trainer.task.name,
        device=trainer.device_in_words,
        samples=trainer.samples,
        parameters=training.shape.parameters,
        steps=sgd.count(trainer.samples),
        training_seconds=trained.seconds,
        evaluation_seconds=measured.seconds,
        memory_bytes=_most_bytes(resource.RUSAGE_SELF),
        trainer_bytes=_most_bytes(resource.RUSAGE_CHILDREN) if isinstance(trainer, ExternalTrainer) else None,
        device_bytes=_gpu_bytes(),
        download_bytes=training.shape.layout.file_bytes,
        upload_bytes=payload_layout(training.work.rows(training.shape)).file_bytes,
    )


def _most_bytes(who: int) -> int:
    """The peak memory of this process, or of its largest child process that has ended, if that is more."""
    return resource.getrusage(who).ru_maxrss * _MAXRSS_BYTES


def _gpu_bytes() -> int | None:
    if "torch" not in sys.modules:  # the trainer does without it
        return None
    import torch  # noqa: PLC0415

    return sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count())) or None
