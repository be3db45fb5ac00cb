"""Files that only their owner may change, since they name programs or addresses, and only their owner may read."""

import os
import shlex
import stat
from pathlib import Path

from federation.errors import Error

_MOUNTED_READ_ONLY = "or mount it read-only"


class NotOwnersOwn(Error, ValueError):
    """Others can change or read a file; the message says which one, and what to do."""


def check_owners_own(path: Path, reason: str, *, secret: bool = False) -> None:
    """Checks that nobody but this user and root can change a file, nor read it if it is `secret`.

    A read-only mount passes with any modes, since nobody on this machine can change it: a ConfigMap has 0777.

    Args:
        path: of the file.
        reason: begins the message: why it matters, such as "FILE names programs that this worker runs".
        secret: True for a file that holds passwords.

    Raises:
        FileNotFoundError: there is no such file.
        NotOwnersOwn: others can write the file or its directory, so that they could replace it, or read what is secret.
    """
    try:
        file = path.resolve(strict=True)
        if os.statvfs(file).f_flag & os.ST_RDONLY:
            return
        for place in dict.fromkeys((file, file.parent, path.absolute().parent)):
            _check_place(place, reason)
        if secret and (mode := file.stat().st_mode) & (stat.S_IRGRP | stat.S_IROTH):
            raise NotOwnersOwn(
                f"{reason}, and others can read it (mode {stat.S_IMODE(mode):04o}): chmod go-rwx "
                f"{shlex.quote(str(file))}, {_MOUNTED_READ_ONLY}"
            )
    except FileNotFoundError:
        raise
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise NotOwnersOwn(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _check_place(place: Path, reason: str) -> None:
    found, name = place.stat(), shlex.quote(str(place))
    if found.st_uid not in (0, os.geteuid()):
        raise NotOwnersOwn(
            f"{reason}, and {place} belongs to another user (uid {found.st_uid}), who can change it: "
            f"chown {os.geteuid()} {name}, {_MOUNTED_READ_ONLY}"
        )
    # In a directory with the sticky bit, such as /tmp, others cannot replace a file of this user.
    sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
        raise NotOwnersOwn(
            f"{reason}, and others can write {place} (mode {stat.S_IMODE(found.st_mode):04o}): chmod go-w {name}, "
            f"{_MOUNTED_READ_ONLY}"
        )
