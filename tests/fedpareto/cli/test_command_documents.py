"""The output of commands with --json has a schema; `command_documents` compares it in every test that runs one."""

import json
from importlib import import_module
from typing import Any

import pytest

from tests.command_documents import FILE, check_suits
from tests.command_lines import command_paths, fedpareto_command
from tests.fedpareto.cli.scene import submit
from tests.harness import Federation
from tests.paths import ROOT


@pytest.fixture
def schemas(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return import_module("schemas")


def test_the_file_of_schemas_is_made_from_the_documents(schemas: Any) -> None:
    assert FILE.read_text() == schemas.text(), "run python tools/schemas.py"


def test_every_command_that_shows_something_has_json_and_a_schema(schemas: Any) -> None:
    with_json = set()
    for path in command_paths():
        command: Any = fedpareto_command()
        for name in path:
            command = command.commands[name]
            command = getattr(command, "loaded", command)
        if any("--json" in parameter.opts for parameter in command.params):
            with_json.add(" ".join(path))
        else:
            # The trainer speaks with a worker over standard output, and a completion is a script.
            assert hasattr(command, "commands") or path in {("worker", "trainer"), ("completion",)}, path
    assert with_json == set(schemas.DOCUMENTS)


@pytest.mark.parametrize(
    "wrong", [{}, {"file": "a", "run": "b", "rounds": "2", "clients": 1, "beside": []}, {"more": 1}], ids=str
)
def test_another_document_does_not_suit(wrong: dict[str, Any]) -> None:
    right = {"file": "a", "run": "b", "rounds": 2, "clients": 1, "beside": []}
    check_suits(["report", "b", "--json"], 0, json.dumps(right))
    with pytest.raises(AssertionError, match="report --json"):
        check_suits(["report", "b", "--json"], 0, json.dumps(wrong if "file" in wrong or not wrong else right | wrong))


def test_commands_that_no_other_test_asks_for_json_suit_their_schemas(fed: Federation) -> None:
    home = fed.directory / "hospital"
    own = ("--home", str(home), "--json")
    joined = fed.fedpareto("worker", "join", *own, standard_input=fed.join_string("hospital"))
    assert json.loads(joined)["client_id"] == "hospital"
    for number in (1, 2):
        submit(fed, f"run-{number}", 'task = "toy"\nrounds = 2\n[selection]\nminimum = 3\n', "--paused")
    fed.admin("join-string", "clinic")
    documents = {
        arguments[0]: fed.admin(*arguments)
        for arguments in (
            ("client", "hospital"), ("tag", "hospital", "north"), ("join-strings",), ("cancel-join-string", "clinic"),
            ("disk",), ("runs",), ("compare", "run-1", "run-2"),
        )
    }  # fmt: skip
    assert documents["tag"]["client"]["tags"] == ["north"]
    assert [run["name"] for run in documents["compare"]["runs"]] == ["run-1", "run-2"]
    bea = ("coordinator", "admin", "bea", "--role", "viewer", "--out", str(fed.directory / "bea"))
    fed.fedpareto(*bea, "--home", str(fed.home), "--json")
    assert fed.admin("revoke-admin", "bea", "--yes")
    (fed.directory / "roster").write_text(json.loads(fed.fedpareto("worker", "roster", "card", *own))["card"])
    assert json.loads(fed.fedpareto("worker", "restored", *own)) == {"pending": None, "accepted": False}
    for arguments in (("renew",), ("runs",), ("log",), ("receipts",), ("privacy",), ("roster", "show")):
        assert fed.fedpareto("worker", *arguments, *own)
    assert len(json.loads(fed.fedpareto("worker", "attacks", "--json"))) > 5
