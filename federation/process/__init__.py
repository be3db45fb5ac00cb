"""What the process as a whole has: its sockets, its service manager, and the state that all of its threads share."""
