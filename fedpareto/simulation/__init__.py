"""Simulated clients: the coordinator's own conductor, algorithms and storage, without a network."""


class SimulationError(Exception):
    """A simulation that cannot begin or go on; the message says what to do."""
