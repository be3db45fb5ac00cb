"""A dishonest member's side of an attack: its memory between rounds, and its exchange with accomplices."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import numpy as np

from federation.attacks import Attack, AttackError, attack_seed, claimed, distorted
from federation.spec.sharing import BUFFERS
from federation.v1.common_pb2 import AssignmentManifest
from federation.vectors import Vector, update_layout
from federation.work.base import Result
from federation.work.registry import kind
from worker.work.accomplices import WAIT_SECONDS, Accomplices


@dataclass(eq=False)
class Attacker:
    """Turns honest results into the results that are handed in.

    Without accomplices, an attacker knows no honest update but its own.

    Raises:
        AttackError: the attack depends on something that a worker does not know.
    """

    attack: Attack
    client_id: str
    accomplices: Accomplices | None = None
    _models: list[tuple[str, str, Vector]] = field(default_factory=list)  # run, digest, model: the last two

    def __post_init__(self) -> None:
        if self.attack.derived:
            setting = f"{self.attack.name}:{self.attack.derived}=NUMBER"
            raise AttackError(f"{self.attack}: a worker does not know how many take part; write {setting}")
        if self.accomplices is not None and not self.attack.needs_peers:
            raise AttackError(f"{self.attack} is made by each attacker alone: leave the accomplices out")

    @property
    def warning(self) -> str:
        """The warning that this worker is dishonest."""
        lone = self.attack.needs_peers and self.accomplices is None
        return (
            f"REHEARSAL OF AN ATTACK: this worker is dishonest, {self.attack}: {self.attack.summary} "
            + (f"It knows no accomplices: {self.attack.alone}. " if lone else "")
            + "Never do this in a federation that is not your own"
        )

    def see(self, manifest: AssignmentManifest, base: Vector) -> None:
        """Remembers a base model (d,): an attacker that does not train sends the last change of the model."""
        earlier = [item for item in self._models if item[0] == manifest.run_id and item[1] != manifest.base_model]
        self._models = [*earlier[-1:], (manifest.run_id, manifest.base_model, base)]

    def distort(
        self, manifest: AssignmentManifest, honest: Result, *, now: datetime, pause: Callable[[float], None]
    ) -> Result:
        """Returns the result that is handed in place of an honest one.

        The honest rows are zeros if the attack does not train. `now` is the coordinator's time; `pause` sleeps, and may
        raise to end the wait.

        Raises:
            AttackError: the attack's code raised an exception, or its answer cannot be used.
        """
        kept = {name: row for name, row in honest.rows.items() if name == BUFFERS}
        rows = {name: row for name, row in honest.rows.items() if name != BUFFERS}
        if not self.attack.trains:
            rows = {name: self._change()[: len(row)] for name, row in rows.items()}
        peers = {objective: row[None] for objective, row in rows.items()}
        if self.accomplices is not None:
            layout = update_layout([(objective, len(row)) for objective, row in rows.items()])
            seconds_left = (manifest.deadline.ToDatetime(tzinfo=UTC) - now).total_seconds()
            updates = self.accomplices.exchange(
                f"{manifest.run_id}/{manifest.round}/{manifest.phase}",
                layout,
                np.concatenate(list(rows.values())),
                seconds=min(WAIT_SECONDS, seconds_left / 2),
                pause=pause,
            )
            ends = np.cumsum([len(row) for row in rows.values()])[:-1]
            peers = dict(zip(rows, np.split(np.stack(updates), ends, axis=1), strict=True))
        seed = attack_seed(manifest.seed, manifest.round, self.client_id)
        of_update = kind(manifest.kind).work.sends_update
        sent = {
            objective: distorted(self.attack, row, of_update=of_update, peers=peers[objective], m=0, seed=seed)
            for objective, row in rows.items()
        }
        return replace(honest, rows=sent | kept, losses=claimed(self.attack, honest.losses))

    def _change(self) -> Vector:
        """The model seen before the last one, minus the last one: zeros as long as only one has been seen."""
        models = [model for _, _, model in self._models]
        return np.asarray(models[0] - models[-1], dtype=np.float32)
