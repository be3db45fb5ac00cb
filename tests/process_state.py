"""How the kernel describes a process that a test looks at."""

from pathlib import Path


def process_state(pid: int) -> str:
    """The state letter of /proc/PID/stat: `T` stopped, `Z` ended and not yet collected, empty where no such process is.

    A process can end between the opening of the file and the reading, which then fails with ProcessLookupError.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_running(pid: int) -> bool:
    """Whether a process is there, and is more than an entry that nobody has collected."""
    return process_state(pid) not in ("", "Z")
