"""What the process as a whole has: its sockets, and the state that all of its threads share."""
