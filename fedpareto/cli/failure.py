"""What a command raises when it cannot do what it was asked: a paragraph for a person, and an exit code."""

USAGE = 2
INTERRUPTED = 130


class Failure(Exception):
    """Ends the command.

    Attributes:
        message: what was wrong, with the value, and what to do.
        code: the exit code: 1 when the work failed, 2 for bad usage.
    """

    def __init__(self, message: str, *, code: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
