"""The first training of a run, as a client would do it, to try it before the run begins."""

from dataclasses import dataclass, replace

from federation.spec.computation import Descend
from federation.spec.objective_names import joint_target
from federation.spec.run_spec import RunSpec
from federation.tasks import initial_model
from federation.training.own import Own, run_shape, tried_parameters
from federation.training.trainer import Trainer
from federation.vectors import Vector
from federation.work.base import Shape
from federation.work.train.work import Train


@dataclass(frozen=True, eq=False)
class FirstTraining:
    """The training of round 0 with one row, without noise.

    Attributes:
        shape: of the run's model.
        own: the client's addition to the shared parameters; None for a run that shares all parameters.
        base: the run's model.
        work: the training, as the run asks for it.
        descent: the training, as the trainer gets it.
    """

    shape: Shape
    own: Own | None
    base: Vector
    work: Train
    descent: Descend

    @classmethod
    def of(cls, trainer: Trainer, spec: RunSpec) -> "FirstTraining":
        """The first training of a run with this trainer and its data.

        Raises:
            SharingError: `[parameters]` does not suit the model.
        """
        shape, sharing = run_shape(trainer, tried_parameters(spec.parameters, trainer.scale_layer))
        _, model = initial_model(trainer.task, spec.seed)
        own, base = (None, model) if sharing is None else (Own(sharing, model), sharing.shared_of(model))
        work = Train.of(spec, 0, joint_target(trainer.objectives))
        return cls(shape, own, base, work, Descend(sgd=work.sgd, targets=work.targets, measure=work.measure))

    def try_smallest(self, trainer: Trainer) -> None:
        """Tries the smallest minibatch. Training with noise has none: it draws each sample on its own.

        Errors are those of `Trainer.try_smallest`.
        """
        if self.work.private is None:
            frozen = () if self.own is None else self.own.sharing.frozen
            trainer.try_smallest(replace(self.descent, frozen=frozen))
