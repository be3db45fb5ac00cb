"""The state that simulated clients keep of a run: personal parameters, and residuals from rounding their updates."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from federation.spec.computation import Computation, Measure
from federation.spec.run_spec import RunSpec
from federation.spec.sharing import Sharing
from federation.tasks import Task, buffers_of, initial_model
from federation.training.own import KeptState, Own, state_file
from federation.vectors import Vector
from federation.work.base import Result, RowSchema, payload_layout


class PopulationState:
    """The states of simulated clients, in a directory for each client.

    A round that is computed again begins with the state before it, so that a resumed simulation gives the same result.

    Raises:
        SharingError: the patterns do not suit the task's model.
    """

    def __init__(self, directory: Path, task: Task, spec: RunSpec) -> None:
        self._directory = directory
        self._sharing: Sharing | None = None
        parameters, buffers = spec.parameters, buffers_of(task)
        if not parameters.shares_all:
            layout, initial = initial_model(task, spec.seed_of_model)
            self._sharing = Sharing.of(layout, parameters, buffers)
            self._initial = np.array(initial)

    def at(self, round_: int, computations: Mapping[str, Computation]) -> dict[str, Own]:
        """The own model of each client: as before the round, or, for a measurement, as after its training.

        Empty for a run that shares all parameters.
        """
        if self._sharing is None:
            return {}
        return {
            name: Own(self._sharing, self._values(self._sharing, round_ + isinstance(computation, Measure), name))
            for name, computation in computations.items()
        }

    def residual(self, round_: int, client: str, residuals: tuple[RowSchema, ...]) -> Vector | None:
        """The residuals from rounding a client's last reply before a round; None without any."""
        return self._kept(client).before(round_, payload_layout(residuals)) if residuals else None

    def keep(self, round_: int, client: str, result: Result, residuals: tuple[RowSchema, ...]) -> None:
        """Keeps the state that belongs to a client's accepted reply in a round."""
        if (content := state_file(self._sharing, result, residuals)) is not None:
            self._kept(client).keep(round_, content)

    def _values(self, sharing: Sharing, round_: int, client: str) -> Vector:
        """The whole model of a client as it was before a round."""
        if not sharing.personal_names:
            return self._initial
        personal = self._kept(client).before(round_, sharing.personal)
        return self._initial if personal is None else sharing.with_personal(self._initial, personal)

    def _kept(self, client: str) -> KeptState:
        return KeptState(self._directory / client, durable=False)
