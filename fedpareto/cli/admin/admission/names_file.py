"""The file of names of `fedpareto admin join-string --names`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from federation.text_files import EncodingError, decoded
from federation.trust.identity import check_name
from federation.trust.keys import IdentityError
from fedpareto.cli.failure import USAGE, CommandFailure, failing

MOST = 1000  # names: the coordinator lets an administrator make 2000 join strings at once
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class ListedNames:
    """The names in a file, each with the number of its line, in order; and what is wrong with which line."""

    lines: Mapping[str, int]
    wrong: Mapping[int, str]


def read_names(path: Path) -> ListedNames:
    """Reads a file with one name a line. Empty lines are left out, and so is what follows a #.

    Raises:
        CommandFailure: the file cannot be read, or has nothing but empty lines, or too many names.
    """
    with failing(OSError, EncodingError, code=USAGE, what=f"cannot read the names in {path}"):
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise CommandFailure(f"{path} has more than {_MAX_BYTES >> 20} MiB: a file of names is smaller", code=USAGE)
        text = decoded(data)
    lines, wrong = dict[str, int](), dict[int, str]()
    for number, line in enumerate(text.splitlines(), start=1):
        name = line.partition("#")[0].strip()
        if not name:
            continue
        try:
            check_name(name, "name")
        except IdentityError as error:
            wrong[number] = str(error)
            continue
        if name in lines:
            wrong[number] = f"{name} is on line {lines[name]} already"
        lines.setdefault(name, number)
    if not lines and not wrong:
        raise CommandFailure(f"{path} has no name: write one on each line", code=USAGE)
    if len(lines) > MOST:
        raise CommandFailure(f"{path} has {len(lines)} names; give at most {MOST} at once", code=USAGE)
    return ListedNames(lines, wrong)
