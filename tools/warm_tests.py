"""Runs tests many times and imports PyTorch, gRPC and other libraries only once; `tools/mutants.py` starts it.

Each line of standard input is a JSON object: the `arguments` of pytest and a `limit` in seconds. For each line, a fork
of this process imports this project's code and runs pytest. It prints a line with the exit code, or "late" after the
limit.
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

PRELOADED = (
    *("alembic.command", "cryptography.x509", "grpc_health.v1.health", "hypothesis", "piqp", "psycopg", "pydantic"),
    *("pytest", "rich.progress", "scipy.optimize", "sklearn.datasets", "sqlalchemy.dialects.postgresql.psycopg"),
    *("sqlalchemy.dialects.sqlite", "sqlalchemy.orm", "torch", "typer"),
)
LATE = "late"


def preload(root: Path) -> None:
    """Imports the libraries, and removes all modules of this project."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    importlib.import_module("federation.line.tls").require_tls13()  # gRPC reads its settings once
    for name in PRELOADED:
        importlib.import_module(name)
    for name, module in list(sys.modules.items()):
        if name != "__main__" and str(getattr(module, "__file__", None) or "").startswith(f"{root}/"):
            del sys.modules[name]


def run(arguments: list[str], limit: float) -> int | str:
    """The exit code of pytest; "late" if it was ended after `limit` seconds."""
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
                os.killpg(child, signal.SIGKILL)  # processes that the tests left
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)  # waiting for a child with a time limit needs polling
    for process in [*psutil.Process(child).children(recursive=True), psutil.Process(child)]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    os.waitpid(child, 0)
    return LATE


def main() -> None:
    """Answers each line of standard input."""
    preload(Path.cwd())
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
