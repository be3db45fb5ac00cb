"""The targets of a simulation's rounds: each gets every round once, and those that take files get them at the end."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from fedpareto.cli.research import simulation_files
from fedpareto.cli.show import sink_lines
from fedpareto.simulation.history import History
from fedpareto.simulation.simulate import Simulation
from fedpareto.sinks.round_numbers import numbers_of
from fedpareto.sinks.sink import RunEnd
from fedpareto.sinks.target_threads import Delivered, Deliveries
from fedpareto.sinks.targets import SinkTarget

_SECONDS_AFTER_A_FAILURE = 10.0


class SimulationTargets:
    """Takes the rounds of a simulation to targets. `tell` is told of targets that cannot be reached."""

    def __init__(self, simulation: Simulation, targets: Sequence[SinkTarget], tell: Callable[[str], object]) -> None:
        self._simulation = simulation
        self._deliveries: Deliveries | None = None
        if targets:
            self._deliveries = Deliveries(sink_lines.followed(simulation.ended_rounds()[0]), targets, tell)
            tell(sink_lines.begins(self._deliveries))
            self.send()  # what a target may lack of a simulation that was interrupted

    def send(self) -> None:
        """Hands over the rounds that have ended since."""
        if self._deliveries is not None:
            for summary in self._simulation.ended_rounds(len(self._deliveries.rounds))[1]:
                self._deliveries.add(numbers_of(summary))

    def finish(self, history: History) -> list[Delivered]:
        """Waits until the targets have the whole run; with its files, if a target takes them."""
        if self._deliveries is None:
            return []
        with tempfile.TemporaryDirectory(prefix="fedpareto-simulate-") as directory:
            takes = self._deliveries.takes_files
            files = simulation_files.write_files(history, Path(directory)) if takes else []
            return self._deliveries.finish(RunEnd(history.state, history.reason, files))

    def leave(self) -> None:
        """Ends the threads of a simulation that did not come to its end, and waits a little for what they have."""
        if self._deliveries is not None:
            self._deliveries.finish(RunEnd("PAUSED", ""), patience=_SECONDS_AFTER_A_FAILURE)
