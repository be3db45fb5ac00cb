"""What a process tells its owner: its events, the numbers that it counts, their page, and the server of `/metrics`."""
