"""Runs several `fedpareto` commands in one process: `python commands.py`, with a JSON list of their words as input.

It prints a JSON list with the exit code, the output and the error output of each. The words `migrate HOME` and `open
HOME` are no commands: they migrate the database of a coordinator, and open all ledgers of a worker.
"""

import io
import json
import sys
from contextlib import closing, redirect_stderr, redirect_stdout
from pathlib import Path

from fedpareto.cli.entry import main


def migrate(home: str) -> None:
    from coordinator.home import CoordinatorHome

    with closing(CoordinatorHome.load(Path(home)).open_database()) as database:
        database.migrate()
        database.check_current()


def open_ledgers(home: str) -> None:
    from worker.ledgers import left_ledger, privacy_ledger, round_ledger
    from worker.ledgers.ledger_file import LedgerFile
    from worker.site import run_requests
    from worker.work import memory

    for module, name in (
        (privacy_ledger, "privacy.db"),
        (round_ledger, "private-rounds.db"),
        (left_ledger, "left.db"),
        (memory, "memory.db"),
        (run_requests, "runs.db"),
    ):
        LedgerFile(Path(home) / name, module.MIGRATIONS, "").close()


def run(words: list[str]) -> tuple[int, str, str]:
    """The exit code, the output and the error output of a command."""
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        sys.argv = ["fedpareto", *words]
        try:
            {"migrate": migrate, "open": open_ledgers}[words[0]](words[1]) if len(words) == 2 else main()
        except SystemExit as end:
            return int(end.code or 0), output.getvalue(), errors.getvalue()
    return 0, output.getvalue(), errors.getvalue()


if __name__ == "__main__":
    print(json.dumps([run(words) for words in json.load(sys.stdin)]))
