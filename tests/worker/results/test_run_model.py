"""What a coordinator may sign of a run's model, and what a member makes of it: it chooses every value in the answer."""

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.digests import digest
from federation.trust.envelope import sign
from federation.v1.common_pb2 import (
    AssignmentManifest,
    KeptRun,
    ModelManifest,
    ModelScore,
    OwnShare,
    ReceiptManifest,
    ReplyManifest,
    RestoreManifest,
    RunState,
    SignedEnvelope,
)
from federation.v1.federation_pb2 import GetModelRequest, GetModelResponse
from federation.vectors import Layout, Tensor, read_vector, to_bytes
from fedpareto.cli.show.model_card import CardFacts, CardScore, markdown
from tests.federation.scene import KEY, MEMBER
from tests.running import command
from tests.scripted import CLIENT, FEDERATION, HungUp, ScriptedCoordinator, scripted
from worker.home import WorkerHome
from worker.receipts import Receipt, append, read_receipts, receipt_line
from worker.results.comparison import compared
from worker.results.fetched_model import alone
from worker.results.run_model import ModelDisputed, RunModel, checked
from worker.work.local_state import kept_state

NONCE = bytes(32)
SPEC = b'name = "trial"\ntask = "digits"\nrounds = 9\nalgorithm.name = "fedavg"\n'
MODEL = to_bytes(Layout((Tensor("weight", (40, 50)),)), np.arange(2000, dtype=np.float32))
STEP, NEXT = digest(b"the step of round 3"), digest(b"the step of round 4")
ASK = GetModelRequest(run="trial", nonce=NONCE)


def manifest(**changes: Any) -> ModelManifest:
    """What an honest coordinator signs of the model after round 3."""
    fields: dict[str, Any] = {
        "federation_id": FEDERATION, "client_id": CLIENT, "nonce": NONCE, "run_id": "run-1", "name": "trial",
        "spec": digest(SPEC), "task": "digits", "state": RunState.RUN_STATE_RUNNING, "round": 3, "step": STEP,
        "result_model": digest(MODEL), "model": digest(MODEL), "model_bytes": len(MODEL), "members": 5,
    }  # fmt: skip
    return ModelManifest(**{**fields, **changes})


def answer(said: ModelManifest, key: Ed25519PrivateKey = KEY, spec: bytes = SPEC) -> GetModelResponse:
    return GetModelResponse(model=sign(said, key), spec=spec)


def accepted(response: GetModelResponse, request: GetModelRequest = ASK) -> RunModel:
    return checked(MEMBER, request, response)


# --- the answer alone

RUN = GetModelRequest(run="run-1", nonce=NONCE)
LIES: dict[str, tuple[dict[str, Any], str]] = {
    "for another member": ({"client_id": "hospital-b"}, "for another client"),
    "of another federation": ({"federation_id": "other"}, "for another federation"),
    "an older answer": ({"nonce": bytes(31) + b"1"}, "for another nonce"),
    "of another run": ({"run_id": "run-2", "name": "other"}, "'trial' was asked for"),
    "a run that is a path": ({"run_id": "../trial"}, "no id of a run"),
    "a round that no run reaches": ({"round": 2**40}, "no run reaches"),
    "no digest of a step": ({"step": "abc"}, "not a digest"),
    "a model by another digest": ({"model": "sha256:" + "0" * 64}, "a model is named by"),
    "no next model": ({"result_model": ""}, "not a digest"),
    "another specification": ({"spec": digest(b"other")}, "not the one that it names"),
    "another task": ({"task": "mnist"}, "not of the specification"),
    "a reply after the model": ({"shares": [OwnShare(round=4)]}, "after the model"),
    "too many numbers": ({"shares": [OwnShare()] * 1001}, "1001 rows"),
    "a table in a metric": ({"scores": [ModelScore(split="test", metric="a | b")]}, "no measurement"),
    "a split of its own": ({"scores": [ModelScore(split="<b>", metric="loss")]}, "no measurement"),
    "a command in a number": ({"numbers": {"\x1b[2J": 1.0}}, "no name of a number"),
    "no number": ({"numbers": {"epsilon/clients": float("nan")}}, "is no number"),
    "a record of words": ({"record": "trust me"}, "is no digest"),
}


