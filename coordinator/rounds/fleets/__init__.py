"""Fleets: the clients that a conductor asks. Real workers are here; simulated clients are in `fedpareto/simulation`."""
