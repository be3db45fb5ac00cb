"""Sends a run to a target, and is killed (SIGKILL, nothing is flushed) at one of the calls of a function.

    python -m tests.programs.sending TARGET ROUNDS MODULE:NAME COUNT before|after

The function runs as shipped; the kill comes before the COUNT-th call of it, or after. With COUNT 0 there is none.
"""

import sys
from importlib import import_module
from pathlib import Path

from fedpareto.sinks.sink import RunEnd
from tests.fedpareto.sinks.scene import send
from tests.programs.crashing import before


def main() -> None:
    target, rounds, function, count, when, *files = sys.argv[1:]
    module, _, path = function.partition(":")
    owner, name = import_module(module), path
    if "." in path:
        kind, _, name = path.partition(".")
        owner = getattr(owner, kind)
    if int(count):
        before(owner, name, count=int(count), returned=when == "after")
    (delivered,) = send([target], int(rounds), RunEnd("COMPLETED", "", list(map(Path, files))))
    sys.exit(delivered.problem or 0)


if __name__ == "__main__":
    main()
