"""What the two consoles share: the guard, the server on a port of this machine, and their style sheet."""

DEFAULT_PORT = 8446
