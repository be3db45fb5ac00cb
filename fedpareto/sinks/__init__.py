"""Delivery of a run's numbers to tracking tools: what a target gets, and a thread for each target."""
