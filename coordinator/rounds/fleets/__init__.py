"""Fleets: whom a conductor asks. Real workers here; simulated clients in `simulation`."""
