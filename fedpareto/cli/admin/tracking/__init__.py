"""`fedpareto admin follow`: a run's numbers for tracking tools, as a client of the coordinator."""
