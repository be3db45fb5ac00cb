"""Simulations that are interrupted after each phase, as often as that takes, and resumed."""

from pathlib import Path

import pytest

from coordinator.rounds.fleets.base import Held, Question
from federation.aggregation.phases import Replies
from fedpareto.simulation.fleet import SimulatedFleet
from fedpareto.simulation.history import History
from fedpareto.simulation.simulate import Simulation


def interrupted_after_each_phase(monkeypatch: pytest.MonkeyPatch, text: str, home: Path) -> History:
    """The history of a simulation that ends each time that it has recorded one more phase, and is resumed."""
    ask, recorded = SimulatedFleet.ask, set[tuple[int, int]]()

    def and_end(fleet: SimulatedFleet, question: Question) -> Replies:
        replies = ask(fleet, question)
        phase = question.current.number, question.number
        if phase in recorded:
            return replies
        recorded.add(phase)
        raise Held

    monkeypatch.setattr(SimulatedFleet, "ask", and_end)
    while True:
        with Simulation(text.encode(), home, resume=bool(recorded)) as simulation:
            history = simulation.run()
        if history.state != "PAUSED":
            return history
