"""Train as a TrainWork, and back."""

from federation.objectives import joint_target
from federation.v1.common_pb2 import ObjectiveWeight, Target, TrainWork
from federation.work.base import Shape, WorkError
from federation.work.computation import LocalSgd
from federation.work.registry import Kind
from federation.work.train.work import Train


def encode(work: Train) -> bytes:
    """The serialized message."""
    message = TrainWork(
        epochs=work.sgd.epochs,
        steps=work.sgd.steps,
        batch_size=work.sgd.batch_size,
        learning_rate=work.sgd.learning_rate,
        proximal_mu=work.sgd.proximal_mu,
        momentum=work.sgd.momentum,
        weight_decay=work.sgd.weight_decay,
        from_jacobian=work.from_jacobian,
        unmeasured=not work.measure,
        targets=[
            Target(row=row, weights=[ObjectiveWeight(objective=name, weight=value) for name, value in weights.items()])
            for row, weights in work.targets.items()
        ],
    )
    return message.SerializeToString(deterministic=True)


def decode(data: bytes, shape: Shape) -> Train:
    """The work of a serialized message. Without targets, it is one row for the mean of the client's objectives.

    Raises:
        WorkError: rates out of range, a row that is named twice, or that names an objective twice.
        DecodeError: it is no TrainWork.
    """
    message = TrainWork.FromString(data)
    targets = {target.row: {item.objective: item.weight for item in target.weights} for target in message.targets}
    if len(targets) < len(message.targets):
        raise WorkError("a row of the update is named twice")
    if any(len(targets[target.row]) < len(target.weights) for target in message.targets):
        raise WorkError("a row of the update names an objective twice")
    try:
        sgd = LocalSgd.of(message)
    except ValueError as error:
        raise WorkError(str(error)) from None
    return Train(
        sgd=sgd,
        targets=targets or joint_target(shape.serves),
        from_jacobian=message.from_jacobian,
        measure=not message.unmeasured,
    )


KIND = Kind(Train, encode, decode)
