"""The file of names of `fedpareto admin join-string --names`."""

from collections.abc import Iterator
from pathlib import Path

from federation.text_files import EncodingError, decoded
from federation.trust.identity import check_name
from federation.trust.keys import IdentityError
from fedpareto.cli.failure import USAGE, CommandFailure, failing

MOST = 1000  # names: the coordinator lets an administrator make 2000 join strings at once
_MAX_BYTES = 1 << 20


def read_names(path: Path) -> list[str]:
    """The names in a file, in order: one a line. Empty lines are left out, and so is what follows a #.

    Raises:
        CommandFailure: the file cannot be read, has no name or too many; a name is no name for a member, or is there
            twice. The message has each such line.
    """
    with failing(OSError, EncodingError, code=USAGE, what=f"cannot read the names in {path}"):
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise CommandFailure(f"{path} has more than {_MAX_BYTES >> 20} MiB: a file of names is smaller", code=USAGE)
        text = decoded(data)
    lines = dict[str, int]()
    wrong = list(_read(text, lines))
    if wrong:
        raise CommandFailure(
            "\n  ".join([f"{path}: no join string was made, because of these lines:", *wrong]), code=USAGE
        )
    if not lines:
        raise CommandFailure(f"{path} has no name: write one on each line", code=USAGE)
    if len(lines) > MOST:
        raise CommandFailure(f"{path} has {len(lines)} names; give at most {MOST} at once", code=USAGE)
    return list(lines)


def _read(text: str, lines: dict[str, int]) -> Iterator[str]:
    """Notes the line of each name, and yields what is wrong."""
    for number, line in enumerate(text.splitlines(), start=1):
        name = line.partition("#")[0].strip()
        if not name:
            continue
        try:
            check_name(name, "name")
        except IdentityError as error:
            yield f"line {number}: {error}"
            continue
        if name in lines:
            yield f"line {number}: {name} is on line {lines[name]} already"
        lines.setdefault(name, number)
