"""What a trainer computes, asked as tests ask for it."""

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.spec.computation import Descend, Differentiate
from federation.spec.objective_names import Targets, joint_target
from federation.spec.train_section import LocalSgd
from federation.training.trainer import Trainer
from federation.work.base import Result

ASKED: dict[str, Any] = {"seed": 0, "round": 0, "client_id": "a"}


def train(
    trainer: Trainer,
    base: NDArray[np.float32],
    work: LocalSgd,
    *,
    targets: Targets | None = None,
    **given: Any,
) -> Result:
    """Local SGD on these targets; on the mean of the client's objectives where none are given.

    `given` are fields of the work and what a computation is asked with.
    """
    wanted = joint_target(trainer.objectives) if targets is None else targets
    more = {field.name: given.pop(field.name) for field in fields(Descend) if field.name in given}
    return trainer.compute(base, Descend(sgd=work, targets=wanted, **more), **{**ASKED, **given})


def jacobian(
    trainer: Trainer, base: NDArray[np.float32], batch_size: int, *, measure: bool = True, **given: Any
) -> Result:
    """The gradients of the client's objectives."""
    differentiate = Differentiate(batch_size=batch_size, measure=measure)
    return trainer.compute(base, differentiate, **{**ASKED, **given})
