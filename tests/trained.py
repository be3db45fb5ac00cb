"""What a trainer computes, asked as tests ask for it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.spec.computation import Descend, Differentiate, LocalSgd
from federation.spec.objective_names import Targets, joint_target
from federation.training.trainer import Trainer
from federation.work.base import Result

ASKED: dict[str, Any] = {"seed": 0, "round": 0, "client_id": "a"}


def train(
    trainer: Trainer,
    base: NDArray[np.float32],
    work: LocalSgd,
    *,
    targets: Targets | None = None,
    from_jacobian: bool = False,
    measure: bool = True,
    idle: bool = False,
    **given: Any,
) -> Result:
    """Local SGD on these targets; on the mean of the client's objectives where none are given."""
    wanted = joint_target(trainer.objectives) if targets is None else targets
    descend = Descend(sgd=work, targets=wanted, from_jacobian=from_jacobian, measure=measure, idle=idle)
    return trainer.compute(base, descend, **{**ASKED, **given})


def jacobian(
    trainer: Trainer, base: NDArray[np.float32], batch_size: int, *, measure: bool = True, **given: Any
) -> Result:
    """The gradients of the client's objectives."""
    differentiate = Differentiate(batch_size=batch_size, measure=measure)
    return trainer.compute(base, differentiate, **{**ASKED, **given})