@pytest.mark.parametrize(("changes", "words"), LIES.values(), ids=LIES)
def test_an_answer_with_a_value_that_cannot_be_is_not_accepted(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelDisputed, match=words.replace("|", r"\|")):
        accepted(answer(manifest(**changes)))


def test_an_answer_counts_with_the_coordinators_signature_of_a_model_alone() -> None:
    assert accepted(answer(manifest())).spec.name == "trial"
    for run in ("run-1", "run", "trial"):
        assert accepted(answer(manifest()), GetModelRequest(run=run, nonce=NONCE)).manifest.round == 3
    forged = answer(manifest(), key=Ed25519PrivateKey.generate())
    other = GetModelResponse(model=sign(ReceiptManifest(client_id=CLIENT), KEY), spec=SPEC)
    large = GetModelResponse(model=SignedEnvelope(manifest=bytes(1 << 20)), spec=SPEC)
    for wrong in (forged, other, large, GetModelResponse(), answer(manifest(), spec=b"name = 1")):
        with pytest.raises(ModelDisputed):
            accepted(wrong)


# --- beside the member's own receipts


def receipt(number: int, *, step: str = "", model: bytes | str = MODEL, **changes: Any) -> Receipt:
    fields: dict[str, Any] = {
        "client_id": CLIENT, "occasion": ("run-1", number, 0), "assignment_id": f"a{number}",
        "base_model": model if isinstance(model, str) else digest(model), "base_model_bytes": len(MODEL),
        "previous_step": step, "spec": digest(SPEC), "asked": "2026-01-02T00:00:00Z", "accepted": True, "reason": "",
        "task": "digits", "kind": "train", "payload_bytes": 1, "assignment": "", "reply": f"r{number}", "receipt": "",
    }  # fmt: skip
    return Receipt(**{**fields, **changes})


def newest(**changes: Any) -> RunModel:
    return accepted(answer(manifest(**changes)))


def test_an_assignment_that_names_the_same_step_and_model_confirms_the_answer() -> None:
    assert compared(newest(), [receipt(3, step=digest(b"2")), receipt(4, step=STEP)], None).round == 4
    evaluated = receipt(3, step=STEP, kind="evaluate")
    assert compared(newest(), [evaluated], None).round == 3
    mean = newest(model=digest(b"mean"))  # of all models: it is evaluated, and the next round starts from another one
    assert compared(mean, [receipt(3, step=STEP, model=b"mean"), receipt(4, step=STEP)], None).round == 3


def test_without_such_an_assignment_it_is_by_the_coordinators_word() -> None:
    for receipts in ([], [receipt(3, step=digest(b"2"))], [receipt(9, step=NEXT, occasion=("run-2", 9, 0))]):
        found = compared(newest(), receipts, None)
        assert (found.round, found.words.startswith("by the coordinator's word")) == (None, True)


CONTRADICTIONS: dict[str, Receipt] = {
    "another step of the round": receipt(4, step=NEXT),
    "an older round as the newest": receipt(7, step=NEXT),
    "another model of the step": receipt(4, step=STEP, model=b"other"),
    "another model that was evaluated": receipt(3, step=STEP, model=b"other", kind="evaluate"),
    "a step that was made before": receipt(2, step=STEP),
    "another specification": receipt(1, spec=digest(b"other")),
    "another task": receipt(1, task="mnist"),
    "a model of another size": receipt(1, base_model_bytes=7),
}


