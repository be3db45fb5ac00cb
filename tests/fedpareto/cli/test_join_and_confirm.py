"""What the command line asks for at a terminal and never takes as an argument: join strings, and a yes."""

from pathlib import Path

import pytest

from fedpareto.cli.failure import USAGE, CommandFailure
from storage.models import Client
from storage.states import ClientState
from tests.command_lines import at_a_terminal, failure
from tests.running import Running, command


def state(served: Running, client: str) -> ClientState:
    return served.look(lambda session: session.get_one(Client, client)).state


def test_a_join_string_comes_from_standard_input_or_from_a_file(served: Running, tmp_path: Path) -> None:
    done = command("worker", "join", "--home", tmp_path / "a", text=served.join_string("ann").encode())
    assert "ann is a member of test" in done.stdout
    file = tmp_path / "join"
    file.write_text(served.join_string("ben").encode() + "\n")
    done = command("worker", "join", "--home", tmp_path / "b", "--join-file", file)
    assert "ben is a member of test" in done.stdout
    failed = failure("worker", "join", "--home", str(tmp_path / "c"), "--join-file", "nowhere")
    assert failed.message == "cannot read the join string from nowhere: No such file or directory"


def test_a_join_string_on_the_command_line_is_refused_and_not_repeated(served: Running, tmp_path: Path) -> None:
    word = served.join_string("cleo").encode()
    done = command("worker", "join", word, "--home", tmp_path / "a", code=1)
    assert isinstance(done.exception, CommandFailure)
    assert done.exception.code == USAGE
    assert "standard input" in done.exception.message
    assert word not in done.exception.message + done.output
    assert not (tmp_path / "a").exists()


def test_a_join_string_that_is_typed_at_a_terminal_is_not_shown(served: Running, tmp_path: Path) -> None:
    word = served.join_string("dora").encode()
    code, written, echo = at_a_terminal("worker", "join", "--home", str(tmp_path / "a"), answer=word)
    assert (code, "dora is a member of test" in written) == (0, True), written
    assert word not in written + echo


def test_a_revocation_without_a_terminal_needs_the_option_that_says_yes(served: Running) -> None:
    served.enroll("erik")
    done = failure("admin", "--home", str(served.home.admin_dir), "revoke", "erik")
    assert (done.code, "--yes" in done.message) == (USAGE, True)
    assert state(served, "erik") is ClientState.ACTIVE
    served.command("revoke", "erik", "--yes")
    assert state(served, "erik") is ClientState.REVOKED


@pytest.mark.full
def test_at_a_terminal_a_revocation_waits_for_a_yes(served: Running) -> None:
    served.enroll("fay")
    arguments = ("admin", "--home", str(served.home.admin_dir), "revoke", "fay")
    code, written, _ = at_a_terminal(*arguments, answer="")
    assert (code, "nothing was changed" in written) == (1, True), written
    assert "Shut fay out for good?" in written
    assert state(served, "fay") is ClientState.ACTIVE
    assert at_a_terminal(*arguments, answer="y")[0] == 0
    assert state(served, "fay") is ClientState.REVOKED
