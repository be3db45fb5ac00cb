"""A trial round on the owner's data, without a coordinator: nothing is sent, and nothing is written."""

import resource
import sys
import time
from dataclasses import dataclass

from federation.objectives import joint_target
from federation.tasks import initial_model
from federation.training.trainer import Trainer
from federation.work.base import RowSchema, payload_layout
from federation.work.computation import SPLITS, Descend, LocalSgd

_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True, kw_only=True)
class TrialRound:
    """What one round of a task costs at this site. Seconds are elapsed, of a round with one row.

    Attributes:
        parameters: d.
        steps: optimiser steps.
        training_seconds: to measure the model on the training split, and to train.
        evaluation_seconds: to measure the model on all splits.
        memory_bytes: the most that this process has held, with its libraries and the data.
        device_bytes: the most that PyTorch has held on GPUs; None if it used none.
        download_bytes: a model.
        upload_bytes: an update, without its manifest of about a kilobyte.
    """

    task: str
    device: str
    samples: int
    parameters: int
    steps: int
    training_seconds: float
    evaluation_seconds: float
    memory_bytes: int
    device_bytes: int | None
    download_bytes: int
    upload_bytes: int


def try_round(trainer: Trainer, sgd: LocalSgd) -> TrialRound:
    """Trains the task's initial model once on this client's data, and evaluates the result.

    Raises:
        DataError: there are no training samples.
        TrainingDiverged: a loss or a parameter is not finite.
    """
    layout, base = initial_model(trainer.task, 0)
    targets = joint_target(trainer.objectives)
    result = trainer.compute(base, Descend(sgd=sgd, targets=targets), seed=0, round=0, client_id="")
    (update,) = result.rows.values()
    began = time.perf_counter()
    trainer.measure(base - update, SPLITS)
    return TrialRound(
        task=trainer.task.name,
        device=trainer.device,
        samples=trainer.samples,
        parameters=layout.size,
        steps=sgd.count(trainer.samples),
        training_seconds=result.seconds,
        evaluation_seconds=time.perf_counter() - began,
        memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES,
        device_bytes=_gpu_bytes(),
        download_bytes=layout.file_bytes,
        upload_bytes=payload_layout(tuple(RowSchema(row, layout.size) for row in targets)).file_bytes,
    )


def _gpu_bytes() -> int | None:
    if "torch" not in sys.modules:  # the trainer does without it
        return None
    import torch  # noqa: PLC0415

    return sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count())) or None
