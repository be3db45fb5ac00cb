"""Writes the table of the keys of worker.toml into docs/member/worker-file.md, from the class that reads the file.

python tools/worker_keys.py [--check]
"""

import argparse
import re
import sys
from pathlib import Path

from worker.config import OPTIONS, WorkerConfig, in_toml

FILE = Path(__file__).resolve().parent.parent / "docs" / "member" / "worker-file.md"
_TABLE = re.compile(r"^\| Key \| .*?(?=^$|\Z)", re.MULTILINE | re.DOTALL)


def table() -> str:
    """The table: each key with its default, its meaning, and the option of its own that it has."""
    rows = ["| Key | Default | Meaning |", "|---|---|---|"]
    for key, field in WorkerConfig.model_fields.items():
        default = "required" if field.is_required() else f"`{in_toml(field.default)}`"
        meaning = str(field.description)
        option = f" (`{OPTIONS[key]}`)" if key in OPTIONS else ""
        rows.append(f"| `{key}` | {default} | {meaning[0].upper()}{meaning[1:]}{option}. |")
    return "\n".join(rows) + "\n"


def main() -> int:
    """Writes the page, or compares it with --check; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare; the exit code is 1 if the page differs")
    check = parser.parse_args().check
    before = FILE.read_text()
    after = _TABLE.sub(lambda _: table(), before)
    if check:
        return int(before != after)
    FILE.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
