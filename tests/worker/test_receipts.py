"""The receipts that a member keeps, and what two members find out when they compare them."""

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.monitoring.events import Events
from federation.trust.envelope import envelope_digest, sign
from federation.trust.key_chain import KeyChain
from federation.v1.common_pb2 import AssignmentManifest, ReceiptManifest, ReplyManifest, SignedEnvelope
from tests.scripted import FEDERATION, ScriptedCoordinator
from tests.worker.scene import command
from worker.home import WorkerHome
from worker.receipts import ReceiptsError, append, disagreements, read_receipts, receipt_line
from worker.work.spool import Spool

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))


def line(client: str, number: int, model: str, step: str, key: Ed25519PrivateKey = KEY, **changes: Any) -> str:
    fields: dict[str, Any] = {
        "federation_id": FEDERATION,
        "run_id": "run-1",
        "round": number,
        "assignment_id": f"{client}-{number}",
        "client_id": client,
        "base_model": model,
    }
    asked = AssignmentManifest(**fields, previous_step=step)
    said = ReceiptManifest(**{**fields, **changes}, accepted=True, envelope=envelope_digest(SignedEnvelope()))
    return receipt_line(SignedEnvelope(), sign(asked, key), sign(said, key), said)


def written(path: Path, *lines: str) -> Path:
    path.write_text("".join(lines))
    return path


def test_members_who_were_told_of_different_models_or_steps_find_out(tmp_path: Path) -> None:
    of_a = ((0, "m0", ""), (1, "m1", "s0"), (2, "m2", "s1"), (3, "m3", "s2"))
    of_b = ((0, "m0", ""), (1, "other", "s0"), (2, "m2", "other"), (4, "m4", ""))
    mine, others = (
        read_receipts(written(tmp_path / name, *(line(name, *one) for one in told)), KeyChain(KEY.public_key()))
        for name, told in (("a", of_a), ("b", of_b))
    )
    found = disagreements(mine, others)
    assert [(one.client_id, one.occasion, other.client_id) for one, other in found] == [
        ("a", ("run-1", 1, 0), "b"),
        ("a", ("run-1", 2, 0), "b"),
    ]
    assert disagreements(mine, mine) == []


def test_after_a_restored_backup_the_last_receipt_of_a_round_counts(tmp_path: Path) -> None:
    ours = written(tmp_path / "a", line("a", 1, "forgotten", "s0"), line("a", 1, "m1", "s0"))
    theirs = written(tmp_path / "b", line("b", 1, "m1", "s0"))
    assert not disagreements(*(read_receipts(path, KeyChain(KEY.public_key())) for path in (ours, theirs)))


@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        (line("a", 1, "m1", "s0", Ed25519PrivateKey.generate()), "may not sign this"),
        (line("a", 1, "m1", "s0", base_model="another"), "differ in base_model"),
        ("{}\n", "'assignment'"),
        ("[]\n", "line 2 proves nothing"),
        ("{\n", "line 2 proves nothing"),
        (json.dumps({"assignment": "!", "receipt": ""}) + "\n", "line 2 proves nothing"),
    ],
)
def test_a_line_that_the_coordinator_did_not_sign_is_named(tmp_path: Path, damaged: str, words: str) -> None:
    with pytest.raises(ReceiptsError, match=words):
        read_receipts(written(tmp_path / "a", line("a", 0, "m0", ""), damaged), KeyChain(KEY.public_key()))


def test_a_line_says_in_clear_from_which_model_and_step_the_work_began() -> None:
    document = json.loads(line("a", 1, "m1", "s0"))
    told = {"run_id": "run-1", "round": 1, "base_model": "m1", "previous_step": "s0"}
    assert document.items() >= told.items()


def test_the_command_verifies_lists_and_compares(tmp_path: Path) -> None:
    coordinator = ScriptedCoordinator()  # type: ignore[abstract]
    home = tmp_path / "home"
    home.mkdir()
    coordinator.member().save(home)
    key = coordinator.signing_key
    written(home / "receipts.jsonl", line("a", 1, "m1", "s0", key), line("a", 2, "m\x1b2", "s1", key))
    same = written(tmp_path / "same", line("b", 1, "m1", "s0", key))
    other = written(tmp_path / "other", line("b", 1, "mx", "s0", key))
    arguments = ["receipts", "--home", str(home)]
    listed = command(*arguments)
    assert "a run run-1 round 1 phase 0: base model m1, previous step s0, accepted" in listed
    assert r"base model m\x1b2" in listed
    assert json.loads(command(*arguments, "--json"))[0]["base_model"] == "m1"
    assert "1 occasion compared, with 0 disagreements" in command(*arguments, "--compare", str(same))
    document, _ = json.JSONDecoder().raw_decode(command(*arguments, "--compare", str(other), "--json", code=1))
    assert document["disagreements"][0]["theirs"]["base_model"] == "mx"


def test_a_receipt_that_was_written_before_its_reply_left_the_spool_stands_and_counts_once(tmp_path: Path) -> None:
    home, events = WorkerHome(tmp_path), Events()

    def taken(receipt: ReceiptManifest) -> int:
        """Starts after kill -9, and records a receipt; the process ends before the reply has left the spool."""
        spool = Spool(home, KEY, events)
        if not spool.entries():
            spool.add(ReplyManifest(assignment_id="a-1"), None, {}, sign(AssignmentManifest(), KEY))
        spool.record(spool.entries()[0], sign(receipt, KEY), receipt)
        return len(home.receipts.read_text().splitlines())

    said = ReceiptManifest(assignment_id="a-1", accepted=True)
    another = ReceiptManifest(assignment_id="a-1", accepted=False)
    assert [taken(receipt) for receipt in (said, said, another)] == [1, 1, 2]


def test_a_line_that_stands_twice_is_one_receipt(tmp_path: Path) -> None:
    twice = written(tmp_path / "a", line("a", 1, "m1", "s0"), line("a", 1, "m1", "s0"), line("a", 2, "m2", "s1"))
    receipts = read_receipts(twice, KeyChain(KEY.public_key()))
    assert [receipt.occasion[1] for receipt in receipts] == [1, 2]


def test_a_receipt_after_a_line_that_was_cut_short_is_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "receipts.jsonl"
    append(path, "one\n")
    with path.open("ab") as file:
        file.write(b"tw")  # and the power was gone
    append(path, "three\n")
    assert path.read_text() == "one\ntw\nthree\n"
