"""Simulated clients: the coordinator's own conductor, algorithms and storage, without a network."""
