"""The assignment that lines of the log are about: set once where its work begins, and found in every line from there.

with about_assignment(assignment_id):
    ...  # every line of this thread or task, also of a library, is about the assignment
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_assignment: ContextVar[str] = ContextVar("assignment", default="")


@contextmanager
def about_assignment(assignment_id: str) -> Iterator[None]:
    """Lines of the block, in this thread or task and in the tasks that it starts, are about this assignment."""
    token = _assignment.set(assignment_id)
    try:
        yield
    finally:
        _assignment.reset(token)


class AssignmentFilter(logging.Filter):
    """Gives each line the attribute `assignment_id`, empty where it is about none. It keeps every line."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Sets the attribute."""
        record.assignment_id = _assignment.get()
        return True
