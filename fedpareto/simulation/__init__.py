"""Simulated clients: the coordinator's own conductor, algorithms and storage, without a network."""

from federation.errors import Error


class SimulationError(Error):
    """A simulation that cannot begin or go on; the message says what to do."""
