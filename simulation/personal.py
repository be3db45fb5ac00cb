"""The clients' own models in a simulated run that does not share every parameter."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from federation.run_sections import ParametersSpec
from federation.runs import RunSpec
from federation.sharing import Sharing
from federation.tasks import Task, initial_model
from federation.training.own import KeptParameters, Own
from federation.vectors import Vector, to_bytes
from federation.work.computation import Computation, Measure


class OwnModels:
    """What each simulated client adds to the shared parameters; personal ones are kept in a directory for each client.

    A round that is computed again begins with what was kept before it, so that a resumed simulation gives the same.

    Raises:
        SharingError: the patterns do not suit the task's model.
    """

    def __init__(self, directory: Path, task: Task, seed: int, spec: ParametersSpec) -> None:
        layout, initial = initial_model(task, seed)
        self._sharing = Sharing.of(layout, spec.personal, spec.frozen, task.buffers(), spec.buffers)
        self._initial = np.array(initial)
        self._directory = directory

    def at(self, round_: int, computations: Mapping[str, Computation]) -> dict[str, Own]:
        """The model of each client for its computation: as before the round, or after its training to be measured."""
        return {
            name: Own(self._sharing, self._values(round_ + isinstance(computation, Measure), name))
            for name, computation in computations.items()
        }

    def keep(self, round_: int, client: str, personal: Vector) -> None:
        """Keeps the personal parameters of a client after the training of a round, whose reply was accepted."""
        self._kept(client).keep(round_, to_bytes(self._sharing.personal, personal))

    def _values(self, round_: int, client: str) -> Vector:
        """The whole model of a client as it was before a round."""
        if not self._sharing.personal_names:
            return self._initial
        personal = self._kept(client).before(round_, self._sharing.personal)
        return self._initial if personal is None else self._sharing.with_personal(self._initial, personal)

    def _kept(self, client: str) -> KeptParameters:
        return KeptParameters(self._directory / client, durable=False)


def own_models(directory: Path, task: Task, spec: RunSpec) -> OwnModels | None:
    """Those of a run; None if it shares all parameters."""
    return None if spec.parameters.shares_all else OwnModels(directory, task, spec.seed, spec.parameters)
