"""The base of all failures that users see."""


class Error(Exception):
    """A failure that a function or a command reports on purpose: its message says what was wrong, and what to do.

    Answers, such as a refusal or a skipped round, are exceptions and no errors: the caller expects them.
    """


class ArgumentError(Error, ValueError):
    """An argument of a call cannot be used: its message names the argument and what is needed."""


class ArgumentTypeError(Error, TypeError):
    """An argument of a call is of another type than what is needed."""
