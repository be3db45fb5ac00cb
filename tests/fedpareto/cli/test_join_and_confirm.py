"""What the command line asks for at a terminal and never takes as an argument: join strings, and a yes."""

import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

from typer.testing import CliRunner

from federation.trust.certificates import fingerprint
from federation.trust.join_string import JoinStringFields
from fedpareto.cli.failure import USAGE, CommandFailure
from fedpareto.cli.main import app
from storage.models import Client
from storage.states import ClientState
from tests.command_lines import failure
from tests.running import Running


def join_string(served: Running, client: str) -> str:
    return JoinStringFields(
        (served.enrollment_address,), fingerprint(served.home.ca), served.join_secret(client), client
    ).encode()


def state(served: Running, client: str) -> ClientState:
    with served.database.read() as session:
        return session.get_one(Client, client).state


def at_a_terminal(*arguments: str, answer: str) -> tuple[int, str, str]:
    """Runs the command with a terminal as its standard input, and types an answer once it asks.

    Returns:
        The exit code, what it wrote, and what the terminal showed of the answer.
    """
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "fedpareto", *arguments],
        stdin=end,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    kill = threading.Timer(60, process.kill)
    kill.start()
    written = b""
    while not re.search(rb"(: |\]: )$", written) and (piece := os.read(process.stdout.fileno(), 1000)):
        written += piece
    os.write(terminal, f"{answer}\n".encode())
    written += process.stdout.read()
    code = process.wait()
    kill.cancel()
    os.set_blocking(terminal, False)
    try:
        echo = os.read(terminal, 10_000)
    except BlockingIOError:
        echo = b""
    process.stdout.close()
    os.close(end)
    os.close(terminal)
    return code, written.decode(), echo.decode()


def test_a_join_string_comes_from_standard_input_or_from_a_file(served: Running, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["worker", "join", "--home", str(tmp_path / "a")], input=join_string(served, "ann"))
    assert done.exit_code == 0, done.output
    assert "ann is a member of test" in done.stdout
    file = tmp_path / "join"
    file.write_text(join_string(served, "ben") + "\n")
    done = CliRunner().invoke(app, ["worker", "join", "--home", str(tmp_path / "b"), "--join-file", str(file)])
    assert "ben is a member of test" in done.stdout
    failed = failure("worker", "join", "--home", str(tmp_path / "c"), "--join-file", "nowhere")
    assert failed.message == "cannot read the join string from nowhere: No such file or directory"


def test_a_join_string_on_the_command_line_is_refused_and_not_repeated(served: Running, tmp_path: Path) -> None:
    word = join_string(served, "cleo")
    done = CliRunner().invoke(app, ["worker", "join", word, "--home", str(tmp_path / "a")])
    assert isinstance(done.exception, CommandFailure)
    assert done.exception.code == USAGE
    assert "standard input" in done.exception.message
    assert word not in done.exception.message + done.output
    assert not (tmp_path / "a").exists()


def test_a_join_string_that_is_typed_at_a_terminal_is_not_shown(served: Running, tmp_path: Path) -> None:
    word = join_string(served, "dora")
    code, written, echo = at_a_terminal("worker", "join", "--home", str(tmp_path / "a"), answer=word)
    assert (code, "dora is a member of test" in written) == (0, True), written
    assert word not in written + echo


def test_a_revocation_without_a_terminal_needs_the_option_that_says_yes(served: Running) -> None:
    served.enroll("erik")
    arguments = ["admin", "--home", str(served.home.admin_dir), "revoke", "erik"]
    done = failure(*arguments)
    assert (done.code, "--yes" in done.message) == (USAGE, True)
    assert state(served, "erik") is ClientState.ACTIVE
    assert CliRunner().invoke(app, [*arguments, "--yes"]).exit_code == 0
    assert state(served, "erik") is ClientState.REVOKED


def test_at_a_terminal_a_revocation_waits_for_a_yes(served: Running) -> None:
    served.enroll("fay")
    arguments = ("admin", "--home", str(served.home.admin_dir), "revoke", "fay")
    code, written, _ = at_a_terminal(*arguments, answer="")
    assert (code, "nothing was changed" in written) == (1, True), written
    assert "Shut fay out for good?" in written
    assert state(served, "fay") is ClientState.ACTIVE
    assert at_a_terminal(*arguments, answer="y")[0] == 0
    assert state(served, "fay") is ClientState.REVOKED