@pytest.mark.parametrize("kept", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_an_answer_that_contradicts_an_assignment_is_not_accepted(kept: Receipt) -> None:
    with pytest.raises(ModelDisputed, match=f"assignment of round {kept.occasion[1]} names"):
        compared(newest(), [kept], None)


def test_the_best_model_may_be_older_than_the_newest_one() -> None:
    best = accepted(answer(manifest()), GetModelRequest(run="trial", nonce=NONCE, best="loss"))
    assert compared(best, [receipt(7, step=NEXT)], None).round is None
    with pytest.raises(ModelDisputed):
        compared(best, [receipt(4, step=NEXT)], None)


def test_a_reply_that_this_member_did_not_send_is_not_its_part() -> None:
    mine, other = OwnShare(round=2, reply="r2"), OwnShare(round=2, reply="r9")
    assert compared(newest(shares=[mine]), [receipt(2)], None).round is None
    with pytest.raises(ModelDisputed, match="'r9' entered round 2"):
        compared(newest(shares=[other]), [receipt(2)], None)


def test_rounds_that_a_restored_backup_has_undone_count_for_nothing() -> None:
    restored = RestoreManifest(runs=[KeptRun(run_id="run-1", next_round=4)])
    restored.restored.FromDatetime(datetime(2026, 1, 3, tzinfo=UTC))
    undone = receipt(7, step=NEXT)
    assert compared(newest(), [undone], restored).round is None
    later = receipt(7, step=NEXT, asked="2026-01-04T00:00:00Z")
    for kept, manifest_ in ((later, restored), (undone, RestoreManifest())):
        with pytest.raises(ModelDisputed):
            compared(newest(), [kept], manifest_)


# --- the command


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScriptedCoordinator, Path]]:
    """A coordinator, and the directory of a member with a receipt of round 4."""
    home = tmp_path_factory.mktemp("site") / "home"
    with scripted() as coordinator:
        member = coordinator.member()
        member.save(home)
        said: dict[str, Any] = {
            "federation_id": FEDERATION,
            "run_id": "run-1",
            "round": 4,
            "assignment_id": "a4",
            "client_id": CLIENT,
        }
        order = AssignmentManifest(
            **said, base_model=digest(MODEL), base_model_bytes=len(MODEL), spec=digest(SPEC), task="digits",
            kind="train", previous_step=STEP,
        )  # fmt: skip
        order.created.FromDatetime(datetime.now(UTC) - timedelta(hours=1))
        reply = sign(ReplyManifest(**said), member.signing_key)
        got = ReceiptManifest(**said, base_model=digest(MODEL), accepted=True)
        key = coordinator.signing_key
        append(home / "receipts.jsonl", receipt_line(reply, sign(order, key), sign(got, key), got))
        assert len(read_receipts(home / "receipts.jsonl", member.coordinator.chain)) == 1
        coordinator.blobs[digest(MODEL)] = MODEL
        yield coordinator, home


def gives(coordinator: ScriptedCoordinator, **changes: Any) -> None:
    """The coordinator answers so."""

    def give(request: GetModelRequest) -> GetModelResponse:
        return answer(manifest(nonce=request.nonce, **changes), coordinator.signing_key)

    coordinator.give_model, coordinator.serve_blob = give, None
    coordinator.fetches.clear()


Site = tuple[ScriptedCoordinator, Path]


