"""The work of a worker: its queue, its execution, its submission, and the state that it keeps for it."""
