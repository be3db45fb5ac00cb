"""Texts that people write with the editors and shells of other systems: byte-order marks, UTF-16, other encodings."""

import codecs
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.home import read_settings
from federation.spec.run_spec import RunSpec, SpecError
from federation.text_files import EncodingError, decoded, read_text
from federation.trust.join_string import JoinStringFields
from federation.trust.member_files import read_description
from fedpareto.cli.admin.upload import read_spec
from fedpareto.cli.secret_input import proxies_for, read_join_string, read_passphrase
from fedpareto.experiments.loading import load
from fedpareto.experiments.published_numbers import PublishedTable
from fedpareto.face.simulated import simulate
from tests.command_lines import failure
from tests.federation.scene import MEMBER
from worker.config import WorkerConfig
from worker.receipts import read_receipts
from worker.site.policy_file import Policy
from worker.site.roster import read_roster

RUN = "name = 'marked'\ntask = 'digits'\nrounds = 1\n"
JOIN = JoinStringFields(("host:1",), "ab" * 32, b"s" * 32, "ann").encode()
MEMBERSHIP = "federation_id = 'f'\nclient_id = 'ann'\naddresses = ['host:1']\n"
# The name of a file, its text, and who reads it. What is read is compared: the value, or the error.
READERS: dict[str, tuple[str, str, Callable[[Path], Any]]] = {
    "a run": ("run.toml", RUN, lambda path: RunSpec.parse(path.read_bytes())),
    "a run that is submitted": ("run.toml", RUN, lambda path: read_spec(path)[1]),
    "a run in a notebook": ("run.toml", RUN.replace("1\n", "x"), lambda path: simulate(str(path))),
    "a run that is simulated": ("r.toml", RUN + "x = 1", lambda path: failure("simulate", str(path)).message),
    "a run that is rehearsed": (
        "run.toml",
        RUN + "x = 1",
        lambda path: failure("worker", "run", "--rehearse", "--task", "digits", "--set", f"spec={path}").message,
    ),
    "settings": ("coordinator.toml", "federation_id = 'f'\n", lambda path: read_settings(path.parent)),
    "a worker's settings": ("worker.toml", "format = 1\nthreads = 2\n", WorkerConfig.load),
    "a policy": ("policy.toml", "tasks = ['digits']\n", Policy.load),
    "a roster": ("roster.toml", "[[member]]\nclient_id = 'ann'\n", lambda path: read_roster(path, MEMBER)),
    "a membership": ("member.toml", MEMBERSHIP, lambda path: read_description(path.parent, "client_id")),
    "an experiment": ("own.toml", "title = 'Own'\n", lambda path: load(str(path))),
    "published numbers": (
        "own.csv",
        "method,value\nFedAvg,1\n",
        lambda path: PublishedTable.model_validate({"file": path.name}, context={"place": path.parent}).rows(),
    ),
    "receipts": ("receipts.jsonl", "{}\n", lambda path: read_receipts(path, MEMBER.coordinator.chain)),
    "a join string": ("join", JOIN + "\nfor ann\n", lambda path: JoinStringFields.decode(read_join_string(path, []))),
    "a passphrase": ("word", "correct horse\n", read_passphrase),
    "a proxy": ("proxy", "http://p:1\n", lambda path: proxies_for(["h:1"], f"@{path}")("h:1")),
}


def read(reader: Callable[[Path], Any], path: Path) -> object:
    """The value that is read, or the words of the error."""
    try:
        return reader(path)
    except Exception as error:
        return str(error)


@pytest.mark.parametrize("what", READERS)
def test_a_byte_order_mark_is_nothing_and_utf_16_is_named(what: str, tmp_path: Path) -> None:
    name, text, reader = READERS[what]
    path = tmp_path / name
    path.write_bytes(text.encode())
    plain = read(reader, path)
    path.write_bytes(codecs.BOM_UTF8 + text.replace("\n", "\r\n").encode())
    assert read(reader, path) == plain
    path.write_bytes(text.encode("utf-16"))  # with its mark
    assert "UTF-16" in str(read(reader, path))


@pytest.mark.parametrize("what", ["settings", "a worker's settings", "a policy", "a roster", "a membership"])
@pytest.mark.parametrize("given", ["2", "0", "'1'", "true"])
def test_a_file_of_another_format_is_refused_with_both_formats(what: str, given: str, tmp_path: Path) -> None:
    name, text, reader = READERS[what]
    (tmp_path / name).write_text(f"format = {given}\n" + text.removeprefix("format = 1\n"))
    said = str(read(reader, tmp_path / name))
    assert f"format: this version of fedpareto reads format 1; got {given.capitalize()}" in said


def test_texts_that_were_joined_have_a_mark_at_the_beginning_of_each(tmp_path: Path) -> None:
    path = tmp_path / "roster.toml"
    path.write_bytes(2 * (codecs.BOM_UTF8 + "name = 'a\ufeff'\n".encode()))
    assert read_text(path) == "name = 'a\ufeff'\n" * 2


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ("a".encode("utf-16-be"), "it is UTF-16, as > in PowerShell writes it: save it as UTF-8"),
        ("a".encode("utf-32"), "it is UTF-16"),
        ("# Zürich\n# Köln\n".encode("cp1252"), r"it is not UTF-8 \(byte 0xfc in line 1\): save it as UTF-8"),
    ],
)
def test_the_error_about_another_encoding_says_what_to_do(data: bytes, problem: str) -> None:
    with pytest.raises(EncodingError, match=problem):
        decoded(data)
    with pytest.raises(SpecError, match=f"not a TOML document: {problem}"):
        RunSpec.parse(data)


@pytest.mark.parametrize("fold", ["\n", "\r\n ", "\n\t", "\u00a0", "\u200b", "\ufeff"])
def test_a_join_string_that_a_mail_program_has_folded_is_whole(fold: str, tmp_path: Path) -> None:
    path = tmp_path / "join"
    path.write_text(f"\n{fold.join(JOIN[at : at + 40] for at in range(0, len(JOIN), 40))}\n\nRegards\n", "utf-8")
    assert JoinStringFields.decode(read_join_string(path, [])).encode() == JOIN


def test_the_run_that_is_submitted_has_no_mark(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(codecs.BOM_UTF8 + RUN.encode())
    assert read_spec(path)[0] == RUN.encode()
