"""Turns Train into a TrainWork, and back."""

from federation.spec.computation import NoisyTraining, PrivateSgd
from federation.spec.objective_names import joint_target
from federation.spec.train_section import LocalSgd
from federation.v1.common_pb2 import ObjectiveWeight, Target, TrainWork
from federation.vectors import FLOATS
from federation.work.base import Shape, WorkError
from federation.work.registry import Kind
from federation.work.train.work import Train


def to_proto(work: Train) -> TrainWork:
    """The message, which has the fields of LocalSgd."""
    targets = [
        Target(row=row, weights=[ObjectiveWeight(objective=name, weight=value) for name, value in weights.items()])
        for row, weights in work.targets.items()
    ]
    message = TrainWork(
        **work.sgd.model_dump(),
        from_jacobian=work.from_jacobian,
        unmeasured=not work.measure,
        targets=targets,
        dtype="" if work.dtype == "F32" else work.dtype,
    )
    if work.private is not None:
        message.sample_noise, message.sample_clip = work.private.noise, work.private.clip
    return message


def from_proto(message: TrainWork, shape: Shape) -> Train:
    """The work of a message. Without targets, it is one row for the mean of the client's objectives.

    Raises:
        WorkError: rates out of range, a row that is named twice, or that names an objective twice, or an element type
            that is no float.
    """
    targets = {target.row: {item.objective: item.weight for item in target.weights} for target in message.targets}
    if len(targets) < len(message.targets):
        raise WorkError("a row of the update is named twice")
    if any(len(targets[target.row]) < len(target.weights) for target in message.targets):
        raise WorkError("a row of the update names an objective twice")
    if message.dtype not in ("", *FLOATS):
        raise WorkError(f"rows of {message.dtype!r}; an update is of {' or '.join(sorted(FLOATS))}")
    try:
        sgd = sgd_of(message)
        private = PrivateSgd(noise=message.sample_noise, clip=message.sample_clip) if message.sample_noise else None
    except ValueError as error:
        raise WorkError(str(error)) from None
    return Train(
        sgd=sgd,
        targets=targets or joint_target(shape.serves),
        from_jacobian=message.from_jacobian,
        measure=not message.unmeasured,
        private=private,
        dtype=message.dtype or "F32",
    )


def sgd_of(message: TrainWork) -> LocalSgd:
    """How a message wants clients to train.

    A field that it does not have keeps its default, but for those of which 0 is a value.

    Raises:
        ValueError: as of `LocalSgd.from_values`.
    """
    given = {field.name: value for field, value in message.ListFields() if field.name in LocalSgd.model_fields}
    return LocalSgd.from_values({"epochs": 0, "batch_size": 0, "learning_rate": 0.0, **given})


def noise_of(message: TrainWork) -> NoisyTraining | None:
    """The training with noise that a message asks for; None where it asks for none.

    Raises:
        ValueError: as of `LocalSgd.from_values` and `PrivateSgd`.
    """
    if not message.sample_noise:
        return None
    private = PrivateSgd(noise=message.sample_noise, clip=message.sample_clip)
    return NoisyTraining(private=private, sgd=sgd_of(message), rows=max(1, len(message.targets)))


KIND = Kind(Train, TrainWork, to_proto, from_proto, noise=noise_of)
