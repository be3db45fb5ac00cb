"""`fedpareto coordinator ...`: the commands on the coordinator's machine."""
