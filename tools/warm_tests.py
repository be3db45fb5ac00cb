"""Runs tests many times without importing PyTorch, gRPC and the rest each time: `tools/mutants.py` starts it.

Each line of standard input is a JSON object: `arguments` of pytest, and `limit`, in seconds. For each one, a fork of
this process imports our own code and runs pytest. The answer is a line with its exit code, or "late" when the limit
has passed.
"""

import importlib
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

PRELOADED = [
    "alembic.command",
    "cryptography.x509",
    "grpc_health.v1.health",
    "hypothesis",
    "piqp",
    "psycopg",
    "pytest",
    "rich.progress",
    "scipy.optimize",
    "sklearn.datasets",
    "sqlalchemy.dialects.postgresql.psycopg",
    "torch",
    "typer",
]
LATE = "late"


def preload(root: Path) -> None:
    """Imports what others wrote, and nothing of the tree of tests."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    importlib.import_module("federation.tls").require_tls13()  # gRPC reads its settings once
    for name in PRELOADED:
        importlib.import_module(name)
    for name, module in list(sys.modules.items()):
        if name != "__main__" and str(getattr(module, "__file__", None) or "").startswith(f"{root}/"):
            del sys.modules[name]


def run(arguments: list[str], limit: float) -> int | str:
    """The exit code of pytest; "late" when it was ended after `limit` seconds."""
    child = os.fork()
    if child == 0:
        os.setsid()
        output = os.open("warm-tests.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = 70
        try:
            code = int(importlib.import_module("pytest").main(arguments))
            sys.stdout.flush()
        finally:
            os._exit(code)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # what the tests left running
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for process in [*psutil.Process(child).children(recursive=True), psutil.Process(child)]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    os.waitpid(child, 0)
    return LATE


def main() -> None:
    """Answers line after line."""
    preload(Path.cwd())
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
