"""`fedpareto admin ...`: the commands of administrators, and their session with a coordinator."""
