"""What a process shows to a monitoring system: the numbers that it counts, their page, and the server of `/metrics`."""
