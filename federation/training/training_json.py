"""A training as a JSON object, and back: for the process of an external trainer, and for several processes."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from federation.spec.computation import PrivateSgd
from federation.spec.train_section import LocalSgd
from federation.training.plans import TrainingPlan


def training_order(plan: TrainingPlan) -> dict[str, Any]:
    """All of a plan but the samples, which the other side counts, and the two functions."""
    return {
        "sgd": plan.sgd.model_dump(),
        "weights": dict(plan.weights),
        "seed": plan.seed,
        "from_gradients": plan.from_gradients,
        "private": None if plan.private is None else asdict(plan.private),
        "frozen": [[part.start, part.stop] for part in plan.frozen],
    }


def plan_of(
    order: Mapping[str, Any],
    samples: int,
    stopped: Callable[[], bool] = lambda: False,
    tell: Callable[[float], None] = lambda share: None,
) -> TrainingPlan:
    """The plan of an order, for this number of training samples."""
    private = order["private"]
    return TrainingPlan(
        sgd=LocalSgd(**order["sgd"]),
        weights=order["weights"],
        seed=order["seed"],
        samples=samples,
        from_gradients=order["from_gradients"],
        private=None if private is None else PrivateSgd(**private),
        frozen=tuple(slice(*part) for part in order["frozen"]),
        stopped=stopped,
        tell=tell,
    )
