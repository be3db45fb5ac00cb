"""The member's own state of each run: replaced with each accepted reply, erased long after the run.

It has the member's personal parameters and the residuals from the rounding of its updates. While a reply waits for its
receipt, its state is in the spool beside it. The state replaces the run's when the coordinator accepts the reply, and
is dropped if it refuses the reply.
"""

import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

from federation.digests import digest
from federation.monitoring.events import Events
from federation.owners_code import TwoTexts
from federation.spec.computation import Computation, Measure
from federation.tasks import initial_model
from federation.training.own import KeptState, Own, state_file
from federation.training.trainer import Trainer
from federation.vectors import Layout, Vector
from federation.work.base import Result, payload_layout
from worker.home import disk_texts
from worker.site.assignment_checks import CheckedAssignment, Declined
from worker.work.spool import Spool, SpoolEntry

ERASED_AFTER = timedelta(days=180)  # without work for the run
_LOOK_SECONDS = 0.05


class LocalState:
    """The member's states of its runs, in one directory for each run.

    At the start, directories that were not used for `ERASED_AFTER`, by this machine's clock, are erased.
    """

    def __init__(self, directory: Path, spool: Spool, events: Events) -> None:
        self._directory = directory
        self._spool = spool
        self._events = events
        self._initial: tuple[tuple[str, int], Vector] | None = None  # of the last task and seed
        self._full: dict[str, OSError] = {}  # by run, the error of writing the state of an accepted reply
        self._erase(datetime.now(UTC))

    def own(
        self, order: CheckedAssignment, trainer: Trainer, computation: Computation, pause: Callable[[float], None]
    ) -> Own | None:
        """This member's part of the model for some work; None where the run shares all parameters.

        It waits until the coordinator has answered the replies to earlier work of the run, which decide on the state.

        Raises:
            TrainingStopped: the work was stopped meanwhile.
            Declined: `disk`: the state of an accepted reply cannot be written, or the kept state cannot be read.
        """
        sharing, manifest = order.sharing, order.manifest
        if sharing is None:
            return None
        values = self._initial_values(trainer, manifest.task, manifest.seed)
        if not sharing.personal_names:
            return Own(sharing, values)
        measures = isinstance(computation, Measure)
        kept = self._settled(order, pause)
        personal = _before(kept, manifest.round + 1 if measures else manifest.round, sharing.personal)
        if personal is not None:
            return Own(sharing, sharing.with_personal(values, personal))
        if not measures:
            text = "the personal parameters begin with the initial values"
            if manifest.round:
                text += ", as none are kept here from an earlier round"
            self._events.tell_of(manifest, "personal-new", text, warns=manifest.round > 0)
        return Own(sharing, values)

    def residual(self, order: CheckedAssignment, pause: Callable[[float], None]) -> Vector | None:
        """The residuals of rounding the last accepted reply, in the order of the work's residuals; None without any.

        It waits and raises as `own` does.
        """
        rounded = order.work.residuals(order.shape)
        if not rounded:
            return None
        return _before(self._settled(order, pause), order.manifest.round, payload_layout(rounded))

    def file(self, order: CheckedAssignment, result: Result) -> bytes | None:
        """The content of the state file to keep once a result is accepted; None if there is no state."""
        return state_file(order.sharing, result, order.work.residuals(order.shape))

    def commit(self, entry: SpoolEntry) -> None:
        """Makes the state of an accepted reply the state of its run. Raises OSError if it cannot be written."""
        run_id, round_ = entry.manifest.run_id, entry.manifest.round
        kept = kept_state(self._directory, run_id)
        try:
            if isinstance(entry.state, bytes):
                kept.keep(round_, entry.state)
            elif entry.state is not None and entry.state.exists():
                kept.take(round_, entry.state)
        except OSError as error:
            self._full[run_id] = error
            raise
        self._full.pop(run_id, None)

    def delayed(self, run_id: str, error: OSError | None) -> None:
        """Notes whether the disk delays the replies of a run, so that work which needs their states does not wait."""
        if error is not None:
            self._full[run_id] = error
        else:
            self._full.pop(run_id, None)

    def _settled(self, order: CheckedAssignment, pause: Callable[[float], None]) -> KeptState:
        """The state of a run, once the coordinator has answered all its replies."""
        run_id = order.manifest.run_id
        while self._spool.awaits_state(run_id):
            if (error := self._full.get(run_id)) is not None:
                raise Declined("disk", disk_texts(error)) from error
            pause(_LOOK_SECONDS)
        return kept_state(self._directory, run_id)

    def _initial_values(self, trainer: Trainer, task: str, seed: int) -> Vector:
        if self._initial is None or self._initial[0] != (task, seed):
            self._initial = ((task, seed), np.array(initial_model(trainer.task, seed)[1]))
        return self._initial[1]

    def _erase(self, now: datetime) -> None:
        for run in self._directory.iterdir() if self._directory.is_dir() else ():
            used = max((path.stat().st_mtime for path in run.glob("*")), default=0.0)
            if now - datetime.fromtimestamp(used, UTC) > ERASED_AFTER:
                shutil.rmtree(run)


def _before(kept: KeptState, round_: int, layout: Layout) -> Vector | None:
    """As `KeptState.before`; raises Declined if the state cannot be read."""
    try:
        return kept.before(round_, layout)
    except OSError as error:
        message = f"what this member keeps of the run cannot be read ({error}): see what is wrong with the disk"
        raise Declined("disk", TwoTexts.of(message, disk_texts(error).wire)) from error


def kept_state(directory: Path, run_id: str) -> KeptState:
    """The state of a run in a member's home."""
    # The id came over the wire: its digest is a safe name whatever it holds.
    return KeptState(directory / digest(run_id.encode()).partition(":")[2][:32])
