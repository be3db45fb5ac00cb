"""The sockets of processes that Python starts through a fork server: files in the directory for temporary files."""

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from federation.errors import Error


class SocketPathTooLong(Error, OSError):
    """The path of a socket would be too long; TMPDIR decides about it."""


@contextmanager
def short_enough() -> Iterator[None]:
    """For the start of such processes: an error that names TMPDIR if the path of a socket would be too long.

    Raises:
        SocketPathTooLong: ENAMETOOLONG, with the directory for temporary files.
    """
    try:
        yield
    except OSError as error:
        if "AF_UNIX path too long" not in str(error):
            raise
        place = tempfile.gettempdir()
        raise SocketPathTooLong(
            errno.ENAMETOOLONG,
            f"this path of {len(place)} characters is too long for the sockets of the processes that are to be "
            "started: set TMPDIR to a directory with a short path, such as /tmp",
            place,
        ) from None