def test_a_download_that_breaks_off_goes_on_and_the_model_is_written_whole(site: Site, tmp_path: Path) -> None:
    coordinator, home = site
    gives(coordinator, scores=[ModelScore(split="test", metric="loss", own=0.5, members=6, mean=0.4, worst=0.9)])

    def broken(blob: bytes, offset: int) -> Iterator[bytes]:
        yield blob[offset : offset + 3000]
        if offset + 3000 < len(blob):
            raise HungUp

    coordinator.serve_blob = broken
    out, card = tmp_path / "model.safetensors", tmp_path / "card.json"
    done = json.loads(
        command("worker", "model", "trial", "--home", home, "--out", out, "--card", card, "--json").stdout
    )
    assert coordinator.fetches == [0, 3000, 6000]
    assert done["compared"]["round"] == 4
    assert out.read_bytes().endswith(MODEL[-8000:])
    header = json.loads(out.read_bytes()[8:-8000])
    assert header["__metadata__"]["fedpareto.round"] == "3"
    told = json.loads(card.read_text())
    assert (told["model"]["digest"], told["trained_by"]["members"]) == (digest(MODEL), 5)
    assert told["metrics"] == [
        {"split": "test", "metric": "loss", "members": 6, "mean": 0.4, "worst": 0.9, "worst_member": ""}
    ]
    assert json.loads((home / "models" / "run-1.json").read_text()) == done
    kept_state(home / "kept", "run-1").keep(3, to_bytes(Layout((Tensor("head", (4,)),)), np.ones(4, np.float32)))
    with WorkerHome(home).lock():  # as a worker that runs
        text = command("worker", "model", "run-1", "--home", home, "--out", out, "--personal", "--force").stdout
    assert "4 personal parameters after round 3" in text
    assert read_vector(tmp_path / "model-personal.safetensors")[1].tolist() == [1.0] * 4
    assert "the same step and model" in text
    assert "worst 0.900" in text
    assert coordinator.fetches == [0, 3000, 6000]  # it was kept
    again = command("worker", "model", "trial", "--home", home, "--out", out, code=1)
    assert "exists: give --force" in str(again.exception)


Served = Callable[[bytes, int], Iterator[bytes]]
WRONG: dict[str, tuple[dict[str, Any], Served | None, str]] = {
    "other bytes": ({}, lambda blob, offset: iter([bytes(len(blob) - offset)]), "is not the model"),
    "too few bytes": ({}, lambda blob, offset: iter([blob[offset:-1]]), "is not the model"),
    "bytes without end": ({}, lambda blob, offset: iter([blob, blob]), "more than the"),
    "another size": ({"model_bytes": 7}, None, "size of the model"),
    "another step": ({"step": NEXT}, None, "the coordinator contradicts itself"),
    "no model": ({"model": digest(bytes(8100)), "model_bytes": 8100}, None, "contradicts itself"),
}


@pytest.mark.parametrize(("changes", "serve", "words"), WRONG.values(), ids=WRONG)
def test_a_coordinator_that_gives_another_model_than_it_signs_makes_the_command_fail(
    site: Site, tmp_path: Path, changes: dict[str, Any], serve: Served | None, words: str
) -> None:
    coordinator, home = site
    for kept in (home / "models").glob("*.safetensors"):
        kept.unlink()
    gives(coordinator, **changes)
    coordinator.serve_blob = serve
    out = tmp_path / "model.safetensors"
    said = command("worker", "model", "trial", "--home", home, "--out", out, "--card", tmp_path / "card.md", code=1)
    assert words in str(said.exception)
    assert list(tmp_path.iterdir()) == []


def test_two_commands_do_not_fetch_models_for_one_member_at_the_same_time(site: Site, tmp_path: Path) -> None:
    coordinator, home = site
    gives(coordinator)
    out = tmp_path / "model.safetensors"
    with alone(home / "models"):
        said = command("worker", "model", "trial", "--home", home, "--out", out, code=1)
    assert "another `worker model` fetches a model for this member" in str(said.exception)
    assert not out.exists()
    command("worker", "model", "trial", "--home", home, "--out", out)


def test_a_card_shows_texts_of_others_as_they_are_and_tells_no_more_than_it_was_given() -> None:
    spec = accepted(answer(manifest())).spec
    facts = CardFacts(
        federation="f|<script>", run="run-1", name="trial", state="RUNNING", round=3, model=digest(MODEL), size=8000,
        step="", record="", spec=spec, spec_digest=digest(SPEC), members=0, names=(), numbers={}, source="x",
        scores=[CardScore(split="test", metric="a`|b", members=6, mean=0.5, worst=float("nan"))],
    )  # fmt: skip
    text = markdown(facts, Path("m`.safetensors"))
    assert r"f\|\<script\>" in text
    assert r"| test | a\`\|b | 6 | 0.500 | – |" in text
    assert "Trained by | not told" in text
    assert "The result of the worst member is not disclosed." in text
    assert "m`" not in text
